"""What people pin and delete by name, beside retention, restores and each other."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ds_ckpt_store.catalog import Catalog, Lease
from ds_ckpt_store.collect import Collector
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.curate import Curator
from ds_ckpt_store.errors import (
    DamagedError,
    KeptError,
    NothingCommittedError,
    TransientError,
)
from ds_ckpt_store.records import Record
from ds_ckpt_store.restore import Restore
from ds_ckpt_store.retention import Retention
from ds_ckpt_store.transfer.budget import Budget
from tests.servers import S3
from tests.store.prefix import Prefix

RECORDS = ".ds_ckpt/checkpoints/"
FILES = {"a": b"1", "b/c": b"22"}


class Killed(BaseException):
    pass


@pytest.fixture
def prefix() -> Prefix:
    return Prefix()


def curator(prefix: Prefix) -> Curator:
    """Of another process, over the same scripted store."""
    return Curator(Catalog(prefix.store, random.Random(prefix.rng.random())))


def beside(prefix: Prefix) -> Curator:
    """Of a process that no rule of the script strikes."""
    return Curator(prefix.another())


def retain(prefix: Prefix, keep_last: int = 1, pause: float = 3600.0) -> tuple[str, ...]:
    catalog = Catalog(prefix.store, random.Random(1))
    lease = Lease(9, True, prefix.clock.now)
    return Retention(catalog, "run", keep_last, pause).apply(lease).deleted


def states(prefix: Prefix) -> dict[str, str]:
    return {record.tag: record.state for record in prefix.another().records()}


def pins(prefix: Prefix) -> set[str]:
    return {record.tag for record in prefix.another().records() if record.pin}


def pointed(prefix: Prefix) -> str | None:
    return prefix.another().latest_text()


def objects(prefix: Prefix, record: Record) -> int:
    return len(prefix.stored_keys(f"{record.folder}/"))


def at_record(prefix: Prefix, record: Record, action: Callable[[], object]) -> None:
    """Let something happen after a record was judged and before it is swapped."""
    prefix.fault("put", "call", RECORDS + record.save_id, action=action)


# ---- pins


def test_a_pin_keeps_from_retention_until_it_is_taken_off(prefix: Prefix) -> None:
    old, _ = prefix.commit("old"), prefix.commit("new")
    assert curator(prefix).pin(old.save_id).pin
    assert retain(prefix) == ()
    assert not curator(prefix).unpin(old.save_id).pin
    assert not curator(prefix).unpin(old.save_id).pin, "twice is no error"
    assert retain(prefix) == (old.save_id,)


def test_a_pin_that_comes_while_retention_decides_wins(prefix: Prefix) -> None:
    old, _ = prefix.commit("old"), prefix.commit("new")
    at_record(prefix, old, lambda: beside(prefix).pin(old.save_id))
    assert retain(prefix, pause=0) == ()
    assert states(prefix)["old"] == "committed"
    assert objects(prefix, old) == 1


def test_a_pin_that_comes_too_late_says_so_and_changes_nothing(prefix: Prefix) -> None:
    old, _ = prefix.commit("old"), prefix.commit("new")
    at_record(prefix, old, lambda: retain(prefix))
    with pytest.raises(NothingCommittedError, match=r"'old'.* was given up \(retention\)"):
        curator(prefix).pin(old.save_id)
    assert states(prefix)["old"] == "deleted"
    assert pins(prefix) == set()


def test_a_pin_whose_answer_was_lost_is_found_or_made_again(prefix: Prefix) -> None:
    record = prefix.commit("t")
    for what in ("fail-after", "late"):
        prefix.fault("put", what, RECORDS)
        assert curator(prefix).pin(record.save_id).pin
        prefix.store.apply_late()
        assert pins(prefix) == {"t"}
        beside(prefix).unpin(record.save_id)


def test_a_record_that_others_keep_writing_ends_with_an_error(prefix: Prefix) -> None:
    record = prefix.commit("t")

    def write() -> None:
        catalog = prefix.another()
        now = catalog.record(record.save_id)
        assert now is not None
        catalog.replace(now)

    prefix.fault("put", "call", RECORDS, action=write, count=None)
    with pytest.raises(TransientError, match="lost to other writers 10 times"):
        curator(prefix).pin(record.save_id)


def test_what_is_no_checkpoint_is_neither_pinned_nor_deleted(prefix: Prefix) -> None:
    prefix.commit("t")
    on_its_way = prefix.catalog.intend(prefix.manifest("way"), 1)
    over = prefix.catalog.intend(prefix.manifest("over"), 1)
    prefix.catalog.abandon(over, "its node is gone")
    unknown = prefix.manifest("unknown").save_id
    for call in (curator(prefix).pin, lambda each: curator(prefix).delete([each])):
        with pytest.raises(NothingCommittedError, match="still being stored"):
            call(on_its_way.save_id)
        with pytest.raises(NothingCommittedError, match="never was a checkpoint"):
            call(over.save_id)
        with pytest.raises(NothingCommittedError, match=f"knows no save {unknown}"):
            call(unknown)


# ---- deleting


def test_the_record_goes_first_and_the_objects_with_a_later_call(prefix: Prefix) -> None:
    old, other, new = prefix.commit("old", FILES), prefix.commit("other"), prefix.commit("new")
    (done,) = curator(prefix).delete([old.save_id])
    assert (done.tag, done.objects) == ("old", 0)
    assert "60 min" in done.left
    assert states(prefix) == {"old": "deleted", "other": "committed", "new": "committed"}
    assert objects(prefix, old) == 2
    prefix.clock.sleep(3601)
    (done,) = curator(prefix).delete([other.save_id])
    assert objects(prefix, old) == 0
    assert objects(prefix, other) == objects(prefix, new) == 1
    (again,) = curator(prefix).delete([old.save_id])
    assert (again.objects, again.left) == (0, "")


def test_what_others_gave_up_or_a_pause_protects_stays_as_long_as_it_should(
    prefix: Prefix,
) -> None:
    agents, earlier = prefix.commit("agents"), prefix.commit("earlier")
    now, _ = prefix.commit("now"), prefix.commit("new")
    prefix.catalog.replace(agents, state="deleted", reason="retention")
    prefix.clock.sleep(3601)  # the agent's pause may be longer than ours
    curator(prefix).delete([earlier.save_id])
    curator(prefix).delete([now.save_id], at_once=True)
    assert [objects(prefix, each) for each in (agents, earlier, now)] == [1, 1, 0]


def test_at_once_the_objects_go_too_and_only_those_that_the_record_lists(prefix: Prefix) -> None:
    old, _ = prefix.commit("old", FILES), prefix.commit("new")
    prefix.put(f"{old.folder}/put by hand", b"keep")
    (done,) = curator(prefix).delete([old.save_id], at_once=True)
    assert (done.objects, done.left) == (2, "")
    assert prefix.stored_keys(f"{old.folder}/") == [f"{old.folder}/put by hand"]
    tombstone = prefix.catalog.record(old.save_id)
    assert tombstone is not None
    assert (tombstone.state, tombstone.purged) == ("deleted", True)


def test_retention_and_gc_finish_what_a_deletion_left(prefix: Prefix) -> None:
    first, second, _ = (prefix.commit(tag) for tag in ("first", "second", "new"))
    curator(prefix).delete([first.save_id])
    prefix.clock.sleep(3601)
    retain(prefix, keep_last=5)
    assert objects(prefix, first) == 0
    curator(prefix).delete([second.save_id])
    prefix.clock.sleep(90_000)
    Collector(prefix.another(), "run").sweep(dry_run=False)
    assert objects(prefix, second) == 0


def test_pinned_newest_and_last_stay_and_then_nothing_goes(prefix: Prefix) -> None:
    plain, pinned = prefix.commit("plain"), prefix.commit("pinned", pin=True)
    new = prefix.commit("new")
    for record, why in ((pinned, "it is pinned"), (new, "it is what a restart")):
        with pytest.raises(KeptError, match=f"'{record.tag}'.* stays: {why}"):
            curator(prefix).delete([plain.save_id, record.save_id])
    with pytest.raises(KeptError, match="it is pinned"):
        curator(prefix).delete([pinned.save_id], even_newest=True)
    assert set(states(prefix).values()) == {"committed"}
    alone = Prefix()
    only, other = alone.commit("only"), alone.commit("other")
    with pytest.raises(KeptError, match="nothing committed would be left"):
        curator(alone).delete([only.save_id, other.save_id], even_newest=True)
    assert set(states(alone).values()) == {"committed"}


def test_the_newest_goes_if_that_is_said_and_latest_moves_back(prefix: Prefix) -> None:
    old, bad, worse = (prefix.commit(tag) for tag in ("old", "bad", "worse"))
    prefix.catalog.point(worse)
    curator(prefix).delete([worse.save_id, bad.save_id], even_newest=True)
    assert states(prefix) == {"old": "committed", "bad": "deleted", "worse": "deleted"}
    assert pointed(prefix) == old.folder
    assert pins(prefix) == set(), "what took its place was pinned for a moment only"


def test_latest_and_the_newest_of_each_run_are_not_taken_by_accident(prefix: Prefix) -> None:
    own, foreign = prefix.commit("own"), prefix.commit("foreign", run_id="other")
    prefix.catalog.point(foreign)
    for record in (own, foreign):
        with pytest.raises(KeptError, match="a restart resumes from"):
            curator(prefix).delete([record.save_id])
    older = prefix.commit("next", run_id="other", epoch=0)
    curator(prefix).delete([older.save_id])
    assert states(prefix) == {"own": "committed", "foreign": "committed", "next": "deleted"}


def test_what_latest_names_stays_also_if_a_newer_one_was_just_committed(prefix: Prefix) -> None:
    old = prefix.commit("old")
    prefix.fault("list", "call", RECORDS, skip=1, action=lambda: prefix.commit("new"))
    with pytest.raises(KeptError, match="what a restart resumes from"):
        curator(prefix).delete([old.save_id])
    curator(prefix).delete([old.save_id])
    assert states(prefix) == {"old": "deleted", "new": "committed"}


def test_retention_that_gives_up_the_next_one_meanwhile_leaves_one(prefix: Prefix) -> None:
    """It was about to take the older one, since a newer stood above it; that newer one goes."""
    old, new = prefix.commit("old"), prefix.commit("new")
    prefix.catalog.point(new)
    at_record(
        prefix, old, lambda: beside(prefix).delete([new.save_id], even_newest=True, at_once=True)
    )
    assert retain(prefix, pause=0) == ()
    assert states(prefix) == {"old": "committed", "new": "deleted"}
    assert pointed(prefix) == old.folder


def test_what_takes_the_place_is_of_the_same_run(prefix: Prefix) -> None:
    old, new = prefix.commit("old"), prefix.commit("new")
    prefix.commit("foreign", run_id="other")
    at_record(prefix, old, lambda: beside(prefix).delete([new.save_id], even_newest=True))
    assert retain(prefix, pause=0) == ()
    assert states(prefix) == {"old": "committed", "new": "deleted", "foreign": "committed"}


@pytest.mark.parametrize("number", range(3))
def test_retention_comes_at_each_swap_and_one_always_stays(prefix: Prefix, number: int) -> None:
    prefix.commit("old")
    new = prefix.commit("new")
    prefix.fault("put", "call", RECORDS, skip=number, action=lambda: retain(prefix, pause=0))
    with contextlib.suppress(KeptError):
        curator(prefix).delete([new.save_id], even_newest=True, at_once=True)
    (left,) = prefix.another().committed()
    assert objects(prefix, left) == 1
    assert pointed(prefix) == left.folder


def test_two_deletions_at_once_leave_one(prefix: Prefix) -> None:
    old, new = prefix.commit("old"), prefix.commit("new")

    def delete_old() -> None:
        beside(prefix).delete([old.save_id], at_once=True)

    at_record(prefix, new, delete_old)  # the older one is pinned by then
    with pytest.raises(KeptError, match="it is pinned"):
        curator(prefix).delete([new.save_id], even_newest=True)
    assert set(states(prefix).values()) == {"committed"}
    prefix.store.script.clear()
    at_record(prefix, old, delete_old)  # before it is pinned
    with pytest.raises(KeptError, match="nothing committed would be left"):
        curator(prefix).delete([new.save_id], even_newest=True)
    assert states(prefix) == {"old": "deleted", "new": "committed"}


def test_a_pin_that_comes_before_the_swap_saves_it(prefix: Prefix) -> None:
    old, _ = prefix.commit("old"), prefix.commit("new")
    at_record(prefix, old, lambda: beside(prefix).pin(old.save_id))
    with pytest.raises(KeptError, match="it is pinned"):
        curator(prefix).delete([old.save_id], at_once=True)
    assert states(prefix)["old"] == "committed"


def test_a_pin_that_was_on_what_takes_the_place_stays_on(prefix: Prefix) -> None:
    prefix.commit("old", pin=True)
    new = prefix.commit("new")
    curator(prefix).delete([new.save_id], even_newest=True)
    assert pins(prefix) == {"old"}


def test_a_users_pin_on_what_takes_the_place_is_not_taken_off(prefix: Prefix) -> None:
    old, new = prefix.commit("old"), prefix.commit("new")
    at_record(prefix, new, lambda: beside(prefix).pin(old.save_id))
    curator(prefix).delete([new.save_id], even_newest=True)
    assert (states(prefix)["new"], pins(prefix)) == ("deleted", {"old"})


def test_a_commit_that_comes_meanwhile_is_what_latest_names(prefix: Prefix) -> None:
    prefix.commit("old")
    new = prefix.commit("new")

    def commit() -> None:
        prefix.another().point(prefix.commit("newer"))

    at_record(prefix, new, commit)
    curator(prefix).delete([new.save_id], even_newest=True)
    assert (pointed(prefix) or "").startswith("newer@")


def test_a_move_of_latest_that_is_under_way_does_not_land_on_what_was_deleted(
    prefix: Prefix,
) -> None:
    old, new = prefix.commit("old"), prefix.commit("new")
    prefix.catalog.point(old)
    prefix.fault(
        "put",
        "call",
        "^latest$",
        action=lambda: beside(prefix).delete([new.save_id], even_newest=True),
    )
    prefix.catalog.point(new)
    assert pointed(prefix) == old.folder


def test_a_move_of_latest_that_lands_late_finds_no_token_of_before_on_s3(seaweed: S3) -> None:
    """A token is a hash of the content there, and `latest` names again what it named before."""
    prefix = Prefix(seaweed.store(seaweed.bucket()))
    old, new = prefix.commit("old"), prefix.commit("new")
    prefix.catalog.point(old)
    prefix.fault("put", "late", "^latest$")
    prefix.catalog.point(new)
    assert pointed(prefix) == new.folder
    curator(prefix).delete([new.save_id], even_newest=True, at_once=True)
    assert prefix.store.apply_late() == 1
    assert pointed(prefix) == old.folder


# ---- deleting what is read


def restore(prefix: Prefix, folder: Path, save_id: str) -> str:
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        job = Restore(
            prefix.store,
            pool,
            budget=Budget(prefix.clock, streams=2),
            clock=prefix.clock,
            rng=random.Random(3),
        )
        return job.run(Volume(str(folder)), save_id=save_id).folder


def test_what_a_restore_holds_is_refused_and_comes_back_whole(
    prefix: Prefix, tmp_path: Path
) -> None:
    old, _ = prefix.commit("old", FILES), prefix.commit("new")

    def delete() -> None:
        with pytest.raises(KeptError, match="a restore holds it"):
            beside(prefix).delete([old.save_id], at_once=True)
        tried.append(True)

    tried: list[bool] = []
    prefix.fault("read", "call", old.folder, action=delete)
    folder = Path(restore(prefix, tmp_path / "volume", old.save_id))
    assert tried
    assert {path: (folder / path).read_bytes() for path in FILES} == FILES
    beside(prefix).delete([old.save_id], at_once=True)
    assert objects(prefix, old) == 0


def test_objects_stay_for_a_restore_that_took_its_hold_just_before_the_swap(
    prefix: Prefix,
) -> None:
    """It has its hold and has read the record, between our look at the holds and the swap."""
    old, _ = prefix.commit("old", FILES), prefix.commit("new")
    at_record(prefix, old, lambda: prefix.another().hold(old.save_id, "h"))
    left = curator(prefix).delete([old.save_id], at_once=True)
    assert "a restore holds it" in left[0].left
    assert objects(prefix, old) == 2
    prefix.another().release("h")
    (done,) = curator(prefix).delete([old.save_id], at_once=True)
    assert done.objects == 2


def test_a_restore_that_chose_it_and_holds_it_after_the_swap_stops(
    prefix: Prefix, tmp_path: Path
) -> None:
    old, _ = prefix.commit("old", FILES), prefix.commit("new")
    prefix.fault(
        "put",
        "call",
        ".ds_ckpt/holds/",
        action=lambda: beside(prefix).delete([old.save_id], at_once=True),
    )
    with pytest.raises(NothingCommittedError, match="was deleted"):
        restore(prefix, tmp_path / "volume", old.save_id)
    assert not (tmp_path / "volume/old").exists()
    assert not (tmp_path / "volume/latest").exists()


def test_a_hold_that_nobody_can_read_keeps_all(prefix: Prefix) -> None:
    old, _ = prefix.commit("old"), prefix.commit("new")
    prefix.put(".ds_ckpt/holds/odd.json", b"{")
    with pytest.raises(KeptError, match="a hold of this prefix cannot be read"):
        curator(prefix).delete([old.save_id])


# ---- dying


@pytest.mark.parametrize("newest", [False, True])
def test_a_deletion_that_dies_at_any_call_tears_nothing_and_is_repeated(newest: bool) -> None:
    for number in range(200):
        prefix = Prefix()
        first, second, third = (prefix.commit(tag, FILES) for tag in ("t1", "t2", "t3"))
        prefix.catalog.point(third)
        gone, heir = (third, second) if newest else (first, third)

        def die() -> None:
            raise Killed

        prefix.fault("*", "call", skip=number, action=die)
        try:
            curator(prefix).delete([gone.save_id], even_newest=newest, at_once=True)
        except Killed:
            pass
        else:
            break
        for record in prefix.another().committed():
            assert objects(prefix, record) == 2
        prefix.store.script.clear()
        curator(prefix).delete([gone.save_id], even_newest=newest, at_once=True)
        assert states(prefix)[gone.tag] == "deleted"
        assert objects(prefix, gone) == 0
        assert pointed(prefix) == heir.folder
        assert pins(prefix) <= {heir.tag}
    assert 15 < number < 199, "it died at every call"


@pytest.mark.parametrize("fault", ["fail-after", "late"])
def test_a_lost_answer_of_any_write_costs_nothing(fault: str) -> None:
    for number in range(20):
        prefix = Prefix()
        old, new = prefix.commit("old", FILES), prefix.commit("new", FILES)
        prefix.fault("put", fault, f"{RECORDS}|^latest$", skip=number)
        struck = prefix.store.script[0]
        curator(prefix).delete([new.save_id], even_newest=True, at_once=True)
        prefix.store.apply_late()
        if struck.count == 1:
            break
        assert states(prefix) == {"old": "committed", "new": "deleted"}
        assert (objects(prefix, old), objects(prefix, new)) == (2, 0)
        prefix.another().point(old)
        assert pointed(prefix) == old.folder
    assert 3 < number < 19


# ---- damage


def test_a_damaged_record_is_named_and_keeps_none_of_the_others(prefix: Prefix) -> None:
    old, bad, _ = (prefix.commit(tag) for tag in ("old", "bad", "new"))
    prefix.put(f"{RECORDS}{bad.save_id}.json", b"{torn")
    with pytest.raises(DamagedError, match=bad.save_id):
        curator(prefix).delete([bad.save_id])
    with pytest.raises(DamagedError, match=bad.save_id):
        curator(prefix).pin(bad.save_id)
    curator(prefix).delete([old.save_id], at_once=True)
    assert objects(prefix, bad) == 1
    assert objects(prefix, old) == 0
