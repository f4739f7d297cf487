"""Bytes into a file, and the checksum of what stands there then.

A range of a file is copied within the kernel (``copy_file_range``): no byte passes through this
process, and a filesystem or a server that can copy by itself does. Where the kernel will not (two
filesystems, an old kernel, a filter of system calls), the source is read and written.

Each piece is read again as soon as it is written, and the CRC32C of that is the answer: of the
bytes that the kernel will write to the disk, and not of those that were meant. The buffer for that
is small enough to stay in the processor's cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading

from ds_ckpt_store.contract.digest import CHUNK, crc32c
from ds_ckpt_store.stores.port import FileSource, Source

PIECE = 8 << 20
READ_AGAIN = 256 << 10

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NEVER = (
    errno.EXDEV,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.EPERM,
    errno.ETXTBSY,
)


class Copier:
    """Copies sources into files; remembers from where the kernel does not copy."""

    def __init__(self) -> None:
        self._by_hand: set[int] = set()  # devices of sources

    def copy(
        self, source: Source, fd: int, offset: int, lock: threading.Lock, *, read_again: bool
    ) -> tuple[int, int | None]:
        """Write a source's bytes at an offset of a file.

        Args:
            source: what to write. If it is a :class:`FileSource`, it is paced here.
            fd: descriptor opened for reading and writing.
            offset: of its first byte in the file.
            lock: held during each write: a file has one lock for its writers in the kernel, and
                many that wait for it spin.
            read_again: also take the checksum of what was written.

        Returns:
            ``(bytes, CRC32C of what was written)``; the checksum is None if not asked for.

        Raises:
            OSError: of the file that is written.
            ShardError: of the source.
        """
        written = _Written(fd, offset, lock, read_again)
        if isinstance(source, FileSource):
            self._copy_in_kernel(source, written)
            if written.count == source.size:
                return written.count, written.crc32c
        # Also if the kernel's copy was short or failed: here the source or the file says why.
        with source.open() as reader:
            reader.seek(written.count)
            while piece := memoryview(reader.read(CHUNK)):
                written.write(piece)
        return written.count, written.crc32c

    def _copy_in_kernel(self, source: FileSource, written: _Written) -> None:
        """Copy as much as the kernel does."""
        device = os.fstat(source.fd).st_dev
        while written.count < source.size and device not in self._by_hand:
            piece = min(PIECE, source.size - written.count)
            source.pace(piece)
            try:
                if not written.copy(source.fd, source.offset + written.count, piece):
                    return
            except OSError as error:
                if error.errno in _FULL:
                    raise
                if error.errno in _NEVER:
                    self._by_hand.add(device)
                return


class _Written:
    """A range of a file that grows, and its checksum."""

    def __init__(self, fd: int, offset: int, lock: threading.Lock, read_again: bool) -> None:
        self._fd = fd
        self._offset = offset
        self._lock = lock
        self.count = 0
        self.crc32c: int | None = 0 if read_again else None

    def copy(self, fd: int, start: int, length: int) -> bool:
        """Append from another file within the kernel; whether all of it came."""
        wanted = self.count + length
        while self.count < wanted:
            with self._lock:
                count = os.copy_file_range(
                    fd, self._fd, wanted - self.count, start, self._offset + self.count
                )
            if count == 0:
                return False
            start += count
            self._grow(count)
        return True

    def write(self, piece: memoryview) -> None:
        """Append from memory."""
        while piece:
            with self._lock:
                count = os.pwrite(self._fd, piece, self._offset + self.count)
            self._grow(count)
            piece = piece[count:]

    def _grow(self, count: int) -> None:
        if self.crc32c is not None:
            self.crc32c = crc32c_again(self._fd, self._offset + self.count, count, self.crc32c)
        self.count += count


def crc32c_again(fd: int, offset: int, length: int, previous: int = 0) -> int:
    """CRC32C of a range as the file holds it, continuing from ``previous``.

    A file that has become shorter gives the checksum of what is there, which is another one.
    """
    view = memoryview(bytearray(min(READ_AGAIN, length)))
    done = 0
    while done < length:
        count = os.preadv(fd, [view[: length - done]], offset + done)
        if count == 0:
            break
        previous = crc32c(view[:count], previous)
        done += count
    return previous


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Let the disk begin with a range now, so that the sync at the end has little left.

    The advice means: write what is dirty, and drop from the page cache what is clean.
    """
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def leave_cache(fd: int, size: int) -> None:
    """Drop a synced file from the page cache, where the trainer's pages belong.

    Small documents stay: they are read again soon.
    """
    if size >= CHUNK:
        start_writeback(fd, 0, 0)
