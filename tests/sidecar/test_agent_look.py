"""What an agent tells of itself while it works, and while it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_sidecar.observe.view import View
from tests.sidecar.stage import Stage, staged


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(tmp_path) as found:
        yield found


def test_a_save_is_seen_while_another_is_uploaded(stage: Stage) -> None:
    stage.save("long", 500, shards=12)  # statuses are written every 20 s there
    player = stage.agent()
    stage.at(5, lambda: stage.save("next", 400))
    views: list[View] = []
    stage.at(45, lambda: views.append(player.agent.look()))
    stage.play(46)
    [view] = views
    assert [(save.tag, save.state) for save in view.saves] == [
        ("next", "discovered"),
        ("long", "uploading"),
    ]
    assert view.backlog_saves == 2
    long = view.saves[1]
    assert 0 < long.share < 1
    assert long.rate == pytest.approx(100, rel=0.3)
    assert long.left_seconds == pytest.approx((6_000 - long.bytes_done) / long.rate)
    assert view.backlog_bytes == 6_400 - long.bytes_done
    assert long.shards_total == 12
    assert long.bytes_done >= 500 * long.shards_done > 0
    assert (view.unready, view.error) == ("", "")


def test_what_waits_is_seen_while_the_store_was_never_reached(stage: Stage) -> None:
    stage.away = True
    stage.save("a", 500)
    player = stage.agent()
    views: list[View] = []
    stage.at(100, lambda: views.append(player.agent.look()))
    stage.play(101)
    [view] = views
    assert [(save.tag, save.state) for save in view.saves] == [("a", "discovered")]
    assert view.lag_seconds >= 99
    assert view.backlog_bytes == 500
    assert view.unready.startswith("starting")
    assert view.error
    assert view.remedy
    assert view.failures > 1
    assert player.agent.tally.errors.total() > 0


def test_all_is_well_again_when_the_store_is_back(stage: Stage) -> None:
    stage.away = True
    stage.save("a", 500)
    player = stage.agent()
    stage.at(100, lambda: setattr(stage, "away", False))
    views: list[View] = []
    stage.at(300, lambda: views.append(player.agent.look()))
    stage.play(301)
    [view] = views
    assert [(save.tag, save.state) for save in view.saves] == [("a", "committed")]
    assert (view.lag_seconds, view.backlog_bytes, view.failures) == (0, 0, 0)
    assert (view.unready, view.error) == ("", "")
    assert view.newest is not None
    assert view.newest.tag == "a"
    assert player.agent.tally.decided["committed"] == 1
    assert player.agent.tally.commit.sum == pytest.approx(
        sum(phase.sum for phase in player.agent.tally.phases.values())
    )
    assert player.agent.tally.commit.sum > 100
    durable = view.saves[0].durable_seconds
    assert durable == pytest.approx(player.agent.tally.commit.sum, abs=0.01)


def test_a_save_whose_manifest_somebody_took_is_no_backlog(stage: Stage) -> None:
    stage.away = True
    stage.save("a", 500)
    player = stage.agent()
    stage.at(50, lambda: setattr(stage, "away", False))
    stage.at(50.5, lambda: setattr(stage, "takes_no_data", True))

    def take() -> None:
        for name in stage.trainer.volume.manifests():
            stage.trainer.volume.fs.unlink(f"{stage.trainer.volume.outbox}/{name}")

    stage.at(200, take)
    views: list[View] = []
    stage.at(600, lambda: views.append(player.agent.look()))
    stage.play(601)
    [view] = views
    assert view.saves == ()
    assert view.lag_seconds == 0


def test_an_agent_that_stands_by_tells_what_the_other_knows(stage: Stage) -> None:
    stage.save("a", 500)
    stage.agent()
    second = stage.agent()
    views: list[View] = []
    stage.at(60, lambda: views.append(second.agent.look()))
    stage.play(61)
    [view] = views
    assert view.state == "standby"
    assert view.unready.startswith("standing by")
    assert view.newest is not None
    assert view.newest.tag == "a"
