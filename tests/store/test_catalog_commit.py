"""One conditional create decides a save; nothing else does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_store import catalog as catalogs
from ds_ckpt_store.contract.manifest import SCHEMA
from ds_ckpt_store.errors import (
    AmbiguousError,
    DamagedError,
    PreconditionError,
    TransientError,
    UnknownSchemaError,
)
from ds_ckpt_store.records import Intent, PartSums, Receipt, Record
from ds_ckpt_store.stores.file import FileStore
from tests.store.prefix import NODE, OTHER, THIRD, Prefix

RECORDS = ".ds_ckpt/checkpoints/"


@pytest.fixture(params=["memory", "file"])
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Prefix]:
    if request.param == "memory":
        yield Prefix()
        return
    store = FileStore.from_url((tmp_path / "store").as_uri())
    yield Prefix(store)
    store.close()


def two_nodes(prefix: Prefix) -> tuple:
    nodes = [NODE, OTHER]
    one = prefix.manifest("t", {"rank0.pt": b"zero"}, node=NODE, nodes=nodes)
    two = prefix.manifest(
        "t", {"rank1.pt": b"one"}, node=OTHER, nodes=nodes, save_id=one.save_id, time_ms=one.time_ms
    )
    return one, two


# ---- intents


def test_an_intent_that_is_there_counts_whatever_we_wanted(prefix: Prefix) -> None:
    manifest = prefix.manifest()
    first = prefix.catalog.intend(manifest, 3)
    assert prefix.another().intend(manifest, 8) == first
    assert first.epoch == 3


def test_of_two_intents_at_once_both_read_the_same(prefix: Prefix) -> None:
    manifest = prefix.manifest()
    rival: list[Intent] = []
    prefix.fault(
        "put",
        "call",
        ".ds_ckpt/saves/",
        action=lambda: rival.append(prefix.another().intend(manifest, 8)),
    )
    assert prefix.catalog.intend(manifest, 3) == rival[0]


@pytest.mark.parametrize("fault", ["fail-after", "late"])
def test_an_intent_whose_answer_was_lost_is_read_back(prefix: Prefix, fault: str) -> None:
    manifest = prefix.manifest()
    prefix.fault("put", fault, ".ds_ckpt/saves/")
    intent = prefix.catalog.intend(manifest, 3)
    prefix.store.apply_late()
    assert prefix.another().undecided() == [intent]


# ---- commit


def test_either_node_may_be_last(prefix: Prefix) -> None:
    for order in ((0, 1), (1, 0)):
        pair = two_nodes(prefix)
        first, last = pair[order[0]], pair[order[1]]
        intent = prefix.store_all(first)
        found = prefix.catalog.commit(intent)
        assert (found.record, found.missing_nodes) == (None, (last.node,))
        assert prefix.catalog.record(first.save_id) is None
        prefix.store_all(last)
        record = prefix.catalog.commit(intent).record
        assert record is not None
        assert [(f.path, f.node) for f in record.files] == [("rank0.pt", NODE), ("rank1.pt", OTHER)]


def test_a_receipt_of_a_node_that_was_not_intended_counts_for_nothing(prefix: Prefix) -> None:
    one, _ = two_nodes(prefix)
    intent = prefix.store_all(one)
    stranger = prefix.manifest("t", {"x": b"x"}, node=THIRD, save_id=one.save_id)
    prefix.upload(stranger)
    prefix.catalog.put_receipt(prefix.receipt(stranger))
    assert prefix.catalog.commit(intent).missing_nodes == (OTHER,)


@pytest.mark.parametrize("body", [None, b"", b"zer", b"zeroo"])
def test_an_object_that_is_missing_or_has_another_size_prevents_the_commit(
    prefix: Prefix, body: bytes | None
) -> None:
    one, two = two_nodes(prefix)
    prefix.store_all(one)
    intent = prefix.store_all(two)
    key = f"{one.folder}/rank0.pt"
    prefix.store.delete(key)
    if body is not None:
        prefix.put(key, body)
    found = prefix.catalog.commit(intent)
    assert (found.record, found.missing_objects) == (None, (key,))
    assert prefix.stored_keys(RECORDS) == []
    prefix.put(key, b"zero")
    assert prefix.catalog.commit(intent).record is not None


def test_two_nodes_that_name_the_same_path_are_never_committed(prefix: Prefix) -> None:
    nodes = [NODE, OTHER]
    one = prefix.manifest("t", {"same.pt": b"1"}, node=NODE, nodes=nodes)
    two = prefix.manifest("t", {"same.pt": b"2"}, node=OTHER, nodes=nodes, save_id=one.save_id)
    prefix.store_all(one)
    intent = prefix.store_all(two)
    with pytest.raises(DamagedError, match="same path"):
        prefix.catalog.commit(intent)
    assert prefix.stored_keys(RECORDS) == []


def test_a_record_that_nobody_could_read_is_not_made(
    prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    intent = prefix.store_all(prefix.manifest("t"))
    monkeypatch.setattr(catalogs, "MAX_DOCUMENT_BYTES", 300)
    with pytest.raises(DamagedError, match="300 is the most"):
        prefix.catalog.commit(intent)
    assert prefix.stored_keys(".ds_ckpt/checkpoints/") == []


def test_sums_of_parts_are_left_out_where_they_make_a_document_too_large_to_be_read(
    prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = PartSums(size=10, crc32c="01234567" * 10)

    def commit() -> tuple[Receipt, Record]:
        manifest = prefix.manifest("t")
        intent = prefix.catalog.intend(manifest, 1)
        prefix.upload(manifest)
        bare = prefix.receipt(manifest)
        files = [entry.model_copy(update={"parts": parts}) for entry in bare.files]
        receipt = bare.model_copy(update={"files": files})
        prefix.catalog.put_receipt(receipt)
        record = prefix.catalog.commit(intent).record
        assert record is not None
        return receipt, record

    receipt, record = commit()
    assert [entry.parts for entry in record.files] == [parts]
    monkeypatch.setattr(catalogs, "MAX_DOCUMENT_BYTES", len(record.to_bytes()) - 1)
    receipt, record = commit()
    assert [entry.parts for entry in record.files] == [None]
    text = f".ds_ckpt/receipts/{receipt.save_id}/{NODE}.json"
    assert "01234567" in prefix.text(text)
    monkeypatch.setattr(catalogs, "MAX_DOCUMENT_BYTES", len(receipt.to_bytes()) - 1)
    prefix.catalog.put_receipt(receipt)
    assert "01234567" not in prefix.text(text)


def test_shards_of_zero_bytes_and_companions_are_part_of_the_record(prefix: Prefix) -> None:
    record = prefix.commit("t", {"empty.pt": b""}, companions={"zero_to_fp32.py": b"#!"})
    assert [(f.path, f.size) for f in record.files] == [("empty.pt", 0)]
    assert record.size == 2
    assert [key for key, _ in record.objects()] == [
        f"{record.folder}/empty.pt",
        f"{record.folder}/.companions/zero_to_fp32.py",
    ]


def test_what_was_decided_stays_decided(prefix: Prefix) -> None:
    manifest = prefix.manifest()
    intent = prefix.store_all(manifest)
    first = prefix.catalog.commit(intent).record
    assert prefix.another().commit(intent).record == first
    assert prefix.another().abandon(intent, "late").state == "committed"


# ---- lost answers


def test_a_commit_that_was_applied_though_its_answer_was_lost_is_seen(prefix: Prefix) -> None:
    intent = prefix.store_all(prefix.manifest())
    prefix.fault("put", "fail-after", RECORDS)
    record = prefix.catalog.commit(intent).record
    assert record is not None
    assert record.state == "committed"
    assert len(prefix.store.asked("put", RECORDS)) == 1


def test_a_commit_that_was_not_applied_is_made_again(prefix: Prefix) -> None:
    intent = prefix.store_all(prefix.manifest())
    prefix.fault("put", "late", RECORDS)  # and it never lands
    record = prefix.catalog.commit(intent).record
    assert record is not None
    assert record.state == "committed"


def test_a_store_that_answers_no_write_is_not_hammered(prefix: Prefix) -> None:
    intent = prefix.store_all(prefix.manifest())
    prefix.fault("put", "fail-before", RECORDS, error=AmbiguousError, count=None)
    with pytest.raises(TransientError, match="in a row"):
        prefix.catalog.commit(intent)
    assert len(prefix.store.asked("put", RECORDS)) <= 20
    prefix.store.script.clear()
    assert prefix.catalog.commit(intent).record is not None


def test_a_commit_that_lands_late_does_not_change_the_decision(prefix: Prefix) -> None:
    intent = prefix.store_all(prefix.manifest())
    prefix.fault("put", "late", RECORDS)
    record = prefix.catalog.commit(intent).record
    assert prefix.store.apply_late() == 1
    assert prefix.another().record(intent.save_id) == record


def test_an_abandonment_that_lands_after_the_commit_changes_nothing(prefix: Prefix) -> None:
    one, two = two_nodes(prefix)
    intent = prefix.store_all(one)
    # The one that gives up saw no receipt; its answer is lost, and the other node arrives.
    prefix.fault("put", "late", RECORDS, count=1)
    prefix.fault("get", "call", RECORDS, skip=1, action=lambda: commit_by_other(prefix, two))
    assert prefix.catalog.abandon(intent, "gave up").state == "committed"
    prefix.store.apply_late()
    record = prefix.another().record(intent.save_id)
    assert record is not None
    assert record.state == "committed"


def commit_by_other(prefix: Prefix, manifest) -> None:
    prefix.upload(manifest)
    catalog = prefix.another()
    catalog.put_receipt(prefix.receipt(manifest))
    catalog.commit(catalog.intend(manifest, 1))


def test_412_after_the_sdk_repeated_our_own_create_is_no_loss(prefix: Prefix) -> None:
    intent = prefix.store_all(prefix.manifest())
    prefix.fault("put", "fail-after", RECORDS, error=PreconditionError)
    record = prefix.catalog.commit(intent).record
    assert record is not None
    assert record.state == "committed"


def test_who_loses_the_race_takes_the_winners_decision(prefix: Prefix) -> None:
    intent = prefix.store_all(prefix.manifest())
    prefix.fault("put", "call", RECORDS, action=lambda: prefix.another().commit(intent))
    record = prefix.catalog.commit(intent).record
    assert record == prefix.another().record(intent.save_id)


# ---- abandon


def test_a_save_whose_receipts_are_complete_is_committed_and_not_abandoned(prefix: Prefix) -> None:
    intent = prefix.store_all(prefix.manifest())
    assert prefix.catalog.abandon(intent, "too slow").state == "committed"


def test_an_abandoned_save_is_over_for_everybody(prefix: Prefix) -> None:
    one, two = two_nodes(prefix)
    intent = prefix.store_all(one)
    assert prefix.catalog.abandon(intent, "node b is gone").reason == "node b is gone"
    prefix.store_all(two)
    record = prefix.another().commit(intent).record
    assert record is not None
    assert record.state == "abandoned"
    assert prefix.catalog.undecided() == []
    assert prefix.catalog.committed() == []


def test_a_save_whose_objects_are_lost_is_abandoned_though_its_receipts_are_there(
    prefix: Prefix,
) -> None:
    manifest = prefix.manifest()
    intent = prefix.store_all(manifest)
    prefix.store.delete(f"{manifest.folder}/shard.pt")
    assert prefix.catalog.abandon(intent, "changed on the volume").state == "abandoned"


# ---- documents that are not what they should be


def test_a_damaged_record_is_named_and_hides_no_other(prefix: Prefix) -> None:
    good = prefix.commit("good")
    bad = prefix.commit("bad")
    prefix.put(f"{RECORDS}{bad.save_id}.json", b"\x00" * 10)
    assert prefix.catalog.records() == [good]
    assert list(prefix.catalog.damaged) == [f"{RECORDS}{bad.save_id}.json"]
    assert "by hand" in prefix.catalog.damaged[f"{RECORDS}{bad.save_id}.json"]
    assert prefix.catalog.find() == good


def test_a_record_of_a_newer_version_is_named_and_hides_no_other(prefix: Prefix) -> None:
    good = prefix.commit("good")
    newer = prefix.commit("newer")
    key = f"{RECORDS}{newer.save_id}.json"
    document = json.loads(prefix.text(key)) | {"schema": SCHEMA + 1}
    del document["checksum"]
    prefix.put(key, json.dumps(document).encode())
    assert prefix.catalog.records() == [good]
    assert "upgrade" in prefix.catalog.damaged[key]


def test_a_record_under_the_name_of_another_save_is_damaged(prefix: Prefix) -> None:
    one, two = prefix.commit("one"), prefix.commit("two")
    key = f"{RECORDS}{two.save_id}.json"
    prefix.put(key, prefix.text(f"{RECORDS}{one.save_id}.json").encode())
    assert prefix.catalog.records() == [one]
    assert key in prefix.catalog.damaged
    with pytest.raises(DamagedError):
        prefix.catalog.record(two.save_id)


def test_damaged_intents_are_named_and_hold_up_no_other(prefix: Prefix) -> None:
    intent = prefix.catalog.intend(prefix.manifest("good"), 1)
    prefix.put(".ds_ckpt/saves/000000000001-0000000000000000.json", b"garbage")
    prefix.put(".ds_ckpt/saves/000000000002-0000000000000000.json", b'{"schema": 99}')
    assert prefix.catalog.undecided() == [intent]
    assert len(prefix.catalog.damaged) == 2


@pytest.mark.parametrize("path", ["../../etc/passwd", "/abs", "a/../../b"])
def test_a_record_whose_paths_lead_away_is_damaged(prefix: Prefix, path: str) -> None:
    record = prefix.commit("t", {"shard.pt": b"x"})
    key = f"{RECORDS}{record.save_id}.json"
    prefix.put(key, prefix.text(key).replace('"path":"shard.pt"', f'"path":"{path}"').encode())
    assert prefix.catalog.records() == []
    assert key in prefix.catalog.damaged


def test_a_record_is_read_once_and_again_when_it_changes(prefix: Prefix) -> None:
    record = prefix.commit()
    prefix.catalog.records()
    before = len(prefix.store.asked("get", RECORDS))
    prefix.catalog.records()
    assert len(prefix.store.asked("get", RECORDS)) == before
    prefix.another().replace(record, state="deleted")
    assert [r.state for r in prefix.catalog.records()] == ["deleted"]


# ---- replace


def test_a_replacement_that_lost_the_race_changes_nothing(prefix: Prefix) -> None:
    record = prefix.commit()
    prefix.fault("put", "call", RECORDS, action=lambda: prefix.another().replace(record, pin=True))
    assert prefix.catalog.replace(record, state="deleted") is None
    now = prefix.another().record(record.save_id)
    assert now is not None
    assert (now.state, now.pin) == ("committed", True)
    assert prefix.catalog.replace(record, state="deleted") is None


def test_a_replacement_whose_answer_was_lost_is_seen_by_its_nonce(prefix: Prefix) -> None:
    record = prefix.commit()
    prefix.fault("put", "fail-after", RECORDS)
    changed = prefix.catalog.replace(record, state="deleted")
    assert changed is not None
    assert changed == prefix.another().record(record.save_id)


def test_a_replacement_that_lands_late_is_void_once_the_record_changed(prefix: Prefix) -> None:
    record = prefix.commit()
    prefix.fault("put", "late", RECORDS)
    assert prefix.catalog.replace(record, state="deleted") is None
    pinned = prefix.catalog.replace(record, pin=True)
    prefix.store.apply_late()
    assert prefix.another().record(record.save_id) == pinned


def test_an_unknown_schema_of_the_record_itself_is_not_taken_for_absence(prefix: Prefix) -> None:
    manifest = prefix.manifest()
    intent = prefix.store_all(manifest)
    prefix.put(f"{RECORDS}{manifest.save_id}.json", b'{"schema": 99}')
    with pytest.raises(UnknownSchemaError):
        prefix.catalog.commit(intent)
