"""A source as an HTTP library wants a body, streamed in large pieces."""

from __future__ import annotations

import hashlib
import os
from typing import BinaryIO

from ds_ckpt_store.contract.digest import CHUNK
from ds_ckpt_store.stores.port import Source


class Body:
    """A seekable reader over a source, of known length.

    HTTP libraries ask for 8 or 16 KiB at a time, which is slow, and send what they get: they get
    more. Who needs no more than it asks for must not read through it.

    Args:
        source: the bytes.
    """

    def __init__(self, source: Source) -> None:
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

    def sha256(self) -> str:
        """SHA-256 of the whole in hexadecimal; reads it all, and goes back to its start."""
        value = hashlib.sha256()
        self.seek(0)
        while piece := self.read():
            value.update(piece)
        self.seek(0)
        return value.hexdigest()

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()
