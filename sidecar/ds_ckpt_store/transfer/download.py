"""Downloading objects: ranges in parallel, each checked, continued after an interruption.

* A file counts as there only when the CRC32C over all of its ranges, as they were received or
  read again from the disk, equals the one of the record.
* Ranges that an interrupted download finished are not fetched again, unless the file no longer
  has those bytes (see :mod:`~ds_ckpt_store.transfer.ranges`).
* All objects are tried, so that one report names every damaged one.

Memory: what the store's SDK holds for as many requests as the budget allows, and 1 MiB each while
files are checked. Descriptors: at most two for each of as many files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.digest import combine_all, crc32c, crc32c_of_fd, to_hex
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.errors import (
    CorruptionError,
    DamagedError,
    NotFoundError,
    TransientError,
)
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.transfer.budget import Budget
from ds_ckpt_store.transfer.coordinator import Coordinator, Job, Steps, Story
from ds_ckpt_store.transfer.plan import PREFERRED_PART
from ds_ckpt_store.transfer.proof import read_crc32c
from ds_ckpt_store.transfer.ranges import Range, RangeList, cover

RANGE_TRIES = 4
SHARD_TRIES = 2
_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class RemoteShard:
    """One object to download, or a part of one.

    Attributes:
        key: relative to the store's prefix.
        size: bytes, as the record says.
        crc32c: of these bytes, as the record says.
        path: absolute; the file to write.
        ranges: absolute; the list of finished ranges meanwhile, ``<path>.ranges`` if empty.
        offset: where in the object the bytes begin, to fetch a part of it alone.
    """

    key: str
    size: int
    crc32c: int
    path: str
    ranges: str = ""
    offset: int = 0


@dataclass(frozen=True)
class Damage:
    """An object that is not what its record says."""

    key: str
    reason: str


class Downloader:
    """Downloads from one store.

    Args:
        store: where from; retries of transient errors are its (decorator's) business, but a read
            that breaks off is continued here.
        executor: runs the jobs; it needs ``budget.fit`` threads, or runs them within ``submit``.
        budget: ranges at a time, over all objects of a call, and bandwidth.
        part_size: bytes of a range.
        fs: where to.
        clock: for the pause before a read that broke off goes on.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        *,
        budget: Budget,
        part_size: int = PREFERRED_PART,
        fs: Filesystem,
        clock: Clock,
    ) -> None:
        self._store = store
        self._executor = executor
        self._budget = budget
        self._part_size = part_size
        self._fs = fs
        self._clock = clock

    def fetch(
        self,
        shards: Sequence[RemoteShard],
        *,
        check: Callable[[], None],
        progress: Callable[[int], None],
        done: Callable[[RemoteShard], None],
    ) -> None:
        """Download all shards; all callbacks happen in the calling thread.

        Args:
            shards: in the order in which they are begun; paths are distinct, folders are made.
            check: called at least once a second and before each request; if it raises, what is
                on its way is awaited and listed, and then the error is raised.
            progress: bytes newly fetched, after each range.
            done: a file is whole, verified and synced.

        Raises:
            DamagedError: objects are missing or differ; all of them are named, and all others
                were fetched.
            CkptError: as the store or ``check`` raised it. Another call continues.
            OSError: the filesystem failed (no space, for instance). Another call continues.
        """
        damages: list[Damage] = []
        stories = (self._fetch_story(shard, progress, done, damages.append) for shard in shards)
        self._run(stories, check)
        if damages:
            found = sorted(damages, key=lambda damage: damage.key)
            raise DamagedError(
                f"{len(found)} of {len(shards)} objects are damaged: "
                + "; ".join(f"{damage.key} {damage.reason}" for damage in found),
                tuple(damage.key for damage in found),
            )

    def verify(
        self,
        objects: Sequence[RemoteShard],
        *,
        check: Callable[[], None],
        progress: Callable[[int], None],
    ) -> list[Damage]:
        """Read every object and compare size and CRC32C; nothing is written.

        Args:
            objects: what to read; their ``path`` is not used.
            check: as for :meth:`fetch`.
            progress: bytes read, after each range.

        Returns:
            What is damaged, in the order of ``objects``.

        Raises:
            CkptError: as the store or ``check`` raised it.
        """
        damages: dict[str, Damage] = {}
        stories = (self._verify_story(shard, progress, damages) for shard in objects)
        self._run(stories, check)
        return [damages[shard.key] for shard in objects if shard.key in damages]

    def _run(self, stories: Iterator[Story], check: Callable[[], None]) -> None:
        Coordinator(self._executor, budget=self._budget, check=check).run(stories)

    # ---- verifying

    def _verify_story(
        self, shard: RemoteShard, progress: Callable[[int], None], damages: dict[str, Damage]
    ) -> Story:
        try:
            [info] = yield [Job(partial(self._store.head, shard.key))]
            if info.size != shard.size:
                reason: str | None = f"has {info.size} bytes, {shard.size} are recorded"
            else:
                ranges = list(cover(shard.size, self._part_size, []))
                received: list[Range] = []
                if ranges:
                    received = yield [
                        Job(
                            partial(self._job_read, shard, each),
                            lambda got: progress(got.length),
                        )
                        for each in ranges
                    ]
                reason = _difference(shard, received)
        except NotFoundError:
            reason = "is missing"
        except CorruptionError as error:
            reason = f"cannot be read as recorded: {error.answer}"
        if reason is not None:
            damages[shard.key] = Damage(shard.key, reason)

    def _job_read(self, shard: RemoteShard, wanted: Range) -> Range:
        value = read_crc32c(self._store, shard.key, wanted.offset, wanted.length, self._budget.pace)
        return Range(wanted.offset, wanted.length, value)

    # ---- fetching

    def _fetch_story(
        self,
        shard: RemoteShard,
        progress: Callable[[int], None],
        done: Callable[[RemoteShard], None],
        damaged: Callable[[Damage], None],
    ) -> Story:
        ranges = RangeList(self._fs, shard.ranges or f"{shard.path}.ranges")
        if (yield from self._is_here(shard, ranges)):
            done(shard)
            return
        reason: str | None = None
        for _ in range(SHARD_TRIES):
            try:
                reason = yield from self._fetch_once(shard, ranges, progress)
            except NotFoundError:
                reason = "is missing"
            except CorruptionError as error:
                reason = f"cannot be read as recorded: {error.answer}"
            if reason is None:
                done(shard)
                return
            ranges.remove()
            self._fs.unlink(shard.path)
        if reason is not None:
            damaged(Damage(shard.key, reason))

    def _is_here(self, shard: RemoteShard, ranges: RangeList) -> Steps[bool]:
        """Whether an earlier call finished this file."""
        state = self._fs.stat(shard.path)
        if state is None or state.size != shard.size or shard.size == 0 or ranges.exists():
            return False
        with self._opened(shard) as fd:
            received = yield [
                Job(partial(self._job_local, fd, each))
                for each in cover(shard.size, self._part_size, [])
            ]
        return _difference(shard, received) is None

    def _fetch_once(
        self, shard: RemoteShard, ranges: RangeList, progress: Callable[[int], None]
    ) -> Steps[str | None]:
        """Complete the file; why it is not right, or None."""
        if shard.size == 0:
            [info] = yield [Job(partial(self._store.head, shard.key))]
            if info.size:
                return f"has {info.size} bytes, none are recorded"
        self._fs.make_folder(os.path.dirname(shard.path))
        listed = ranges.read(shard.size)
        with self._opened(shard) as fd, ranges.opened() as append:

            def note(result: tuple[Range, int]) -> None:
                got, fetched = result
                if fetched:
                    append(got)
                    progress(fetched)

            results: list[tuple[Range, int]] = []
            if shard.size:
                results = yield [
                    Job(partial(self._job_range, fd, shard, each), note)
                    for each in cover(shard.size, self._part_size, listed)
                ]
            reason = _difference(shard, [got for got, _ in results])
            if reason is not None:
                return reason
            yield [Job(partial(os.fsync, fd))]
        ranges.remove()
        return None

    @contextmanager
    def _opened(self, shard: RemoteShard) -> Iterator[int]:
        fd = self._fs.open_write(shard.path)
        try:
            os.ftruncate(fd, shard.size)
            yield fd
        finally:
            os.close(fd)

    def _job_local(self, fd: int, wanted: Range) -> Range:
        value, count = crc32c_of_fd(fd, wanted.offset, wanted.length, check=self._budget.alive)
        return Range(wanted.offset, count, value)

    def _job_range(self, fd: int, shard: RemoteShard, wanted: Range) -> tuple[Range, int]:
        """A range on the disk: as it is there already, or fetched; and the bytes fetched."""
        if wanted.crc32c is not None and self._job_local(fd, wanted) == wanted:
            return wanted, 0
        value = received = 0

        def sink(view: memoryview) -> None:
            nonlocal value, received
            if received + len(view) > wanted.length:
                raise CorruptionError("read", shard.key, "more bytes came than were asked for")
            self._budget.pace(len(view))
            value = crc32c(view, value)
            while len(view):
                count = os.pwrite(fd, view, wanted.offset + received)
                received += count
                view = view[count:]

        for attempt in range(1, RANGE_TRIES + 1):
            try:
                self._store.read(
                    shard.key,
                    shard.offset + wanted.offset + received,
                    wanted.length - received,
                    sink,
                )
                break
            except TransientError:
                if attempt == RANGE_TRIES:
                    raise
                self._clock.sleep(_PAUSE_SECONDS * attempt)
        if received < wanted.length:
            raise CorruptionError("read", shard.key, "fewer bytes came than were asked for")
        return Range(wanted.offset, wanted.length, value), received


def _difference(shard: RemoteShard, received: Sequence[Range]) -> str | None:
    """Why these ranges are not the shard, or None."""
    value = combine_all((each.crc32c or 0, each.length) for each in received)
    if value == shard.crc32c:
        return None
    return f"has CRC32C {to_hex(value)}, {to_hex(shard.crc32c)} is recorded"
