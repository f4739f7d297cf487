"""CRC32C, the checksum of record (RFC 3720, polynomial 0x1EDC6F41), by awscrt.

awscrt computes it with the processor's own instruction and without the GIL (about 0.06 s a GiB),
and combines the sums of parts into the sum of the whole, so no byte is read twice for it.
A sum is an ``int`` in memory, eight hexadecimal digits in documents, and base64 of four
big-endian bytes in S3 and GCS headers.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable

from awscrt import checksums

CHUNK = 512 << 10  # bytes read at once: few enough to stay in the processor's cache


def crc32c(data: bytes | bytearray | memoryview, previous: int = 0) -> int:
    """CRC32C of ``data``, continuing from ``previous``."""
    return int(checksums.crc32c(data, previous))


def combine(first: int, second: int, second_length: int) -> int:
    """CRC32C of two byte strings put together, from their sums and the second one's length."""
    return int(checksums.combine_crc32c(first, second, second_length))


def combine_all(parts: Iterable[tuple[int, int]]) -> int:
    """CRC32C of parts put together; each part is ``(sum, length in bytes)``, in order."""
    total = 0
    for value, length in parts:
        total = combine(total, value, length)
    return total


def to_hex(value: int) -> str:
    """Eight lower-case hexadecimal digits."""
    return f"{value:08x}"


def from_hex(text: str) -> int:
    """The inverse of :func:`to_hex`."""
    return int(text, 16)


def to_base64(value: int) -> str:
    """As S3 and GCS write it: base64 of four big-endian bytes."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def from_base64(text: str) -> int:
    """The inverse of :func:`to_base64`."""
    return int.from_bytes(base64.b64decode(text), "big")


def crc32c_of_fd(
    fd: int, offset: int, length: int, *, check: Callable[[], None] | None = None
) -> tuple[int, int]:
    """CRC32C of a range of an open file.

    Args:
        fd: descriptor opened for reading.
        offset: first byte.
        length: bytes to read.
        check: called before each chunk; may raise to stop.

    Returns:
        ``(sum, bytes read)``; fewer bytes than ``length`` mean that the file is shorter.
    """
    buffer = bytearray(min(CHUNK, max(length, 1)))
    view = memoryview(buffer)
    value = done = 0
    while done < length:
        if check is not None:
            check()
        count = os.preadv(fd, [view[: min(len(buffer), length - done)]], offset + done)
        if count == 0:
            break
        value = crc32c(view[:count], value)
        done += count
    return value, done
