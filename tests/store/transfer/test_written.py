"""A store that reads again what it has written: nothing is read before, and nobody is wronged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ckpt_store.errors import AmbiguousError, CorruptionError, ShardChangedError, TransientError
from ds_ckpt_store.stores.faulty import FaultyStore, Rule
from ds_ckpt_store.stores.port import Proof
from ds_ckpt_store.transfer.source import FileSlice
from ds_ckpt_store.transfer.upload import MemoryUploadLog
from tests.store.transfer.support import PART, InlineExecutor, Scene, memory_store
from tests.store.transfer.test_upload import CHANGES, overwrite


@pytest.fixture
def written(scene: Scene) -> Scene:
    scene.store = FaultyStore(memory_store(scene.bucket, Proof.WRITTEN_CHECKSUM))
    return scene


def test_parts_are_not_read_before_they_are_sent(
    written: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = written.shard("rank0.pt", 5 * PART + 3)

    def refuse(_: FileSlice) -> int:
        raise AssertionError("read for its sum")

    monkeypatch.setattr(FileSlice, "crc32c", property(refuse))
    written.upload(shard)
    assert written.holds(shard)


def test_an_answer_that_tells_what_was_written_is_not_asked_again(written: Scene) -> None:
    shard = written.shard("rank0.pt", 100)
    written.upload(shard)
    assert [call.operation for call in written.store.calls] == ["put"]
    assert not written.store.asked("read")


@pytest.mark.parametrize(("operation", "size"), [("put", 1000), ("put_part", 4 * PART)])
def test_what_the_store_wrote_wrong_is_sent_again_and_only_that(
    written: Scene, operation: str, size: int
) -> None:
    shard = written.shard("rank0.pt", size)
    written.fault(Rule(operation, "corrupt", count=2))
    written.upload(shard)
    assert written.holds(shard)
    pieces = 4 if operation == "put_part" else 1
    assert len(written.store.asked(operation)) == pieces + 2


@pytest.mark.parametrize(("operation", "size"), [("put", 1000), ("put_part", 4 * PART)])
def test_a_disk_that_writes_wrong_each_time_is_given_up(
    written: Scene, operation: str, size: int
) -> None:
    shard = written.shard("rank0.pt", size)
    written.fault(Rule(operation, "corrupt", count=None))
    with pytest.raises(CorruptionError):
        written.upload(shard)
    assert written.stored == []
    assert len(written.store.asked(operation)) <= 24


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [1000, 8 * PART])
def test_a_shard_that_changed_is_told_from_a_store_that_errs(
    written: Scene, change: Callable[[Path], None], size: int
) -> None:
    shard = written.shard("rank0.pt", size)
    change(written.folder / shard.key)
    with pytest.raises(ShardChangedError):
        written.upload(shard)
    assert not written.bucket.objects
    assert not written.bucket.unfinished


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_that_changes_under_the_upload_is_never_completed(
    written: Scene, change: Callable[[Path], None]
) -> None:
    shard = written.shard("rank0.pt", 40 * PART)
    path = written.folder / shard.key
    written.fault(Rule("put_part", "call", action=lambda: change(path), skip=10))
    with pytest.raises(ShardChangedError):
        written.upload(shard)
    assert not written.store.asked("complete")
    assert not written.bucket.objects


def test_a_changed_small_shard_never_takes_the_place_of_a_stored_one(written: Scene) -> None:
    """What was stored before may be committed, and this process may have forgotten it."""
    shard = written.shard("rank0.pt", 1000)
    written.upload(shard)
    version = written.bucket.objects[shard.key].version
    overwrite(written.folder / shard.key)
    with pytest.raises(ShardChangedError):
        written.upload(shard, log=MemoryUploadLog())
    assert written.bucket.objects[shard.key].version == version


def test_a_put_whose_answer_was_lost_is_written_again(written: Scene) -> None:
    shard = written.shard("rank0.pt", 1000)
    written.fault(Rule("put", "fail-after", error=AmbiguousError, count=2))
    written.upload(shard)
    assert len(written.store.asked("put")) == 3
    assert written.holds(shard)


@pytest.mark.parametrize("changed", [False, True])
def test_parts_of_an_earlier_start_are_compared_with_the_file(
    tmp_path: Path, changed: bool
) -> None:
    scene = Scene(tmp_path, InlineExecutor(), proof=Proof.WRITTEN_CHECKSUM)
    shard = scene.shard("rank0.pt", 6 * PART)
    scene.fault(Rule("complete", "fail-before"))
    with pytest.raises(TransientError):
        scene.upload(shard)
    scene.fault()
    if changed:
        overwrite(tmp_path / shard.key)
        with pytest.raises(ShardChangedError):
            scene.upload(shard)
        assert not scene.bucket.objects
    else:
        [stored] = scene.upload(shard)
        assert (stored.resumed_parts, scene.sent) == (6, 0)
        assert scene.holds(shard)
