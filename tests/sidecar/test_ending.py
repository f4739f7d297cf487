"""How much time is left, whether the trainer is over, and what goes first: by the clock alone."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import pytest

from ds_ckpt_sidecar.ending import (
    END_SECONDS,
    FLOOR_SECONDS,
    LIVES_SECONDS,
    NOTICE_SECONDS,
    UNSEEN_SECONDS,
    Ending,
    Impatient,
    Patience,
    TrainerWatch,
)
from ds_ckpt_sidecar.lifecycle import Save
from ds_ckpt_sidecar.order import COMMIT_SECONDS, Rate, first_in_hurry
from ds_ckpt_store.contract.manifest import NodeManifest, Shard, TrainerStatus
from ds_ckpt_store.errors import PausedError

_numbers = count()


class HandClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def time(self) -> float:
        return 1.8e9 + self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


# ---- the time that is left


def test_the_time_is_over_so_long_after_the_first_signal(clock: HandClock) -> None:
    ending = Ending(clock, 25.0)
    assert (ending.stopping, ending.hurried, ending.over) == (False, False, False)
    ending.stop()
    clock.now += 24
    ending.stop()
    assert ending.stopping
    assert not ending.over
    clock.now += 1 - END_SECONDS
    assert ending.over, "the end of the process lies within the drain"


def test_a_drain_of_next_to_nothing_keeps_half_of_it_for_work(clock: HandClock) -> None:
    ending = Ending(clock, 0.5)
    ending.stop()
    clock.now += 0.2
    assert not ending.over
    clock.now += 0.05
    assert ending.over


def test_the_last_reports_get_what_is_left_of_the_drain(clock: HandClock) -> None:
    ending = Ending(clock, 25.0)
    assert ending.seconds_to_exit(2.0) == 2.0, "nobody waits for the end"
    ending.stop()
    assert ending.seconds_to_exit(2.0) == 2.0
    clock.now += 24.5
    assert 0.3 < ending.seconds_to_exit(2.0) < 0.5
    clock.now += 10
    assert 0 < ending.seconds_to_exit(2.0) < 0.2


def test_a_plan_is_made_from_the_notice_on_and_never_for_less_than_the_kubelet_leaves(
    clock: HandClock,
) -> None:
    ending = Ending(clock, 25.0)
    ending.notice()
    clock.now += 20
    assert ending.seconds_left() == 5.0 - END_SECONDS
    ending.stop()
    assert ending.seconds_left() == 5.0 - END_SECONDS, "the signal adds nothing to the grace"
    assert not ending.over
    clock.now += 10
    assert ending.seconds_left() == FLOOR_SECONDS
    assert not ending.over, "tried until it is killed, or 25 s after the signal"


def test_no_plan_is_made_for_more_than_is_left(clock: HandClock) -> None:
    ending = Ending(clock, 2.0)
    ending.stop()
    clock.now += 1.0
    assert ending.seconds_left() == 1.0 - END_SECONDS
    clock.now += 1.5
    assert 0 < ending.seconds_left() < 0.5


def test_a_notice_is_forgotten(clock: HandClock) -> None:
    ending = Ending(clock, 25.0)
    ending.notice()
    clock.now += NOTICE_SECONDS
    assert not ending.hurried
    ending.stop()
    assert ending.seconds_left() == 25.0 - END_SECONDS


def test_a_second_notice_lets_the_time_begin_anew(clock: HandClock) -> None:
    ending = Ending(clock, 25.0)
    ending.notice()
    clock.now += NOTICE_SECONDS - 1
    ending.notice()
    clock.now += 5
    assert ending.noticed
    assert ending.seconds_left() == 20.0 - END_SECONDS


# ---- whoever waits


def test_whoever_waits_long_is_woken_when_a_hurry_begins(clock: HandClock) -> None:
    began = clock.now
    Impatient(clock, lambda: clock.now >= began + 7, lambda: False).sleep(60.0)
    assert clock.now == began + 7


def test_in_a_hurry_nobody_waits_longer_than_a_second(clock: HandClock) -> None:
    patient = Impatient(clock, lambda: True, lambda: False)
    patient.sleep(60.0)
    assert sum(clock.slept) == 1.0
    patient.sleep(0.25)
    assert sum(clock.slept) == 1.25


def test_without_a_hurry_all_of_it_is_slept(clock: HandClock) -> None:
    Impatient(clock, lambda: False, lambda: False).sleep(2.5)
    assert sum(clock.slept) == 2.5


def test_when_the_time_is_over_nothing_is_waited_for_any_more(clock: HandClock) -> None:
    with pytest.raises(PausedError, match="time for draining is over"):
        Impatient(clock, lambda: True, lambda: True).sleep(60.0)


# ---- the trainer


def said(
    *,
    finished: bool = False,
    by_itself: bool = False,
    attempt: str = "a",
    time: float | None = None,
) -> TrainerStatus:
    return TrainerStatus(
        run_id="run",
        attempt=attempt,
        time=float(next(_numbers)) if time is None else time,
        finished=finished,
        by_itself=by_itself,
        nodes=["n"],
    )


def test_a_trainer_that_says_so_has_finished(clock: HandClock) -> None:
    watch = TrainerWatch(clock, 300.0)
    assert watch.look(None) == ""
    assert watch.look(said()) == ""
    assert watch.lives
    assert watch.look(said(finished=True)) == "finished"
    assert not watch.lives


def test_what_an_earlier_pod_left_says_nothing_of_this_one(clock: HandClock) -> None:
    watch = TrainerWatch(clock, 300.0)
    left = said(finished=True)
    assert watch.look(left) == ""
    clock.now += 299
    assert watch.look(left) == ""
    assert watch.look(said(attempt="b")) == ""
    clock.now += 299
    assert watch.look(said(attempt="b")) == ""


def test_a_finished_mark_that_stays_is_believed_after_the_same_silence(clock: HandClock) -> None:
    watch = TrainerWatch(clock, 300.0)
    left = said(finished=True)
    watch.look(left)
    clock.now += 300
    assert watch.look(left) == "finished"


def test_a_heartbeat_that_was_there_before_and_never_moves_is_believed_only_after_long(
    clock: HandClock,
) -> None:
    watch = TrainerWatch(clock, 300.0)
    left = said()
    watch.look(left)
    clock.now += UNSEEN_SECONDS - 1
    assert watch.look(left) == "", "the trainer of this pod may still be on its way"
    assert not watch.lives
    clock.now += 1
    assert watch.look(left) == "gone"
    assert watch.look(said()) == "", "and it is not, once it beats"
    assert watch.patience == 300.0


def test_who_is_patient_for_longer_than_that_is_so_with_an_unknown_trainer_too(
    clock: HandClock,
) -> None:
    watch = TrainerWatch(clock, 2 * UNSEEN_SECONDS)
    left = said()
    watch.look(left)
    clock.now += 2 * UNSEEN_SECONDS - 1
    assert watch.look(left) == ""
    clock.now += 1
    assert watch.look(left) == "gone"


@pytest.mark.parametrize(("finished", "verdict"), [(False, "gone"), (True, "finished")])
def test_a_last_word_between_the_start_and_the_first_look_is_of_this_pod(
    clock: HandClock, finished: bool, verdict: str
) -> None:
    watch = TrainerWatch(clock, 300.0)
    clock.now += 3
    last = said(finished=finished, time=clock.time() - 1)
    first = watch.look(last)
    assert first == ("finished" if finished else "")
    clock.now += 300
    assert watch.look(last) == verdict


def test_saves_without_a_word_of_a_trainer_end_the_waiting_only_after_long(
    clock: HandClock,
) -> None:
    watch = TrainerWatch(clock, 300.0)
    assert watch.look(None, "a.json") == ""
    clock.now += UNSEEN_SECONDS - 1
    assert watch.look(None, "b.json") == "", "who saves, lives"
    clock.now += UNSEEN_SECONDS - 1
    assert watch.look(None, "b.json") == ""
    clock.now += 1
    assert watch.look(None, "b.json") == "gone"


def test_a_volume_on_which_nobody_has_been_is_waited_on_without_end(clock: HandClock) -> None:
    watch = TrainerWatch(clock, 300.0)
    watch.look(None)
    clock.now += 100 * UNSEEN_SECONDS
    assert watch.look(None) == ""


def test_one_whose_process_ended_by_itself_may_be_started_again(clock: HandClock) -> None:
    watch = TrainerWatch(clock, 300.0)
    assert watch.look(said()) == ""
    clock.now += 5
    left = said(finished=True, by_itself=True)
    assert watch.look(left) == ""
    assert not watch.lives, "no drain waits for it"
    clock.now += 299
    assert watch.look(left) == ""
    clock.now += 2
    assert watch.look(left) == "gone"


def test_one_that_was_seen_to_beat_and_falls_silent_is_gone(clock: HandClock) -> None:
    watch = TrainerWatch(clock, 300.0)
    watch.look(None)
    last = said()
    watch.look(last)
    clock.now += LIVES_SECONDS
    assert not watch.lives
    clock.now += 284
    assert watch.look(last) == ""
    clock.now += 1
    assert watch.look(last) == "gone"
    assert watch.look(said()) == "", "and it is not, once it beats again"


def test_a_status_that_cannot_be_read_is_no_sign_of_life_and_no_end(clock: HandClock) -> None:
    watch = TrainerWatch(clock, 300.0)
    watch.look(None)
    watch.look(said())
    clock.now += 100
    assert watch.look(None) == ""
    clock.now += 200
    assert watch.look(None) == "gone"


def test_patience_lasts_while_less_is_left(clock: HandClock) -> None:
    patience = Patience(clock, 25.0)
    for left in (100, 90, 80):
        assert not patience.is_over(left)
        clock.now += 20
    assert not patience.is_over(80)
    clock.now += 5
    assert patience.is_over(85)
    patience.renew()
    assert not patience.is_over(85)


# ---- what goes first


class Counted:
    """Stands for a budget: how much was moved."""

    moved = 0


def rate_of(clock: HandClock, bytes_per_second: int) -> Rate:
    budget = Counted()
    rate = Rate(budget, clock)  # type: ignore[arg-type]
    for _ in range(5):
        rate.look()
        clock.now += 1
        budget.moved += bytes_per_second
    rate.look()
    return rate


def save(number: int, size: int, *, done: int = 0, waits: bool = False) -> Save:
    save_id = f"{number:012x}-{number:016x}"
    shard = Shard(path="x", size=size, crc32c="00000000", device=1, inode=1, mtime_ns=1, rank=0)
    manifest = NodeManifest(
        run_id="run",
        attempt=save_id,
        save_id=save_id,
        tag=f"t{number}",
        time_ms=number,
        nodes=["0" * 32],
        node="0" * 32,
        ranks=[0],
        shards=[shard],
    )
    found = Save(manifest, f"{save_id}.json")
    found.bytes_done = done
    found.waiting_for = ("other",) if waits else ()
    return found


def tag_of(saves: Iterable[Save], rate: Rate, left: float, current: Save | None = None) -> str:
    return first_in_hurry(list(saves), rate, left, current).manifest.tag


def test_the_newest_that_fits_goes_first(clock: HandClock) -> None:
    saves = [save(1, 100), save(2, 900), save(3, 5000)]
    rate = rate_of(clock, 100)
    assert tag_of(saves, rate, 60) == "t3"
    assert tag_of(saves, rate, 25) == "t2"
    assert tag_of(saves, rate, 5) == "t1"


def test_what_was_sent_already_is_not_counted(clock: HandClock) -> None:
    saves = [save(1, 100), save(2, 5000, done=4200)]
    assert tag_of(saves, rate_of(clock, 100), 10) == "t2"


def test_before_anything_was_measured_the_newest_goes_first(clock: HandClock) -> None:
    rate = Rate(Counted(), clock)  # type: ignore[arg-type]
    assert tag_of([save(1, 1), save(2, 1 << 40)], rate, 2) == "t2"


def test_if_none_fits_the_one_that_comes_nearest_goes_first(clock: HandClock) -> None:
    assert tag_of([save(1, 9000), save(2, 3000), save(3, 5000)], rate_of(clock, 100), 5) == "t2"


def test_what_is_under_way_is_not_dropped_for_a_guess_that_is_a_little_off(
    clock: HandClock,
) -> None:
    small, large = save(1, 100), save(2, 1200)
    rate = rate_of(clock, 100)
    assert tag_of([small, large], rate, 10, current=large) == "t2"
    assert tag_of([small, large], rate, 10) == "t1"
    assert tag_of([small, large], rate, 5, current=large) == "t1"


def test_what_waits_for_other_nodes_alone_comes_last(clock: HandClock) -> None:
    rate = rate_of(clock, 100)
    assert tag_of([save(1, 100), save(2, 100, waits=True)], rate, 25) == "t1"
    assert tag_of([save(2, 100, waits=True)], rate, 25) == "t2"


def test_what_has_no_byte_left_is_not_passed_over_for_a_guess(clock: HandClock) -> None:
    whole, new = save(1, 1000, done=1000), save(2, 100)
    unknown = Rate(Counted(), clock)  # type: ignore[arg-type]
    assert tag_of([whole, new], unknown, 25) == "t1"
    assert tag_of([whole, new], unknown, 2, current=whole) == "t1"
    rate = rate_of(clock, 100)
    assert tag_of([whole, new], rate, 3.9) == "t1", "there may be no time for both"
    assert tag_of([whole, new], rate, 4) == "t2", "there is plenty of time for both"
    assert tag_of([whole, save(2, 5000)], rate, 2) == "t1"
    assert tag_of([save(0, 5, done=5), whole, save(2, 5000)], rate, 2) == "t1"
    assert tag_of([save(1, 100), save(2, 9, done=9)], rate, 25) == "t2"


def test_a_rate_is_of_late_and_a_pause_is_no_part_of_it(clock: HandClock) -> None:
    budget = Counted()
    rate = Rate(budget, clock)  # type: ignore[arg-type]
    fast = save(1, 10_000)
    for _ in range(20):
        rate.look()
        clock.now += 1
        budget.moved += 1000
    rate.look()
    assert rate.seconds(fast) == 10 + COMMIT_SECONDS
    clock.now += 600  # nothing to do
    rate.look()
    assert rate.seconds(fast) == 10 + COMMIT_SECONDS
    for _ in range(20):
        clock.now += 1
        budget.moved += 100
        rate.look()
    assert rate.seconds(fast) == 100 + COMMIT_SECONDS
    rate.forget()
    assert rate.seconds(fast) == 0.0


def test_a_rate_that_is_shown_is_none_while_nothing_moves(clock: HandClock) -> None:
    budget = Counted()
    rate = Rate(budget, clock)  # type: ignore[arg-type]
    assert rate.current == 0
    for _ in range(20):
        rate.look()
        clock.now += 1
        budget.moved += 1000
    rate.look()
    assert rate.current == 1000
    for _ in range(12):  # the store takes nothing
        clock.now += 1
        rate.look()
    assert rate.current == 0
    assert rate.known > 0, "a guess goes by what was measured"
    budget.moved += 1000
    clock.now += 600  # nobody looks
    assert rate.current == 0
