"""Checksums while the bytes are written: right, in the engine's own file, and never in the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ckpt_hook import links
from ds_ckpt_hook.sealing import Seals, attach
from ds_ckpt_store.contract.digest import crc32c, to_hex
from ds_ckpt_store.contract.filesystem import FileStat, Filesystem
from ds_ckpt_store.errors import ShardChangedError
from tests.hook.standin import Engine, Job, manifests

FS = Filesystem()


class TorchCheckpointEngine:
    """As DeepSpeed's: it writes with one torch.save."""

    def __init__(self, *, zipped: bool = True) -> None:
        self.zipped = zipped

    def save(self, state_dict: object, path: str) -> str:
        torch.save(state_dict, path, _use_new_zipfile_serialization=self.zipped)
        return f"saved {path}"

    def commit(self, tag: str) -> str:
        return f"committed {tag}"


class FastCheckpointEngine(TorchCheckpointEngine):
    pass


class Holder:
    def __init__(self, writer: object) -> None:
        self.checkpoint_engine: Any = writer


def attached(*, zipped: bool = True, keep_zip_sums: bool = False) -> tuple[Any, Seals]:
    seals, engine = Seals(), Holder(TorchCheckpointEngine(zipped=zipped))
    assert attach(engine, seals, FS, keep_zip_sums=keep_zip_sums)
    return engine.checkpoint_engine, seals


def state_of(path: Path) -> FileStat:
    state = FS.stat(str(path))
    assert state is not None
    return state


def states() -> dict[str, Any]:
    return {
        "weights": torch.arange(3_000_000, dtype=torch.float32),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "step": 7,
        "nested": [{"a": (1, "b")}, torch.tensor(2)],
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_the_sum_is_that_of_the_file_and_the_file_loads(tmp_path: Path, zipped: bool) -> None:
    writer, seals = attached(zipped=zipped)
    path = tmp_path / "shard.pt"
    assert writer.save(states(), str(path)) == f"saved {path}"
    assert seals.of(state_of(path)) == crc32c(path.read_bytes())
    loaded = torch.load(path, weights_only=False)
    assert torch.equal(loaded["weights"], states()["weights"])
    assert loaded["nested"][0] == {"a": (1, "b")}


def test_a_file_that_is_written_anew_has_the_sum_of_its_new_bytes(tmp_path: Path) -> None:
    writer, seals = attached()
    path = tmp_path / "shard.pt"
    writer.save({"a": torch.ones(10_000)}, str(path))
    writer.save(path=path, state_dict={"a": torch.zeros(10)})
    assert seals.of(state_of(path)) == crc32c(path.read_bytes())


def test_what_somebody_else_has_written_since_has_no_sum(tmp_path: Path) -> None:
    writer, seals = attached()
    path = tmp_path / "shard.pt"
    writer.save(states(), str(path))
    os.utime(path, ns=(1, 1))
    assert seals.of(state_of(path)) is None


def test_everything_else_of_the_engine_stays_its_own(tmp_path: Path) -> None:
    writer, _ = attached()
    assert isinstance(writer, TorchCheckpointEngine)
    assert writer.commit("t") == "committed t"


@pytest.mark.parametrize("keep", [True, False])
def test_the_zips_own_sums_are_left_out_of_these_writes_and_of_no_others(
    tmp_path: Path, keep: bool
) -> None:
    during = []

    class Watched:
        def __reduce__(self) -> tuple[Any, ...]:
            during.append(torch.serialization.get_crc32_options())
            return (dict, ())

    writer, _ = attached(keep_zip_sums=keep)
    writer.save({"a": Watched()}, str(tmp_path / "a"))
    assert during == [keep]
    assert torch.serialization.get_crc32_options()
    with pytest.raises(AttributeError):
        writer.save({"a": lambda: 0}, str(tmp_path / "b"))
    assert torch.serialization.get_crc32_options()


def test_a_torch_without_the_switch_saves_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.serialization, "set_crc32_options")
    writer, seals = attached()
    writer.save(states(), str(tmp_path / "a"))
    assert seals.of(state_of(tmp_path / "a")) is not None


def test_a_save_that_fails_fails_as_without_us_and_leaves_no_sum() -> None:
    writer, seals = attached()
    with pytest.raises(OSError, match="No space left") as failure:
        writer.save(states(), "/dev/full")
    assert failure.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError):
        writer.save(states(), "/nowhere/at/all")
    assert not seals._sums


