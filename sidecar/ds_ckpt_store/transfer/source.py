"""A slice of an open file as a body to send, in small views.

Reading a part whole would cost its size in memory for each stream; here a body holds one buffer
of 512 KiB while it is read, and hands out views of it, so that no byte is copied on its way
to the socket. The checksum is made in a first pass (which leaves the slice in the page cache),
because a store is told it before the body.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from ds_ckpt_store.contract.digest import CHUNK, crc32c_of_fd
from ds_ckpt_store.errors import ShardChangedError, ShardUnreadableError
from ds_ckpt_store.stores.port import FileSource


def size_of(fd: int, name: str) -> int:
    """Bytes of an open file.

    Raises:
        ShardUnreadableError: as the system says.
    """
    try:
        return os.fstat(fd).st_size
    except OSError as error:
        raise ShardUnreadableError(f"{name} cannot be examined: {error.strerror}") from error


class FileSlice(FileSource):
    """``size`` bytes from ``offset`` of an open file; a port ``Source``.

    Args:
        fd: descriptor opened for reading; it must stay open as long as the slice is used.
        offset: first byte.
        size: bytes.
        name: of the shard, for messages.
        pace: called with the size of each piece before it is handed out to be sent; may wait.
            While bytes are read for their sum it is called with 0, which says: still at work.
    """

    def __init__(
        self,
        fd: int,
        offset: int,
        size: int,
        name: str,
        pace: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(fd, offset, size)
        self._name = name
        self._pace = pace

    def pace(self, size: int) -> None:
        """Wait as ``pace`` was told to."""
        if self._pace is not None:
            self._pace(size)

    @functools.cached_property
    def crc32c(self) -> int:
        """CRC32C of the bytes, which are read for it once.

        Raises:
            ShardChangedError: the file is shorter.
            ShardUnreadableError: the system cannot read it.
        """
        try:
            value, count = crc32c_of_fd(self.fd, self.offset, self.size, check=lambda: self.pace(0))
        except OSError as error:
            raise _unreadable(self._name, error) from error
        if count < self.size:
            raise _short(self._name, self.offset + count)
        return value

    def open(self) -> BinaryIO:
        """A reader over the slice.

        Raises:
            ShardChangedError: the file has become too short.
        """
        size = size_of(self.fd, self._name)
        if size < self.offset + self.size:
            raise _short(self._name, size)
        return cast(BinaryIO, SliceReader(self, self._name))


class SliceReader(io.RawIOBase):
    """Reads a slice in views of one buffer; a view holds until the next ``read``.

    ``read(n)`` gives up to 512 KiB **even if n is less**: HTTP libraries ask for 8 or 16 KiB at a
    time, and so many rounds cost more than sending does. Who must not get more than it asks for
    reads through ``io.BufferedReader``. Without a size, ``read`` gives all that is left, as bytes.
    """

    def __init__(self, part: FileSlice, name: str) -> None:
        super().__init__()
        self._fd = part.fd
        self._offset = part.offset
        self._size = part.size
        self._pace = part.pace
        self._name = name
        self._position = 0
        self._view = memoryview(bytearray(min(CHUNK, part.size)))

    def __len__(self) -> int:
        return self._size

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Bytes from the slice's start."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to another position in the slice."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = min(max(base + offset, 0), self._size)
        return self._position

    def readall(self) -> bytes:
        """All that is left."""
        return b"".join(iter(lambda: bytes(self._next(self._view)), b""))

    def readinto(self, buffer: Any) -> int:
        """Fill the caller's buffer, as far as one read of the file goes."""
        return len(self._next(memoryview(buffer).cast("B")))

    def read(self, size: int | None = -1) -> Any:
        """The next view, or all that is left without a size; empty at the end."""
        if size is None or size < 0:
            return self.readall()
        return self._next(self._view) if size > 0 else b""

    def _next(self, buffer: memoryview) -> memoryview:
        count = min(len(buffer), self._size - self._position)
        if count == 0:
            return buffer[:0]
        start = self._offset + self._position
        self._pace(count)
        try:
            got = os.preadv(self._fd, [buffer[:count]], start)
        except OSError as error:
            raise _unreadable(self._name, error) from error
        if got == 0:
            raise _short(self._name, start)
        self._position += got
        return buffer[:got]


def _short(name: str, size: int) -> ShardChangedError:
    return ShardChangedError(f"{name} ends at byte {size}: it was truncated since it was saved")


def _unreadable(name: str, error: OSError) -> ShardUnreadableError:
    return ShardUnreadableError(f"{name} cannot be read: {error.strerror}")
