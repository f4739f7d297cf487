"""Who may write some objects of a prefix must not reach further by them than those objects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ds_ckpt_store.catalog import MAX_HOLD_BYTES, Lease
from ds_ckpt_store.contract.manifest import MAX_DOCUMENT_BYTES
from ds_ckpt_store.errors import DamagedError, NothingCommittedError
from ds_ckpt_store.records import LONGEST_HOLD, Record
from ds_ckpt_store.retention import Retention
from tests.store.prefix import Prefix


@pytest.fixture
def prefix() -> Prefix:
    return Prefix()


def hold(prefix: Prefix, record: Record, **fields: Any) -> None:
    """A hold as anybody could write it who may restore."""
    document = {"schema": 1, "save_id": record.save_id, "seconds": 60, "nonce": "n", **fields}
    prefix.put(".ds_ckpt/holds/evil.json", json.dumps(document).encode())


def retain(prefix: Prefix) -> tuple[str, ...]:
    now = prefix.catalog.store_time("test")
    return Retention(prefix.catalog, "run", 1, pause=0).apply(Lease(1, True, now)).deleted


# ---- holds: a restore needs no other right to write


@pytest.mark.parametrize(
    "fields",
    [
        {"seconds": 10**400},
        {"seconds": LONGEST_HOLD + 1},
        {"seconds": -1},
        {"seconds": "inf"},
        {"save_id": "../owner"},
        {"padding": "x" * MAX_HOLD_BYTES},
    ],
    ids=lambda fields: ",".join(fields),
)
def test_a_hold_that_is_none_protects_nothing_and_stops_nobody(
    prefix: Prefix, fields: dict[str, Any]
) -> None:
    old, _ = prefix.commit("old"), prefix.commit("new")
    hold(prefix, old, **fields)
    assert retain(prefix) == (old.save_id,)


def test_a_hold_protects_no_longer_than_a_day_by_one_write(prefix: Prefix) -> None:
    old, _ = prefix.commit("old"), prefix.commit("new")
    hold(prefix, old, seconds=LONGEST_HOLD)
    assert retain(prefix) == ()
    prefix.clock.now += LONGEST_HOLD + 1
    assert retain(prefix) == (old.save_id,)


def test_a_huge_hold_or_record_is_not_even_fetched(prefix: Prefix) -> None:
    good = prefix.commit("good")
    huge = f".ds_ckpt/checkpoints/{good.save_id[:-1]}x.json"
    prefix.put(huge, b" " * (MAX_DOCUMENT_BYTES + 1))
    hold(prefix, good, padding="x" * MAX_HOLD_BYTES)
    retain(prefix)
    prefix.catalog.holds(0.0)
    assert prefix.catalog.committed() == [good]
    assert huge in prefix.catalog.damaged
    asked = [call.key for call in prefix.store.asked("get")]
    assert huge not in asked
    assert ".ds_ckpt/holds/evil.json" not in asked


# ---- companions: they get their names beside the checkpoint, where other files lie


@pytest.mark.parametrize("path", ["latest", "deep/zero_to_fp32.py", "step1", "../x", ".ds_ckpt"])
def test_a_record_whose_companion_takes_another_name_is_damaged(prefix: Prefix, path: str) -> None:
    record = prefix.commit("step1/a", companions={"zero_to_fp32.py": b"#!"})
    key = f".ds_ckpt/checkpoints/{record.save_id}.json"
    document = json.loads(record.model_dump_json(by_alias=True))
    document["companions"][0]["path"] = path
    prefix.put(key, json.dumps(document).encode())
    with pytest.raises(NothingCommittedError, match="damaged"):
        prefix.another().find()


@pytest.mark.parametrize("path", ["latest", "deep/zero_to_fp32.py", "step1"])
def test_a_receipt_whose_companion_takes_another_name_is_never_committed(
    prefix: Prefix, path: str
) -> None:
    manifest = prefix.manifest("step1/a", companions={"zero_to_fp32.py": b"#!"})
    intent = prefix.store_all(manifest)
    document = json.loads(prefix.receipt(manifest).model_dump_json(by_alias=True))
    document["companions"][0]["path"] = path
    key = f".ds_ckpt/receipts/{manifest.save_id}/{manifest.node}.json"
    prefix.put(key, json.dumps(document).encode())
    with pytest.raises(DamagedError):
        prefix.catalog.commit(intent)
    assert prefix.catalog.record(manifest.save_id) is None
