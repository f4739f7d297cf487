"""`latest` only moves forward, and only to what is committed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_ckpt_store.errors import NothingCommittedError, PreconditionError, UnknownSchemaError
from tests.store.prefix import Prefix

RECORDS = ".ds_ckpt/checkpoints/"


@pytest.fixture
def prefix() -> Prefix:
    return Prefix()


def test_it_names_the_folder_as_deepspeed_would(prefix: Prefix) -> None:
    record = prefix.commit("a/b")
    assert prefix.catalog.latest() is None
    assert prefix.catalog.point(record)
    assert prefix.text("latest") == record.folder
    assert prefix.catalog.latest() == record


@settings(max_examples=25, deadline=None)
@given(st.permutations([(1, 5), (1, 9), (2, 1), (2, 2), (3, 0)]))
def test_it_rests_on_the_newest_by_epoch_then_time_in_whatever_order(
    order: list[tuple[int, int]],
) -> None:
    prefix = Prefix()
    for epoch, time_ms in order:
        record = prefix.commit(f"e{epoch}t{time_ms}", epoch=epoch, time_ms=time_ms)
        before = prefix.catalog.latest()
        assert prefix.catalog.point(record) == (before is None or before.order < record.order)
    latest = prefix.catalog.latest()
    assert latest is not None
    assert latest.tag == "e3t0"


def test_of_two_saves_in_one_millisecond_the_higher_id_is_newer(prefix: Prefix) -> None:
    ids = ["018bcfe56800-0000000000000001", "018bcfe56800-0000000000000002"]
    one, two = (prefix.commit("t", save_id=save_id, time_ms=1) for save_id in ids)
    assert prefix.catalog.point(two)
    assert not prefix.catalog.point(one)
    assert not prefix.catalog.point(two)


def test_the_text_of_a_tag_decides_nothing(prefix: Prefix) -> None:
    prefix.catalog.point(prefix.commit("global_step900"))
    later = prefix.commit("global_step10")
    assert prefix.catalog.point(later)
    assert prefix.catalog.find() == later


@pytest.mark.parametrize(
    "text",
    [b"", b"global_step1", b"\xff\xfe", b"x" * 10_000, b"gone@018bcfe56800-0000000000000001"],
)
def test_text_that_names_nothing_of_ours_is_replaced(prefix: Prefix, text: bytes) -> None:
    prefix.put("latest", text)
    record = prefix.commit()
    assert prefix.catalog.latest() is None
    assert prefix.catalog.point(record)
    assert prefix.catalog.latest() == record


def test_a_folder_of_another_tag_with_the_same_save_id_is_not_ours(prefix: Prefix) -> None:
    record = prefix.commit("t")
    prefix.put("latest", f"other@{record.save_id}".encode())
    assert prefix.catalog.latest() is None


def test_a_pointer_to_a_tombstone_or_a_damaged_record_is_replaced(prefix: Prefix) -> None:
    for damage in (False, True):
        gone = prefix.commit("gone", epoch=9)
        prefix.catalog.point(gone)
        if damage:
            prefix.put(f"{RECORDS}{gone.save_id}.json", b"garbage")
        else:
            prefix.catalog.replace(gone, state="deleted")
        assert prefix.catalog.latest() is None
        record = prefix.commit("next")
        assert prefix.catalog.point(record)


def test_a_pointer_to_a_record_of_a_newer_version_is_left_alone(prefix: Prefix) -> None:
    newer = prefix.commit("newer")
    prefix.catalog.point(newer)
    prefix.put(f"{RECORDS}{newer.save_id}.json", b'{"schema": 99}')
    with pytest.raises(UnknownSchemaError):
        prefix.catalog.point(prefix.commit("next"))
    assert prefix.text("latest") == newer.folder
    assert prefix.catalog.latest() is None


def test_a_tombstone_is_never_pointed_at(prefix: Prefix) -> None:
    record = prefix.commit()
    prefix.another().replace(record, state="deleted")
    assert not prefix.catalog.point(record)
    assert prefix.catalog.latest_text() is None


def test_who_loses_the_race_to_a_newer_one_leaves_it(prefix: Prefix) -> None:
    old, middle, new = (prefix.commit(tag) for tag in ("old", "middle", "new"))
    prefix.catalog.point(old)
    prefix.fault("put", "call", "^latest$", action=lambda: prefix.another().point(new))
    assert not prefix.catalog.point(middle)
    assert prefix.catalog.latest() == new


def test_who_loses_the_race_to_an_older_one_moves_on(prefix: Prefix) -> None:
    old, new = prefix.commit("old"), prefix.commit("new")
    prefix.fault("put", "call", "^latest$", action=lambda: prefix.another().point(old))
    assert prefix.catalog.point(new)
    assert prefix.catalog.latest() == new


@pytest.mark.parametrize("fault", ["fail-after", "late"])
@pytest.mark.parametrize("error", [None, PreconditionError])
def test_after_a_lost_answer_it_is_read_and_decided_again(
    prefix: Prefix, fault: str, error: type[Exception] | None
) -> None:
    old, new = prefix.commit("old"), prefix.commit("new")
    prefix.catalog.point(old)
    prefix.fault("put", fault, "^latest$", error=error)
    prefix.catalog.point(new)
    prefix.store.apply_late()
    assert prefix.catalog.latest() == new


def test_a_move_that_lands_late_does_not_undo_a_later_one(prefix: Prefix) -> None:
    old, middle, new = (prefix.commit(tag) for tag in ("old", "middle", "new"))
    prefix.catalog.point(old)
    prefix.fault("put", "late", "^latest$")
    prefix.catalog.point(middle)
    prefix.catalog.point(new)
    prefix.store.apply_late()
    assert prefix.catalog.latest() == new


# ---- finding


def test_a_tag_means_its_newest_committed_save(prefix: Prefix) -> None:
    first, second = prefix.commit("t"), prefix.commit("t")
    prefix.commit("other")
    assert prefix.catalog.find("t") == second
    assert prefix.catalog.find("t", first.save_id) == first
    assert prefix.catalog.find(save_id=first.save_id) == first


def test_what_cannot_be_found_is_answered_with_what_there_is(prefix: Prefix) -> None:
    with pytest.raises(NothingCommittedError, match="none at all"):
        prefix.catalog.find()
    prefix.commit("step1")
    prefix.commit("step2")
    with pytest.raises(NothingCommittedError, match="committed tags: step1, step2"):
        prefix.catalog.find("step3")


# ---- holds


def test_a_hold_protects_until_it_expires_by_the_stores_clock(prefix: Prefix) -> None:
    record = prefix.commit()
    prefix.catalog.hold(record.save_id, "h", seconds=100)
    assert prefix.catalog.held(prefix.clock.now + 99) == {record.save_id}
    assert prefix.catalog.held(prefix.clock.now + 101) == set()
    prefix.clock.sleep(90)
    prefix.catalog.hold(record.save_id, "h", seconds=100)
    assert prefix.catalog.held(prefix.clock.now + 50) == {record.save_id}
    prefix.catalog.release("h")
    prefix.catalog.release("h")
    assert prefix.catalog.held(prefix.clock.now) == set()


def test_a_hold_that_cannot_be_read_stops_nobody(prefix: Prefix) -> None:
    prefix.put(".ds_ckpt/holds/x.json", b"garbage")
    prefix.put(".ds_ckpt/holds/y.json", b'{"schema": 99}')
    record = prefix.commit()
    prefix.catalog.hold(record.save_id, "h")
    assert prefix.catalog.held(prefix.clock.now) == {record.save_id}
