"""What a resume has set aside leaves the volume once its save is decided, and not before."""

from __future__ import annotations

import os
from pathlib import Path

from tests.sidecar.handoff import Trainer
from tests.sidecar.world import World


def _set_aside(trainer: Trainer, save_id: str, tag: str) -> Path:
    target = Path(trainer.volume.aside) / save_id / tag
    target.parent.mkdir(parents=True)
    os.rename(Path(trainer.volume.path) / tag, target)
    return target


def test_a_folder_set_aside_goes_when_its_save_is_durable(world: World, trainer: Trainer) -> None:
    first = trainer.save("a", {"x": 10, "deep/y": 20})
    trainer.save("b", {"x": 10})
    _set_aside(trainer, first.save_id, "a")
    assert world.once(trainer.volume.path) == 0
    assert set(world.states().values()) == {"committed"}
    assert not os.path.exists(trainer.volume.aside)


def test_a_file_set_aside_that_is_not_what_was_saved_stays(world: World, trainer: Trainer) -> None:
    first = trainer.save("a", {"x": 10, "y": 20})
    trainer.save("b", {"x": 10})
    aside = _set_aside(trainer, first.save_id, "a")
    (aside / "x").unlink()
    (aside / "x").write_bytes(b"written by somebody else")
    assert world.once(trainer.volume.path) == 0
    assert sorted(os.listdir(aside)) == ["x"]
