"""The way back: whole and verified, or without a name."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ds_ckpt_store import restore as restoring
from ds_ckpt_store.contract.filesystem import Filesystem, Space
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import (
    AccessError,
    DamagedError,
    NoRoomError,
    NothingCommittedError,
    PausedError,
    SettingsError,
)
from ds_ckpt_store.records import Record
from ds_ckpt_store.restore import Restore, RestoreResult, is_restored
from ds_ckpt_store.transfer.budget import Budget
from tests.store.prefix import Prefix

MIB = 1 << 20


@dataclass
class Scene:
    """A prefix and a volume."""

    folder: Path
    pool: ThreadPoolExecutor
    prefix: Prefix = field(default_factory=Prefix)

    @property
    def volume(self) -> Volume:
        return Volume(str(self.folder))

    def restore(self, volume: Volume | None = None, **options: object) -> RestoreResult:
        job = Restore(
            self.prefix.store,
            self.pool,
            budget=Budget(self.prefix.clock, streams=4),
            clock=self.prefix.clock,
            rng=random.Random(3),
        )
        return job.run(volume or self.volume, **options)  # type: ignore[arg-type]

    def files(self) -> dict[str, bytes]:
        """Everything on the volume but our own folder."""
        return {
            path: (self.folder / path).read_bytes()
            for path, _ in Filesystem().walk(str(self.folder))
            if not path.startswith(".ds_ckpt/")
        }

    def damage(self, record: Record, path: str) -> str:
        """Flip a byte of an object."""
        key = f"{record.folder}/{path}"
        data = bytearray(self.prefix.store.store.get(key)[0])
        data[len(data) // 2] ^= 1
        self.prefix.put(key, bytes(data))
        return key

    def fetched(self) -> int:
        return len(self.prefix.store.asked("read", "@"))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    (tmp_path / "volume").mkdir()
    with ThreadPoolExecutor(4) as pool:
        yield Scene(tmp_path / "volume", pool)


SAVED = {"mp_rank_00_model_states.pt": b"model", "deep/er/zero.pt": b"z" * 1000, "empty.pt": b""}


# ---- what is restored


def test_the_newest_comes_back_as_it_was_with_latest(scene: Scene) -> None:
    scene.prefix.commit("step1")
    record = scene.prefix.commit("step2", SAVED, companions={"zero_to_fp32.py": b"#!"})
    result = scene.restore()
    assert scene.files() == {
        **{f"step2/{path}": data for path, data in SAVED.items()},
        "zero_to_fp32.py": b"#!",
        "latest": b"step2",
    }
    assert (result.record, result.folder) == (record, f"{scene.folder}/step2")
    assert (result.fetched_bytes, result.reused_bytes) == (1007, 0)
    note = scene.volume.restored_from()
    assert note is not None
    assert note.bytes == 1007
    assert note.seconds is not None
    assert 0 <= note.seconds <= result.seconds
    assert is_restored(scene.volume, record.save_id)
    assert os.listdir(scene.folder / ".ds_ckpt/restoring") == []


@pytest.mark.parametrize("tag", ["a/b", "ü 1%+", "日本/語", ".hidden", " x", "10"])
def test_any_tag_comes_back_under_its_own_name(scene: Scene, tag: str) -> None:
    scene.prefix.commit(tag, {"ünïcode @%.pt": b"1"})
    scene.restore()
    assert scene.files() == {f"{tag}/ünïcode @%.pt": b"1", "latest": tag.encode()}


def test_a_tag_means_its_newest_save_and_a_save_id_that_very_one(scene: Scene) -> None:
    first = scene.prefix.commit("t", {"x": b"first"})
    scene.prefix.commit("t", {"x": b"second"})
    scene.prefix.commit("other", {"x": b"third"})
    scene.restore(tag="t")
    assert scene.files() == {"t/x": b"second", "latest": b"t"}
    scene.restore(save_id=first.save_id)
    assert scene.files() == {"t/x": b"first", "latest": b"t"}


def test_what_is_not_there_is_said_and_nothing_is_made(scene: Scene) -> None:
    with pytest.raises(NothingCommittedError, match="none at all"):
        scene.restore()
    scene.prefix.commit("t")
    with pytest.raises(NothingCommittedError, match="committed tags: t"):
        scene.restore(tag="u")
    assert scene.files() == {}


def test_the_volume_is_made_if_its_parent_is_there(scene: Scene) -> None:
    scene.prefix.commit("t", {"x": b"1"})
    scene.restore(Volume(f"{scene.folder}/new"))
    assert (scene.folder / "new/t/x").read_bytes() == b"1"
    with pytest.raises(SettingsError, match="does not exist"):
        scene.restore(Volume(f"{scene.folder}/no/such"))


# ---- interrupted


def test_an_interrupted_restore_looks_like_nothing_and_continues(scene: Scene) -> None:
    shards = {f"shard{number}.pt": random.Random(number).randbytes(MIB) for number in range(8)}
    scene.prefix.commit("t", shards)
    (scene.folder / "latest").write_text("before")
    done = 0

    def stop_half_way(size: int) -> None:
        nonlocal done
        done += size
        if done >= 4 * MIB:
            raise PausedError("killed")

    with pytest.raises(PausedError):
        scene.restore(progress=stop_half_way)
    assert scene.files() == {"latest": b"before"}
    before = scene.fetched()
    result = scene.restore()
    assert scene.files() == {**{f"t/{path}": data for path, data in shards.items()}, "latest": b"t"}
    assert done >= 4 * MIB
    assert result.fetched_bytes <= 4 * MIB
    assert scene.fetched() - before == result.fetched_bytes // MIB


@pytest.mark.parametrize("dies_at", range(12))
def test_a_restore_that_dies_at_any_step_of_placing_is_finished_by_the_next(
    scene: Scene, dies_at: int
) -> None:
    class Killed(BaseException):
        pass

    class DyingFilesystem(Filesystem):
        left = dies_at

        def _step(self) -> None:
            if self.left == 0:
                raise Killed
            self.left -= 1

        def rename(self, source: str, target: str) -> None:
            self._step()
            super().rename(source, target)
            self._step()

        def write_atomic(self, path: str, data: bytes, *, durable: bool = True) -> None:
            self._step()
            super().write_atomic(path, data, durable=durable)
            self._step()

    record = scene.prefix.commit("t", SAVED, companions={"zero_to_fp32.py": b"new"})
    (scene.folder / "t").mkdir()
    (scene.folder / "t/torn.pt").write_bytes(b"torn")
    (scene.folder / "latest").write_text("t")
    died = False
    try:
        scene.restore(Volume(str(scene.folder), DyingFilesystem()))
    except Killed:
        died = True
        there = {path[2:]: data for path, data in scene.files().items() if path.startswith("t/")}
        assert there in ({}, {"torn.pt": b"torn"}, SAVED), "never half of each"
    scene.restore()
    assert scene.files() == {
        **{f"t/{path}": data for path, data in SAVED.items()},
        "zero_to_fp32.py": b"new",
        "latest": b"t",
    }
    assert is_restored(scene.volume, record.save_id)
    assert os.listdir(scene.folder / ".ds_ckpt/restoring") == []
    aside = list((scene.folder / ".ds_ckpt/aside").rglob("torn.pt"))
    assert [path.read_bytes() for path in aside] == [b"torn"]
    assert died == (dies_at < 10)


def test_the_remains_of_a_restore_of_another_save_are_removed(scene: Scene) -> None:
    scene.prefix.commit("old")
    with pytest.raises(PausedError):
        scene.restore(check=pause_now)
    scene.prefix.commit("new")
    scene.restore()
    assert os.listdir(scene.folder / ".ds_ckpt/restoring") == []


def pause_now() -> None:
    raise PausedError("stop")


def test_two_restores_do_not_work_on_one_volume(scene: Scene) -> None:
    scene.prefix.commit("t")
    refused = []

    def second(record: Record, size: int) -> None:
        with pytest.raises(SettingsError, match="another restore"):
            scene.restore()
        refused.append(True)

    scene.restore(plan=second)
    assert refused == [True]


# ---- damaged


def test_every_damaged_object_is_named_and_nothing_gets_its_name(scene: Scene) -> None:
    record = scene.prefix.commit("t", {f"{n}.pt": b"x" * 100 for n in range(4)})
    flipped = scene.damage(record, "1.pt")
    scene.prefix.store.delete(f"{record.folder}/2.pt")
    scene.prefix.put(f"{record.folder}/3.pt", b"short")
    with pytest.raises(DamagedError) as caught:
        scene.restore()
    assert caught.value.objects == (flipped, f"{record.folder}/2.pt", f"{record.folder}/3.pt")
    assert "2.pt is missing" in str(caught.value)
    assert scene.files() == {}
    # Put right by hand, it goes on, and what was right is not fetched again.
    for name in ("1.pt", "2.pt", "3.pt"):
        scene.prefix.put(f"{record.folder}/{name}", b"x" * 100)
    assert scene.restore().fetched_bytes == 300
    assert set(scene.files()) == {"t/0.pt", "t/1.pt", "t/2.pt", "t/3.pt", "latest"}


def test_a_shard_of_zero_bytes_that_grew_is_damaged(scene: Scene) -> None:
    record = scene.prefix.commit("t", {"empty.pt": b""})
    scene.prefix.put(f"{record.folder}/empty.pt", b"x")
    with pytest.raises(DamagedError, match=r"empty\.pt"):
        scene.restore()
    assert scene.files() == {}


def test_a_damaged_record_is_left_out_and_named(scene: Scene) -> None:
    scene.prefix.commit("good", {"x": b"1"})
    bad = scene.prefix.commit("bad")
    scene.prefix.put(f".ds_ckpt/checkpoints/{bad.save_id}.json", b"garbage")
    scene.restore()
    assert scene.files() == {"good/x": b"1", "latest": b"good"}


def test_a_byte_flipped_on_the_way_is_fetched_again(scene: Scene) -> None:
    scene.prefix.commit("t", {"x": b"1" * 100})
    scene.prefix.fault("read", "corrupt", "@")
    scene.restore()
    assert scene.files()["t/x"] == b"1" * 100


# ---- what stood there before


def test_a_folder_that_differs_is_set_aside_and_its_right_shards_are_taken_over(
    scene: Scene,
) -> None:
    scene.prefix.commit("t", {"same.pt": b"s" * 100, "other.pt": b"o" * 50})
    (scene.folder / "t").mkdir()
    (scene.folder / "t/same.pt").write_bytes(b"s" * 100)
    (scene.folder / "t/other.pt").write_bytes(b"O" * 50)
    (scene.folder / "t/surplus.pt").write_bytes(b"newer than the checkpoint")
    inode = (scene.folder / "t/same.pt").stat().st_ino
    result = scene.restore()
    assert (result.fetched_bytes, result.reused_bytes) == (50, 100)
    assert scene.files() == {"t/same.pt": b"s" * 100, "t/other.pt": b"o" * 50, "latest": b"t"}
    assert (scene.folder / "t/same.pt").stat().st_ino == inode
    assert sorted(os.listdir(result.set_aside)) == ["other.pt", "same.pt", "surplus.pt"]
    assert Path(result.set_aside, "other.pt").read_bytes() == b"O" * 50


def test_what_is_there_already_is_left_alone_and_not_fetched(scene: Scene) -> None:
    scene.prefix.commit("a/b", SAVED, companions={"zero_to_fp32.py": b"#!"})
    scene.restore()
    inodes = {path: (scene.folder / path).stat().st_ino for path in scene.files() if "/" in path}
    before = scene.fetched()
    (scene.folder / "latest").write_text("elsewhere")
    result = scene.restore()
    assert (result.fetched_bytes, result.set_aside) == (0, "")
    assert scene.fetched() == before
    assert {path: (scene.folder / path).stat().st_ino for path in inodes} == inodes
    assert scene.files()["latest"] == b"a/b"
    assert os.listdir(scene.folder / ".ds_ckpt/restoring") == []


def test_a_link_that_stands_for_a_shard_is_not_followed(scene: Scene, tmp_path: Path) -> None:
    scene.prefix.commit("t", {"x": b"1" * 10})
    (tmp_path / "outside").write_bytes(b"1" * 10)
    (scene.folder / "t").mkdir()
    (scene.folder / "t/x").symlink_to(tmp_path / "outside")
    assert scene.restore().fetched_bytes == 10
    assert not (scene.folder / "t/x").is_symlink()


def test_a_link_that_stands_for_the_folder_is_set_aside_and_not_written_through(
    scene: Scene, tmp_path: Path
) -> None:
    scene.prefix.commit("t", {"x": b"1"})
    (tmp_path / "outside").mkdir()
    (scene.folder / "t").symlink_to(tmp_path / "outside")
    scene.restore()
    assert not (scene.folder / "t").is_symlink()
    assert list((tmp_path / "outside").iterdir()) == []


# ---- room, holds, read-only


class Small(Filesystem):
    def space(self, path: str) -> Space:
        return Space(100 * MIB, 65 * MIB)


def test_a_link_in_the_middle_of_a_tag_is_refused_and_not_written_through(
    scene: Scene, tmp_path: Path
) -> None:
    scene.prefix.commit("a/b/step1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    scene.folder.mkdir(exist_ok=True)
    (scene.folder / "a").mkdir()
    (scene.folder / "a/b").symlink_to(elsewhere)
    with pytest.raises(SettingsError, match="a/b is a link or a file"):
        scene.restore()
    assert list(elsewhere.iterdir()) == []
    (scene.folder / "a/b").unlink()
    scene.restore()
    assert (scene.folder / "a/b/step1/shard.pt").is_file()


@pytest.mark.parametrize("name", ["restoring", "aside"])
def test_a_folder_of_ours_that_is_a_link_is_refused_and_not_emptied(
    scene: Scene, tmp_path: Path, name: str
) -> None:
    (tmp_path / "outside/home").mkdir(parents=True)
    (tmp_path / "outside/home/file").write_bytes(b"precious")
    (scene.folder / ".ds_ckpt").mkdir()
    (scene.folder / ".ds_ckpt" / name).symlink_to(tmp_path / "outside")
    scene.prefix.commit("t")
    with pytest.raises(SettingsError, match="link"):
        scene.restore()
    assert (tmp_path / "outside/home/file").read_bytes() == b"precious"


def test_no_room_is_said_before_a_byte_moves(scene: Scene) -> None:
    scene.prefix.commit("t", {"x": bytes(2 * MIB)})
    with pytest.raises(NoRoomError, match=f"needs {2 * MIB} more"):
        scene.restore(Volume(str(scene.folder), Small()))
    assert scene.fetched() == 0
    assert scene.files() == {}


def test_room_is_judged_by_what_lies_on_the_disk_and_not_by_lengths(scene: Scene) -> None:
    record = scene.prefix.commit("t", {"x": bytes(2 * MIB)})
    staged = scene.folder / f".ds_ckpt/restoring/{record.save_id}/shards/x"
    staged.parent.mkdir(parents=True)
    with staged.open("wb") as file:
        file.truncate(2 * MIB)  # as an interrupted restore leaves it: a hole
    with pytest.raises(NoRoomError, match="make room"):
        scene.restore(Volume(str(scene.folder), Small()))


def test_a_hold_stands_while_it_works_and_is_gone_afterwards(scene: Scene) -> None:
    record = scene.prefix.commit("t")
    held = []

    def look(_record: Record, _size: int) -> None:
        held.append(scene.prefix.another().held(scene.prefix.clock.now))

    scene.restore(plan=look)
    assert held == [{record.save_id}]
    assert scene.prefix.stored_keys(".ds_ckpt/holds/") == []
    with pytest.raises(PausedError):
        scene.restore(check=pause_now, tag="t", volume=Volume(f"{scene.folder}/other"))
    assert scene.prefix.stored_keys(".ds_ckpt/holds/") == []


def test_a_hold_is_renewed_in_a_long_restore(scene: Scene) -> None:
    scene.prefix.commit("t", {f"{n}": b"x" for n in range(6)})

    def slow(_size: int) -> None:
        scene.prefix.clock.sleep(restoring.HOLD_SECONDS / 2)

    scene.restore(progress=slow)
    assert len(scene.prefix.store.asked("put", "holds/")) >= 3


def test_a_store_that_may_only_be_read_is_restored_from_without_a_hold(scene: Scene) -> None:
    scene.prefix.commit("t", {"x": b"1"})
    scene.prefix.fault("put", "fail-before", error=AccessError, count=None)
    scene.prefix.fault("delete", "fail-before", error=AccessError, count=None)
    result = scene.restore()
    assert "holds/" in result.without_hold
    assert scene.files() == {"t/x": b"1", "latest": b"t"}


def test_a_record_that_retention_gives_up_meanwhile_is_not_begun(scene: Scene) -> None:
    record = scene.prefix.commit("t")
    scene.prefix.fault(
        "put",
        "call",
        "holds/",
        action=lambda: scene.prefix.another().replace(record, state="deleted"),
    )
    with pytest.raises(NothingCommittedError, match="run the restore again"):
        scene.restore()
    assert scene.fetched() == 0


# ---- is it still what was restored?


def test_a_volume_is_believed_as_long_as_its_files_show_it(scene: Scene) -> None:
    record = scene.prefix.commit("t", {"x": b"12345"})
    assert not is_restored(scene.volume, record.save_id)
    scene.restore()
    shard = scene.folder / "t/x"
    os.utime(shard)  # touched, same bytes
    assert is_restored(scene.volume, record.save_id)
    assert not is_restored(scene.volume, "018bcfe56800-0000000000000001")
    shard.write_bytes(b"12346")
    assert not is_restored(scene.volume, record.save_id)
    shard.unlink()
    assert not is_restored(scene.volume, record.save_id)
