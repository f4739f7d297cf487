"""A node's cache of what was read from stores: ranks and restarts share it, and none trusts it.

::

    <folder>/<name>            a piece of an object, and behind its bytes the CRC32C of each block
    <folder>/<name>.part       being fetched; what a killed fetcher left is gone on with
    <folder>/<name>.ranges     which ranges of it are there
    <folder>/locks/<000..fff>  held by whoever fetches a piece whose name ends so
    <folder>/locks/room        held while room is made and taken

A piece's name is made of what the bytes are (their CRC32C and size) and where they are from, so
an entry is right for ever or wrong for ever. Guarantees:

- A piece is fetched by one process; others wait for it, or fetch other pieces meanwhile. Locks go
  with their process. One that lives and fetches nothing for a minute is not waited for.
- An entry has its name only when it was compared with the record, and each block is compared with
  its checksum whenever it is handed out: neither a killed process, nor a disk that errs, nor a
  power loss makes wrong bytes of it. What is found wrong is dropped, and fetched again.
- It takes no more than its limit. Entries that were not used for longest go first; those that
  a process has open stay.
- Whatever goes wrong with it costs speed, and nothing else: the caller reads from the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_ckpt_store.contract.clock import Clock, SystemClock
from ds_ckpt_store.contract.digest import combine_all, crc32c, to_hex
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.records import Piece
from ds_ckpt_store.transfer.download import RemoteShard

logger = logging.getLogger("ds_ckpt_hook")

BLOCK = 4 << 20
HEADROOM = 64 << 20  # bytes that stay free on the disk
BATCH = 32  # pieces that one process fetches at a time
PATIENCE_SECONDS = 60.0  # without a new byte from the process that fetches a piece
POLL_SECONDS = 0.02
_NAME = re.compile(r"([0-9a-f]{8}-[0-9]+-[0-9a-f]{32})(\.part|\.ranges)?")

Fetch = Callable[[Sequence[RemoteShard], Callable[[RemoteShard], None]], None]


@dataclass(frozen=True)
class Wanted:
    """A piece of an object in some store: what to fetch, and what it must be."""

    url: str
    key: str
    piece: Piece

    @property
    def name(self) -> str:
        """Of its entry: no two different pieces have the same."""
        where = hashlib.sha256(f"{self.url}\n{self.key}\n{self.piece.offset}".encode()).hexdigest()
        return f"{to_hex(self.piece.crc32c)}-{self.piece.size}-{where[:32]}"

    @property
    def entry_size(self) -> int:
        """Bytes of its entry."""
        return self.piece.size + 4 * len(blocks(self.piece.size))


def blocks(size: int) -> list[tuple[int, int]]:
    """``(offset, length)`` of the blocks of so many bytes."""
    return [(offset, min(BLOCK, size - offset)) for offset in range(0, size, BLOCK)]


class Entry:
    """An open entry. It stays readable when it is dropped from the cache meanwhile."""

    def __init__(self, fd: int, sums: Sequence[int]) -> None:
        self._fd = fd
        self._sums = sums

    def block(self, number: int, length: int) -> bytes | None:
        """A block, or None if the disk does not give it as it was."""
        try:
            data = os.pread(self._fd, length, number * BLOCK)
        except OSError:
            return None
        return data if crc32c(data) == self._sums[number] else None

    def close(self) -> None:
        """Let it go: it may be dropped for others from now on."""
        _unlock(self._fd)


class Cache:
    """The cache in one folder.

    Args:
        folder: absolute; it is made when it is first needed.
        limit: bytes that all entries may take; None: half of what they and the free space are.
        free: bytes that the disk can still take; None: as its filesystem says.
        fs: the filesystem.
        clock: time, for waiting.
    """

    def __init__(
        self,
        folder: str,
        limit: int | None = None,
        *,
        free: Callable[[], int] | None = None,
        fs: Filesystem | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.folder = folder
        self._limit = limit
        self._fs = fs or Filesystem()
        self._free = free or (lambda: self._fs.space(folder).free)
        self._clock = clock or SystemClock()
        self._is_usable = True
        self._has_warned = False

    def bring(self, wanted: Sequence[Wanted], fetch: Fetch) -> None:
        """Have these pieces here, as far as there is room.

        Args:
            wanted: the pieces, in the order in which they will be read.
            fetch: downloads and verifies, and calls back for each that is whole.

        Raises:
            CkptError: as ``fetch`` raised it: the store is away, or its bytes are wrong.
        """
        if not self._is_usable:
            return
        try:
            self._fs.make_folder(f"{self.folder}/locks")
            self._bring({each.name: each for each in wanted}, fetch)
        except OSError as error:
            self._is_usable = False
            self._warn(str(error))

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the cache in %s cannot hold all: what is not in it is read from the store by each "
                "rank for itself, which is slow: %s",
                self.folder,
                why,
            )

    def open(self, wanted: Wanted) -> Entry | None:
        """The entry of a piece, or None if it is not here, or not as it was."""
        path = f"{self.folder}/{wanted.name}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # it is being dropped
            os.close(fd)
            return None
        sums = _sums(fd, wanted.piece)
        if sums is None:
            os.close(fd)
            self.drop(wanted)
            return None
        with contextlib.suppress(OSError):
            os.utime(fd)
        return Entry(fd, sums)

    def drop(self, wanted: Wanted) -> None:
        """Forget an entry whose bytes are not as they were."""
        logger.warning("%s/%s is not as it was: it is dropped", self.folder, wanted.name)
        with contextlib.suppress(OSError):
            self._fs.unlink(f"{self.folder}/{wanted.name}")

    def clear(self) -> None:
        """Drop all that nobody has open or fetches; never raises."""
        with contextlib.suppress(OSError):
            for name, _ in self._by_age():
                self._evict(name)

    # ---- fetching

    def _bring(self, wanted: Mapping[str, Wanted], fetch: Fetch) -> None:
        todo = dict(wanted)
        while todo := {name: each for name, each in todo.items() if not self._is_here(name)}:
            with self._claimed(todo, wanted) as mine:
                if mine is None:
                    return
                self._fetch(mine, fetch)
            for name in mine:  # once: what others evict again meanwhile is read without the cache
                del todo[name]
            if not mine and not self._wait(first := next(iter(todo))):
                del todo[first]

    def _is_here(self, name: str) -> bool:
        return self._fs.stat(f"{self.folder}/{name}") is not None

    def _fetch(self, mine: Mapping[str, Wanted], fetch: Fetch) -> None:
        if not mine:
            return
        parts = {f"{self.folder}/{name}.part": (name, each) for name, each in mine.items()}

        def done(shard: RemoteShard) -> None:
            name, each = parts[shard.path]
            self._seal(shard.path, each.piece)
            self._fs.rename(shard.path, f"{self.folder}/{name}")

        shards = [
            RemoteShard(
                each.key,
                each.piece.size,
                each.piece.crc32c,
                path,
                f"{self.folder}/{name}.ranges",
                each.piece.offset,
            )
            for path, (name, each) in parts.items()
        ]
        try:
            fetch(shards, done)
        except OSError:  # the disk may be full, and others need it
            for name in mine:
                self._remove_unfinished(name)
            raise

    def _seal(self, path: str, piece: Piece) -> None:
        """Write the sum of each block behind the bytes."""
        fd = self._fs.open_write(path)
        try:
            sums = [crc32c(os.pread(fd, length, offset)) for offset, length in blocks(piece.size)]
            os.pwrite(fd, struct.pack(f">{len(sums)}I", *sums), piece.size)
        finally:
            os.close(fd)

    # ---- who fetches what

    @contextlib.contextmanager
    def _claimed(
        self, todo: Mapping[str, Wanted], spare: Mapping[str, Wanted]
    ) -> Iterator[dict[str, Wanted] | None]:
        """Pieces that nobody else fetches now, with room for them; None: there is no room."""
        locks: dict[str, int] = {}
        try:
            mine, is_full = self._claim(todo, spare, locks)
            yield None if is_full and not mine else mine
        finally:
            for lock in locks.values():
                _unlock(lock)

    def _claim(
        self, todo: Mapping[str, Wanted], spare: Mapping[str, Wanted], locks: dict[str, int]
    ) -> tuple[dict[str, Wanted], bool]:
        """Lock some pieces and take room for them; and whether the rest has none."""
        mine: dict[str, Wanted] = {}
        room_lock = self._lock_room()
        try:
            room = _Room(self, spare)
            for name, each in todo.items():
                if not self._lock(name, locks) or self._is_here(name):
                    continue
                if not room.take(name, each.entry_size):
                    self._warn(f"no room for {each.entry_size} bytes (DS_CKPT_CACHE_MIB)")
                    return mine, True
                self._reserve(name, each)
                mine[name] = each
                if len(mine) == BATCH:
                    break
        finally:
            _unlock(room_lock)
        return mine, False

    def _lock_room(self) -> int:
        """The lock on the room; others hold it for moments only.

        Raises:
            TimeoutError: it is held by a process that does nothing.
        """
        path, began = f"{self.folder}/locks/room", self._clock.monotonic()
        while (lock := self._fs.try_lock(path)) is None:
            if self._clock.monotonic() - began >= PATIENCE_SECONDS:
                raise TimeoutError(f"{path} is held by a process that does nothing: end it")
            self._clock.sleep(POLL_SECONDS)
        return lock

    def _reserve(self, name: str, wanted: Wanted) -> None:
        """Let others see the room that a piece is going to take."""
        path = f"{self.folder}/{name}.part"
        if self._fs.stat(path) is None:
            fd = self._fs.open_write(path)
            try:
                os.ftruncate(fd, wanted.entry_size)
            finally:
                os.close(fd)

    def _lock(self, name: str, locks: dict[str, int]) -> bool:
        path = self._lock_of(name)
        if path not in locks:
            lock = self._fs.try_lock(path)
            if lock is None:
                return False
            locks[path] = lock
        return True

    def _lock_of(self, name: str) -> str:
        return f"{self.folder}/locks/{name[-3:]}"

    def _wait(self, name: str) -> bool:
        """Until nobody fetches a piece any more; False if whoever does so does nothing."""
        seen, since = None, self._clock.monotonic()
        while not self._is_here(name):
            lock = self._fs.try_lock(self._lock_of(name))
            if lock is not None:
                _unlock(lock)
                return True
            now, state = self._clock.monotonic(), self._fs.stat(f"{self.folder}/{name}.part")
            if state != seen:
                seen, since = state, now
            elif now - since >= PATIENCE_SECONDS:
                self._warn(f"{name} is being fetched, and no byte came for {now - since:.0f} s")
                return False
            self._clock.sleep(POLL_SECONDS)
        return True

    # ---- room

    def _by_age(self) -> list[tuple[str, _Taken]]:
        """Entries, also unfinished ones, and what they take; the one used last comes last."""
        found: dict[str, _Taken] = {}
        for each in self._fs.names(self.folder):
            state, match = self._fs.stat(f"{self.folder}/{each}"), _NAME.fullmatch(each)
            if state is not None and match is not None:
                missing = max(0, state.size - state.allocated) if match[2] == ".part" else 0
                found.setdefault(match[1], _Taken()).add(state.size, missing, state.mtime_ns)
        return sorted(found.items(), key=lambda item: item[1].used_ns)

    def _evict(self, name: str) -> bool:
        """Remove an entry, finished or not, that nobody has open or fetches."""
        lock = self._fs.try_lock(self._lock_of(name))
        if lock is None:
            return False
        try:
            self._remove_unfinished(name)
            path = f"{self.folder}/{name}"
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                return True
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._fs.unlink(path)
            except BlockingIOError:
                return False
            finally:
                os.close(fd)
            return True
        finally:
            _unlock(lock)

    def _remove_unfinished(self, name: str) -> None:
        for ending in (".part", ".ranges"):
            self._fs.unlink(f"{self.folder}/{name}{ending}")


@dataclass
class _Taken:
    """What an entry takes: bytes, how many of them are not on the disk yet, when it was used."""

    size: int = 0
    missing: int = 0
    used_ns: int = 0

    def add(self, size: int, missing: int, used_ns: int) -> None:
        self.size += size
        self.missing += missing
        self.used_ns = max(self.used_ns, used_ns)


class _Room:
    """What can still be taken, for one who holds the lock on it.

    Args:
        cache: the cache.
        spare: entries that are needed themselves.
    """

    def __init__(self, cache: Cache, spare: Mapping[str, Wanted]) -> None:
        found = cache._by_age()
        self._cache = cache
        self._sizes = {name: each.size for name, each in found}
        self._oldest = iter([name for name, _ in found if name not in spare])
        taken = sum(self._sizes.values())
        free = cache._free() - sum(each.missing for _, each in found)
        limit = (taken + free) // 2 if cache._limit is None else cache._limit
        self._left = min(limit - taken, free - HEADROOM)

    def take(self, name: str, size: int) -> bool:
        """Whether there is room for an entry, if need be by evicting others."""
        more = size - self._sizes.get(name, 0)
        while self._left < more:
            oldest = next(self._oldest, None)
            if oldest is None:
                return False
            if self._cache._evict(oldest):
                self._left += self._sizes[oldest]
        self._left -= more
        return True


def _unlock(fd: int) -> None:
    """End a lock, also where a forked child has the file open too."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _sums(fd: int, piece: Piece) -> list[int] | None:
    """The sums of an entry's blocks; None if it is none for this piece."""
    cut = blocks(piece.size)
    try:
        tail = os.pread(fd, 4 * len(cut) + 1, piece.size)
    except OSError:
        return None
    if len(tail) != 4 * len(cut):
        return None
    sums = list(struct.unpack(f">{len(cut)}I", tail))
    whole = combine_all((value, length) for value, (_, length) in zip(sums, cut, strict=True))
    return sums if whole == piece.crc32c else None
