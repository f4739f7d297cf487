"""Documents on a store that checks nothing: what arrives changed is put right at once."""

from __future__ import annotations

import random

import pytest

from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.errors import CorruptionError
from ds_ckpt_store.stores.faulty import FaultyStore, Rule
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import BytesSource, Capabilities, IfAbsent, IfVersion, Proof
from ds_ckpt_store.stores.probe import Findings, fit
from ds_ckpt_store.stores.reading_back import TRIES, ReadingBack

KEY = ".ds_ckpt/owner.json"


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket(SystemClock())


@pytest.fixture
def faulty(bucket: MemoryBucket) -> FaultyStore:
    claims = Capabilities(proofs=(Proof.READ_BACK,))
    return FaultyStore(MemoryStore(bucket, claims, refuses_corruption=False))


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("condition", ["none", "absent", "version"])
def test_a_document_that_arrives_changed_is_written_again(
    faulty: FaultyStore, bucket: MemoryBucket, condition: str, swaps: bool
) -> None:
    conditions = {"none": None, "absent": IfAbsent()}
    if condition == "version":
        conditions["version"] = IfVersion(faulty.put(KEY, BytesSource(b"before")).version)
    faulty.script.append(Rule("put", "corrupt", count=2))
    store = ReadingBack(faulty, swaps=swaps)
    info = store.put(KEY, BytesSource(b"as it should be"), condition=conditions[condition])
    data, now = store.get(KEY)
    assert (data, now.version) == (b"as it should be", info.version)


def test_one_that_keeps_arriving_changed_is_an_error(faulty: FaultyStore) -> None:
    faulty.script.append(Rule("put", "corrupt", count=None))
    with pytest.raises(CorruptionError, match=f"changed {TRIES} times"):
        ReadingBack(faulty, swaps=True).put(KEY, BytesSource(b"x"))


def test_what_another_writer_has_made_of_it_meanwhile_is_left_alone(
    faulty: FaultyStore, bucket: MemoryBucket
) -> None:
    other = MemoryStore(bucket)
    faulty.script.append(Rule("put", "corrupt"))
    faulty.script.append(
        Rule("get", "call", action=lambda: other.put(KEY, BytesSource(b"another's")) and None)
    )
    ReadingBack(faulty, swaps=True).put(KEY, BytesSource(b"ours"))
    assert other.get(KEY)[0] == b"another's"


def test_data_is_left_to_the_transfer_which_reads_it_back_itself(faulty: FaultyStore) -> None:
    ReadingBack(faulty, swaps=True).put("tag@save/shard.pt", BytesSource(b"x"))
    assert not faulty.asked("get")


def test_the_protocol_gets_it_where_reading_back_is_the_only_proof(
    faulty: FaultyStore, bucket: MemoryBucket
) -> None:
    store = fit(faulty, Findings(Proof.READ_BACK, conditional_create=True, swap=True))
    faulty.script.append(Rule("put", "corrupt", key="owner"))
    catalog = Catalog(store, random.Random(1))
    catalog.own("run", "018bcfe56800-0000000000000001", "n" * 32)
    owner = Catalog(MemoryStore(bucket), random.Random(2)).owner()
    assert owner is not None
    assert owner.run_id == "run"
