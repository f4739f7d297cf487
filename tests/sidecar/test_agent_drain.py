"""What an agent does with little time: SIGTERM, the notice of a preStop hook, a store that is away.

The network moves 100 bytes a second, see :mod:`tests.sidecar.stage`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_sidecar.ending import END_SECONDS, NOTICE_SECONDS
from tests.sidecar.stage import Stage, staged

DRAIN = 25.0
PART_SECONDS = 2.0


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(tmp_path) as found:
        yield found


# ---- what goes first


def test_without_a_hurry_the_oldest_goes_first(stage: Stage) -> None:
    for tag in ("a", "b", "c"):
        stage.save(tag, 500)
    stage.agent()
    stage.play(60)
    assert stage.order() == ["a", "b", "c"]


def test_after_sigterm_the_newest_goes_first_and_nothing_is_sent_twice(stage: Stage) -> None:
    for tag in ("a", "b", "c"):
        stage.save(tag, 500)
    player = stage.agent()
    stage.at(2, player.agent.stop)  # in the middle of "a"
    stage.play(60)
    assert stage.order() == ["c", "b", "a"]
    assert player.code == 0
    assert player.ended_at < 2 + DRAIN
    assert stage.sent == 3 * 500


def test_a_save_that_is_handed_over_while_it_drains_goes_before_older_ones(stage: Stage) -> None:
    stage.save("old", 1500)
    player = stage.agent()
    stage.at(2, player.agent.stop)
    stage.at(5, lambda: stage.save("last words", 400))
    stage.play(60)
    assert stage.order() == ["last words", "old"]
    assert (player.code, stage.sent) == (0, 1900)


def test_a_new_save_that_does_not_fit_waits_until_the_older_one_that_does_is_stored(
    stage: Stage,
) -> None:
    stage.save("small", 800)
    stage.save("huge", 8000)
    player = stage.agent(order="newest")
    stage.at(10, player.agent.stop)  # "huge" is under way, and would take 70 s more
    stage.play(60)
    assert stage.order() == ["small"]
    assert player.code == 1
    assert 10 + DRAIN <= player.ended_at <= 10 + DRAIN + PART_SECONDS, "it goes on with the rest"
    assert "not durable: huge: uploading" in stage.said()


def test_a_recovery_save_goes_first_without_any_notice(stage: Stage) -> None:
    """The trainer knows first that it is to end; the sidecar is told when the trainer has ended."""
    stage.save("old", 6000)
    stage.save("older than the last", 300)
    stage.agent()
    stage.at(10, lambda: stage.save("last words", 900, kind="recovery"))
    stage.play(55)
    assert stage.committed() == ["last words"], "what was under way for 10 s makes way"
    stage.play(120)
    assert stage.order() == ["last words", "old", "older than the last"]
    assert stage.sent <= 7200 + 1500, "and goes on where it was"


def test_of_two_that_do_not_fit_the_nearer_one_is_tried_all_the_same(stage: Stage) -> None:
    """What is left of the grace is a guess, and a network may become faster."""
    stage.save("large", 4000)
    stage.save("larger", 9000)
    player = stage.agent(order="newest")
    stage.at(10, player.agent.stop)
    stage.at(20, lambda: setattr(stage, "rate", 1000.0))
    stage.play(60)
    assert stage.order() == ["large", "larger"]
    assert player.code == 0


def test_what_did_not_fit_is_continued_by_the_next_start(stage: Stage) -> None:
    stage.save("huge", 8000)
    first = stage.agent()
    stage.at(10, first.agent.stop)
    stage.play(60)
    assert first.code == 1
    sent = stage.sent
    stage.agent()
    stage.play(85)  # it tells how it stands every 20 s
    status = stage.trainer.volume.sidecar_status()
    assert status is not None
    assert status.backlog_bytes <= 8000 - sent - 1500, "what was sent before counts"
    stage.play(200)
    assert stage.committed() == ["huge"]
    assert stage.sent == 8000


def test_with_two_seconds_what_lacks_only_its_commit_goes_before_what_has_just_begun(
    stage: Stage,
) -> None:
    stage.save("whole", 300)
    first = stage.agent()
    while stage.sent < 300:
        stage.play(stage.now + 0.005)
    first.process.kill()
    assert stage.committed() == []
    stage.save("new", 9000)
    second = stage.agent(drain_seconds=2.0)
    second.agent.stop()
    stage.play(stage.now + 60)
    assert stage.committed() == ["whole"]
    assert second.code == 1
    assert stage.said().startswith("durable: whole (")


def test_a_bound_of_the_settings_is_lifted_by_the_signal_itself(stage: Stage) -> None:
    for act in ("stop", "notice"):
        player = stage.agent(bandwidth="64KiB")
        stage.play(stage.now + 3)
        getattr(player.agent, act)()
        assert player.agent._budget.bandwidth == 0
        player.process.kill()


def test_while_it_drains_nothing_is_removed_before_all_is_stored(stage: Stage) -> None:
    stage.save("a", 300)
    stage.save("b", 1500)
    player = stage.agent(keep_local=0)
    stage.at(1, player.agent.stop)
    stage.play(60)
    events = [
        event for _, event, _ in stage.log.lines if event in ("save.committed", "save.cleaned")
    ]
    assert events[:2] == ["save.committed"] * 2
    assert events[2:], "and then it is put in order"
    assert player.code == 0


# ---- how long


def test_a_second_sigterm_makes_the_end_come_neither_sooner_nor_later(stage: Stage) -> None:
    stage.save("huge", 8000)
    player = stage.agent()
    for at in (2, 3, 20):
        stage.at(at, player.agent.stop)
    stage.play(60)
    assert 2 + DRAIN <= player.ended_at <= 2 + DRAIN + PART_SECONDS


def test_with_all_stored_sigterm_ends_it_at_once(stage: Stage) -> None:
    stage.save("a", 300)
    player = stage.agent()
    stage.at(100, player.agent.stop)
    stage.play(200)
    assert (player.code, stage.committed()) == (0, ["a"])
    assert player.ended_at < 101


def test_with_two_seconds_of_grace_it_ends_in_time_and_says_what_is_lost(stage: Stage) -> None:
    stage.save("old", 300)
    player = stage.agent(drain_seconds=2.0)
    stage.at(10, lambda: stage.save("new", 1000))
    stage.at(14, player.agent.stop)
    stage.play(60)
    over = 16 - END_SECONDS  # a request that is under way is awaited, on this network
    assert over <= player.ended_at <= over + PART_SECONDS
    assert player.code == 1
    assert stage.said().startswith("durable: old (old@")
    assert "not durable: new: uploading, 0 of 1 MiB are stored" in stage.said()


@pytest.mark.parametrize("trouble", ["another node is missing", "takes no data", "away"])
def test_with_two_seconds_no_pause_goes_beyond_them(stage: Stage, trouble: str) -> None:
    for quarter in range(8):
        with stage._on_stage():
            lacks = trouble == "another node is missing"
            nodes = [stage.trainer.node, "f" * 32] if lacks else None
            stage.trainer.save(f"t{quarter}", {"x": 10}, nodes=nodes)
    stage.away = trouble == "away"
    stage.takes_no_data = trouble == "takes no data"
    player = stage.agent(drain_seconds=2.0)
    stage.at(100, player.agent.stop)
    stage.play(160)
    assert player.code is not None
    assert 101 < player.ended_at <= 102


def test_what_is_left_of_a_save_that_a_newer_one_has_outdated_is_said_to_be_so(
    stage: Stage,
) -> None:
    stage.save("old", 9000)
    stage.save("new", 300)
    player = stage.agent(drain_seconds=4.0)
    stage.at(2, player.agent.stop)
    stage.play(60)
    assert player.code == 1
    assert stage.committed() == ["new"]
    (line,) = [line for line in stage.said().splitlines() if line.startswith("not durable")]
    assert line.startswith("not durable: old: uploading")
    assert line.endswith("; a newer checkpoint is durable")


# ---- the early notice


def test_a_notice_turns_the_order_round_and_does_not_end_it(stage: Stage) -> None:
    for tag in ("a", "b", "c"):
        stage.save(tag, 500)
    player = stage.agent()
    stage.at(2, player.agent.notice)
    stage.play(60)
    assert stage.order() == ["c", "b", "a"]
    assert player.code is None
    assert len(stage.log.of("agent.noticed")) == 1
    assert player.why("/readyz") == ""


def test_while_a_notice_holds_nothing_is_removed_and_afterwards_it_is(stage: Stage) -> None:
    stage.save("a", 300)
    player = stage.agent(keep_local=0)
    player.agent.notice()
    stage.save("b", 300)
    stage.play(NOTICE_SECONDS - 10)
    assert stage.order() == ["b", "a"]
    assert not stage.log.of("save.cleaned")
    stage.play(NOTICE_SECONDS + 70)
    assert stage.log.of("save.cleaned")


def test_a_notice_without_a_signal_is_taken_back(stage: Stage) -> None:
    player = stage.agent()
    stage.at(1, player.agent.notice)
    stage.play(NOTICE_SECONDS + 60)
    assert len(stage.log.of("agent.notice_expired")) == 1
    for tag in ("a", "b", "c"):
        stage.save(tag, 500)
    stage.play(NOTICE_SECONDS + 120)
    assert stage.order() == ["a", "b", "c"], "as the settings say"
    assert player.code is None


def test_a_notice_frees_the_bandwidth_that_the_settings_bound_and_gives_it_back(
    stage: Stage,
) -> None:
    player = stage.agent(bandwidth="64KiB")
    stage.at(1, player.agent.notice)
    stage.play(NOTICE_SECONDS + 60)
    assert [line["bandwidth"] for line in stage.log.of("limits.changed")] == [
        "no limit",
        "0.0625 MiB/s",
    ]


def test_a_bandwidth_that_was_set_while_it_runs_holds_in_a_hurry_too(stage: Stage) -> None:
    player = stage.agent()
    stage.play(1)
    limits = Path(stage.trainer.volume.limits)
    limits.write_text('{"schema": 1, "bandwidth": 1048576}')
    stage.at(50, player.agent.stop)
    stage.play(100)
    assert stage.log.of("limits.changed")[-1]["bandwidth"] == "1 MiB/s"


def test_after_a_notice_the_time_is_planned_from_the_notice_on(stage: Stage) -> None:
    """The trainer uses up most of the grace, and the signal comes when 2 s are left."""
    stage.save("warm", 500)
    player = stage.agent()
    stage.at(1, player.agent.notice)

    def last_saves() -> None:
        stage.save("small", 300)
        stage.save("large", 1500)

    stage.at(20, last_saves)
    stage.at(21, player.agent.stop)
    stage.play(25)
    assert stage.order() == ["warm", "small"], "with 25 s from the signal on, large would go first"


def test_a_signal_that_leaves_two_seconds_lets_the_cluster_hear_at_once_what_may_be_lost(
    stage: Stage,
) -> None:
    """The kubelet kills it before it has ended, and then it could tell nothing."""
    player = stage.agent()
    stage.at(1, player.agent.notice)
    stage.at(22, lambda: stage.save("large", 9000))
    stage.at(24, player.agent.stop)
    stage.play(25)
    assert player.code is None
    assert ["large" in saves[0] for saves in stage.reports.of("not durable")] == [True]
    stage.play(60)
    assert player.code == 1
    assert len(stage.reports.of("not durable")) == 1


def test_a_drain_that_has_time_tells_the_cluster_of_no_loss(stage: Stage) -> None:
    stage.save("a", 300)
    stage.save("b", 900)
    player = stage.agent()
    stage.at(1, player.agent.stop)
    stage.play(60)
    assert player.code == 0
    assert stage.reports.of("not durable") == []


# ---- a store that is away


def test_sigterm_while_the_store_is_away_ends_in_time_and_says_what_is_not_durable(
    stage: Stage,
) -> None:
    stage.save("a", 300)
    player = stage.agent()
    stage.play(20)
    stage.away = True
    stage.save("b", 300)
    stage.play(60)
    player.agent.stop()
    stage.play(200)
    assert 60 + DRAIN - 1 <= player.ended_at <= 60 + DRAIN + PART_SECONDS
    assert player.code == 1
    said = stage.said()
    assert said.startswith("durable: a (a@")
    assert "not durable: b: " in said
    assert "the store is away" in said
    (told,) = stage.reports.of("not durable")
    assert told[0].startswith("b: ")


def test_a_store_that_comes_back_while_it_drains_is_used_at_once(stage: Stage) -> None:
    player = stage.agent()
    stage.play(5)
    stage.away = True
    stage.save("a", 300)
    stage.play(400)  # calls are repeated seldom by now
    player.agent.stop()
    stage.at(410, lambda: setattr(stage, "away", False))
    stage.play(500)
    assert stage.committed() == ["a"]
    assert player.code == 0
    assert player.ended_at < 417


def test_a_save_that_has_failed_for_long_is_tried_at_once_when_a_drain_begins(
    stage: Stage,
) -> None:
    stage.takes_no_data = True
    stage.save("a", 100)
    player = stage.agent()
    stage.play(600)
    delayed = stage.log.of("save.delayed")
    while len(stage.log.of("save.delayed")) == len(delayed):
        stage.play(stage.now + 1)
    assert stage.log.of("save.delayed")[-1]["next_try_seconds"] > 25
    told = stage.now
    player.agent.stop()
    stage.at(told + 12, lambda: setattr(stage, "takes_no_data", False))
    stage.play(told + 100)
    assert (stage.committed(), player.code) == (["a"], 0)
    assert player.ended_at < told + 20


def test_a_store_that_was_never_reached_is_tried_until_the_time_is_over(stage: Stage) -> None:
    stage.away = True
    stage.save("a", 300)
    player = stage.agent()
    stage.at(30, player.agent.stop)
    stage.play(200)
    assert 30 + DRAIN - 2 <= player.ended_at <= 30 + DRAIN + PART_SECONDS
    assert player.code == 1
    assert stage.said().startswith("durable: unknown: list '': the store is away\n")
    assert "not durable: a: discovered, " in stage.said()
    assert [line["tag"] for line in stage.log.of("save.left")] == ["a"]
    assert [line["saves"] for line in stage.log.of("agent.draining")] == [1]


def test_an_agent_that_is_cut_short_logs_what_it_leaves(stage: Stage) -> None:
    stage.save("a", 9000)
    player = stage.agent()
    stage.at(10, player.agent.cut_short)
    stage.play(11)
    (left,) = stage.log.of("save.left")
    assert left["reason"].startswith("a: uploading")


def test_what_was_durable_at_an_earlier_start_is_not_logged_as_committed_again(
    stage: Stage,
) -> None:
    stage.save("a", 300)
    first = stage.agent(keep_local=2)
    stage.at(20, first.agent.stop)
    stage.play(30)
    stage.agent(keep_local=2)
    stage.play(60)
    assert stage.order() == ["a"]
    assert [line["tag"] for line in stage.log.of("save.found_committed")] == ["a"]


def test_what_an_earlier_start_made_durable_is_not_called_lost_while_the_store_is_away(
    stage: Stage,
) -> None:
    stage.save("a", 300)
    first = stage.agent()
    stage.at(20, first.agent.stop)
    stage.play(30)
    stage.away = True
    second = stage.agent()
    manifest = stage.save("b", 300)
    stage.play(40)
    assert "not durable: b: " in stage.said()
    assert "not durable: a: " not in stage.said()
    Path(stage.trainer.volume.outbox, manifest.file_name).unlink()
    second.agent.stop()
    stage.play(42)
    assert second.code == 0, "there is nothing to store"


def test_a_store_that_was_never_reached_keeps_nothing_back_that_has_nothing_to_store(
    stage: Stage,
) -> None:
    stage.away = True
    player = stage.agent()
    stage.at(30, player.agent.stop)
    stage.play(200)
    assert player.ended_at < 33
    assert player.code == 0


def test_a_store_that_is_first_reached_while_it_drains_gets_what_is_there(stage: Stage) -> None:
    stage.away = True
    stage.save("a", 300)
    player = stage.agent()
    stage.at(30, player.agent.stop)
    stage.at(40, lambda: setattr(stage, "away", False))
    stage.play(200)
    assert (stage.committed(), player.code) == (["a"], 0)
    assert player.ended_at < 47


# ---- an eviction: SIGTERM, and SIGKILL sooner than the settings say

SAVE_SECONDS = 60.0
UPLOAD_SECONDS = 20.0


@pytest.mark.parametrize("grace", [30.0, 15.0, 2.0])
@pytest.mark.parametrize("age", [1.0, 8.0, 17.0, 21.0, 59.0])
def test_an_eviction_loses_no_more_than_the_newest_save_and_says_which(
    stage: Stage, grace: float, age: float
) -> None:
    """A save every minute, each of which takes 20 s, and a pod that dies ``age`` s after one.

    The table in docs/operations.md is this, with other figures.
    """
    size = int(stage.rate * UPLOAD_SECONDS)
    for number in range(3):
        stage.at(number * SAVE_SECONDS, lambda n=number: stage.save(f"t{n}", size))
    player = stage.agent(rescan_seconds=0.5)
    stage.at(2 * SAVE_SECONDS + age, player.agent.stop)
    stage.play(2 * SAVE_SECONDS + age + grace)
    player.process.kill()
    durable = age + grace >= UPLOAD_SECONDS + 2.0  # the agent looks, the network answers
    surely_lost = age + grace < UPLOAD_SECONDS
    assert durable or surely_lost
    assert stage.committed() == (["t0", "t1", "t2"] if durable else ["t0", "t1"])
    first, *rest = stage.said().splitlines()
    assert first.startswith(f"durable: {'t2' if durable else 't1'} (")
    assert [line.partition(", ")[0] for line in rest[:-1]] == (
        [] if durable else ["not durable: t2: uploading"]
    )
