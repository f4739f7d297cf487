"""A source as an HTTP library wants a body, and its checksums, all taken in one reading."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import BinaryIO

from ds_ckpt_store.contract.digest import CHUNK, crc32c
from ds_ckpt_store.stores.port import FileSource, Source


def examine(source: Source, *hashes: Callable[[memoryview], object]) -> int:
    """CRC32C of a source, and other hashes of the very same bytes.

    A server checks a body by one hash, and the manifest by another. If each were taken in a
    reading of its own, a file that is written to in between could pass both.

    Args:
        source: what is read, once.
        hashes: called with each piece in order.
    """
    value = 0
    for piece in _pieces(source):
        value = crc32c(piece, value)
        for update in hashes:
            update(piece)
    return value


def _pieces(source: Source) -> Iterator[memoryview]:
    done = 0
    if isinstance(source, FileSource):  # not through its reader, which waits for bandwidth
        view = memoryview(bytearray(min(CHUNK, max(source.size, 1))))
        while done < source.size:
            try:
                count = os.preadv(source.fd, [view[: source.size - done]], source.offset + done)
            except OSError:
                break
            if count == 0:
                break
            source.pace(0)  # still at work
            yield view[:count]
            done += count
    if done == source.size:
        return
    with closing(source.open()) as reader:  # of another kind; or it raises what is wrong
        reader.seek(done)
        while piece := reader.read(CHUNK):
            yield memoryview(piece)


class Body:
    """A seekable reader over a source, of known length.

    HTTP libraries ask for 8 or 16 KiB at a time, which is slow, and send what they get: they get
    more. Who needs no more than it asks for must not read through it.

    Args:
        source: the bytes.
        sha256: of the whole in hexadecimal, for who signs it.
    """

    def __init__(self, source: Source, sha256: str | None = None) -> None:
        self.sha256 = sha256
        self._reader: BinaryIO = source.open()
        self._size = source.size

    def __len__(self) -> int:
        return self._size

    def read(self, amount: int = -1) -> bytes | memoryview:
        """The next piece, valid until the next call; empty at the end."""
        del amount
        return self._reader.read(CHUNK)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to another position."""
        return self._reader.seek(offset, whence)

    def tell(self) -> int:
        """Bytes that were given so far."""
        return self._reader.tell()

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()
