"""``after_save`` over several ranks and nodes: what is published, and what is not."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt_hook import saving
from ds_ckpt_hook.core import Hook
from ds_ckpt_hook.errors import NotPublishedError
from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.manifest import END_OF_TIME_MS, TrainerStatus
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import TagError
from tests.hook.standin import Engine, Job, manifests

Folders = Callable[[int], list[Path]]
MODEL = "mp_rank_00_model_states.pt"


def optimizer(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def final_status(job: Job) -> TrainerStatus:
    """What the sidecar of the first node reads once the trainer has finished."""
    session = next(iter(job.hooks[0].sessions.values()))
    session.finish()
    status = session.volume.trainer_status()
    assert status is not None
    return status


def test_one_node_lists_every_shard_with_its_checksum(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume, volume])
    saves = job.save("global_step1", metrics={"loss": 2.5, "bad": float("nan")}, kind="epoch")
    (manifest,) = manifests(volume)
    assert manifest.save_id == saves[0].save_id == saves[1].save_id
    assert {shard.path: shard.rank for shard in manifest.shards} == {
        MODEL: 0,
        optimizer(0): 0,
        optimizer(1): 1,
    }
    for shard in manifest.shards:
        file = volume / "global_step1" / shard.path
        link = volume / ".ds_ckpt/links" / manifest.save_id / shard.path
        data = file.read_bytes()
        assert (shard.size, shard.crc32c) == (len(data), digest.to_hex(digest.crc32c(data)))
        assert (shard.inode, shard.mtime_ns) == (file.stat().st_ino, file.stat().st_mtime_ns)
        assert link.samefile(file)
    assert manifest.ranks == [0, 1]
    assert manifest.step == 1
    assert (manifest.kind, manifest.metrics) == ("epoch", {"loss": 2.5, "bad": None})
    assert manifest.protection == "hardlink"
    assert os.listdir(volume / ".ds_ckpt/pieces") == []


def test_a_file_on_two_nodes_is_uploaded_by_the_lowest_rank_and_a_replica_elsewhere(
    folders: Folders,
) -> None:
    first, second = folders(2)
    Job([first, second]).save("t")
    (one,), (two,) = manifests(first), manifests(second)
    assert one.save_id == two.save_id
    assert one.nodes == two.nodes == sorted([one.node, two.node])
    assert [shard.path for shard in one.shards] == [MODEL, optimizer(0)]
    assert [shard.path for shard in two.shards] == [optimizer(1)]
    assert [shard.path for shard in two.replicas] == [MODEL]
    assert one.replicas == []
    assert (one.elsewhere, two.elsewhere) == ([optimizer(1)], [optimizer(0)])
    assert one.shards[0].crc32c != two.replicas[0].crc32c


def test_what_rank_0_says_of_a_save_counts_on_every_node(folders: Folders) -> None:
    first, second = folders(2)
    job = Job([first, second])
    for engine in job.engines:
        engine.save_checkpoint(job.volumes[engine.rank], "t")
    only_on_0: dict[str, Any] = {"metrics": {"loss": 0.5}, "kind": "epoch", "pin": True}
    job.all_ranks(
        lambda rank, hook: saving.after_save(
            hook,
            job.engines[rank],
            "t",
            save_dir=job.volumes[rank],
            **(only_on_0 if rank == 0 else {"metrics": "not numbers"}),
        )
    )
    job.drain()
    for volume in (first, second):
        (manifest,) = manifests(volume)
        assert (manifest.metrics, manifest.kind, manifest.pin) == ({"loss": 0.5}, "epoch", True)


class Vector:
    """As a tensor of several values answers."""

    def __float__(self) -> float:
        raise RuntimeError("cannot be converted to a scalar")


def test_metrics_and_kinds_that_cannot_be_kept_cost_no_save(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    (volume,) = folders(1)
    job = Job([volume, volume])
    many = {f"m{number:03}": 1.0 for number in range(300)}
    odd = {"": 1.0, "x" * 257: 1.0, "a\nb": 1.0, "\ud800": 1.0, "huge": 10**400, "v": Vector()}
    job.save("one", metrics={"loss": 0.5, **odd}, kind="")
    job.save("two", metrics=many, kind="a\x00b")
    job.save("three", metrics=Vector())
    one, two, three = manifests(volume)
    assert (one.kind, one.metrics) == ("checkpoint", {"loss": 0.5, "huge": None, "v": None})
    assert (two.kind, two.metrics) == ("checkpoint", dict(list(many.items())[:256]))
    assert three.metrics == {}
    for told in ("kind '' is left out", "'m256'", "'a\\nb'", "metrics are left out, they are no"):
        assert told in caplog.text


def test_a_save_dir_inside_the_volume_keeps_its_place_there(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume / "runs" / "a"], directory=str(volume))
    job.save("t")
    (manifest,) = manifests(volume)
    assert manifest.root == "runs/a"
    assert Volume(str(volume)).tag_folder(manifest) == "runs/a/t"


@pytest.mark.parametrize("tag", ["7", "run/a/step1", "ü 1%+", "@x", "a b"])
def test_tags_that_deepspeed_can_save_under(folders: Folders, tag: str) -> None:
    (volume,) = folders(1)
    Job([volume]).save(tag)
    assert [manifest.tag for manifest in manifests(volume)] == [tag]


def test_a_tag_below_another_tag_is_a_save_of_its_own(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    for tag in ("a", "a/b", "a"):
        job.save(tag)
    assert [len(manifest.shards) for manifest in manifests(volume)] == [2, 2, 2]


@pytest.mark.parametrize("tag", ["../x", "/abs", "", ".ds_ckpt/x", "x" * 250])
def test_a_tag_that_cannot_be_stored_publishes_nothing_and_says_why(
    folders: Folders, tag: str, caplog: pytest.LogCaptureFixture
) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    save = saving.after_save(job.hooks[0], job.engines[0], tag, save_dir=volume)
    assert save.status().state == "failed"
    assert "choose" in caplog.text
    assert manifests(volume) == []
    with pytest.raises((TagError, NotPublishedError)):
        saving.after_save(job.hooks[0], job.engines[0], tag, save_dir=volume, strict=True)


def test_ranks_with_different_tags_publish_nothing_and_the_next_save_works(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    (volume,) = folders(1)
    job = Job([volume, volume])
    for engine in job.engines:
        engine.save_checkpoint(volume, f"tag{engine.rank}")
    with caplog.at_level(logging.WARNING):
        saves = job.all_ranks(
            lambda rank, hook: saving.after_save(
                hook, job.engines[rank], f"tag{rank}", save_dir=volume
            )
        )
    # rank 1 wrote no model file, so its own tag is whole; only the tags differ
    assert [save.status().state for save in saves] == ["failed", "failed"]
    assert "different tags" in caplog.text
    assert manifests(volume) == []
    job.save("together")
    assert [manifest.tag for manifest in manifests(volume)] == ["together"]
    assert final_status(job).skipped_saves == 1


def test_strict_raises_on_every_rank(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume, volume])
    for engine in job.engines:
        engine.save_checkpoint(volume, f"tag{engine.rank}")

    def refused(rank: int, hook: Hook) -> bool:
        try:
            saving.after_save(hook, job.engines[rank], f"tag{rank}", save_dir=volume, strict=True)
        except NotPublishedError:
            return True
        return False

    assert job.all_ranks(refused) == [True, True]


def test_a_rank_whose_shard_is_missing_stops_everybody_from_publishing(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = folders(2)
    job = Job([first, second])
    for engine in job.engines:
        engine.save_checkpoint(job.volumes[engine.rank], "t")
    (second / "t" / optimizer(1)).unlink()
    job.all_ranks(
        lambda rank, hook: saving.after_save(
            hook, job.engines[rank], "t", save_dir=job.volumes[rank]
        )
    )
    assert manifests(first) == manifests(second) == []
    assert f"rank 1: {second}/t/{optimizer(1)} is missing" in caplog.text


def test_a_rank_that_knows_no_folder_is_named_on_all_ranks(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    (volume,) = folders(1)
    job = Job([volume, volume])
    for _ in range(2):
        caplog.clear()
        job.all_ranks(
            lambda rank, hook: saving.after_save(
                hook, job.engines[rank], "t", save_dir=volume if rank == 0 else None
            )
        )
        assert caplog.text.count("rank 1: ") == 2
    job.save("t")
    job.all_ranks(
        lambda rank, hook: saving.after_save(
            hook, job.engines[rank], "u", save_dir=volume if rank == 0 else None
        )
    )
    assert [manifest.tag for manifest in manifests(volume)] == ["t"]


def test_shards_of_a_larger_earlier_world_are_not_part_of_the_save(folders: Folders) -> None:
    (volume,) = folders(1)
    stale = volume / "t" / optimizer(7)
    stale.parent.mkdir()
    stale.write_bytes(b"old")
    os.utime(stale, (1_000_000_000, 1_000_000_000))
    Job([volume, volume]).save("t")
    (manifest,) = manifests(volume)
    assert optimizer(7) not in [shard.path for shard in manifest.shards]
    assert stale.exists()


def test_an_own_shard_that_is_older_than_the_process_was_not_written_by_it(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.engines[0].save_checkpoint(volume, "t")
    os.utime(volume / "t" / MODEL, (1_000_000_000, 1_000_000_000))
    saving.after_save(job.hooks[0], job.engines[0], "t", save_dir=volume)
    assert manifests(volume) == []
    assert "older than this process" in caplog.text


def test_a_tag_saved_again_is_a_new_save_with_a_later_time(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.save("t", "first")
    job.save("t", "second!")
    one, two = manifests(volume)
    assert one.save_id != two.save_id
    assert one.time_ms < two.time_ms
    assert one.shards[0].crc32c != two.shards[0].crc32c


def test_times_do_not_run_backwards_after_a_clock_that_was_ahead(folders: Folders) -> None:
    (volume,) = folders(1)
    Job([volume]).save("t")
    (first,) = manifests(volume)
    ahead = first.model_copy(update={"time_ms": first.time_ms + 10**9})
    future = f"{ahead.time_ms:012x}-{'0' * 16}"
    Volume(str(volume)).publish(ahead.model_copy(update={"save_id": future, "tag": "future"}))
    job = Job([volume])
    job.save("u")
    assert manifests(volume)[-1].time_ms > ahead.time_ms
    assert manifests(volume)[-1].attempt > future


@pytest.mark.parametrize("date", ["f" * 12, f"{END_OF_TIME_MS - 1:012x}"])
def test_a_file_of_an_impossible_date_does_not_stop_publishing(folders: Folders, date: str) -> None:
    volumes = folders(2)
    (volumes[1] / ".ds_ckpt/outbox").mkdir(parents=True)
    garbage = volumes[1] / f".ds_ckpt/outbox/{date}-{'0' * 16}.garbage"
    garbage.touch()
    Job(volumes).save("t")
    garbage.unlink()
    assert [[each.tag for each in manifests(volume)] for volume in volumes] == [["t"], ["t"]]


def test_what_an_earlier_attempt_left_is_cleared_before_anybody_writes(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.save("t")
    (kept,) = manifests(volume)
    job.hooks[0].sessions[str(volume)].finish()
    place = Volume(str(volume))
    assert place.trainer_status().finished  # type: ignore[union-attr]
    lost = "0" * 12 + "-" + "1" * 16
    for folder in (place.pieces, place.links):
        os.makedirs(f"{folder}/{lost}")
        Path(f"{folder}/{lost}/1.json").write_text("{}")
    Job([volume]).save("u")
    assert os.listdir(place.pieces) == []
    assert lost not in os.listdir(place.links)
    assert kept.save_id in os.listdir(place.links)
    status = place.trainer_status()
    assert status is not None
    assert not status.finished
    assert status.attempt != kept.attempt


def test_the_scripts_beside_the_tag_are_kept_as_they_were(folders: Folders) -> None:
    first, second = folders(2)
    for folder in (first, second):
        (folder / "zero_to_fp32.py").write_text("print(1)")
        (folder / "big.py").write_bytes(b"#" * (1 << 20) + b"#")
    Job([first, second]).save("t")
    (one,), (two,) = manifests(first), manifests(second)
    assert [entry.path for entry in one.companions] == ["zero_to_fp32.py"]
    assert two.companions == []
    copy = first / ".ds_ckpt/links" / one.save_id / ".companions/zero_to_fp32.py"
    (first / "zero_to_fp32.py").write_text("changed in place")
    assert copy.read_text() == "print(1)"


def test_rotation_by_the_trainer_leaves_the_links(folders: Folders) -> None:
    (volume,) = folders(1)
    Job([volume]).save("t")
    shutil.rmtree(volume / "t")
    (manifest,) = manifests(volume)
    link = volume / ".ds_ckpt/links" / manifest.save_id / MODEL
    data = link.read_bytes()
    assert digest.to_hex(digest.crc32c(data)) == manifest.shards[0].crc32c


class NoLinks(Filesystem):
    """A filesystem without hard links, as SMB and some FUSE filesystems are."""

    def link(self, source: str, target: str) -> None:
        raise OSError(95, "Operation not supported", source)


def test_without_hard_links_the_bytes_are_cloned_or_copied(folders: Folders) -> None:
    (volume,) = folders(1)
    (volume / ".ds_ckpt").mkdir()
    Volume(str(volume)).node_id()  # made with a link
    job = Job([volume])
    job.hooks[0].fs = NoLinks()
    job.save("t")
    (manifest,) = manifests(volume)
    assert manifest.protection in ("reflink", "copy")
    copy = volume / ".ds_ckpt/links" / manifest.save_id / MODEL
    assert not copy.samefile(volume / "t" / MODEL)
    assert digest.to_hex(digest.crc32c(copy.read_bytes())) == manifest.shards[0].crc32c
    assert manifest.shards[0].inode == (volume / "t" / MODEL).stat().st_ino


class SlowHash(Filesystem):
    """Stops before the first file is opened for its checksum, until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def open_beneath(self, root: str, relative: str) -> int:
        if "/links/" in root:
            self.reached.set()
            assert self.go_on.wait(20)
        return super().open_beneath(root, relative)


