"""What was uploaded does not stay in the page cache, unless that is asked for."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_store.contract.digest import crc32c
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.stores.faulty import Rule
from ds_ckpt_store.transfer.upload import LocalShard
from tests.store.transfer.support import PART, Scene

_IN_MEMORY = ("tmpfs", "ramfs")


def cached_bytes(path: Path) -> int:
    """Bytes of a file that lie in the page cache, as ``mincore`` says; reading none of them."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as view:
        pages = -(-size // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in found) * mmap.PAGESIZE


def kind_of_filesystem(folder: Path) -> str:
    """As ``/proc/mounts`` names what holds a folder."""
    best = ("", "")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind = line.split()[:3]
        if os.path.commonpath([point, str(folder)]) == point and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


@pytest.fixture
def disk(tmp_path: Path, scene: Scene) -> Iterator[Scene]:
    """A scene on a disk: a filesystem in memory has no cache beside it."""
    if kind_of_filesystem(tmp_path) not in _IN_MEMORY:
        yield scene
        return
    folder = Path(__file__).parent / f".page-cache-{os.getpid()}"
    scene.folder = folder
    folder.mkdir()
    try:
        yield scene
    finally:
        Filesystem().remove_tree(str(folder))


def shard_on_disk(scene: Scene, name: str, size: int) -> LocalShard:
    """A shard whose pages are clean, and all in the cache."""
    shard = scene.shard(name, size)
    path = scene.folder / name
    with path.open("r+b") as file:
        os.fsync(file.fileno())
    assert crc32c(path.read_bytes()) == shard.crc32c
    assert cached_bytes(path) >= size
    return shard


@pytest.mark.parametrize("size", [PART, 20 * PART + 5], ids=["whole", "in parts"])
def test_pages_of_what_was_sent_are_given_back(disk: Scene, size: int) -> None:
    shard = shard_on_disk(disk, "rank0.pt", size)
    disk.upload(shard)
    assert disk.holds(shard)
    assert cached_bytes(disk.folder / "rank0.pt") <= size // 10


@pytest.mark.parametrize("size", [PART, 20 * PART + 5], ids=["whole", "in parts"])
def test_pages_are_kept_when_asked(disk: Scene, size: int) -> None:
    shard = shard_on_disk(disk, "rank0.pt", size)
    disk.keep_cached = True
    disk.upload(shard)
    assert cached_bytes(disk.folder / "rank0.pt") >= size


def test_other_files_keep_their_pages(disk: Scene) -> None:
    shard_on_disk(disk, "others.pt", 10 * PART)
    disk.upload(shard_on_disk(disk, "rank0.pt", 10 * PART))
    assert cached_bytes(disk.folder / "others.pt") >= 10 * PART


def test_what_could_not_be_sent_is_still_in_the_cache_for_the_next_try(disk: Scene) -> None:
    shard = shard_on_disk(disk, "rank0.pt", PART)
    disk.fault(Rule("put", "fail-before", count=None))
    with pytest.raises(Exception, match="scripted"):
        disk.upload(shard)
    assert cached_bytes(disk.folder / "rank0.pt") >= PART
