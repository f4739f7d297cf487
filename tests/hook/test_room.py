"""Whether the volume can take another checkpoint: the same answer on all ranks, in time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt_hook import room
from ds_ckpt_hook.core import Hook
from ds_ckpt_store.contract.filesystem import Filesystem, Space
from ds_ckpt_store.contract.volume import Volume
from tests.hook.standin import Job
from tests.hook.test_feedback import FakeTime, sidecar

Folders = Callable[[int], list[Path]]
LARGE = 1 << 62


class Small(Filesystem):
    """A disk with so many bytes free."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def space(self, path: str) -> Space:
        return Space(1 << 40, self.free)


def ask(job: Job, size: int | None = None, **options: Any) -> list[bool]:
    def call(rank: int, hook: Hook) -> bool:
        return room.ready_to_save(hook, size, save_dir=job.volumes[rank], **options)

    return job.all_ranks(call)


def test_one_node_without_room_and_no_rank_saves(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = folders(2)
    job = Job([one, one, two])
    job.hooks[2].fs = Small(500)
    assert ask(job, 501, policy="skip") == [False] * 3
    assert "left out on all ranks: rank 2: 0 MiB are left on" in caplog.text
    assert ask(job, 500, policy="skip") == [True] * 3


def test_warn_saves_all_the_same(folders: Folders, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(folders(2))
    assert ask(job, LARGE) == [True, True]
    assert "saving all the same" in caplog.text


def test_before_the_first_save_nobody_knows_how_much_it_takes(folders: Folders) -> None:
    job = Job(folders(1))
    job.hooks[0].fs = Small(0)
    assert ask(job, policy="skip") == [True]


def test_the_next_save_is_taken_to_be_as_large_as_the_last(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.hooks[0].fs = disk = Small(LARGE)
    job.save("a", "x" * 10_000)
    size = job.hooks[0].sessions[str(volume)].last_bytes
    assert size > 20_000, "model and optimizer"
    for free, ready in ((size, False), (int(size * 1.03), True)):
        disk.free = free
        assert ask(job, policy="skip") == [ready]
    again = Job([volume])
    again.hooks[0].fs = Small(size)
    assert ask(again, policy="skip") == [False], "an earlier start has handed over as much"


def test_the_limit_of_the_emptydir_counts_before_the_disk(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    (volume / "weights").write_bytes(bytes(3 << 20))
    sidecar(volume, "running", limit_bytes=(4 << 20))
    assert ask(job, 2 << 20, policy="skip") == [False]
    assert ask(job, 1 << 19, policy="skip") == [True]


class Clearing(FakeTime):
    """While somebody waits, a sidecar makes room and stays alive."""

    def __init__(self, volume: Path, after: float) -> None:
        super().__init__()
        self._volume = volume
        self._until = self.now + after

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        sidecar(self._volume, "running", time=self.now, limit_bytes=8 << 20)
        if self.now >= self._until:
            shutil.rmtree(self._volume / "old", ignore_errors=True)


def waiting(folders: Folders, after: float) -> tuple[Job, Path]:
    (volume,) = folders(1)
    job = Job([volume])
    job.save("old", "x" * (3 << 20))
    for link in (volume / ".ds_ckpt/links").iterdir():
        shutil.rmtree(link)
    job.hooks[0].clock = clock = Clearing(volume, after)
    sidecar(volume, "running", time=clock.now, limit_bytes=8 << 20)
    return job, volume


def test_wait_waits_until_the_sidecar_has_made_room(folders: Folders) -> None:
    job, volume = waiting(folders, 100)
    began = job.hooks[0].clock.monotonic()
    assert ask(job, policy="wait", timeout=1000) == [True]
    assert 100 <= job.hooks[0].clock.monotonic() - began < 110
    assert not (volume / "old").exists()


def test_wait_gives_up_in_time(folders: Folders, caplog: pytest.LogCaptureFixture) -> None:
    job, _ = waiting(folders, 5000)
    assert ask(job, policy="wait", timeout=1000) == [False]
    assert "after 1000 s there still is none" in caplog.text


def test_without_a_sidecar_there_is_nothing_to_wait_for(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    job, volume = waiting(folders, 5000)
    sidecar(volume, "refused", time=job.hooks[0].clock.time(), limit_bytes=8 << 20)
    assert ask(job, policy="wait", timeout=1000) == [False]
    assert "no sidecar is at work" in caplog.text


def test_with_nothing_to_store_there_is_nothing_to_wait_for(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    job, volume = waiting(folders, 5000)
    for name in Volume(str(volume)).manifests():
        (volume / ".ds_ckpt/outbox" / name).unlink()
    assert ask(job, LARGE, policy="wait", timeout=1000) == [False]
    assert "nothing waits to be stored" in caplog.text


def test_a_rank_that_does_not_come_holds_nobody_for_ever(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(folders(2), exchange_timeout=1.0)
    ask(job, 1)
    assert room.ready_to_save(job.hooks[0], 1, save_dir=job.volumes[0], policy="skip")
    assert "cannot agree whether there is room" in caplog.text
