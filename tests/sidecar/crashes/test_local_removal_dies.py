"""The removal of a save's local files is killed while the trainer writes to the same folder.

The trainer saves again between our look at a file and our taking it, so what is taken is not what
the manifest names. Wherever we die, the new bytes are never lost, and they are back under their
name after the next removal.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ds_ckpt_sidecar.local import LocalFiles
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.manifest import NodeManifest
from ds_ckpt_store.contract.volume import Volume
from tests.sidecar.handoff import Trainer

NEW = b"saved again, longer than before"
NAME = "global_step1/a.pt"


class Racing(Filesystem):
    """The trainer writes in place just before the first file is taken; the n-th change kills."""

    def __init__(self, changes: int) -> None:
        self._left = changes
        self._raced = False

    def take_beneath(self, root: str, relative: str, target: str) -> None:
        if not self._raced and relative == NAME:
            self._raced = True
            with open(f"{root}/{relative}", "wb") as file:
                file.write(NEW)
        self._count()
        super().take_beneath(root, relative, target)

    def link(self, source: str, target: str) -> None:
        self._count()
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self._count()
        super().unlink(path)

    def remove_folder(self, path: str) -> bool:
        self._count()
        return super().remove_folder(path)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def remove_in_child(path: str, manifest: NodeManifest, changes: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            LocalFiles(Volume(path, Racing(changes))).remove(manifest)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def copies_of_new(root: Path) -> list[str]:
    return sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and path.read_bytes() == NEW
    )


def test_new_bytes_survive_a_kill_at_every_change(tmp_path: Path) -> None:
    deaths = 0
    for changes in range(100):
        root = tmp_path / str(changes)
        trainer = Trainer(root, seed=1)
        manifest = trainer.save(
            "global_step1", {"a.pt": b"old", "b.pt": b"b"}, protection="none", latest=False
        )
        code = remove_in_child(str(root), manifest, changes)
        assert code in (0, -signal.SIGKILL)
        deaths += code != 0
        if (root / NAME).exists() and (root / NAME).read_bytes() == b"old":
            continue  # died before the trainer wrote
        assert copies_of_new(root)
        LocalFiles(trainer.volume).remove(manifest)
        assert copies_of_new(root) == [NAME]
        assert not trainer.volume.fs.names(trainer.volume.trash)
        assert not (root / "global_step1/b.pt").exists()
        if code == 0:
            break
    assert deaths > 5


@pytest.mark.parametrize("younger", [False, True])
def test_half_written_files_of_others_go_after_an_hour(tmp_path: Path, younger: bool) -> None:
    volume = Trainer(tmp_path).volume
    others = [
        f"{volume.path}/.latest.7.0123abcd.tmp",
        f"{volume.own}/.restored.json.7.0123abcd.tmp",
        f"{volume.outbox}/.x.json.7.0123abcd.tmp",
        f"{volume.status}/.trainer.json.7.0123abcd.tmp",
    ]
    own = f"{volume.status}/.sidecar.json.7.0123abcd.tmp"
    users = [f"{volume.path}/.notes.7.0123abcd.tmp", f"{volume.path}/.latest.tmp"]
    for path in [*others, own, *users]:
        Path(path).write_bytes(b"half")
    now = os.stat(own).st_mtime + (3590 if younger else 3610)
    assert LocalFiles(volume).clear_up(now) == []
    assert [os.path.exists(path) for path in others] == [younger] * len(others)
    assert not os.path.exists(own)
    assert all(os.path.exists(path) for path in users)


def test_files_that_no_manifest_names_are_set_aside(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, seed=1)
    volume = trainer.volume
    known = trainer.save("global_step1", {"a.pt": 10})
    for name in (known.save_id, "018bcfe56800-0000000000000000"):
        os.makedirs(f"{volume.trash}/{name}")
        Path(f"{volume.trash}/{name}/0").write_bytes(b"taken")
    (sentence,) = LocalFiles(volume).clear_up(0)
    assert "018bcfe56800-0000000000000000-trash.0" in sentence
    assert volume.fs.names(volume.trash) == [known.save_id]
    aside = Path(volume.aside) / "018bcfe56800-0000000000000000-trash.0/0"
    assert aside.read_bytes() == b"taken"


def test_a_folder_that_is_used_again_keeps_its_files(tmp_path: Path) -> None:
    """Of the older save the links go, and a file that a killed removal had taken before."""
    trainer = Trainer(tmp_path, seed=1)
    older = trainer.save("best", {"a.pt": b"one", "b.pt": b"unchanged"})
    taken = f"{trainer.volume.trash}/{older.save_id}"
    os.makedirs(taken)
    os.rename(tmp_path / "best/a.pt", f"{taken}/2")
    (tmp_path / "best/a.pt").write_bytes(b"two")
    LocalFiles(trainer.volume).remove(older, links_only=True)
    assert (tmp_path / "best/a.pt").read_bytes() == b"two"
    assert (tmp_path / "best/b.pt").read_bytes() == b"unchanged"
    assert not trainer.volume.fs.names(trainer.volume.trash)
    assert not trainer.volume.fs.names(trainer.volume.links)
