"""Up to a folder and back: no part of the way is made for tests."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from ds_ckpt_store.contract.digest import crc32c
from ds_ckpt_store.errors import CorruptionError, PausedError, ShardChangedError
from ds_ckpt_store.stores.faulty import FaultyStore
from ds_ckpt_store.stores.file import TEMPORARY, FileStore
from ds_ckpt_store.stores.port import Proof
from ds_ckpt_store.stores.retry import RetryStore
from ds_ckpt_store.transfer.download import RemoteShard
from ds_ckpt_store.transfer.upload import LocalShard
from tests.store.transfer.support import PART, Scene


def remote(scene: Scene, shard: LocalShard) -> RemoteShard:
    return RemoteShard(
        shard.key, shard.size, shard.crc32c, str(scene.folder / "restored" / shard.key)
    )


def test_shards_go_to_a_folder_and_come_back(scene: Scene) -> None:
    scene.store = folder_store(scene)
    sizes = (0, 1, PART, PART + 1, 7 * PART + 5)
    shards = [scene.shard(f"step@1/{i}.pt", size) for i, size in enumerate(sizes)]
    scene.upload(*shards)
    for shard in shards:
        copy = scene.folder / "bucket" / shard.key
        assert copy.read_bytes() == (scene.folder / shard.key).read_bytes()
    targets = [remote(scene, shard) for shard in shards]
    scene.fetch(*targets)
    assert all(scene.is_restored(target) for target in targets)
    damaged = replace(targets[4], crc32c=targets[4].crc32c ^ 1)
    found = scene.downloader().verify([*targets[:4], damaged], check=lambda: None, progress=id)
    assert [each.key for each in found] == [damaged.key]


def folder_store(scene: Scene) -> FaultyStore:
    """As a process opens it that starts now."""
    return FaultyStore(FileStore(str(scene.folder / "bucket")))


def arrived(scene: Scene, shard: LocalShard) -> bool:
    """Whether the folder has the shard, and nothing unfinished."""
    bucket = scene.folder / "bucket"
    left = [path.name for path in (bucket / TEMPORARY).iterdir() if path.name != "lock"]
    return not left and crc32c((bucket / shard.key).read_bytes()) == shard.crc32c


def pause_after(scene: Scene, count: int) -> Callable[[], None]:
    def check() -> None:
        if len(scene.store.asked("put_part")) >= count:
            raise PausedError("asked to stop")

    return check


def test_an_upload_to_a_folder_continues_after_a_pause(scene: Scene) -> None:
    scene.store = folder_store(scene)
    shard = scene.shard("rank0.pt", 10 * PART)
    with pytest.raises(PausedError):
        scene.upload(shard, check=pause_after(scene, 4), streams=1)
    scene.store = folder_store(scene)
    [stored] = scene.upload(shard)
    assert (stored.resumed_parts, stored.proof) == (4, Proof.WRITTEN_CHECKSUM)
    assert sorted(scene.parts_sent()) == [5, 6, 7, 8, 9, 10]
    assert arrived(scene, shard)


def test_a_part_that_was_damaged_between_two_starts_is_sent_again(scene: Scene) -> None:
    scene.store = folder_store(scene)
    shard = scene.shard("rank0.pt", 6 * PART)
    with pytest.raises(PausedError):
        scene.upload(shard, check=pause_after(scene, 3), streams=1)
    (data,) = (scene.folder / "bucket" / TEMPORARY).glob("*.data")
    with data.open("r+b") as file:
        file.seek(PART + 5)
        byte = file.read(1)
        file.seek(PART + 5)
        file.write(bytes([byte[0] ^ 1]))
    scene.store = folder_store(scene)
    [stored] = scene.upload(shard)
    assert stored.resumed_parts == 0
    assert arrived(scene, shard)


def damage_copies(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """A kernel, or memory, that changes a byte of a copy."""
    left = times

    def copy(source: int, target: int, count: int, start: int, offset: int) -> int:
        nonlocal left
        piece = bytearray(os.pread(source, count, start))
        piece[0] ^= left > 0
        left -= 1
        return os.pwrite(target, piece, offset)

    monkeypatch.setattr(os, "copy_file_range", copy)


@pytest.mark.parametrize("size", [PART, 6 * PART + 1])
def test_bytes_that_the_disk_got_wrong_are_written_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    scene.store = folder_store(scene)
    shard = scene.shard("rank0.pt", size)
    damage_copies(monkeypatch, times=1)
    scene.upload(shard)
    assert arrived(scene, shard)


@pytest.mark.parametrize("size", [PART, 6 * PART + 1])
def test_a_disk_that_gets_everything_wrong_is_named_and_not_the_shard(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    scene.store = folder_store(scene)
    shard = scene.shard("rank0.pt", size)
    damage_copies(monkeypatch, times=1_000_000)
    with pytest.raises(CorruptionError):
        scene.upload(shard)
    assert scene.stored == []


@pytest.mark.parametrize("size", [PART, 6 * PART + 1])
def test_a_shard_that_changed_is_superseded_and_no_object(scene: Scene, size: int) -> None:
    scene.store = folder_store(scene)
    shard = scene.shard("rank0.pt", size)
    (scene.folder / shard.key).write_bytes(bytes(size))
    with pytest.raises(ShardChangedError):
        scene.upload(shard)
    assert not (scene.folder / "bucket" / shard.key).exists()


def test_after_a_sync_that_failed_the_shard_is_sent_anew(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it goes under RetryStore: the completion is repeated, and finds the upload gone."""
    inner = FileStore(str(scene.folder / "bucket"))
    scene.store = FaultyStore(RetryStore(inner, scene.clock, random.Random(1)))
    shard = scene.shard("rank0.pt", 6 * PART)
    sync, told = os.fsync, []

    def fsync(fd: int) -> None:
        if not told and os.readlink(f"/proc/self/fd/{fd}").endswith(".data"):
            told.append(fd)
            raise OSError(errno.EIO, "Input/output error")
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    scene.upload(shard)
    assert sorted(scene.parts_sent()) == sorted([*range(1, 7), *range(1, 7)])
    assert arrived(scene, shard)
