"""The finished ranges of a file being downloaded, remembered in a list beside it.

One line for each range, ``offset length crc32c-hex``, appended after the range was written. A
hint, never the truth: on continuing, each listed range is read from the file and its checksum
compared, so neither a torn line nor a power loss between line and data does harm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ds_ckpt_store.contract.digest import from_hex, to_hex
from ds_ckpt_store.contract.filesystem import Filesystem

_LINE = re.compile(rb"([0-9]{1,19}) ([0-9]{1,19}) ([0-9a-f]{8})")
_MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Range:
    """A range in bytes; ``crc32c`` as it was listed, or None if it is not there yet."""

    offset: int
    length: int
    crc32c: int | None = None


class RangeList:
    """The list of one file.

    Args:
        fs: the filesystem.
        path: of the list, absolute.
    """

    def __init__(self, fs: Filesystem, path: str) -> None:
        self._fs = fs
        self._path = path

    def exists(self) -> bool:
        """Whether a download of this file was interrupted."""
        return self._fs.stat(self._path) is not None

    def read(self, size: int) -> list[Range]:
        """Listed ranges in order, without overlaps, within ``size`` bytes; bad lines left out."""
        try:
            lines = self._fs.read(self._path, _MAX_BYTES).split(b"\n")
        except FileNotFoundError:
            return []
        matches = [match.groups() for match in map(_LINE.fullmatch, lines) if match]
        listed = sorted((int(a), int(b), from_hex(c.decode())) for a, b, c in matches)
        result: list[Range] = []
        end = 0
        for offset, length, value in listed:
            if offset >= end and length > 0 and offset + length <= size:
                result.append(Range(offset, length, value))
                end = offset + length
        return result

    @contextmanager
    def opened(self) -> Iterator[Callable[[Range], None]]:
        """What to call after a range was written."""
        fd = self._fs.open_write(self._path)

        def append(done: Range) -> None:
            # The newline comes first: an earlier line may have been cut off.
            line = f"\n{done.offset} {done.length} {to_hex(done.crc32c or 0)}"
            os.write(fd, line.encode())

        try:
            os.lseek(fd, 0, os.SEEK_END)
            yield append
        finally:
            os.close(fd)

    def remove(self) -> None:
        """The file is whole."""
        self._fs.unlink(self._path)


def cover(size: int, part_size: int, listed: list[Range]) -> Iterator[Range]:
    """The whole file as ranges in order: the listed ones, and the gaps cut into parts."""
    position = 0
    for known in [*listed, Range(size, 0)]:
        while position < known.offset:
            length = min(part_size, known.offset - position)
            yield Range(position, length)
            position += length
        if known.length:
            yield known
            position += known.length
