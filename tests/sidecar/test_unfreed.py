"""What was removed from the volume and still takes room there."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_sidecar.local import LocalFiles
from ds_ckpt_sidecar.unfreed import EVERY_SECONDS, MOST, Unfreed
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.volume import Volume
from tests.sidecar.handoff import Trainer

SIZE = 1 << 20


@pytest.fixture
def unfreed(tmp_path: Path) -> Iterator[Unfreed]:
    watched = Unfreed(Volume(str(tmp_path)))
    (tmp_path / ".ds_ckpt").mkdir()
    yield watched
    watched.close()


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(b"x" * SIZE)
    return path


def remove(unfreed: Unfreed, *paths: Path) -> None:
    with unfreed.removing(path.name for path in paths):
        for path in paths:
            path.unlink()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_that_nobody_keeps_is_freed_at_once(unfreed: Unfreed, shard: Path) -> None:
    before = descriptors()
    remove(unfreed, shard)
    assert (unfreed.bytes, descriptors()) == (0, before)


def test_a_file_that_another_process_has_open_counts_until_it_lets_go(
    unfreed: Unfreed, shard: Path
) -> None:
    before = descriptors()
    code = "import sys; f = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(shard)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        remove(unfreed, shard)
        unfreed.look(0)
        assert unfreed.bytes == SIZE
        other.communicate()
    unfreed.look(EVERY_SECONDS - 1)
    assert unfreed.bytes == SIZE
    unfreed.look(EVERY_SECONDS)
    assert (unfreed.bytes, descriptors()) == (0, before)


def test_a_mapping_keeps_a_file_as_well(unfreed: Unfreed, shard: Path) -> None:
    with open(shard, "rb") as file:
        mapping = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)
    with mapping:
        remove(unfreed, shard)
        assert unfreed.bytes == SIZE
    unfreed.look(0)
    assert unfreed.bytes == 0


def test_another_name_keeps_a_file_and_it_can_still_be_opened(
    unfreed: Unfreed, shard: Path
) -> None:
    other = shard.with_name("other")
    os.link(shard, other)
    remove(unfreed, shard)
    unfreed.look(0)
    assert unfreed.bytes == SIZE
    other.open("r+b").close()
    other.unlink()
    unfreed.look(EVERY_SECONDS)
    assert unfreed.bytes == 0


def test_no_more_than_so_many_are_kept(unfreed: Unfreed, tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(MOST + 6)]
    for path in paths:
        path.write_bytes(b"x" * 4096)
        os.link(path, f"{path}.other")
    before = descriptors()
    for path in paths:
        remove(unfreed, path)
    assert descriptors() == before + MOST
    unfreed.close()
    assert (unfreed.bytes, descriptors()) == (0, before)


def test_links_folders_and_what_is_not_there_are_left_alone(
    unfreed: Unfreed, shard: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(shard)
    (tmp_path / "folder").mkdir()
    with unfreed.removing(["link", "folder", "nowhere", "../x"]):
        pass
    assert unfreed.bytes == 0


def test_a_removal_that_fails_fails_as_it_would(unfreed: Unfreed, shard: Path) -> None:
    before = descriptors()
    with pytest.raises(PermissionError, match="no"), unfreed.removing([shard.name]):
        raise PermissionError("no")
    assert (unfreed.bytes, descriptors()) == (0, before)


def test_a_filesystem_without_leases_tells_of_names_only(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    fd = os.open(shard, os.O_RDONLY)
    assert Filesystem().is_kept(fd)
    with open(shard, "rb"):
        shard.unlink()
        assert not Filesystem().is_kept(fd)
    os.close(fd)


def test_a_removed_save_whose_shard_is_still_read_is_not_freed(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    unfreed = Unfreed(trainer.volume)
    manifest = trainer.save("global_step1", {"a.pt": b"x" * SIZE, "b.pt": b"y" * SIZE})
    with open(tmp_path / "global_step1/a.pt", "rb"):
        LocalFiles(trainer.volume, unfreed).remove(manifest)
        assert unfreed.bytes == SIZE
    unfreed.look(0)
    assert unfreed.bytes == 0


def test_the_last_names_may_be_our_own_links(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    unfreed = Unfreed(trainer.volume)
    manifest = trainer.save("global_step1", {"a.pt": b"x" * SIZE, "b.pt": b"y" * SIZE})
    with open(tmp_path / "global_step1/a.pt", "rb"):
        (tmp_path / "global_step1/a.pt").unlink()
        (tmp_path / "global_step1/b.pt").unlink()
        LocalFiles(trainer.volume, unfreed).remove(manifest)
        assert unfreed.bytes == SIZE
    unfreed.look(0)
    assert unfreed.bytes == 0


class Hiding(Filesystem):
    """As NFS: what is open gets a hidden name."""

    def removes_open_files(self, folder: str) -> bool:
        return False

    def open_beneath(self, root: str, relative: str) -> int:
        raise AssertionError("it would get a hidden name, and its folder could not be removed")


def test_where_an_open_file_gets_a_hidden_name_none_is_opened(shard: Path) -> None:
    unfreed = Unfreed(Volume(str(shard.parent), Hiding()))
    with open(shard, "rb"):
        remove(unfreed, shard)
    assert unfreed.bytes == 0


def test_the_trial_leaves_nothing_and_its_failure_no_error(shard: Path) -> None:
    unfreed = Unfreed(Volume(str(shard.parent)))  # whose own folder is not there
    with open(shard, "rb"):
        remove(unfreed, shard)
    assert unfreed.bytes == 0
    own = shard.parent / "own"
    own.mkdir()
    assert Filesystem().removes_open_files(str(own))
    assert list(own.iterdir()) == []