def test_a_shard_written_again_before_its_checksum_is_never_published(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    fs = job.hooks[0].fs = SlowHash()
    job.engines[0].save_checkpoint(volume, "t", "first")
    save = saving.after_save(job.hooks[0], job.engines[0], "t", save_dir=volume)
    assert fs.reached.wait(20)
    job.engines[0].save_checkpoint(volume, "t", "second")
    fs.go_on.set()
    job.drain()
    assert save.status().state == "failed"
    assert "superseded" in caplog.text
    assert manifests(volume) == []
    assert os.listdir(volume / ".ds_ckpt/links") == []
    status = final_status(job)
    assert status.skipped_saves == 1
    assert "superseded" in (status.error or "")


def test_a_rank_that_fails_in_the_background_stops_its_node(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    (volume,) = folders(1)
    job = Job([volume, volume])
    fs = job.hooks[1].fs = SlowHash()
    for engine in job.engines:
        engine.save_checkpoint(volume, "t")
    saves = job.all_ranks(
        lambda rank, hook: saving.after_save(hook, job.engines[rank], "t", save_dir=volume)
    )
    assert fs.reached.wait(20)
    (volume / "t" / optimizer(1)).write_text("something else")
    fs.go_on.set()
    job.drain()
    assert [save.status().state for save in saves] == ["failed", "failed"]
    assert manifests(volume) == []


def test_a_rank_that_dies_before_its_checksums_lets_the_leader_give_up(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume, volume], publish_timeout=0.2)
    job.hooks[1].worker.submit = lambda job: None  # type: ignore[method-assign]
    for engine in job.engines:
        engine.save_checkpoint(volume, "t")
    saves = job.all_ranks(
        lambda rank, hook: saving.after_save(hook, job.engines[rank], "t", save_dir=volume)
    )
    assert job.hooks[0].worker.drain(20)
    assert "no checksums came from ranks [1]" in saves[0].status().reason
    assert manifests(volume) == []


def test_one_ranks_trouble_with_a_save_does_not_keep_back_the_next(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume, volume], publish_timeout=5)
    submit = job.hooks[1].worker.submit
    job.hooks[1].worker.submit = lambda job: None  # type: ignore[method-assign]
    for engine in job.engines:
        engine.save_checkpoint(volume, "late")
    job.all_ranks(
        lambda rank, hook: saving.after_save(hook, job.engines[rank], "late", save_dir=volume)
    )
    job.hooks[1].worker.submit = submit  # type: ignore[method-assign]
    for engine in job.engines:
        engine.save_checkpoint(volume, "next")
    job.all_ranks(
        lambda rank, hook: saving.after_save(hook, job.engines[rank], "next", save_dir=volume)
    )
    deadline = time.monotonic() + 20
    while not manifests(volume) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [manifest.tag for manifest in manifests(volume)] == ["next"]


