"""Disks, permissions and stores fail: a sentence names the thing and the remedy, and what can heal
is tried again."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import (
    AccessError,
    NotFoundError,
    SettingsError,
    ThrottledError,
    WeakStoreError,
)
from ds_ckpt_store.stores.faulty import FaultyStore
from ds_ckpt_store.stores.memory import MemoryStore
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import World, contents, left_of_saves, status, until

MIB = 1 << 20


# ---- no byte free


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A volume of 16 MiB of its own; a simulated one below needs no privilege."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", path]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode and "permission denied" in mounted.stderr:
        pytest.skip("this user may not mount a filesystem")
    assert mounted.returncode == 0, mounted.stderr
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def fill(path: Path) -> None:
    """Leave no byte free."""
    with (path / "ballast").open("wb", buffering=0) as file:
        for size in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\x00" * size)
    assert Filesystem().space(str(path)).free == 0


def test_with_no_byte_free_it_still_uploads_commits_and_cleans(world: World, small: Path) -> None:
    trainer = Trainer(small, seed=1)
    trainer.save("old", {"x": 6 * MIB})
    new = trainer.save("new", {"x": 1000})
    fill(small)
    assert world.once(small) == 0
    assert world.states() == {"old": "committed", "new": "committed"}
    world.check_whole()
    assert sorted(contents(small)) == ["ballast", "latest", "new/x"]
    assert left_of_saves(small) == [f"outbox/{new.file_name}", f"links/{new.save_id}"]
    assert Filesystem().space(str(small)).free > 5 * MIB
    assert "make room" in str(world.log.of("journal.degraded"))


def test_a_disk_that_fills_up_while_it_works_stops_nothing(world: World, small: Path) -> None:
    trainer = Trainer(small, seed=1)
    trainer.save("t", {"x": 6 * MIB})
    world.fault("put_part", "call", "t@", action=lambda: fill(small))
    assert world.once(small) == 0
    assert world.states() == {"t": "committed"}


class FullDisk(Filesystem):
    """No new file and no new folder."""

    def write_atomic(self, path: str, data: bytes, *, durable: bool = True) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    def make_folder(self, path: str) -> None:
        if not os.path.isdir(path):
            raise OSError(errno.ENOSPC, "No space left on device", path)


def test_where_nothing_can_be_written_saves_are_committed_all_the_same(
    world: World, trainer: Trainer
) -> None:
    for tag in ("a", "b"):
        trainer.save(tag, {"x": 6 * MIB, "y": 10})
    Path(trainer.volume.lock).touch()
    code = world.once(trainer.volume.path, fs=FullDisk(), journal="/dev/full")
    assert code == 0
    assert world.states() == {"a": "committed", "b": "committed"}
    world.check_whole()
    assert world.log.of("journal.degraded")
    assert len(world.log.of("status.unwritable")) == 1


class FullFromTheStart(Filesystem):
    """The last byte was taken while the folders were made."""

    def create_exclusive(self, path: str, data: bytes, *, durable: bool = True) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device", path)


def test_a_volume_that_has_no_room_for_the_nodes_id_is_refused_with_what_to_do(
    world: World, tmp_path: Path
) -> None:
    for _ in range(2):  # and the lock is free again
        with pytest.raises(SettingsError, match=r"node\.json: No space.* cannot begin") as told:
            world.once(tmp_path, fs=FullFromTheStart())
        assert "make room" in str(told.value)


@pytest.mark.parametrize("damage", ["empty", "torn", "gone"])
def test_a_node_id_that_is_lost_is_taken_from_the_saves_that_name_it(
    world: World, trainer: Trainer, damage: str
) -> None:
    """A power cut may: the hook makes the file without a sync, and syncs it before a hand-over."""
    trainer.save("a", {"x": 1000})
    identity = Path(trainer.volume.own, "node.json")
    whole = identity.read_bytes()
    identity.write_bytes(b"" if damage == "empty" else whole[:-20])
    if damage == "gone":
        identity.unlink()
    assert world.once(trainer.volume.path) == 0
    assert world.states() == {"a": "committed"}
    assert identity.read_bytes() == whole
    assert bool(world.log.of("volume.identity_renewed")) == (damage != "gone")


def test_a_node_id_that_is_damaged_before_any_save_is_made_anew(
    world: World, tmp_path: Path
) -> None:
    identity = tmp_path / ".ds_ckpt/node.json"
    identity.parent.mkdir()
    identity.write_bytes(b"")
    assert world.once(tmp_path) == 0
    assert Volume(str(tmp_path)).known_node()
    assert (tmp_path / ".ds_ckpt/node.json.damaged").read_bytes() == b""


def test_a_volume_that_cannot_hold_files_is_refused_with_what_to_do(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="is no folder"):
        world.once(tmp_path / "file")
    with pytest.raises(SettingsError, match="no filesystem that keeps files"):
        world.once(Path("/proc"))


class NoRoomForNames(Filesystem):
    """A full disk on which a new folder needs a block of its own, as most filesystems have it."""

    def make_folder(self, path: str) -> None:
        if not os.path.isdir(path) and "/trash" in path:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        super().make_folder(path)


def test_a_disk_without_room_for_one_more_folder_is_cleaned_all_the_same(
    world: World, trainer: Trainer
) -> None:
    old = trainer.save("old", {"x": 10})
    trainer.save("new", {"x": 10})
    world.once(trainer.volume.path, fs=NoRoomForNames())
    assert not Path(trainer.volume.link_folder(old.save_id)).exists(), "links are freed at least"
    world.once(trainer.volume.path)
    assert sorted(contents(Path(trainer.volume.path))) == ["latest", "new/x"]


def test_a_status_that_cannot_be_written_is_said_once_and_holds_nothing_up(
    world: World, trainer: Trainer
) -> None:
    class ReadOnlyStatus(Filesystem):
        def write_atomic(self, path: str, data: bytes, *, durable: bool = True) -> None:
            if "/status/" in path:
                raise OSError(errno.EROFS, "Read-only file system", path)
            super().write_atomic(path, data, durable=durable)

    for tag in ("a", "b"):
        trainer.save(tag, {"x": 10})
    assert world.once(trainer.volume.path, fs=ReadOnlyStatus()) == 0
    assert set(world.states().values()) == {"committed"}
    assert len(world.log.of("status.unwritable")) == 1


# ---- the journal


@pytest.mark.parametrize("data", [b"garbage" * 1000, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_damaged_journal_is_begun_anew_and_said(
    world: World, trainer: Trainer, data: bytes
) -> None:
    trainer.save("t", {"x": 6 * MIB})
    Path(trainer.volume.journal).write_bytes(data)
    assert world.once(trainer.volume.path) == 0
    assert world.states() == {"t": "committed"}
    assert "nothing is lost" in world.log.of("journal.degraded")[0]["reason"]


def test_a_journal_that_cannot_be_written_is_gone_without(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.save("t", {"x": 6 * MIB})
    assert world.once(trainer.volume.path, journal=str(tmp_path / "no/such/folder/j.db")) == 0
    assert world.states() == {"t": "committed"}
    assert "in memory" in world.log.of("journal.degraded")[0]["reason"]


# ---- the store


def test_a_store_that_is_down_at_start_is_waited_for(world: World, trainer: Trainer) -> None:
    down = world.fault("*", "fail-before", count=None)
    trainer.save("t", {"x": 10})
    with world.running(trainer.volume.path):
        until(lambda: world.log.of("store.unavailable"))
        said = world.log.of("store.unavailable")[0]
        assert said["destination"] == "memory://bucket/run"
        assert "next_try_seconds" in said
        until(lambda: trainer.volume.sidecar_status())
        world.store.script.remove(down)
        until(lambda: world.states() == {"t": "committed"})


def test_once_gives_up_on_a_store_that_is_down(world: World, trainer: Trainer) -> None:
    world.fault("*", "fail-before", count=None)
    trainer.save("t", {"x": 10})
    assert world.once(trainer.volume.path) == 1
    sidecar = trainer.volume.sidecar_status()
    assert sidecar is not None
    assert sidecar.last_error


def test_a_store_that_goes_down_in_between_is_waited_for(world: World, trainer: Trainer) -> None:
    with world.running(trainer.volume.path):
        trainer.save("a", {"x": 10})
        until(lambda: world.states() == {"a": "committed"})
        down = world.fault("*", "fail-before", count=None, error=AccessError)
        manifest = trainer.save("b", {"x": 10})
        until(lambda: world.log.of("save.delayed") or world.log.of("pass.failed"))
        world.store.script.remove(down)
        until(lambda: world.states() == {"a": "committed", "b": "committed"})
        until(lambda: status(trainer.volume.path, manifest.save_id).state == "committed")

    sidecar = trainer.volume.sidecar_status()
    assert sidecar is not None
    assert sidecar.last_error == ""


@pytest.mark.parametrize(
    "operation", ["put", "get", "head", "list", "put_part", "begin", "complete"]
)
def test_throttling_of_any_call_is_outlasted(
    world: World, trainer: Trainer, operation: str
) -> None:
    world.fault(operation, "fail-before", skip=2, count=4, error=ThrottledError)
    trainer.save("t", {"x": 6 * MIB, "y": 10})
    assert world.once(trainer.volume.path) == 0
    assert world.states() == {"t": "committed"}
    world.check_whole()


@pytest.mark.parametrize("key", [r"/x$", r"receipts/", r"checkpoints/", "^latest$", r"saves/"])
@pytest.mark.parametrize("fault", ["fail-after", "late"])
def test_a_lost_answer_of_any_write_costs_nothing(
    world: World, trainer: Trainer, key: str, fault: str
) -> None:
    world.fault("put", fault, key)
    trainer.save("t", {"x": 100})
    assert world.once(trainer.volume.path) == 0
    world.store.apply_late()
    assert world.states() == {"t": "committed"}
    assert world.latest() == "t"
    world.check_whole()


def test_an_upload_that_the_store_forgot_is_begun_anew(world: World, trainer: Trainer) -> None:
    world.fault("complete", "call", "t@", action=world.bucket.unfinished.clear)
    trainer.save("t", {"x": 6 * MIB})
    assert world.once(trainer.volume.path) == 0
    world.check_whole()
    assert world.states() == {"t": "committed"}


def test_bytes_that_change_on_their_way_are_sent_again(world: World, trainer: Trainer) -> None:
    world.fault("put", "corrupt", r"/y$")
    world.fault("put_part", "corrupt", r"/x$")
    trainer.save("t", {"x": 6 * MIB, "y": 10})
    assert world.once(trainer.volume.path) == 0
    world.check_whole()
    assert world.states() == {"t": "committed"}
    told = world.log.of("transfer.changed")
    assert told, "nobody would look for what changes bytes on their way"
    assert told[0]["kind"] == "CorruptionError"


def test_a_store_whose_head_forgets_an_object_is_not_believed(
    world: World, trainer: Trainer
) -> None:
    manifest = trainer.save("t", {"x": 6 * MIB})
    world.fault("head", "fail-before", "t@.*/x$", count=None, error=NotFoundError)
    assert world.once(trainer.volume.path) == 1
    assert world.states() == {}
    assert manifest.file_name in os.listdir(trainer.volume.outbox)


def test_a_store_without_conditional_create_is_refused_with_the_remedy(
    world: World, trainer: Trainer
) -> None:
    weak = FaultyStore(MemoryStore(world.bucket, honours_create=False))
    trainer.save("t", {"x": 10})
    assert world.agent(trainer.volume.path, store=weak).run(once=False) == 1
    said = world.log.of("store.unavailable")[0]
    assert said["kind"] == WeakStoreError.__name__
    assert "Use a store that honours" in said["error"]
    assert "next_try_seconds" not in said
    sidecar = trainer.volume.sidecar_status()
    assert sidecar is not None
    assert sidecar.state == "refused"
    assert world.once(trainer.volume.path, store=weak, allow_weak_store=True) == 0
    assert world.states() == {"t": "committed"}


def test_a_store_that_checks_nothing_is_used_with_a_warning(world: World, trainer: Trainer) -> None:
    trainer.save("t", {"x": 10})
    careless = MemoryStore(world.bucket, refuses_corruption=False)
    assert world.once(trainer.volume.path, store=careless) == 0
    assert ("warning", "store.weak_proof") in [line[:2] for line in world.log.lines]
    (said,) = world.log.of("store.weak_proof")
    assert "every object is read back" in said["reason"]
    assert world.states() == {"t": "committed"}


def test_a_store_that_keeps_checksums_is_used_without(world: World, trainer: Trainer) -> None:
    trainer.save("t", {"x": 10})
    assert world.once(trainer.volume.path) == 0
    assert world.log.of("store.weak_proof") == []


# ---- two agents on one volume


def test_a_second_agent_stands_by_and_takes_over(world: World, trainer: Trainer) -> None:
    second = world.agent(trainer.volume.path)
    thread = threading.Thread(target=second.run, daemon=True)
    with world.running(trainer.volume.path):
        until(lambda: world.log.of("store.probed"))
        thread.start()
        until(lambda: world.log.of("agent.standby"))
        assert trainer.volume.lock in world.log.of("agent.standby")[0]["reason"]
        assert world.once(trainer.volume.path) == 1
        assert len(world.log.of("agent.started")) == 1
    until(lambda: len(world.log.of("agent.started")) == 2)
    trainer.save("t", {"x": 10})
    until(lambda: world.states() == {"t": "committed"})
    second.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_standby_ends_when_it_is_told_to(world: World, trainer: Trainer) -> None:
    with world.running(trainer.volume.path):
        until(lambda: world.log.of("store.probed"))
        with world.running(trainer.volume.path):
            until(lambda: world.log.of("agent.standby"))
        assert len(world.log.of("agent.started")) == 1


# ---- stopping


def test_a_stop_sends_the_newest_first_until_the_deadline(world: World, trainer: Trainer) -> None:
    for tag in ("a", "b", "c"):
        trainer.save(tag, {"x": 11 * MIB})
    agents = []
    # The first part of the oldest save is on its way when the signal comes.
    world.fault("put_part", "call", "a@", action=lambda: agents[0].stop())
    agents.append(world.agent(trainer.volume.path))
    assert agents[0].run() == 0
    order = list(dict.fromkeys(call.key[0] for call in world.store.asked("complete", "@")))
    assert order == ["c", "b", "a"]
    assert world.states() == {"a": "committed", "b": "committed", "c": "committed"}
    assert len(world.store.asked("put_part", "a@")) == 3, "what was sent before is not sent again"


def test_a_stop_without_time_leaves_the_rest_to_a_later_start(
    world: World, trainer: Trainer
) -> None:
    for tag in ("a", "b"):
        trainer.save(tag, {"x": 16 * MIB})
    agents = []
    world.fault("put_part", "call", "a@", skip=1, action=lambda: agents[0].stop())
    agents.append(world.agent(trainer.volume.path, drain_seconds=0, streams=1))
    assert agents[0].run() == 1
    assert world.states() == {}
    assert {line["tag"] for line in world.log.of("save.left")} == {"a", "b"}
    assert "later start continues" in world.log.of("save.left")[0]["reason"]
    sent = len(world.store.asked("put_part", "a@"))
    assert sent >= 2
    assert world.once(trainer.volume.path) == 0
    assert world.states() == {"a": "committed", "b": "committed"}
    assert len(world.store.asked("put_part", "a@")) == 4, "16 MiB in parts of 5: none sent twice"
    world.check_whole()


def test_a_watch_that_cannot_be_set_leaves_the_scan(
    world: World, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from watchdog.observers import Observer

    def no_more_watches(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "inotify watch limit reached")

    monkeypatch.setattr(Observer, "schedule", no_more_watches)
    with world.running(trainer.volume.path):
        until(lambda: world.log.of("outbox.unwatched"))
        trainer.save("t", {"x": 10})
        until(lambda: world.states() == {"t": "committed"})


def test_the_watch_ends_a_long_pause(world: World, trainer: Trainer) -> None:
    with world.running(trainer.volume.path, rescan_seconds=3600):
        until(lambda: world.log.of("store.probed"))
        until(lambda: trainer.volume.sidecar_status() is not None)
        trainer.save("t", {"x": random.Random(1).randbytes(10)})
        until(lambda: world.states() == {"t": "committed"})
