"""An agent in a plain container: nobody tells it to end, so it sees for itself that all is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_sidecar.ending import LIVES_SECONDS, UNSEEN_SECONDS
from tests.sidecar.stage import Stage, staged

GONE = 300.0
LOOK = 6.0


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(tmp_path) as found:
        yield found


def test_it_ends_once_the_trainer_has_finished_and_all_is_durable(stage: Stage) -> None:
    player = stage.agent(exit_when_finished=True)
    stage.beating(until=40)
    stage.at(30, lambda: stage.save("a", 500))
    stage.at(41, lambda: stage.beat(finished=True))
    stage.play(100)
    assert stage.committed() == ["a"]
    assert player.code == 0
    assert 41 <= player.ended_at <= 41 + LOOK
    assert stage.said().endswith("nothing to do: every save that was handed over is durable\n")


def test_without_the_setting_it_stays(stage: Stage) -> None:
    player = stage.agent()
    stage.beating(until=40)
    stage.at(41, lambda: stage.beat(finished=True))
    stage.play(2000)
    assert player.code is None


def test_an_upload_that_goes_on_after_the_end_of_training_is_given_all_the_time_it_takes(
    stage: Stage,
) -> None:
    player = stage.agent(exit_when_finished=True)
    stage.beating(until=20)
    stage.at(20, lambda: stage.save("huge", 9000))
    stage.at(21, lambda: stage.beat(finished=True))
    stage.play(300)
    assert stage.committed() == ["huge"], "90 s, which is far longer than a drain"
    assert player.code == 0


def test_an_upload_that_fails_again_and_again_is_gone_on_with_as_long_as_less_is_left(
    stage: Stage,
) -> None:
    player = stage.agent(exit_when_finished=True, drain_seconds=100.0)
    stage.beating(until=20)
    stage.at(20, lambda: stage.save("huge", 6000))
    stage.at(21, lambda: stage.beat(finished=True))
    for begin in (30, 110, 190, 270):
        stage.at(begin, lambda: setattr(stage, "takes_no_data", True))
        stage.at(begin + 60, lambda: setattr(stage, "takes_no_data", False))
    stage.play(600)
    assert len(stage.log.of("save.delayed")) >= 2
    assert (stage.committed(), player.code) == (["huge"], 0)
    assert player.ended_at > 21 + 2 * 100


def test_an_attempt_that_begins_while_the_last_upload_goes_on_is_served(stage: Stage) -> None:
    player = stage.agent(exit_when_finished=True)
    stage.beating(until=20)
    stage.at(21, lambda: stage.save("a", 3000))
    stage.at(21, lambda: stage.beat(finished=True))
    stage.at(40, stage.beat)  # in the middle of it
    stage.play(100)
    assert stage.committed() == ["a"]
    assert player.code is None


def test_an_attempt_that_begins_and_finishes_while_the_last_upload_goes_on_is_served(
    stage: Stage,
) -> None:
    """Before and after it the trainer says that it has finished, and means another time."""
    player = stage.agent(exit_when_finished=True)
    stage.beating(until=20)
    stage.at(21, lambda: stage.save("a", 9000))
    stage.at(21, lambda: stage.beat(finished=True))
    stage.at(40, stage.beat)
    stage.at(41, lambda: stage.save("b", 300))
    stage.at(42, lambda: stage.beat(finished=True))
    stage.play(400)
    assert stage.committed() == ["a", "b"]
    assert player.code == 0


def test_a_finished_mark_of_an_earlier_attempt_does_not_end_it(stage: Stage) -> None:
    stage.beat(finished=True)
    player = stage.agent(exit_when_finished=True)
    stage.play(GONE - 10)
    assert player.code is None, "the trainer of this pod may still be on its way"
    stage.trainer.attempt = stage.trainer.attempt[:-1] + "0"
    stage.beating(until=1000)
    stage.play(999)
    assert player.code is None
    stage.at(1001, lambda: stage.beat(finished=True))
    stage.play(1100)
    assert player.code == 0


def test_one_that_is_started_again_after_the_end_of_training_ends_too(stage: Stage) -> None:
    stage.beat(finished=True)
    stage.save("a", 300)
    player = stage.agent(exit_when_finished=True)
    stage.play(2 * GONE)
    assert (stage.committed(), player.code) == (["a"], 0)
    assert GONE <= player.ended_at <= GONE + LOOK


def test_a_trainer_that_has_gone_without_a_word_ends_it_as_a_failure(stage: Stage) -> None:
    player = stage.agent(exit_when_finished=True)
    stage.beating(until=40)
    stage.at(30, lambda: stage.save("a", 300))
    stage.play(GONE)
    assert player.code is None
    stage.play(GONE + 100)
    assert stage.committed() == ["a"]
    assert player.code == 1
    (said,) = stage.log.of("trainer.gone")
    assert "silent for 300 s" in said["reason"]


def test_a_trainer_that_comes_back_in_time_is_served(stage: Stage) -> None:
    player = stage.agent(exit_when_finished=True, trainer_gone_seconds=100.0)
    stage.beating(until=40)
    stage.play(130)
    stage.beating(until=200)
    stage.at(200, lambda: stage.save("a", 300))
    stage.at(201, lambda: stage.beat(finished=True))
    stage.play(300)
    assert (stage.committed(), player.code) == (["a"], 0)


def test_before_the_trainer_was_heard_of_it_waits_without_end(stage: Stage) -> None:
    player = stage.agent(exit_when_finished=True)
    stage.play(2 * UNSEEN_SECONDS)
    assert player.code is None


def test_one_that_was_killed_after_the_trainer_fell_silent_ends_in_the_end(stage: Stage) -> None:
    first = stage.agent(exit_when_finished=True)
    stage.beating(until=20)
    stage.at(10, lambda: stage.save("a", 300))
    stage.play(30)
    first.process.kill()
    second = stage.agent(exit_when_finished=True)
    stage.play(30 + UNSEEN_SECONDS - 1)
    assert second.code is None
    stage.play(30 + UNSEEN_SECONDS + LOOK)
    assert (stage.committed(), second.code) == (["a"], 1)
    (said,) = stage.log.of("trainer.gone")
    assert "silent for 3600 s" in said["reason"]


def test_a_trainer_that_beat_only_before_the_first_look_is_missed_as_soon_as_any(
    stage: Stage,
) -> None:
    stage.away = True
    player = stage.agent(exit_when_finished=True)
    stage.at(0.005, stage.beat)
    stage.at(20, lambda: setattr(stage, "away", False))
    stage.play(GONE + 40)
    assert player.code == 1


def test_saves_of_a_trainer_that_left_no_word_are_stored_and_then_it_ends(stage: Stage) -> None:
    stage.save("a", 300)
    player = stage.agent(exit_when_finished=True)
    stage.play(UNSEEN_SECONDS - 1)
    assert (stage.committed(), player.code) == (["a"], None)
    stage.play(UNSEEN_SECONDS + LOOK)
    assert player.code == 1


def test_a_store_that_stays_away_after_the_end_of_training_does_not_keep_it_for_ever(
    stage: Stage,
) -> None:
    player = stage.agent(exit_when_finished=True)
    stage.beating(until=20)
    stage.play(19)
    stage.away = True
    stage.save("a", 300)
    stage.at(21, lambda: stage.beat(finished=True))
    stage.play(2000)
    assert player.code == 1
    assert "not durable: a: " in stage.said()


def test_a_store_that_was_never_reached_does_not_keep_it_for_ever_either(stage: Stage) -> None:
    stage.away = True
    stage.save("a", 300)
    player = stage.agent(exit_when_finished=True)
    stage.beating(until=20)
    stage.at(21, lambda: stage.beat(finished=True))
    stage.play(2000)
    assert player.code == 1
    assert "durable: unknown: list '': the store is away" in stage.said()


def test_a_trainer_that_is_told_to_end_at_the_same_time_may_save_once_more(stage: Stage) -> None:
    """Both containers of a pod get SIGTERM at once where the agent is no native sidecar."""
    player = stage.agent(exit_when_finished=True)
    stage.beating(until=51)
    stage.at(50, player.agent.stop)
    stage.at(57, lambda: stage.save("last words", 300))
    stage.at(58, lambda: stage.beat(finished=True))
    stage.play(100)
    assert (stage.committed(), player.code) == (["last words"], 0)
    assert player.ended_at < 65


def test_a_trainer_that_was_silent_when_the_signal_came_is_not_waited_for(stage: Stage) -> None:
    player = stage.agent(exit_when_finished=True)
    stage.beating(until=51)
    stage.at(51 + LIVES_SECONDS, player.agent.stop)
    stage.play(100)
    assert player.code == 0
    assert player.ended_at < 51 + LIVES_SECONDS + 2