class FullAtFirst(Filesystem):
    """Writes nothing until there is room."""

    room = False

    def write_atomic(self, path: str, data: bytes, *, durable: bool = True) -> None:
        if not self.room and ("/pieces/" in path or "/outbox/" in path):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        super().write_atomic(path, data, durable=durable)


def test_a_save_is_handed_over_once_there_is_room(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume, volume])
    fs = FullAtFirst()
    for hook in job.hooks:
        hook.fs = fs
    for engine in job.engines:
        engine.save_checkpoint(volume, "t")
    job.all_ranks(
        lambda rank, hook: saving.after_save(hook, job.engines[rank], "t", save_dir=volume)
    )
    assert not job.hooks[0].worker.drain(0.3)
    assert manifests(volume) == []
    fs.room = True
    job.drain()
    assert [manifest.tag for manifest in manifests(volume)] == ["t"]


def test_latest_follows_on_nodes_where_deepspeed_does_not_write_it(folders: Folders) -> None:
    volumes = folders(2)
    job = Job(volumes)
    job.save("one")
    assert job.resume() == ["one", "one"]
    for volume in volumes:
        (volume / "latest").write_text("one")
    for engine in job.engines:
        engine.save_checkpoint(volumes[engine.rank], "two")
    (volumes[1] / "latest").write_text("one")  # as DeepSpeed leaves it there
    job.all_ranks(
        lambda rank, hook: saving.after_save(hook, job.engines[rank], "two", save_dir=volumes[rank])
    )
    job.drain()
    assert [(volume / "latest").read_text() for volume in volumes] == ["two", "two"]


