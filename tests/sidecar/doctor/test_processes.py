"""Who works on the volume now."""

from __future__ import annotations

import fcntl
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt_sidecar.doctor import Finding, check_processes
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.manifest import SaveState, SaveStatus, SidecarStatus, TrainerStatus
from ds_ckpt_store.contract.names import new_save_id
from tests.sidecar.doctor.support import (
    only,
)
from tests.sidecar.handoff import Trainer


def test_what_agent_and_trainer_last_said_is_told(trainer: Trainer) -> None:
    place, now = trainer.volume, SystemClock().time()
    told = {each.what.rpartition("/")[2]: each for each in check_processes(place)}
    assert {each.severity for each in told.values()} == {"note"}
    trainer.say()

    def say(age: float, state: Any, error: str = "", **values: float) -> Finding:
        place.write_sidecar_status(
            SidecarStatus(
                time=now - age, pid=1, version="9", state=state, last_error=error, **values
            )
        )
        return next(e for e in check_processes(place) if e.what.endswith("sidecar.json"))

    assert say(1, "running").severity == "ok"
    assert say(5000, "stopped").severity == "ok"
    assert say(5000, "stopped", "no bucket").severity == "warning"
    silent = say(5000, "running")
    assert (silent.severity, "nothing since" in silent.sentence) == ("warning", True)
    assert say(100, "running").severity == "warning"
    assert say(100, "running", silent_after=180).severity == "ok"
    failing = say(1, "running", "no bucket")
    assert (failing.severity, "no bucket" in failing.sentence) == ("warning", True)
    assert say(1, "refused", "another run").severity == "error"


def test_a_trainer_whose_clock_is_ahead_is_told(trainer: Trainer) -> None:
    trainer.volume.write_trainer_status(
        TrainerStatus(run_id="run", attempt="a", time=SystemClock().time() + 300)
    )
    warning = only(check_processes(trainer.volume), "warning")
    assert re.search(r"(299|300) s ahead", warning.sentence)


@pytest.mark.parametrize("name", ["restore.lock", "cleaning.lock", "agent.lock"])
def test_a_lock_that_is_held_is_told_and_one_that_is_only_there_is_not(
    trainer: Trainer, name: str
) -> None:
    path = f"{trainer.volume.own}/{name}"
    Path(path).touch()
    assert path not in {each.what for each in check_processes(trainer.volume)}
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert path in {each.what for each in check_processes(trainer.volume)}
        fcntl.flock(file, fcntl.LOCK_UN)
        lock = trainer.volume.fs.try_lock(path)
        assert lock is not None, "the look keeps no lock"
        os.close(lock)


def test_saves_that_will_not_become_durable_are_told(trainer: Trainer) -> None:
    place, now = trainer.volume, SystemClock().time()
    trainer.say()

    def say(number: int, state: SaveState, tag: str = "") -> str:
        save_id = new_save_id(number, random.Random(number))
        status = SaveStatus(
            save_id=save_id, tag=tag or f"step{number}", state=state, reason="a reason", time=now
        )
        place.write_save_status(status)
        return f"save {save_id}"

    def told() -> list[tuple[str, str]]:
        found = [each for each in check_processes(place) if each.what.startswith("save ")]
        assert all("a reason" in each.sentence and each.remedy for each in found)
        return [(each.severity, each.what) for each in found]

    held = say(1, "held")
    assert told() == [("error", held)]
    lost = say(2, "superseded")
    assert told() == [("warning", lost), ("error", held)]
    bad = say(3, "quarantined")
    say(4, "committed")
    assert told() == [("error", bad), ("error", held)]
