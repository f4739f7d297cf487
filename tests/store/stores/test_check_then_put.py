"""Conditions over a store that has none hold for what one writer does in sequence."""

from __future__ import annotations

import pytest

from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.errors import PreconditionError
from ds_ckpt_store.stores.check_then_put import CheckThenPut
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import BytesSource, IfAbsent, IfVersion


@pytest.fixture
def store() -> CheckThenPut:
    bucket = MemoryBucket(SystemClock())
    return CheckThenPut(MemoryStore(bucket, honours_create=False, honours_swap=False))


def test_create_fails_over_what_is_there(store: CheckThenPut) -> None:
    store.put("k", BytesSource(b"first"), condition=IfAbsent())
    with pytest.raises(PreconditionError):
        store.put("k", BytesSource(b"second"), condition=IfAbsent())
    assert store.get("k")[0] == b"first"


def test_swap_succeeds_only_over_the_version_that_was_read(store: CheckThenPut) -> None:
    old = store.put("k", BytesSource(b"1")).version
    new = store.put("k", BytesSource(b"2"), condition=IfVersion(old)).version
    with pytest.raises(PreconditionError):
        store.put("k", BytesSource(b"3"), condition=IfVersion(old))
    assert store.get("k")[0] == b"2"
    store.delete("k")
    with pytest.raises(PreconditionError):
        store.put("k", BytesSource(b"3"), condition=IfVersion(new))
    assert list(store.list("")) == []


def test_a_plain_put_is_passed_on(store: CheckThenPut) -> None:
    for data in (b"1", b"2"):
        store.put("k", BytesSource(data))
    assert store.get("k")[0] == b"2"
