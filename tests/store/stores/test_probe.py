"""The probe finds out what a store does, whatever it promises."""

from __future__ import annotations

import dataclasses
import random

import pytest

from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.errors import AccessError, ThrottledError, TransientError, WeakStoreError
from ds_ckpt_store.stores.check_then_put import CheckThenPut
from ds_ckpt_store.stores.faulty import FaultyStore, Rule
from ds_ckpt_store.stores.file import FileStore
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import BytesSource, IfAbsent, IfVersion, Proof, Store
from ds_ckpt_store.stores.probe import fit, probe
from ds_ckpt_store.stores.retry import RetryPolicy, RetryStore
from ds_ckpt_store.stores.swap_by_create import SwapByCreate
from tests.servers import S3


def memory(**switches: bool) -> MemoryStore:
    return MemoryStore(MemoryBucket(SystemClock()), **switches)


def nothing_left(store: Store) -> bool:
    return not list(store.list("")) and not list(store.uploads(""))


def test_seaweedfs_has_all_that_the_protocol_needs(seaweed: S3) -> None:
    store = seaweed.store(seaweed.bucket())
    findings = probe(store, random.Random(1))
    assert (findings.proof, findings.conditional_create, findings.swap) == (
        Proof.STORED_CHECKSUM,
        True,
        True,
    )
    assert fit(store, findings) is store
    assert findings.doubt() is None
    assert nothing_left(store)


def test_an_s3_that_ignores_checksums_and_conditions_is_refused(juicefs: S3) -> None:
    store = juicefs.store(juicefs.bucket())
    findings = probe(store, random.Random(1))
    assert findings.proof is Proof.SIGNED_PAYLOAD
    assert not findings.conditional_create
    assert not findings.swap
    assert "stored-checksum proves nothing here" in findings.describe()
    with pytest.raises(WeakStoreError, match="no conditional create"):
        fit(store, findings)
    assert isinstance(fit(store, findings, allow_weak=True), CheckThenPut)
    assert store.proof is Proof.SIGNED_PAYLOAD
    assert not list(store.list(""))


def test_swift_lets_two_creates_win_that_come_together(swift: S3) -> None:
    """It judges a condition when a request begins, and the later time stamp wins."""
    store = swift.store(swift.bucket())
    findings = probe(store, random.Random(1))
    assert (findings.proof, findings.conditional_create, findings.swap) == (
        Proof.SIGNED_PAYLOAD,
        False,
        False,
    )
    assert "of two creates at once both succeeded" in findings.describe()
    assert "keeps no CRC32C" in str(findings.doubt())
    with pytest.raises(WeakStoreError, match="of two puts with If-None-Match both were accepted"):
        fit(store, findings)
    assert nothing_left(store)


class LooksFirst(MemoryStore):
    """Judges a condition before it takes the body."""

    looks_first_for: type

    def put(self, key, source, *, condition=None):
        if isinstance(condition, self.looks_first_for):
            with self.bucket.lock:
                self._judge("put", key, condition)
            condition = None
        return super().put(key, source, condition=condition)


@pytest.mark.parametrize("kind", [IfAbsent, IfVersion])
def test_a_store_that_looks_before_it_writes_is_found_out(kind: type) -> None:
    store = LooksFirst(MemoryBucket(SystemClock()))
    store.looks_first_for = kind
    findings = probe(store, random.Random(1))
    assert findings.conditional_create is (kind is not IfAbsent)
    assert findings.swap is (kind is not IfVersion)
    assert nothing_left(store)


def test_a_folder_shows_what_it_wrote_and_has_both_conditions(tmp_path) -> None:
    store = FileStore(str(tmp_path / "root"))
    findings = probe(store, random.Random(1))
    assert (findings.proof, findings.conditional_create, findings.swap) == (
        Proof.WRITTEN_CHECKSUM,
        True,
        True,
    )
    assert nothing_left(store)


def test_a_store_that_ignores_if_match_gets_swaps_made_of_creates() -> None:
    store = memory(honours_swap=False)
    fitted = fit(store, probe(store, random.Random(1)))
    assert isinstance(fitted, SwapByCreate)
    assert nothing_left(store)


def test_a_store_that_refuses_every_if_match_gets_swaps_made_of_creates() -> None:
    """As Ceph's gateway does before its version 19."""

    class AlwaysFails(MemoryStore):
        def put(self, key, source, *, condition=None):
            if isinstance(condition, IfVersion):
                condition = IfVersion("never")
            return super().put(key, source, condition=condition)

    store = AlwaysFails(MemoryBucket(SystemClock()))
    findings = probe(store, random.Random(1))
    assert (findings.conditional_create, findings.swap) == (True, False)


def test_a_server_that_learned_to_swap_keeps_the_versions_that_exist() -> None:
    store = memory()
    SwapByCreate(store).put("latest", BytesSource(b"old"), condition=IfAbsent())
    assert isinstance(fit(store, probe(store, random.Random(1))), SwapByCreate)


def test_a_store_that_accepts_wrong_checksums_is_read_back() -> None:
    store = memory(refuses_corruption=False)
    findings = probe(store, random.Random(1))
    assert findings.proof is Proof.READ_BACK
    assert "every object is read back" in str(findings.doubt())


def test_a_store_that_does_not_return_checksums_is_not_believed() -> None:
    store = memory(returns_crc32c=False)
    assert probe(store, random.Random(1)).proof is not Proof.STORED_CHECKSUM


@pytest.mark.parametrize("error", [AccessError, TransientError])
def test_nothing_is_concluded_from_a_failure(error) -> None:
    store = FaultyStore(memory(), [Rule("put", "fail-before", error=error, skip=2)])
    with pytest.raises(error):
        probe(store, random.Random(1))


def count(operation: str) -> int:
    """How often a probe calls this."""
    store = FaultyStore(memory())
    probe(store, random.Random(1))
    return sum(call.operation == operation for call in store.calls)


@pytest.mark.parametrize(
    ("operation", "fault"),
    [
        ("put", Rule("put", "fail-after", error=ThrottledError)),
        ("put", Rule("put", "fail-before", error=ThrottledError)),
        ("get", Rule("get", "corrupt")),
    ],
    ids=["refused and applied", "refused", "changed on its way"],
)
def test_a_fault_at_any_call_changes_no_finding(
    monkeypatch: pytest.MonkeyPatch, operation: str, fault: Rule
) -> None:
    """Sidecars that come to different findings would not see each other's swaps."""
    monkeypatch.setattr("ds_ckpt_store.stores.probe.LONGEST_PAUSE", 0.05)
    for skip in range(count(operation)):
        store = FaultyStore(memory(), [dataclasses.replace(fault, skip=skip)])
        patient = RetryStore(store, SystemClock(), random.Random(1), policy=RetryPolicy(base=1e-4))
        findings = probe(patient, random.Random(1))
        assert (findings.conditional_create, findings.swap) == (True, True), f"at {skip}"
        assert (store.script[0].count or 0) < 1, "it happened"
