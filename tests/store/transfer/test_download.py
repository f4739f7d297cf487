"""Downloads as stories. Files, threads and checksums are real; the faults are scripted."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt_store.contract.digest import crc32c
from ds_ckpt_store.errors import AccessError, DamagedError, PausedError, TransientError
from ds_ckpt_store.stores.faulty import Rule
from ds_ckpt_store.transfer.download import Damage, RemoteShard
from ds_ckpt_store.transfer.ranges import Range, cover
from tests.store.transfer.support import PART, Crash, InlineExecutor, Scene, nothing


def reads(scene: Scene) -> int:
    return len(scene.store.asked("read"))


def crash() -> None:
    raise Crash


# ---- all well


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 5 * PART, 5 * PART + 17])
def test_an_object_of_any_size_arrives(scene: Scene, size: int) -> None:
    shard = scene.remote("step/rank0.pt", size)
    assert scene.fetch(shard) == [shard]
    assert scene.is_restored(shard)
    assert scene.fetched == size


def test_many_objects_of_mixed_sizes_arrive(scene: Scene) -> None:
    shards = [scene.remote(f"{i}.pt", (i * 7919) % (3 * PART)) for i in range(60)]
    assert {shard.key for shard in scene.fetch(*shards)} == {shard.key for shard in shards}
    assert all(scene.is_restored(shard) for shard in shards)


@pytest.mark.parametrize(("offset", "size"), [(0, PART), (PART + 3, 2 * PART), (3 * PART, 17)])
def test_a_part_of_an_object_is_fetched_alone(scene: Scene, offset: int, size: int) -> None:
    whole = scene.remote("rank0.pt", 3 * PART + 17)
    data = (scene.folder / whole.key).read_bytes()[offset : offset + size]
    shard = replace(whole, size=size, crc32c=crc32c(data), offset=offset)
    scene.fault(Rule("read", "truncate"))
    assert scene.fetch(shard) == [shard]
    assert Path(shard.path).read_bytes() == data
    assert scene.fetched == size


def test_a_file_that_is_there_already_is_not_fetched(scene: Scene) -> None:
    shard = scene.remote("rank0.pt", 4 * PART)
    scene.fetch(shard)
    before = reads(scene)
    assert scene.fetch(shard) == [shard]
    assert (reads(scene), scene.fetched) == (before, 0)


@pytest.mark.parametrize("stale", [b"", b"short", bytes(4 * PART), bytes(9 * PART)])
def test_a_file_with_other_bytes_is_replaced(scene: Scene, stale: bytes) -> None:
    shard = scene.remote("rank0.pt", 4 * PART)
    Path(shard.path).parent.mkdir()
    Path(shard.path).write_bytes(stale)
    scene.fetch(shard)
    assert scene.is_restored(shard)


# ---- interrupted


def test_after_a_crash_only_missing_ranges_are_fetched(tmp_path: Path) -> None:
    scene = Scene(tmp_path, InlineExecutor())
    shard = scene.remote("rank0.pt", 10 * PART)
    scene.fault(Rule("read", "call", action=crash, skip=6))
    with pytest.raises(Crash):
        scene.fetch(shard, streams=1)
    scene.fault()
    scene.fetch(shard)
    assert scene.fetched == 4 * PART
    assert scene.is_restored(shard)


def test_a_pause_keeps_finished_ranges_and_the_next_call_continues(scene: Scene) -> None:
    shards = [scene.remote(f"{i}.pt", 8 * PART) for i in range(3)]

    def pause_after_ten_ranges() -> None:
        if reads(scene) >= 10:
            raise PausedError("asked to stop")

    with pytest.raises(PausedError):
        scene.fetch(*shards, check=pause_after_ten_ranges)
    before = scene.fetched
    assert before >= 10 * PART
    scene.fetch(*shards)
    assert before + scene.fetched == 24 * PART
    assert all(scene.is_restored(shard) for shard in shards)


def test_an_error_of_the_store_keeps_finished_ranges(scene: Scene) -> None:
    shard = scene.remote("rank0.pt", 8 * PART)
    scene.fault(Rule("read", "fail-before", error=AccessError, skip=5, count=None))
    with pytest.raises(AccessError):
        scene.fetch(shard)
    scene.fault()
    scene.fetch(shard)
    assert scene.fetched == 3 * PART
    assert scene.is_restored(shard)


def interrupted(tmp_path: Path) -> tuple[Scene, RemoteShard]:
    """A download of ten parts that died after six."""
    scene = Scene(tmp_path, InlineExecutor())
    shard = scene.remote("rank0.pt", 10 * PART)
    scene.fault(Rule("read", "call", action=crash, skip=6))
    with pytest.raises(Crash):
        scene.fetch(shard, streams=1)
    scene.fault()
    return scene, shard


def test_a_finished_range_that_rotted_on_the_disk_is_fetched_again(tmp_path: Path) -> None:
    scene, shard = interrupted(tmp_path)
    with Path(shard.path).open("r+b") as file:
        file.seek(2 * PART + 5)
        file.write(b"\0\0\0\0")
    scene.fetch(shard)
    assert scene.fetched == 5 * PART
    assert scene.is_restored(shard)


def test_a_file_cut_short_by_a_power_loss_is_completed(tmp_path: Path) -> None:
    scene, shard = interrupted(tmp_path)
    os.truncate(shard.path, PART + 1)
    scene.fetch(shard)
    assert scene.fetched == 9 * PART
    assert scene.is_restored(shard)


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\n",
        b"\n1 2",
        b"\n\xff\xfe",
        b"\n-5 3 00000000",
        b"\n0 99999999999999999999 00000000",
        b"\n655359 2 00000000",
        b"\n3 5 0000000g",
        b"\n0 65536 00000000",
        b"\n100 50 00000000",
    ],
)
def test_a_list_of_ranges_with_nonsense_in_it_costs_at_most_a_fetch(
    tmp_path: Path, noise: bytes
) -> None:
    scene, shard = interrupted(tmp_path)
    with Path(shard.path + ".ranges").open("ab") as file:
        file.write(noise)
    scene.fetch(shard)
    assert scene.is_restored(shard)


def test_another_part_size_continues_what_the_first_began(tmp_path: Path) -> None:
    scene, shard = interrupted(tmp_path)
    scene.fetch(shard, part_size=PART // 3)
    assert scene.fetched == 4 * PART
    assert scene.is_restored(shard)


@given(
    size=st.integers(0, 500),
    part_size=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 500), max_size=8, unique=True),
)
def test_listed_ranges_and_gaps_cover_the_file_in_order(
    size: int, part_size: int, cuts: list[int]
) -> None:
    edges = sorted(cut for cut in cuts if cut <= size)
    listed = [Range(a, b - a, 7) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    position = 0
    for each in cover(size, part_size, listed):
        assert each.offset == position
        assert each.length > 0
        assert each in listed or each.length <= part_size
        position += each.length
    assert position == size


# ---- reads go wrong


def test_a_read_that_breaks_off_goes_on_where_it_stopped(scene: Scene) -> None:
    shard = scene.remote("rank0.pt", 4 * PART)
    scene.fault(Rule("read", "truncate", count=2))
    scene.fetch(shard)
    assert (reads(scene), scene.fetched) == (6, shard.size)
    assert scene.is_restored(shard)


def test_a_read_that_breaks_off_again_and_again_is_given_up_and_continued_later(
    scene: Scene,
) -> None:
    shard = scene.remote("rank0.pt", 4 * PART)
    scene.fault(Rule("read", "truncate", count=None))
    with pytest.raises(TransientError):
        scene.fetch(shard)
    scene.fault()
    scene.fetch(shard)
    assert scene.is_restored(shard)


@pytest.mark.parametrize("size", [100, 4 * PART])
def test_bytes_corrupted_on_their_way_are_fetched_once_more(scene: Scene, size: int) -> None:
    shard = scene.remote("rank0.pt", size)
    scene.fault(Rule("read", "corrupt"))
    assert scene.fetch(shard) == [shard]
    assert scene.fetched == 2 * size
    assert scene.is_restored(shard)


# ---- damaged objects


def damaged_four(scene: Scene) -> tuple[list[RemoteShard], list[RemoteShard]]:
    """Four damaged objects among whole ones: (damaged, whole)."""
    whole = [scene.remote(f"whole{i}.pt", i * PART) for i in range(3)]
    flipped, short, gone, empty = (
        scene.remote(f"{name}.pt", size)
        for name, size in (("flipped", 3 * PART), ("short", 3 * PART), ("gone", PART), ("e", 0))
    )
    data = scene.bucket.objects[flipped.key].data
    scene.bucket_put(flipped.key, data[:-1] + bytes([data[-1] ^ 1]))
    scene.bucket_put(short.key, scene.bucket.objects[short.key].data[:-1])
    scene.store.delete(gone.key)
    scene.store.delete(empty.key)
    return [flipped, short, gone, empty], whole


def test_every_damaged_object_is_named_and_all_others_are_fetched(scene: Scene) -> None:
    damaged, whole = damaged_four(scene)
    with pytest.raises(DamagedError) as caught:
        scene.fetch(*damaged, *whole)
    assert caught.value.objects == ("e.pt", "flipped.pt", "gone.pt", "short.pt")
    assert "gone.pt is missing" in str(caught.value)
    assert "flipped.pt has CRC32C" in str(caught.value)
    assert all(scene.is_restored(shard) for shard in whole)
    left = {path.name for path in (scene.folder / "restored").iterdir()}
    assert left == {Path(shard.path).name for shard in whole}


def test_verify_names_every_damaged_object_and_writes_nothing(scene: Scene) -> None:
    damaged, whole = damaged_four(scene)
    long = scene.remote("long.pt", PART)
    scene.bucket_put(long.key, scene.bucket.objects[long.key].data + b"x")
    seen = []
    found = scene.downloader().verify([*damaged, long, *whole], check=nothing, progress=seen.append)
    assert [each.key for each in found] == [shard.key for shard in [*damaged, long]]
    assert Damage("gone.pt", "is missing") in found
    assert Damage("long.pt", f"has {PART + 1} bytes, {PART} are recorded") in found
    assert sum(seen) == 3 * PART + sum(shard.size for shard in whole)
    assert not (scene.folder / "restored").exists()


def test_verify_of_whole_objects_finds_nothing(scene: Scene) -> None:
    shards = [scene.remote(f"{i}.pt", size) for i, size in enumerate((0, 5, 4 * PART + 1))]
    assert scene.downloader().verify(shards, check=nothing, progress=nothing) == []


def test_verify_does_not_take_an_outage_for_damage(scene: Scene) -> None:
    shard = scene.remote("rank0.pt", 4 * PART)
    scene.fault(Rule("read", "fail-before", count=None))
    with pytest.raises(TransientError):
        scene.downloader().verify([shard], check=nothing, progress=nothing)


# ---- the disk


def test_a_link_planted_at_the_target_is_not_followed(scene: Scene) -> None:
    shard = scene.remote("rank0.pt", 100)
    victim = scene.folder / "victim"
    victim.write_bytes(b"precious")
    Path(shard.path).parent.mkdir()
    Path(shard.path).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        scene.fetch(shard)
    assert victim.read_bytes() == b"precious"


def test_descriptors_are_given_back_whatever_happens(scene: Scene) -> None:
    before = len(os.listdir("/proc/self/fd"))
    damaged, whole = damaged_four(scene)
    with pytest.raises(DamagedError):
        scene.fetch(*damaged, *whole)
    scene.fault(Rule("read", "fail-before", error=AccessError, count=None))
    with pytest.raises(AccessError):
        scene.fetch(*[scene.remote(f"again{i}.pt", 3 * PART) for i in range(5)])
    assert len(os.listdir("/proc/self/fd")) == before
