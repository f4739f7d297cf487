"""Swaps made of creates: exactly one writer follows each version, whatever is lost on the way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.errors import AmbiguousError, PreconditionError
from ds_ckpt_store.stores import swap_by_create
from ds_ckpt_store.stores.faulty import FaultyStore, Rule
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import BytesSource, IfAbsent, IfVersion
from ds_ckpt_store.stores.swap_by_create import VERSIONS, SwapByCreate, has_versions


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket(SystemClock())


@pytest.fixture
def plain(bucket: MemoryBucket) -> MemoryStore:
    return MemoryStore(bucket, honours_swap=False)


@pytest.fixture
def store(plain: MemoryStore) -> SwapByCreate:
    return SwapByCreate(plain)


def swap(store: SwapByCreate, key: str, data: bytes) -> None:
    store.put(key, BytesSource(data), condition=IfVersion(store.get(key)[1].version))


def test_any_tool_finds_the_newest_under_the_plain_key(store, plain) -> None:
    store.put("latest", BytesSource(b"1"), condition=IfAbsent())
    assert plain.get("latest")[0] == b"1"
    swap(store, "latest", b"2")
    assert plain.get("latest")[0] == b"2"


def test_versions_are_hidden_and_each_key_is_listed_once(store) -> None:
    store.put("a", BytesSource(b"plain"))
    store.put("a/b", BytesSource(b"1"), condition=IfAbsent())
    store.put("a-b", BytesSource(b"1"), condition=IfAbsent())
    swap(store, "a/b", b"22")
    assert [(info.key, info.size) for info in store.list("")] == [("a", 5), ("a-b", 1), ("a/b", 2)]
    assert [info.key for info in store.list("a/")] == ["a/b"]
    assert [info.key for info in store.list(".ds_ckpt/")] == []


def test_a_decision_counts_even_if_its_plain_copy_was_never_made(bucket) -> None:
    faulty = FaultyStore(MemoryStore(bucket), [Rule("put", "fail-before", skip=1, count=None)])
    SwapByCreate(faulty).put("record", BytesSource(b"committed"), condition=IfAbsent())
    store = SwapByCreate(MemoryStore(bucket))
    assert store.get("record")[0] == b"committed"
    assert store.head("record").size == 9
    assert [info.key for info in store.list("")] == ["record"]
    with pytest.raises(PreconditionError):
        store.put("record", BytesSource(b"abandoned"), condition=IfAbsent())


def test_a_swap_whose_answer_was_lost_is_ambiguous_and_can_be_read(bucket, store) -> None:
    store.put("owner", BytesSource(b"1"), condition=IfAbsent())
    faulty = FaultyStore(MemoryStore(bucket), [Rule("put", "fail-after")])
    with pytest.raises(AmbiguousError):
        swap(SwapByCreate(faulty), "owner", b"2")
    assert store.get("owner")[0] == b"2"


def test_a_swap_that_arrives_late_does_not_undo_a_newer_one(bucket, store) -> None:
    store.put("owner", BytesSource(b"1"), condition=IfAbsent())
    faulty = FaultyStore(MemoryStore(bucket), [Rule("put", "late", key="versions")])
    with pytest.raises(AmbiguousError):
        swap(SwapByCreate(faulty), "owner", b"late")
    swap(store, "owner", b"2")
    faulty.apply_late()
    assert store.get("owner")[0] == b"2"


def test_two_who_overtake_each_other_leave_the_newest_under_the_plain_key(bucket, store) -> None:
    """The slower of two writers copies its version only after the faster one copied a newer."""
    store.put("latest", BytesSource(b"1"), condition=IfAbsent())
    overtaken = FaultyStore(
        MemoryStore(bucket),
        [Rule("put", "call", key="^latest$", action=lambda: swap(store, "latest", b"3"))],
    )
    swap(SwapByCreate(overtaken), "latest", b"2")
    assert store.get("latest")[0] == b"3"
    assert MemoryStore(bucket).get("latest")[0] == b"3"


def test_a_count_raced_by_many_loses_no_increment(bucket) -> None:
    stores = [SwapByCreate(MemoryStore(bucket, honours_swap=False)) for _ in range(8)]
    stores[0].put("count", BytesSource(b"0"), condition=IfAbsent())

    def increment(store: SwapByCreate) -> None:
        done = 0
        while done < 20:
            data, info = store.get("count")
            try:
                store.put(
                    "count",
                    BytesSource(str(int(data) + 1).encode()),
                    condition=IfVersion(info.version),
                )
            except PreconditionError:
                continue
            done += 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(increment, stores))
    assert stores[0].get("count")[0] == b"160"
    assert MemoryStore(bucket).get("count")[0] == b"160"


def test_old_versions_are_pruned(store, plain, monkeypatch) -> None:
    monkeypatch.setattr(swap_by_create, "KEPT", 3)
    store.put("latest", BytesSource(b"0"), condition=IfAbsent())
    for number in range(10):
        swap(store, "latest", str(number).encode())
    assert store.get("latest")[0] == b"9"
    assert len(list(plain.list(VERSIONS))) == 3


def test_a_create_so_late_that_its_number_was_pruned_has_lost(bucket, monkeypatch) -> None:
    monkeypatch.setattr(swap_by_create, "KEPT", 3)
    store = SwapByCreate(MemoryStore(bucket))
    store.put("latest", BytesSource(b"0"), condition=IfAbsent())

    def go_on() -> None:
        for number in range(10):
            swap(store, "latest", str(number).encode())

    slow = FaultyStore(MemoryStore(bucket), [Rule("put", "call", action=go_on)])
    with pytest.raises(PreconditionError, match="too late"):
        swap(SwapByCreate(slow), "latest", b"slow")
    assert store.get("latest")[0] == b"9"


def test_a_reader_can_tell_that_there_are_versions(store, plain) -> None:
    store.put("k", BytesSource(b"1"))
    assert not has_versions(plain)
    store.put("latest", BytesSource(b"1"), condition=IfAbsent())
    assert has_versions(plain)
    store.delete("latest")
    assert not has_versions(plain)