def test_attaching_twice_sums_once(tmp_path: Path) -> None:
    seals, engine = Seals(), Holder(TorchCheckpointEngine())
    assert attach(engine, seals, FS, keep_zip_sums=False)
    save = engine.checkpoint_engine.save
    assert attach(engine, seals, FS, keep_zip_sums=False)
    assert engine.checkpoint_engine.save is save


@pytest.mark.parametrize("writer", [FastCheckpointEngine(), None])
def test_an_engine_whose_writes_cannot_be_seen_is_left_as_it_is(writer: Any) -> None:
    engine = Holder(writer)
    assert not attach(engine, Seals(), FS, keep_zip_sums=False)
    assert writer is None or "save" not in vars(writer)


def test_what_is_saved_elsewhere_than_to_a_path_goes_there(tmp_path: Path) -> None:
    writer, seals = attached()
    with (tmp_path / "a").open("wb") as stream:
        writer.save(states(), stream)
    assert torch.load(tmp_path / "a", weights_only=False)["step"] == 7
    assert not seals._sums


def test_only_so_many_files_are_remembered(tmp_path: Path) -> None:
    seals = Seals()
    state = state_of(tmp_path)
    for inode in range(10_001):
        seals.add(FileStat(**{**vars(state), "inode": inode}), inode)
    assert seals.of(FileStat(**{**vars(state), "inode": 0})) is None
    assert seals.of(FileStat(**{**vars(state), "inode": 10_000})) == 10_000


# ---- and what after_save makes of it


class AttachedEngine(Engine):
    """Writes its shards by way of a checkpoint engine, as DeepSpeed does."""

    def __init__(self, rank: int, seals: Seals) -> None:
        super().__init__(rank)
        self.checkpoint_engine = TorchCheckpointEngine()
        assert attach(self, seals, FS, keep_zip_sums=False)

    def save_checkpoint(self, save_dir: Path, tag: str, content: str = "") -> None:
        super().save_checkpoint(save_dir, tag, content)
        for path in (save_dir / tag).glob(f"*_{self.rank}_*.pt"):
            self.checkpoint_engine.save({"content": path.read_text()}, str(path))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job([tmp_path, tmp_path])
    made.engines = [AttachedEngine(n, hook.seals) for n, hook in enumerate(made.hooks)]
    return made


def test_after_save_reads_no_shard_again_that_was_summed(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    taken = links.crc32c_of_fd

    def noted(fd: int, *rest: int) -> tuple[int, int]:
        read.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        return taken(fd, *rest)

    monkeypatch.setattr(links, "crc32c_of_fd", noted)
    job.save("t")
    (manifest,) = manifests(tmp_path)
    assert [shard.path for shard in manifest.shards if shard.path.startswith("zero")]
    assert read == ["mp_rank_00_model_states.pt"]
    for shard in manifest.shards:
        assert shard.crc32c == to_hex(crc32c((tmp_path / "t" / shard.path).read_bytes()))


def kept_of(tmp_path: Path, protection: links.Protection) -> links.Kept:
    (tmp_path / "shard").write_bytes(b"as it was damaged")
    os.link(tmp_path / "shard", tmp_path / "links-shard")
    (tmp_path / "links").mkdir()
    os.rename(tmp_path / "links-shard", tmp_path / "links" / "shard")
    return links.Kept(
        path="shard",
        source=str(tmp_path),
        target=str(tmp_path / "links"),
        protection=protection,
        state=state_of(tmp_path / "shard"),
        crc32c=crc32c(b"as it was written"),
    )


def test_damage_is_told_with_the_sum_that_was_written(tmp_path: Path) -> None:
    """The sidecar, which reads every byte, sees that this sum is another."""
    _, value = links.hash_kept(FS, kept_of(tmp_path, "hardlink"))
    assert value == crc32c(b"as it was written")


@pytest.mark.parametrize("protection", ["copy", "none"])
def test_damage_that_is_read_here_is_found_here(
    tmp_path: Path, protection: links.Protection
) -> None:
    kept = kept_of(tmp_path, protection)
    (tmp_path / "links" / "shard").unlink()
    with pytest.raises(ShardChangedError, match="was damaged on the disk"):
        links.hash_kept(FS, kept)
