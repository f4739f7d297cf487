"""What lies on the volume under our own names may be hostile: it leads nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import SettingsError
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import World, contents

PRECIOUS = {"0": b"precious", "trainer.json": b"precious too", "deep/file": b"and this"}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    for path, data in PRECIOUS.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    "name", [".", "outbox", "pieces", "links", "status", "restoring", "aside", "trash"]
)
def test_a_folder_of_ours_that_is_a_link_is_refused_and_not_followed(
    world: World, trainer: Trainer, outside: Path, name: str
) -> None:
    trainer.save("t", {"x": 10})
    own = Path(trainer.volume.own) / name
    if own.exists():
        own.rename(Path(trainer.volume.path) / "moved")
    own.symlink_to(outside)
    with pytest.raises(SettingsError, match="link"):
        world.once(trainer.volume.path)
    assert contents(outside) == PRECIOUS
    with pytest.raises(SettingsError, match="link"):
        Volume(trainer.volume.path).prepare()  # the hook's way in


@pytest.mark.parametrize("save_id", ["../../../outside", "/", ".", "a/b"])
def test_a_forged_note_of_a_restore_takes_no_folder_for_its_own(
    world: World, trainer: Trainer, outside: Path, save_id: str
) -> None:
    state = (outside / "0").stat()
    file = {
        "path": "old/x",
        "size": state.st_size,
        "crc32c": "00000000",
        "device": state.st_dev,
        "inode": state.st_ino,
        "mtime_ns": state.st_mtime_ns,
    }
    note = {
        "schema": 1,
        "source": "s",
        "run_id": "run",
        "save_id": save_id,
        "tag": "old",
        "time_ms": 1,
        "epoch": 1,
        "files": [file],
    }
    Path(trainer.volume.restored).write_text(json.dumps(note))
    trainer.save("new", {"x": 10})
    world.once(trainer.volume.path)
    assert contents(outside) == PRECIOUS
    assert world.states() == {"new": "committed"}


def test_a_trainer_that_names_a_node_by_half_a_character_does_not_end_the_agent(
    world: World, trainer: Trainer
) -> None:
    trainer.say(nodes=["NODE"])
    path = Path(trainer.volume.status, "trainer.json")
    told = json.loads(path.read_bytes())
    told.pop("checksum", None)
    path.write_bytes(json.dumps(told).encode().replace(b"NODE", b"\\ud800"))
    trainer.save("t", {"x": 10})
    world.once(trainer.volume.path)
    assert world.states() == {"t": "committed"}
    assert world.log.of("trainer.unreadable")


@pytest.mark.parametrize("started", ["-1e999", "NaN", "Infinity", "-1e308", "1e308", "true"])
def test_a_trainer_that_says_nonsense_of_its_start_does_not_damage_the_lease(
    world: World, trainer: Trainer, started: str
) -> None:
    trainer.say()
    path = Path(trainer.volume.status, "trainer.json")
    told = {**json.loads(path.read_bytes()), "started": "NONSENSE"}
    told.pop("checksum", None)
    path.write_text(json.dumps(told).replace('"NONSENSE"', started))
    trainer.save("t", {"x": 10})
    world.once(trainer.volume.path)
    assert world.states() == {"t": "committed"}
    assert world.catalog.owner() is not None, "it can still be read"


def test_folders_nested_without_end_do_not_end_the_agent(world: World, trainer: Trainer) -> None:
    old = trainer.save("old", {"x": 10})
    trainer.save("new", {"x": 10})
    folder = os.open(trainer.volume.link_folder(old.save_id), os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    assert world.once(trainer.volume.path) == 0
    assert world.states() == {"old": "committed", "new": "committed"}
    assert world.log.of("clean.failed")
    subprocess.run(["rm", "-rf", trainer.volume.path], check=True)  # pytest's own way gives up
