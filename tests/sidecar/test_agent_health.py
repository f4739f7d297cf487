"""What the agent's page says of it: alive, started, able to store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_sidecar.observe import report
from ds_ckpt_sidecar.observe.metrics import Metrics
from ds_ckpt_sidecar.observe.view import look
from ds_ckpt_store.errors import CkptError, ExpiredError, ThrottledError, TransientError
from tests.sidecar.stage import Player, Stage, staged
from tests.simulation.kernel import EPOCH


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(tmp_path) as found:
        yield found


def page(player: Player) -> dict[str, str]:
    return {path: player.why(path) for path in ("/healthz", "/startedz", "/readyz")}


def test_before_it_has_the_volume_it_is_alive_and_not_started(stage: Stage) -> None:
    player = stage.agent()
    assert page(player) == {
        "/healthz": "",
        "/startedz": "starting: the volume is not locked yet",
        "/readyz": "starting: the store has not been reached yet",
    }


def test_once_the_store_answered_all_is_well(stage: Stage) -> None:
    player = stage.agent()
    stage.play(1)
    assert page(player) == {"/healthz": "", "/startedz": "", "/readyz": ""}


def test_a_store_that_is_away_at_start_keeps_it_unready_and_alive_for_hours(stage: Stage) -> None:
    stage.away = True
    player = stage.agent()
    for hour in (1, 2, 3):
        stage.play(3600 * hour)
        said = page(player)
        assert (said["/healthz"], said["/startedz"]) == ("", "")
        assert "the store is away" in said["/readyz"]
    stage.away = False
    stage.play(3600 * 3 + 90)
    assert player.why("/readyz") == ""


@pytest.mark.parametrize("kind", [ExpiredError, ThrottledError])
def test_a_store_that_puts_it_off_at_start_is_told_from_the_first_answer_on(
    stage: Stage, kind: type[TransientError]
) -> None:
    """Such an answer is waited out for minutes, before it counts as a failure."""
    stage.away, stage.answer = True, kind
    stage.save("a", 300)
    player = stage.agent()
    stage.play(1)
    assert stage.log.of("store.unavailable") == []
    assert stage.log.of("store.retried")[0]["kind"] == kind.__name__
    assert "the store is away" in player.why("/readyz")
    assert "not durable: a: discovered, " in stage.said()
    assert "the store is away" in stage.said()
    stage.away = False
    stage.play(300)
    assert (stage.committed(), player.why("/readyz")) == (["a"], "")


def test_a_store_that_goes_away_later_makes_it_unready_until_it_is_back(stage: Stage) -> None:
    player = stage.agent()
    stage.play(10)
    stage.away = True
    stage.save("a", 300)
    for hour in (1, 2):
        stage.play(3600 * hour)
        assert player.why("/healthz") == ""
        assert "the store is away" in player.why("/readyz")
    stage.away = False
    stage.play(3600 * 2 + 200)
    assert stage.committed() == ["a"]
    assert page(player) == {"/healthz": "", "/startedz": "", "/readyz": ""}


def test_one_that_stands_by_has_started_and_is_not_ready(stage: Stage) -> None:
    first = stage.agent()
    stage.play(1)
    second = stage.agent()
    stage.play(1000)
    assert page(second)["/healthz"] == page(second)["/startedz"] == ""
    assert page(second)["/readyz"].startswith("standing by: another agent works on")
    first.agent.stop()
    stage.play(1030)
    assert page(second)["/readyz"] == "", "it took over"


def test_while_it_drains_it_is_alive_and_able_to_store(stage: Stage) -> None:
    stage.save("huge", 8000)
    player = stage.agent(drain_seconds=60.0)
    stage.at(5, player.agent.stop)
    for second in (6, 20, 60):
        stage.play(second)
        assert player.code is None
        assert page(player) == {"/healthz": "", "/startedz": "", "/readyz": ""}


def test_in_a_long_upload_it_is_alive(stage: Stage) -> None:
    stage.save("huge", 90_000)
    player = stage.agent()
    for minute in range(1, 15):
        stage.play(60 * minute)
        assert player.why("/healthz") == ""


def slow_store_with_eight_records(stage: Stage) -> None:
    """Until second 30 an agent has stored and ended; each call takes minutes from then on."""
    for number in range(8):
        stage.save(f"t{number}", 10)
    first = stage.agent()
    stage.at(20, first.agent.stop)
    stage.play(30)
    stage.call_seconds = 100.0


def test_a_store_that_takes_minutes_for_what_has_no_end_in_sight_is_no_hang(stage: Stage) -> None:
    slow_store_with_eight_records(stage)
    stage.beat()
    player = stage.agent()  # reads eight records, one after the other
    for step in range(1, 60):
        stage.play(30 + 50 * step)
        assert player.why("/healthz") == ""


def test_one_that_hangs_is_dead_after_some_minutes_and_alive_when_it_moves_again(
    stage: Stage,
) -> None:
    stage.save("a", 300)
    player = stage.agent()
    stage.play(1)
    player.process.frozen_until = 1000.0  # in a call to a network filesystem, for instance
    stage.play(300)
    assert player.why("/healthz") == ""
    stage.play(600)
    assert "the agent's main loop has not moved for" in player.why("/healthz")
    stage.play(1010)
    assert player.why("/healthz") == ""


def test_the_notice_of_a_prestop_hook_is_answered_at_once(stage: Stage) -> None:
    player = stage.agent()
    stage.play(1)
    assert player.why("/prestop") == ""
    stage.play(3)
    assert len(stage.log.of("agent.noticed")) == 1


def test_another_runs_prefix_makes_it_unready_with_the_reason(stage: Stage) -> None:
    other = stage.agent()
    stage.save("a", 300)
    stage.play(20)
    assert stage.committed() == ["a"]
    other.process.kill()
    stage.trainer.run_id = "another"
    stage.save("b", 300)
    stage.beat()
    player = stage.agent()
    stage.play(60)
    assert "another run" in player.why("/readyz") or "belongs to run" in player.why("/readyz")
    assert player.why("/healthz") == ""


def test_what_keeps_it_from_going_on_stands_in_the_termination_message(stage: Stage) -> None:
    stage.trainer.volume.fs.remove_tree(stage.trainer.volume.own)
    Path(stage.trainer.volume.own).write_text("in the way")
    player = stage.agent()
    stage.play(1)
    assert isinstance(player.process.result, CkptError)
    assert "the agent gave up: " in stage.said()
    assert stage.trainer.volume.own in stage.said()


def test_an_error_that_nobody_expected_stands_there_too(stage: Stage) -> None:
    stage.save("a", 3000)
    player = stage.agent()
    stage.play(5)

    def broken() -> None:
        raise ZeroDivisionError("of a library")

    player.agent._health.beat = broken  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        stage.play(10)
    first, second, last = stage.said().splitlines()
    assert first == "durable: nothing"
    assert second.startswith("not durable: a: uploading")
    assert last == "the agent gave up: ZeroDivisionError: of a library"


def hang(stage: Stage, seconds: float) -> None:
    """From 10 s on each call to the store takes so long, and then fails."""
    stage.at(10, lambda: setattr(stage, "call_seconds", seconds))
    stage.at(10, lambda: setattr(stage, "away", True))


def test_the_probe_the_page_and_the_metric_never_disagree(stage: Stage) -> None:
    """While the store is away, hangs, or is back, in a wait, a hang, a drain, and after the end."""
    stage.away = True
    first = stage.agent()
    second = stage.agent()
    stage.at(100, lambda: setattr(stage, "away", False))
    for at in (200, 1_000):
        stage.at(at, lambda: stage.save(f"t{stage.now:.0f}", 300))
    stage.at(300, lambda: setattr(stage, "call_seconds", 250.0))
    stage.at(900, lambda: setattr(stage, "call_seconds", 0.01))
    stage.at(1_700, lambda: setattr(first.process, "frozen_until", 2_200.0))
    stage.at(2_500, first.agent.stop)
    reasons = set()
    for moment in range(1, 2_700, 7):
        stage.play(moment)
        for player in (first, second):
            view = player.agent.look()
            metrics = Metrics(player.agent.look, player.agent.tally).render("")[1].decode()
            ready = f'ds_ckpt_agent_ready{{run="{view.run_id}"}} {float(not view.unready)}'
            assert player.why("/readyz") == view.unready
            assert ready in metrics
            reasons.add(view.unready)
    assert (first.why("/readyz"), second.why("/readyz")) == ("the agent is stopped", "")
    for seen in ("starting: ", "standing by: ", "last heard of ", "is stopped"):
        assert any(seen in reason for reason in reasons)


@pytest.mark.parametrize("kind", [TransientError, ThrottledError, ExpiredError])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("seconds", [1.0, 60.0, 119.0])
def test_an_agent_whose_calls_to_the_store_hang_is_heard_of_between_them(
    stage: Stage, kind: type[TransientError], begun: bool, seconds: float
) -> None:
    stage.answer = kind
    hang(stage, seconds)
    if begun:
        stage.agent()
    stage.play(11)
    if not begun:
        stage.agent()
    stage.save("a", 300)
    assert longest_silence(stage, 1_500) <= seconds + 2 * report.HEARTBEAT_SECONDS + 1


def test_one_that_reads_much_from_a_slow_store_is_heard_of_between_two_calls(stage: Stage) -> None:
    slow_store_with_eight_records(stage)
    stage.agent()
    assert longest_silence(stage, 2_000, since=200) <= 100 + 2 * report.HEARTBEAT_SECONDS + 1


def test_one_that_seldom_has_anything_to_do_is_heard_of(stage: Stage) -> None:
    stage.agent(rescan_seconds=3_600.0)
    assert longest_silence(stage, 3_000) <= 2 * report.HEARTBEAT_SECONDS


@pytest.mark.parametrize("patience", [1.0, 60.0, 3_600.0])
def test_all_who_judge_it_wait_for_a_request_that_hangs(stage: Stage, patience: float) -> None:
    """For its connection and its answer, each as long as ``--stall-seconds`` allows."""
    stage.agent(stall_seconds=patience)
    stage.play(5)
    said = stage.trainer.volume.sidecar_status()
    assert said is not None
    oldest = 2 * patience + 2 * report.HEARTBEAT_SECONDS
    assert not said.is_silent(said.time + oldest)
    assert look(said, None, [], said.time + oldest).alive
    assert said.is_silent(said.time + oldest + 61)


def longest_silence(stage: Stage, until: float, since: float = 60.0) -> float:
    """The oldest that the heartbeat gets, looked at every second."""
    longest = 0.0
    for second in range(int(max(since, stage.now + 1)), int(until)):
        stage.play(second)
        said = stage.trainer.volume.sidecar_status()
        assert said is not None
        longest = max(longest, EPOCH + stage.now - said.time)
    return longest
