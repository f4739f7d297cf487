"""What may go, and in which order it goes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt_store.catalog import Lease
from ds_ckpt_store.errors import PausedError, RefusedError, StoreError
from ds_ckpt_store.records import Record
from ds_ckpt_store.retention import Retained, Retention, expired
from tests.store.prefix import NODE, Prefix

RECORDS = ".ds_ckpt/checkpoints/"


# ---- the rule


def a_record(number: int, **fields: Any) -> Record:
    return Record.model_validate(
        {
            "schema": 1,
            "run_id": "run",
            "attempt": "a",
            "save_id": f"{number:012x}-{number:016x}",
            "tag": f"t{number}",
            "time_ms": number,
            "nodes": [NODE],
            "epoch": 1,
            "state": "committed",
            **fields,
        }
    )


records = st.lists(
    st.tuples(
        st.integers(1, 40),
        st.sampled_from(["run", "run", "run", "other"]),
        st.booleans(),
        st.integers(1, 3),
    ),
    max_size=12,
    unique_by=lambda item: item[0],
).map(
    lambda items: [
        a_record(number, run_id=run_id, pin=pin, epoch=epoch)
        for number, run_id, pin, epoch in items
    ]
)


@given(records, st.integers(-1, 5), st.data())
def test_what_must_stay_always_stays(
    committed: list[Record], keep_last: int, data: st.DataObject
) -> None:
    ids = [record.save_id for record in committed]
    latest = data.draw(st.none() | st.sampled_from(ids) if ids else st.none())
    protected = data.draw(st.sets(st.sampled_from(ids)) if ids else st.just(set()))
    gone = expired(committed, keep_last=keep_last, run_id="run", latest=latest, protected=protected)
    assert gone == sorted(gone, key=lambda record: record.order)
    own = sorted((r for r in committed if r.run_id == "run"), key=lambda record: record.order)
    newest = own[-max(keep_last, 1) :]
    for record in gone:
        assert record.run_id == "run"
        assert not record.pin
        assert record.save_id != latest
        assert record.save_id not in protected
        assert record not in newest
    # And nothing stays without a reason.
    for record in own:
        reasons = record in newest or record.pin or record.save_id in {latest, *protected}
        assert (record in gone) == (not reasons)


# ---- the order of things


@pytest.fixture
def prefix() -> Prefix:
    return Prefix()


def lease(prefix: Prefix, epoch: int = 1, newest: bool = True) -> Lease:
    return Lease(epoch, newest, prefix.clock.now)


def retention(prefix: Prefix, keep_last: int = 1, pause: float = 3600) -> Retention:
    return Retention(prefix.catalog, "run", keep_last, pause)


def states(prefix: Prefix) -> dict[str, str]:
    return {record.tag: record.state for record in prefix.another().records()}


def objects(prefix: Prefix, record: Record) -> int:
    return len(prefix.stored_keys(f"{record.folder}/"))


def test_the_record_goes_first_and_its_objects_only_after_the_pause(prefix: Prefix) -> None:
    old, new = prefix.commit("old"), prefix.commit("new")
    first = retention(prefix).apply(lease(prefix))
    assert (first.deleted, first.objects) == ((old.save_id,), 0)
    assert states(prefix) == {"old": "deleted", "new": "committed"}
    assert objects(prefix, old) == 1
    prefix.clock.sleep(3599)
    assert retention(prefix).apply(lease(prefix)) == Retained()
    prefix.clock.sleep(2)
    assert retention(prefix).apply(lease(prefix)) == Retained(purged=(old.save_id,), objects=1)
    assert objects(prefix, old) == 0
    assert objects(prefix, new) == 1
    assert states(prefix) == {"old": "deleted", "new": "committed"}, "the tombstone stays"
    prefix.clock.sleep(9999)
    assert retention(prefix).apply(lease(prefix)) == Retained()


def test_latest_is_moved_before_anything_is_given_up(prefix: Prefix) -> None:
    old, new = prefix.commit("old"), prefix.commit("new")
    prefix.catalog.point(old)
    retention(prefix).apply(lease(prefix))
    assert prefix.text("latest") == new.folder
    puts = [call.key for call in prefix.store.asked("put", f"^latest$|{RECORDS}{old.save_id}")]
    assert puts[-2:] == ["latest", f"{RECORDS}{old.save_id}.json"]


def test_nothing_is_given_up_while_latest_cannot_be_moved(prefix: Prefix) -> None:
    old, _ = prefix.commit("old"), prefix.commit("new")
    prefix.catalog.point(old)
    prefix.fault("put", "fail-before", "^latest$", count=None, error=RefusedError)
    with pytest.raises(StoreError):
        retention(prefix).apply(lease(prefix))
    assert states(prefix) == {"old": "committed", "new": "committed"}


def test_who_deletes_much_is_asked_before_each_and_may_stop(prefix: Prefix) -> None:
    """A sidecar renews its lease and beats meanwhile, and ends when it is told to."""
    files = {f"shard{number}.pt": b"x" for number in range(20)}
    old, _ = prefix.commit("old", files), prefix.commit("new")
    left = 7

    def check() -> None:
        nonlocal left
        if left == 0:
            raise PausedError("told to stop")
        left -= 1

    retention = Retention(prefix.catalog, "run", 1, pause=0)
    with pytest.raises(PausedError):
        retention.apply(Lease(1, True, prefix.catalog.store_time("t")), check=check)
    assert len(prefix.stored_keys(old.folder)) == 13
    done = retention.apply(Lease(1, True, prefix.catalog.store_time("t")))
    assert done.purged == (old.save_id,)
    assert prefix.stored_keys(old.folder) == []


def test_only_what_the_record_lists_is_deleted(prefix: Prefix) -> None:
    old, _ = prefix.commit("old", {"a": b"1", "b/c": b"2"}), prefix.commit("new")
    prefix.put(f"{old.folder}/put by hand", b"keep")
    prefix.put("my notes.txt", b"keep")
    retention(prefix, pause=0).apply(lease(prefix))
    assert prefix.stored_keys(f"{old.folder}/") == [f"{old.folder}/put by hand"]
    assert "my notes.txt" in prefix.stored_keys()


def test_pinned_held_parent_and_resumed_from_stay(prefix: Prefix) -> None:
    prefix.commit("pinned", pin=True)
    held = prefix.commit("held")
    parent = prefix.commit("parent")
    source = prefix.commit("source")
    prefix.commit("plain")
    prefix.commit("new", parent=parent.save_id)
    prefix.catalog.hold(held.save_id, "h")
    retention(prefix).apply(lease(prefix), {source.save_id})
    assert states(prefix) == {
        "pinned": "committed",
        "held": "committed",
        "parent": "committed",
        "source": "committed",
        "plain": "deleted",
        "new": "committed",
    }


def test_objects_stay_while_a_restore_that_came_just_before_holds_them(prefix: Prefix) -> None:
    old, _ = prefix.commit("old"), prefix.commit("new")
    # The hold is written after retention has listed holds, and before it gives the record up.
    prefix.fault(
        "put",
        "call",
        RECORDS + old.save_id,
        action=lambda: prefix.another().hold(old.save_id, "h", seconds=5000),
    )
    retention(prefix).apply(lease(prefix))
    assert states(prefix)["old"] == "deleted"
    prefix.clock.sleep(4000)
    assert retention(prefix).apply(lease(prefix)).objects == 0
    assert objects(prefix, old) == 1
    prefix.clock.sleep(4000)
    assert retention(prefix).apply(lease(prefix)).objects == 1


def test_saves_of_another_run_are_not_touched(prefix: Prefix) -> None:
    foreign = prefix.commit("foreign", run_id="other")
    gone = prefix.commit("gone", run_id="other")
    prefix.catalog.replace(gone, state="deleted")
    prefix.commit("old"), prefix.commit("new")
    prefix.clock.sleep(9999)
    retention(prefix).apply(lease(prefix))
    assert states(prefix)["foreign"] == "committed"
    assert objects(prefix, foreign) == objects(prefix, gone) == 1


def test_an_older_epoch_deletes_nothing(prefix: Prefix) -> None:
    prefix.commit("old"), prefix.commit("new")
    assert retention(prefix).apply(lease(prefix, newest=False)) == Retained()
    prefix.commit("newer", epoch=2)
    assert retention(prefix).apply(lease(prefix, epoch=1)) == Retained()
    assert set(states(prefix).values()) == {"committed"}


def test_the_last_one_is_never_given_up(prefix: Prefix) -> None:
    prefix.commit("only")
    retention(prefix, keep_last=1, pause=0).apply(lease(prefix))
    assert states(prefix) == {"only": "committed"}
    assert Retention(prefix.catalog, "run", 1).apply(lease(Prefix())) == Retained()


@pytest.mark.parametrize("dies_at", range(8))
def test_a_pass_that_dies_anywhere_is_repeated_and_no_committed_one_is_torn(
    prefix: Prefix, dies_at: int
) -> None:
    class Killed(BaseException):
        pass

    kept = [prefix.commit(f"t{number}", {"a": b"1", "b": b"2"}) for number in range(4)]
    prefix.clock.sleep(10)

    def die() -> None:
        raise Killed

    for operation in ("put", "delete"):
        prefix.fault(operation, "call", skip=dies_at // 2, action=die)
    for _ in range(3):
        with contextlib.suppress(Killed):
            retention(prefix, keep_last=2, pause=0).apply(lease(prefix))
        for record in prefix.another().committed():
            assert objects(prefix, record) == 2
    assert list(states(prefix).values()) == ["deleted", "deleted", "committed", "committed"]
    assert [objects(prefix, record) for record in kept] == [0, 0, 2, 2]
    assert prefix.text("latest") == kept[-1].folder


def test_a_record_that_was_pinned_meanwhile_is_not_given_up(prefix: Prefix) -> None:
    old, _ = prefix.commit("old"), prefix.commit("new")
    prefix.catalog.records()

    def pin() -> None:
        assert prefix.another().replace(old, pin=True) is not None

    prefix.fault("put", "call", RECORDS + old.save_id, action=pin)
    assert retention(prefix, pause=0).apply(lease(prefix)).deleted == ()
    assert states(prefix)["old"] == "committed"
    assert objects(prefix, old) == 1


def test_what_is_further_in_training_than_the_newest_is_not_given_up() -> None:
    """Training was begun anew by mistake: its first saves must not cost the days before it."""
    before = [a_record(number, step=100 * number) for number in (1, 2, 3)]
    anew = [a_record(number, step=number, epoch=2) for number in (4, 5, 6)]

    def gone(committed: list[Record]) -> list[int]:
        latest = committed[-1].save_id
        given_up = expired(committed, keep_last=1, run_id="run", latest=latest, protected=())
        return [record.time_ms for record in given_up]

    assert gone([*before, *anew]) == [4, 5]
    assert gone([*before, *anew, a_record(7, step=250, epoch=2)]) == [1, 2, 4, 5, 6]
    assert gone([*before, *anew, a_record(7, step=301, epoch=2)]) == [1, 2, 3, 4, 5, 6]


def test_without_a_pause_one_pass_is_enough(prefix: Prefix) -> None:
    old = prefix.commit("old")
    prefix.commit("new")
    lease = prefix.catalog.own("run", prefix.attempt(), NODE)
    done = Retention(prefix.catalog, "run", keep_last=1, pause=0.0).apply(lease)
    assert done.purged == (old.save_id,)
    assert prefix.stored_keys(f"{old.folder}/") == []


def test_a_hold_that_a_killed_restore_left_is_removed_in_the_end(prefix: Prefix) -> None:
    record = prefix.commit("t")
    prefix.catalog.hold(record.save_id, "h", seconds=100)
    prefix.clock.now += 150
    assert prefix.catalog.held(prefix.clock.now) == set()
    assert prefix.stored_keys(".ds_ckpt/holds/") != [], "it may still come back"
    prefix.clock.now += 100
    assert prefix.catalog.held(prefix.clock.now) == set()
    assert prefix.stored_keys(".ds_ckpt/holds/") == []
