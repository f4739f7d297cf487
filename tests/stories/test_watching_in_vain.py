"""Notifications of files fail loudly, or in silence: saves are found all the same."""

from __future__ import annotations

import errno
import time

import pytest
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from tests.sidecar.handoff import Trainer
from tests.sidecar.world import World, until


@pytest.mark.parametrize("step", ["schedule", "start"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "inotify watch limit reached"),
        (errno.EMFILE, "inotify instance limit reached"),
        (errno.ENOSYS, "Function not implemented"),
    ],
)
def test_a_limit_of_the_system_is_said_and_the_scan_finds_the_saves(
    world: World,
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    number: int,
    words: str,
) -> None:
    """ENOSPC here means no watches are left, and not that the disk is full."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, words)

    monkeypatch.setattr(Observer, step, fail)
    with world.running(trainer.volume.path):
        until(lambda: world.log.of("outbox.unwatched"))
        (said,) = world.log.of("outbox.unwatched")
        assert words in said["reason"]
        assert "scan" in said["reason"]
        trainer.save("t", {"x": 10})
        until(lambda: world.states() == {"t": "committed"})
    assert "No space left" not in world.log.text()
    assert world.log.of("journal.degraded") == []


def test_a_watch_that_tells_nothing_costs_no_more_than_the_pause_between_scans(
    world: World, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events were lost in a full queue, or the volume is of a kind that has none."""
    monkeypatch.setattr(BaseObserver, "dispatch_events", lambda *_: time.sleep(0.05))
    with world.running(trainer.volume.path, rescan_seconds=0.3):
        until(lambda: world.log.of("store.probed"))
        for number in range(3):
            trainer.save(f"t{number}", {"x": 10})
            until(lambda number=number: f"t{number}" in world.states())
    assert set(world.states().values()) == {"committed"}
    assert world.log.of("outbox.unwatched") == []
