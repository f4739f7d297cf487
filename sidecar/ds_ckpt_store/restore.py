"""The way back: one committed checkpoint from the store onto a volume.

Guarantees:

- A folder appears under its tag only when every shard in it was fetched and its CRC32C compared
  with the record; DeepSpeed's ``latest`` is written last. Until then all lies under
  ``.ds_ckpt/restoring/<save_id>/``, where nothing looks for a checkpoint.
- Interrupted anywhere and run again, it continues: finished shards and finished ranges are
  compared with their checksums, not fetched again.
- What stood under the tag before is moved to ``.ds_ckpt/aside/``, never overwritten; shards of it
  that are right already are taken over by a hard link instead of fetched.
- While it runs, a hold keeps retention from the record. A store that does not let us write one
  is read without.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from ds_ckpt_store.catalog import HOLD_SECONDS, Catalog
from ds_ckpt_store.contract import digest, names
from ds_ckpt_store.contract.clock import Clock, fresh_token
from ds_ckpt_store.contract.manifest import Restored, RestoredFile
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import (
    CkptError,
    DamagedError,
    ManifestError,
    NoRoomError,
    NothingCommittedError,
    SettingsError,
    StoreError,
)
from ds_ckpt_store.records import Record
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.transfer.budget import Budget
from ds_ckpt_store.transfer.download import Downloader, RemoteShard

HEADROOM = 64 << 20


@dataclass(frozen=True)
class RestoreResult:
    """What a restore did; sizes in bytes, time in seconds."""

    record: Record
    folder: str
    fetched_bytes: int
    reused_bytes: int
    seconds: float
    set_aside: str = ""
    without_hold: str = ""


class Restore:
    """Restores from one store.

    Args:
        store: the store; only read, but for the hold.
        executor: where ranges are fetched.
        budget: ranges in flight, and bandwidth.
        clock: time.
        rng: randomness, for the hold's name.
    """

    def __init__(
        self, store: Store, executor: Executor, *, budget: Budget, clock: Clock, rng: random.Random
    ) -> None:
        self._store = store
        self._executor = executor
        self._budget = budget
        self._clock = clock
        self._rng = rng
        self.catalog = Catalog(store, rng)

    def run(
        self,
        volume: Volume,
        *,
        tag: str | None = None,
        save_id: str | None = None,
        check: Callable[[], None] = lambda: None,
        progress: Callable[[int], None] = lambda _: None,
        plan: Callable[[Record, int], None] = lambda _record, _bytes: None,
    ) -> RestoreResult:
        """Restore the newest committed checkpoint, or the newest with a tag, or one save.

        Args:
            volume: where to; its folder is made if its parent exists.
            tag: take the newest committed record with this tag.
            save_id: take this save.
            check: called often; may raise to stop (what is done is kept).
            progress: called with the number of bytes that were fetched since the last call.
            plan: called once, before a byte moves, with the record and the bytes that are to be
                fetched, or were by an earlier run.

        Raises:
            NothingCommittedError: no committed checkpoint fits.
            DamagedError: an object is missing or differs; it is named, and nothing got its name.
            NoRoomError: there is not enough room.
        """
        started = self._clock.monotonic()
        record = self.catalog.find(tag, save_id)
        self._make_root(volume)
        lock = volume.fs.try_lock(volume.restore_lock)
        if lock is None:
            raise SettingsError(f"another restore is at work on {volume.path}: let it finish")
        try:
            return self._run(volume, record, started, check, progress, plan)
        finally:
            os.close(lock)

    def _run(
        self,
        volume: Volume,
        record: Record,
        started: float,
        check: Callable[[], None],
        progress: Callable[[int], None],
        plan: Callable[[Record, int], None],
    ) -> RestoreResult:
        hold_id = f"{record.save_id}-{fresh_token(self._rng)}"
        without_hold = self._hold(record, hold_id)
        renewed = self._clock.monotonic()
        fetched = 0

        def count(size: int) -> None:
            nonlocal fetched
            fetched += size
            progress(size)

        def keep_hold() -> None:
            nonlocal renewed
            check()
            if not without_hold and self._clock.monotonic() - renewed > HOLD_SECONDS / 4:
                renewed = self._clock.monotonic()
                self._hold(record, hold_id)

        try:
            now = self.catalog.record(record.save_id)
            if now is None or now.state != "committed":
                raise NothingCommittedError(
                    f"checkpoint {record.tag!r} (save {record.save_id}) was deleted just now, by "
                    "retention or by name; run the restore again to take the newest one"
                )
            placed = _Placement(volume, record)
            placed.forget_others()
            reused = placed.take_over()
            todo = placed.missing()
            plan(record, sum(shard.size for shard in todo))
            self._check_room(volume, placed, todo)
            downloader = Downloader(
                self._store,
                self._executor,
                budget=self._budget,
                fs=volume.fs,
                clock=self._clock,
            )
            downloader.fetch(todo, check=keep_hold, progress=count, done=lambda _: None)
            aside = placed.put_in_place(
                self._store.url, fetched, lambda: self._clock.monotonic() - started
            )
        finally:
            if not without_hold:
                with contextlib.suppress(StoreError):
                    self.catalog.release(hold_id)
        return RestoreResult(
            record,
            f"{volume.path}/{record.tag}",
            fetched,
            reused,
            self._clock.monotonic() - started,
            aside,
            without_hold,
        )

    def _hold(self, record: Record, hold_id: str) -> str:
        """Write the hold; returns why it could not be written, or nothing."""
        try:
            self.catalog.hold(record.save_id, hold_id)
        except StoreError as error:
            return str(error)
        return ""

    @staticmethod
    def _make_root(volume: Volume) -> None:
        if not volume.fs.is_folder(volume.path):
            if not volume.fs.is_folder(os.path.dirname(volume.path)):
                raise SettingsError(
                    f"cannot restore to {volume.path}: {os.path.dirname(volume.path)} does not "
                    "exist; make it, or mount the volume"
                )
            volume.fs.make_folder(volume.path)
        volume.refuse_links()
        volume.fs.make_folder(volume.restoring)

    @staticmethod
    def _check_room(volume: Volume, placed: _Placement, todo: list[RemoteShard]) -> None:
        needed = sum(shard.size for shard in todo) - placed.already_staged(todo)
        space = volume.fs.space(volume.path)
        if needed + HEADROOM > space.free and needed > 0:
            raise NoRoomError(
                f"{volume.path} has {space.free} bytes free and the checkpoint needs {needed} more "
                f"(and {HEADROOM} to spare): make room or use a larger volume; nothing was fetched"
            )


class _Placement:
    """Where the files of one record lie while it is restored, and how they get their names."""

    def __init__(self, volume: Volume, record: Record) -> None:
        self._volume = volume
        self._fs = volume.fs
        self._record = record
        self._staging = f"{volume.restoring}/{record.save_id}"
        self._shards = f"{self._staging}/shards"
        self._companions = f"{self._staging}/companions"
        self._target = f"{volume.path}/{record.tag}"
        self._all: list[RemoteShard] = []
        for number, (key, entry) in enumerate(record.objects()):
            root = self._shards if not _is_companion(key, record) else self._companions
            crc = digest.from_hex(entry.crc32c)
            # Not beside the shard: another shard may have any name.
            ranges = f"{self._staging}/ranges/{number}"
            path = f"{root}/{entry.path}"
            self._all.append(RemoteShard(key, entry.size, crc, path, ranges))
        self._whole: set[str] = set()
        self._in_place = False

    def forget_others(self) -> None:
        """Drop what interrupted restores of other saves have left."""
        for name in self._fs.names(self._volume.restoring):
            if name != self._record.save_id:
                self._fs.remove_tree(f"{self._volume.restoring}/{name}")

    def take_over(self) -> int:
        """Link what the volume already holds and is right into the staging folder; bytes taken."""
        taken = 0
        named = {path for shard in self._all for path in (shard.path, shard.ranges)}
        for folder in sorted({os.path.dirname(path) for path in named}):
            self._fs.make_folder(folder)
        for shard in self._all:
            if self._fs.stat(shard.path) is not None:
                continue
            relative = self._own_name(shard)
            if self._is_right(relative, shard):
                with contextlib.suppress(OSError):
                    self._fs.link(f"{self._volume.path}/{relative}", shard.path)
                    self._whole.add(shard.key)
                    taken += shard.size
        # The very folder is there already: a restart, or a run that died after the swap.
        there = {path for path, _ in self._fs.walk(self._target)}
        linked = all(shard.key in self._whole for shard in self._all if self._is_shard(shard))
        self._in_place = linked and there == {entry.path for entry in self._record.files}
        return taken

    def _is_shard(self, shard: RemoteShard) -> bool:
        """Whether it is one of the folder's files, and no companion beside it."""
        return shard.path.startswith(f"{self._shards}/")

    def _own_name(self, shard: RemoteShard) -> str:
        """Where a file belongs, relative to the volume."""
        if self._is_shard(shard):
            return f"{self._record.tag}/{shard.path[len(self._shards) + 1 :]}"
        return os.path.basename(shard.path)

    def _is_right(self, relative: str, shard: RemoteShard) -> bool:
        try:
            fd = self._fs.open_beneath(self._volume.path, relative)
        except (OSError, ManifestError):
            return False
        try:
            if self._fs.fstat(fd).size != shard.size:
                return False
            return digest.crc32c_of_fd(fd, 0, shard.size) == (shard.crc32c, shard.size)
        except OSError:
            return False
        finally:
            os.close(fd)

    def missing(self) -> list[RemoteShard]:
        """What is to be fetched, or to be continued."""
        return [shard for shard in self._all if shard.key not in self._whole]

    def already_staged(self, shards: list[RemoteShard]) -> int:
        """Bytes on the disk of unfinished shards that a former run has left."""
        states = (self._fs.stat(shard.path) for shard in shards)
        return sum(min(state.size, state.allocated) for state in states if state is not None)

    def put_in_place(self, source: str, fetched: int, elapsed: Callable[[], float]) -> str:
        """Give everything its name, ``latest`` last; returns where the former folder went.

        Args:
            source: the store's URL.
            fetched: bytes.
            elapsed: seconds since the restore began.
        """
        aside = self._swap_folder()
        for shard in self._all:
            if not self._is_shard(shard):
                self._fs.rename(shard.path, f"{self._volume.path}/{self._own_name(shard)}")
        self._fs.sync_folder(self._volume.path)
        restored = self._describe(source, fetched, elapsed())
        self._fs.write_atomic(self._volume.restored, restored.to_bytes())
        self._fs.write_atomic(f"{self._volume.path}/latest", self._record.tag.encode())
        self._fs.remove_tree(self._staging)
        return aside

    def _swap_folder(self) -> str:
        """Move the staged folder to its tag; a run that died on the way is picked up here."""
        for folder in sorted({os.path.dirname(shard.path) for shard in self._all}):
            self._fs.sync_folder(folder)
        aside = ""
        if self._in_place:
            return aside
        self._refuse_links()
        if self._fs.stat(self._target) is not None:
            self._fs.make_folder(self._volume.aside)
            number = 0
            while self._fs.stat(f"{self._volume.aside}/{self._record.save_id}.{number}"):
                number += 1
            aside = f"{self._volume.aside}/{self._record.save_id}.{number}"
            self._fs.rename(self._target, aside)
        self._fs.make_folder(os.path.dirname(self._target))
        self._fs.rename(self._shards, self._target)
        self._fs.sync_folder(os.path.dirname(self._target))
        return aside

    def _refuse_links(self) -> None:
        """The way to the tag's folder leads through folders of the volume and through no link."""
        path = self._volume.path
        for name in self._record.tag.split("/")[:-1]:
            path = f"{path}/{name}"
            state = self._fs.stat(path)
            if state is not None and not state.is_folder:
                raise SettingsError(
                    f"{path} is a link or a file, and checkpoint {self._record.tag!r} belongs "
                    "below it: remove it; nothing was put in place"
                )

    def _describe(self, source: str, fetched: int, seconds: float) -> Restored:
        record = self._record
        files = []
        for entry in record.files:
            state = self._fs.stat(f"{self._target}/{entry.path}")
            if state is None or state.size != entry.size:
                raise DamagedError(f"{self._target}/{entry.path} changed while it was put in place")
            files.append(
                RestoredFile(
                    path=f"{record.tag}/{entry.path}",
                    size=entry.size,
                    crc32c=entry.crc32c,
                    device=state.device,
                    inode=state.inode,
                    mtime_ns=state.mtime_ns,
                )
            )
        return Restored(
            source=source,
            run_id=record.run_id,
            save_id=record.save_id,
            tag=record.tag,
            time_ms=record.time_ms,
            epoch=record.epoch,
            step=record.step,
            world_size=record.world_size,
            files=files,
            bytes=fetched,
            seconds=seconds,
        )


def _is_companion(key: str, record: Record) -> bool:
    return key.startswith(f"{record.folder}/{names.COMPANIONS_DIR}/")


def is_restored(volume: Volume, save_id: str) -> bool:
    """Whether the volume holds a save whole, as ``restored.json`` says and its files still show.

    A file whose size, inode and times are those of the restore is taken as it is; one that differs
    is read and its checksum compared.
    """
    try:
        restored = volume.restored_from()
    except CkptError:
        return False
    if restored is None or restored.save_id != save_id or not restored.files:
        return False
    for entry in restored.files:
        state = volume.fs.stat(f"{volume.path}/{entry.path}")
        if state is None or state.size != entry.size:
            return False
        if state.identity != (entry.device, entry.inode, entry.size, entry.mtime_ns):
            try:
                fd = volume.fs.open_beneath(volume.path, entry.path)
            except (OSError, ManifestError):
                return False
            try:
                want = (digest.from_hex(entry.crc32c), entry.size)
                if digest.crc32c_of_fd(fd, 0, entry.size) != want:
                    return False
            finally:
                os.close(fd)
    return True
