"""A shard changes on the volume after its manifest was written: nothing wrong becomes a checkpoint.

Each kind of change is made to a small shard, which is sent whole, and to one that goes in parts,
before the agent has read it and while it is being sent, under each way in which stores prove what
they hold.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ckpt_store.contract.manifest import NodeManifest
from ds_ckpt_store.stores.faulty import Rule
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import status
from tests.stories.places import MIB, Stage

GOOD = {"small": random.Random(1).randbytes(1000), "large": random.Random(2).randbytes(6 * MIB)}


def flip(path: Path) -> None:
    """One bit of the last byte, and size and times as they were."""
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"still growing")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def hole(path: Path) -> None:
    """The end is zeros that were never written, as after a crash of the machine."""
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


def rewrite(path: Path) -> None:
    """As ``torch.save`` does when a tag is saved again: the same inode, other bytes."""
    path.write_bytes(random.Random(3).randbytes(path.stat().st_size))


CHANGES: dict[str, Callable[[Path], None]] = {
    each.__name__: each for each in (flip, append, truncate, empty, hole, rewrite)
}


@pytest.mark.parametrize(
    ("place", "size"),
    [
        ("memory", "small"),
        ("memory", "large"),
        ("file", "small"),
        ("file", "large"),
        ("seaweed", "small"),
        ("seaweed", "large"),
        ("swift", "small"),
        ("azure", "large"),
        ("gcs", "small"),
    ],
    indirect=["place"],
)
def test_whatever_changes_a_shard_keeps_its_save_from_being_committed(
    stage: Stage, trainer: Trainer, size: str
) -> None:
    """Twelve saves of which one shard each is changed, and one that is left alone."""
    saves: dict[str, NodeManifest] = {}
    for moment in ("before", "during"):
        for name, change in CHANGES.items():
            tag = f"{moment}-{name}"
            saves[tag] = trainer.save(tag, {"x": GOOD[size]}, latest=False)
            path = Path(trainer.folder(saves[tag])) / "x"
            if moment == "before":
                change(path)
            else:  # the last of its bytes have not been read to be sent when this call begins
                operation = "put" if size == "small" else "put_part"
                act = lambda change=change, path=path: change(path)  # noqa: E731
                skip = 0 if size == "small" else 1
                rule = Rule(operation, "call", f"^{tag}@", action=act, skip=skip)
                stage.store.script.append(rule)
    trainer.save("good", {"x": GOOD[size]})
    stage.once(trainer.volume.path)

    expected = {**dict.fromkeys(saves, "abandoned"), "good": "committed"}
    if size == "small":  # what comes after the bytes of the manifest was not there when they went
        expected["during-append"] = "committed"
        saves.pop("during-append")
    assert stage.states() == expected
    for tag, manifest in saves.items():
        said = status(trainer.volume.path, manifest.save_id)
        assert said.state == "superseded", tag
        assert "/x" in said.reason, tag
        assert stage.keys(f"{manifest.folder}/") == [], tag
    assert stage.unfinished() == []
    stage.check_whole()


@pytest.mark.parametrize("protection", ["hardlink", "none"])
@pytest.mark.parametrize("place", ["memory", "file"], indirect=True)
def test_a_shard_replaced_by_another_of_its_size_is_sent_as_it_was_or_not_at_all(
    stage: Stage, trainer: Trainer, tmp_path: Path, protection: str
) -> None:
    """``os.replace``, as careful savers do: the link keeps the bytes of the manifest."""
    manifest = trainer.save("t", {"x": GOOD["small"]}, protection=protection)  # type: ignore[arg-type]
    path = Path(trainer.folder(manifest)) / "x"
    state = path.stat()
    other = path.with_name("x.tmp")
    other.write_bytes(random.Random(3).randbytes(state.st_size))
    os.utime(other, ns=(state.st_atime_ns, state.st_mtime_ns))
    os.replace(other, path)
    stage.once(trainer.volume.path)
    if protection == "hardlink":
        assert stage.states() == {"t": "committed"}
        assert stage.restored(tmp_path / "new") == {"x": GOOD["small"]}
    else:
        assert stage.states() == {"t": "abandoned"}
        assert "CRC32C" in status(trainer.volume.path, manifest.save_id).reason


@pytest.mark.parametrize("place", ["memory", "file"], indirect=True)
def test_a_shard_that_changes_between_two_starts_is_found_though_most_of_it_is_stored(
    stage: Stage, trainer: Trainer
) -> None:
    """The parts that an earlier agent sent are compared with the file before they are used."""
    manifest = trainer.save("t", {"x": GOOD["large"]})
    agents = [stage.agent(trainer.volume.path, drain_seconds=0)]
    stage.fault("put_part", "call", "^t@", skip=1, action=agents[0].stop)
    assert agents[0].run() == 1
    assert stage.unfinished() == [f"{manifest.folder}/x"]
    path = Path(trainer.folder(manifest)) / "x"
    with path.open("r+b") as file:  # a byte of the first part
        file.write(bytes([GOOD["large"][0] ^ 1]))
    os.utime(path, ns=(manifest.shards[0].mtime_ns, manifest.shards[0].mtime_ns))
    stage.once(trainer.volume.path)
    assert stage.states() == {"t": "abandoned"}
    assert stage.keys(manifest.folder) == stage.unfinished() == []
