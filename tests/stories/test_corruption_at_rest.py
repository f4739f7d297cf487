"""Objects of a committed checkpoint change in the store: the restore names each, and none gets its
name; what changes before the commit keeps the record from being written."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ckpt_store.errors import DamagedError
from ds_ckpt_store.stores.port import BytesSource, Store
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import contents
from tests.stories.places import MIB, NETWORKED, Stage

PART = 5 * MIB
SMALL, OTHER = random.Random(1).randbytes(1000), random.Random(2).randbytes(1000)
LARGE = random.Random(3).randbytes(2 * PART + 777)
FILES = {"a.pt": SMALL, "b.pt": OTHER, "large.pt": LARGE, "empty.pt": b""}


def put(store: Store, key: str, data: bytes) -> None:
    store.put(key, BytesSource(data))


def flip(store: Store, folder: str) -> list[str]:
    key = f"{folder}/large.pt"
    changed = bytearray(LARGE)
    changed[PART] ^= 1
    put(store, key, bytes(changed))
    return [key]


def truncate(store: Store, folder: str) -> list[str]:
    put(store, f"{folder}/large.pt", LARGE[:-1])
    return [f"{folder}/large.pt"]


def empty(store: Store, folder: str) -> list[str]:
    put(store, f"{folder}/a.pt", b"")
    return [f"{folder}/a.pt"]


def fill(store: Store, folder: str) -> list[str]:
    put(store, f"{folder}/empty.pt", b"x")
    return [f"{folder}/empty.pt"]


def swap(store: Store, folder: str) -> list[str]:
    """Two ranks' shards have one size as a rule."""
    put(store, f"{folder}/a.pt", OTHER)
    put(store, f"{folder}/b.pt", SMALL)
    return [f"{folder}/a.pt", f"{folder}/b.pt"]


def delete(store: Store, folder: str) -> list[str]:
    store.delete(f"{folder}/b.pt")
    return [f"{folder}/b.pt"]


def reorder(store: Store, folder: str) -> list[str]:
    """The parts are all there, in another order."""
    put(store, f"{folder}/large.pt", LARGE[PART : 2 * PART] + LARGE[:PART] + LARGE[2 * PART :])
    return [f"{folder}/large.pt"]


def companion(store: Store, folder: str) -> list[str]:
    put(store, f"{folder}/.companions/zero_to_fp32.py", b"#?")
    return [f"{folder}/.companions/zero_to_fp32.py"]


DAMAGES: dict[str, Callable[[Store, str], list[str]]] = {
    each.__name__: each for each in (flip, truncate, empty, fill, swap, delete, reorder, companion)
}
SAME_SIZE = {"flip", "swap", "reorder", "companion"}


ALONE = [[name] for name in DAMAGES]
TOGETHER = [["flip", "swap", "fill", "companion"], ["reorder", "empty", "delete"]]


@pytest.mark.parametrize(
    ("place", "rounds"),
    [("memory", ALONE), ("file", ALONE), *((name, TOGETHER) for name in NETWORKED)],
    indirect=["place"],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)}-rounds",
)
def test_a_damaged_object_is_named_and_nothing_gets_its_name(
    stage: Stage, trainer: Trainer, tmp_path: Path, rounds: list[list[str]]
) -> None:
    """After each round all is put right by hand."""
    manifest = trainer.save("t", FILES, companions={"zero_to_fp32.py": b"#!"})
    assert stage.once(trainer.volume.path, part_mib=5) == 0
    good = {key: stage.looked.get(key)[0] for key in stage.keys(f"{manifest.folder}/")}
    for names in rounds:
        keys = sorted(key for name in names for key in DAMAGES[name](stage.looked, manifest.folder))
        target = tmp_path / names[0]
        with pytest.raises(DamagedError) as caught:
            stage.restored(target)
        assert caught.value.objects == tuple(keys), names
        assert all(key in str(caught.value) for key in keys), names
        assert contents(target) == {}, names
        for key in keys:
            put(stage.looked, key, good[key])
    assert stage.restored(tmp_path / "whole") == FILES


@pytest.mark.parametrize("name", [name for name in DAMAGES if name not in SAME_SIZE])
@pytest.mark.parametrize("place", ["memory", "file", "seaweed"], indirect=True)
def test_what_is_lost_before_the_commit_is_sent_again_first(
    stage: Stage, trainer: Trainer, tmp_path: Path, name: str
) -> None:
    """Between the receipt and the record somebody touches an object."""
    manifest = trainer.save("t", FILES, companions={"zero_to_fp32.py": b"#!"})
    keys: list[str] = []
    stage.fault(
        "list",
        "call",
        f"^{manifest.folder}/$",
        action=lambda: keys.extend(DAMAGES[name](stage.looked, manifest.folder)),
    )
    assert stage.once(trainer.volume.path, part_mib=5) == 0, stage.log.text()
    assert keys
    (said,) = stage.log.of("save.delayed")
    assert keys[0] in said["error"]
    assert stage.states() == {"t": "committed"}
    stage.check_whole()
    assert stage.restored(tmp_path / "new") == FILES


@pytest.mark.parametrize("place", ["file", "seaweed"], indirect=True)
def test_what_was_appended_to_an_object_is_left_out_and_verify_names_it(
    stage: Stage, trainer: Trainer, tmp_path: Path
) -> None:
    """The bytes of the record are all there, and they alone get the name."""
    manifest = trainer.save("t", FILES)
    assert stage.once(trainer.volume.path, part_mib=5) == 0
    put(stage.looked, f"{manifest.folder}/a.pt", SMALL + b"x")
    assert stage.restored(tmp_path / "new") == FILES
    (damage,) = stage.verified(manifest.tag)
    assert (damage.key, damage.reason) == (
        f"{manifest.folder}/a.pt",
        "has 1001 bytes, 1000 are recorded",
    )
