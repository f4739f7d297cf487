"""What the agent's page says of it: alive, started, able to store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_store.errors import CkptError, ExpiredError, ThrottledError, TransientError
from tests.sidecar.stage import Player, Stage, staged


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


def test_a_store_that_takes_minutes_for_what_has_no_end_in_sight_is_no_hang(stage: Stage) -> None:
    for number in range(8):
        stage.save(f"t{number}", 10)
    first = stage.agent()
    stage.at(20, first.agent.stop)
    stage.play(30)
    stage.call_seconds = 100.0
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
