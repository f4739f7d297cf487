"""CRC32C as RFC 3720 has it, of parts put together, and of ranges of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt_store.contract import digest


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (b"\x00" * 32, 0x8A9136AA),  # the examples of RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_sums(data: bytes, value: int) -> None:
    assert digest.crc32c(data) == value


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_sums_of_parts_combine_into_the_sum_of_the_whole(parts: list[bytes]) -> None:
    combined = digest.combine_all((digest.crc32c(part), len(part)) for part in parts)
    assert combined == digest.crc32c(b"".join(parts))


@given(st.integers(0, 2**32 - 1))
def test_both_texts_give_the_number_back(value: int) -> None:
    assert digest.from_hex(digest.to_hex(value)) == value
    assert digest.from_base64(digest.to_base64(value)) == value
    assert len(digest.to_hex(value)) == 8


def test_a_range_of_a_file_says_when_the_file_is_shorter(tmp_path: Path) -> None:
    data = os.urandom(3 * digest.CHUNK + 17)
    (tmp_path / "file").write_bytes(data)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        whole = digest.crc32c_of_fd(fd, 0, len(data))
        inner = digest.crc32c_of_fd(fd, 5, digest.CHUNK + 1)
        over = digest.crc32c_of_fd(fd, len(data) - 10, 100)
        none = digest.crc32c_of_fd(fd, 0, 0)
    finally:
        os.close(fd)
    assert whole == (digest.crc32c(data), len(data))
    assert inner == (digest.crc32c(data[5 : digest.CHUNK + 6]), digest.CHUNK + 1)
    assert over == (digest.crc32c(data[-10:]), 10)
    assert none == (0, 0)