def test_the_sidecars_group_may_read_files_and_rename_in_folders(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.engines[0].save_checkpoint(volume, "a/b")
    (volume / "a/b" / MODEL).chmod(0o600)
    (volume / "a/b").chmod(0o700)
    saving.after_save(job.hooks[0], job.engines[0], "a/b", save_dir=volume)
    job.drain()
    assert (volume / "a/b" / MODEL).stat().st_mode & 0o040
    assert (volume / "a/b").stat().st_mode & 0o2070 == 0o2070
    assert (volume / "a").stat().st_mode & 0o2070 == 0o2070


def checkpoint_engine(name: str, **members: Any) -> Any:
    def get_commit_info(self: Any) -> None:
        return None

    base = type("CheckpointEngine", (), {"get_commit_info": get_commit_info})
    return type(name, (base,), {"is_decoupled": lambda self: True, **members})()


@pytest.mark.parametrize("name", ["NebulaCheckpointEngine", "DataStatesCheckpointEngine"])
def test_an_engine_that_never_says_when_it_is_done_is_refused_by_name(
    folders: Folders, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.engines[0].checkpoint_engine = checkpoint_engine(name)  # type: ignore[attr-defined]
    job.save("t")
    assert manifests(volume) == []
    assert name in caplog.text
    assert "default checkpoint engine" in caplog.text


def test_a_decoupled_save_is_taken_at_the_first_call_after_it_has_finished(
    folders: Folders,
) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    engine: Any = job.engines[0]
    info: list[object] = [object()]
    engine.checkpoint_engine = checkpoint_engine(
        "DecoupledCheckpointEngine", get_commit_info=lambda self: info[0]
    )
    engine.global_steps = 4
    first = saving.after_save(job.hooks[0], engine, None, save_dir=volume)
    assert first.status().reason == "the checkpoint engine has not finished writing it"
    assert first.save_id is None
    engine.save_checkpoint(volume, "global_step4")
    engine.global_steps = 5
    info[0] = None
    job.save("u")
    assert [(m.tag, m.step) for m in manifests(volume)] == [("global_step4", 4), ("u", 6)]
    assert first.save_id is not None


def test_an_engine_of_another_age_leaves_all_to_the_listing(folders: Folders) -> None:
    (volume,) = folders(1)

    class Old(Engine):
        def __init__(self) -> None:
            super().__init__(0)

    engine = Old()
    engine.save_checkpoint(volume, "t")
    del engine.save_non_zero_checkpoint, engine.save_zero_checkpoint
    job = Job([volume])
    saving.after_save(job.hooks[0], engine, "t", save_dir=volume)
    job.drain()
    assert [shard.path for shard in manifests(volume)[0].shards] == [MODEL, optimizer(0)]
