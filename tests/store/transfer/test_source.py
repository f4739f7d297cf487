from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_store.contract.digest import CHUNK, crc32c
from ds_ckpt_store.errors import ShardChangedError, ShardUnreadableError
from ds_ckpt_store.transfer.source import FileSlice

DATA = bytes(range(256)) * 12_289  # 3 MiB and a bit


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "rank0.pt"
    path.write_bytes(DATA)
    number = os.open(path, os.O_RDWR)
    yield number
    os.close(number)


@pytest.mark.parametrize(
    ("offset", "size"), [(0, len(DATA)), (7, 2 << 20), (len(DATA) - 1, 1), (5, 0)]
)
def test_a_slice_gives_its_bytes_and_their_checksum_each_time_it_is_opened(
    fd: int, offset: int, size: int
) -> None:
    source = FileSlice(fd, offset, size, "rank0.pt")
    expected = DATA[offset : offset + size]
    assert (source.size, source.crc32c) == (size, crc32c(expected))
    for _ in range(2):
        with source.open() as reader:
            assert b"".join(iter(lambda: bytes(reader.read(8192)), b"")) == expected
            assert reader.read(8192) == b""


def test_read_gives_large_views_for_small_questions_and_all_for_none(fd: int) -> None:
    with FileSlice(fd, 0, len(DATA), "rank0.pt").open() as reader:
        first = reader.read(8192)
        assert isinstance(first, memoryview)
        assert len(first) == CHUNK
        assert reader.read(0) == b""
        rest = reader.read()
        assert rest == DATA[CHUNK:]


def test_a_reader_seeks_within_its_slice(fd: int) -> None:
    with FileSlice(fd, 100, 1000, "rank0.pt").open() as reader:
        assert reader.seek(0, os.SEEK_END) == 1000
        assert reader.seek(-10, os.SEEK_END) == 990
        assert reader.read(50) == DATA[1090:1100]
        assert reader.seek(5) == 5
        assert reader.seek(5, os.SEEK_CUR) == 10
        assert reader.tell() == 10
        assert reader.read() == DATA[110:1100]


def test_buffered_reading_never_gives_more_than_was_asked_for(fd: int) -> None:
    raw = FileSlice(fd, 3, 300_000, "rank0.pt").open()
    reader = io.BufferedReader(raw)  # type: ignore[arg-type, type-var]
    assert reader.read(10) == DATA[3:13]
    assert reader.read() == DATA[13:300_003]


def test_a_file_that_is_too_short_has_changed(fd: int) -> None:
    with pytest.raises(ShardChangedError, match=r"rank0\.pt"):
        _ = FileSlice(fd, 0, len(DATA) + 1, "rank0.pt").crc32c


def test_truncation_is_noticed_when_opening_and_while_reading(fd: int) -> None:
    source = FileSlice(fd, 0, len(DATA), "rank0.pt")
    with source.open() as reader:
        os.ftruncate(fd, CHUNK)
        assert len(reader.read(1)) == CHUNK
        with pytest.raises(ShardChangedError, match=str(CHUNK)):
            reader.read(1)
    with pytest.raises(ShardChangedError):
        source.open()


def test_an_error_of_the_system_is_named(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(ShardUnreadableError, match=r"rank0\.pt .*directory"):
            _ = FileSlice(folder, 0, 10, "rank0.pt").crc32c
    finally:
        os.close(folder)
