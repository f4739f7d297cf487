"""A source as an HTTP library wants a body, streamed in large pieces."""

from __future__ import annotations

import os
from typing import BinaryIO

from ds_ckpt_store.stores.port import Source

PIECE = 1 << 20  # bytes of a body that are sent at once; smaller ones cost more


class Body:
    """A seekable reader over a source, of known length.

    Whoever sends it asks for 8 or 16 KiB at a time, which is slow, and takes what it gets: it gets
    more. Whoever signs it asks for what has room in a buffer, and must not get more.

    Args:
        source: the bytes.
        exact: never give more than is asked for.
    """

    def __init__(self, source: Source, *, exact: bool = False) -> None:
        self._reader: BinaryIO = source.open()
        self._size = source.size
        self._exact = exact
        self._rest = memoryview(b"")

    def __len__(self) -> int:
        return self._size

    def read(self, amount: int = -1) -> memoryview:
        """The next piece, valid until the next call; empty at the end."""
        if not self._rest:
            self._rest = memoryview(self._reader.read(PIECE))
        count = amount if self._exact and amount > 0 else len(self._rest)
        piece, self._rest = self._rest[:count], self._rest[count:]
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to another position."""
        if whence == os.SEEK_CUR:
            offset -= len(self._rest)
        self._rest = memoryview(b"")
        return self._reader.seek(offset, whence)

    def tell(self) -> int:
        """Bytes that were given so far."""
        return self._reader.tell() - len(self._rest)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()
