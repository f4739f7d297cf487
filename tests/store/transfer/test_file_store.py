"""Up to a folder and back: no part of the way is made for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds_ckpt_store.errors import PausedError
from ds_ckpt_store.stores.faulty import FaultyStore
from ds_ckpt_store.stores.file import FileStore
from ds_ckpt_store.transfer.download import RemoteShard
from ds_ckpt_store.transfer.upload import LocalShard
from tests.store.transfer.support import PART, Scene


def remote(scene: Scene, shard: LocalShard) -> RemoteShard:
    return RemoteShard(
        shard.key, shard.size, shard.crc32c, str(scene.folder / "restored" / shard.key)
    )


def test_shards_go_to_a_folder_and_come_back(scene: Scene) -> None:
    scene.store = FaultyStore(FileStore(str(scene.folder / "bucket")))
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


def test_an_upload_to_a_folder_continues_after_a_pause(scene: Scene) -> None:
    scene.store = FaultyStore(FileStore(str(scene.folder / "bucket")))
    shard = scene.shard("rank0.pt", 10 * PART)

    def pause_after_four_parts() -> None:
        if len(scene.store.asked("put_part")) >= 4:
            raise PausedError("asked to stop")

    with pytest.raises(PausedError):
        scene.upload(shard, check=pause_after_four_parts, streams=1)
    scene.store = FaultyStore(FileStore(str(scene.folder / "bucket")))
    [stored] = scene.upload(shard)
    assert stored.resumed_parts == 4
    assert sorted(scene.parts_sent()) == [5, 6, 7, 8, 9, 10]
    assert (
        Path(scene.folder / "bucket" / shard.key).read_bytes()
        == (scene.folder / shard.key).read_bytes()
    )
