"""The bound on memory, measured in fresh processes against the formula that people are told.

The growth over what a process holds before is at most requests at a time times (buffer +
``request_memory``), and what the allocator and the threads' stacks take. Neither the size of a
shard, nor of a part, nor the number of shards counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_ckpt_store.transfer.budget import BUFFER

MIB = 1 << 20
STREAMS = 4
SLACK = 8 * MIB  # the allocator's, and the threads' stacks

PROGRAM = """
import os, sys
from concurrent.futures import ThreadPoolExecutor

from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.digest import CHUNK, crc32c, crc32c_of_fd
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import Capabilities, Limits, ObjectInfo, Part, Proof
from ds_ckpt_store.transfer.budget import Budget, streams_within
from ds_ckpt_store.transfer.download import Downloader, RemoteShard
from ds_ckpt_store.transfer.upload import LocalShard, MemoryUploadLog, Uploader

direction, path = sys.argv[1:3]
count, size, part, holds, memory = map(int, sys.argv[3:])
view = memoryview(bytes(CHUNK))


class Sieve(MemoryStore):
    "Reads every body, holds as much as it says, keeps nothing, and gives zeros back."

    def receive(self, source):
        held = bytearray(holds)
        for place in range(0, holds, 4096):
            held[place] = 1
        value = 0
        with source.open() as reader:
            while piece := reader.read(16384):
                value = crc32c(piece, value)
        assert value == source.crc32c
        return value

    def put(self, key, source, *, condition=None):
        return ObjectInfo(key, source.size, "v1", 0.0, self.receive(source))

    def put_part(self, upload, number, source):
        return Part(number, source.size, self.receive(source), "token")

    def complete(self, upload, parts):
        self.done = ObjectInfo(upload.key, sum(part.size for part in parts), "v1")
        return self.done

    def head(self, key):
        return getattr(self, "done", None) or super().head(key)

    def read(self, key, offset, length, sink):
        for start in range(0, length, len(view)):
            sink(view[: min(len(view), length - start)])


def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def nothing(*_):
    pass


proof = Proof.STORED_CHECKSUM if count > 1 else Proof.SIGNED_PAYLOAD
store = Sieve(
    MemoryBucket(SystemClock()),
    Capabilities(proofs=(proof,), request_memory=holds, limits=Limits(min_part=1)),
)
with open(path, "rb") as file:
    value, _ = crc32c_of_fd(file.fileno(), 0, size)
opened = lambda: os.open(path, os.O_RDONLY)
budget = Budget(SystemClock(), fit=streams_within(memory, store.capabilities))
with ThreadPoolExecutor(budget.fit) as executor:
    if direction == "up":
        shards = [LocalShard(f"{number}.pt", size, value, opened) for number in range(count)]
        before = peak()
        uploader = Uploader(store, executor, budget=budget, part_size=part, clock=SystemClock())
        uploader.upload(shards, MemoryUploadLog(), check=nothing, progress=nothing, stored=nothing)
    else:
        shards = [
            RemoteShard(f"{number}", size, value, f"{path}.{number}") for number in range(count)
        ]
        before = peak()
        downloader = Downloader(
            store, executor, budget=budget, part_size=part, fs=Filesystem(), clock=SystemClock()
        )
        downloader.fetch(shards, check=nothing, progress=nothing, done=nothing)
    print(peak() - before)
"""


def growth(
    tmp_path: Path, direction: str, *, count: int, size: int, part: int, holds: int = 0
) -> int:
    """Bytes by which the peak resident memory of a fresh process grows."""
    path = tmp_path / "rank0.pt"
    path.touch()
    os.truncate(path, size)
    memory = STREAMS * (BUFFER + holds)
    numbers = [str(number) for number in (count, size, part, holds, memory)]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, direction, str(path), *numbers],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


CASES = {
    "one large shard": {"count": 1, "size": 256 * MIB, "part": 16 * MIB},
    "one shard in huge parts": {"count": 1, "size": 256 * MIB, "part": 128 * MIB},
    "thousands of parts": {"count": 1, "size": 256 * MIB, "part": 64 << 10},
    "thousands of shards": {"count": 3000, "size": 64 << 10, "part": 16 * MIB},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_an_upload_holds_no_more_than_the_formula_says(
    tmp_path: Path, case: dict[str, int]
) -> None:
    assert growth(tmp_path, "up", **case) <= STREAMS * BUFFER + SLACK


def test_what_a_request_holds_counts_once_for_each_that_memory_has_room_for(
    tmp_path: Path,
) -> None:
    """The other half: the formula's second term is really there, so the first test can fail."""
    holds = 16 * MIB
    grown = growth(tmp_path, "up", count=1, size=256 * MIB, part=4 * MIB, holds=holds)
    assert 2 * holds < grown <= STREAMS * (BUFFER + holds) + SLACK


def test_a_download_holds_no_range_in_memory(tmp_path: Path) -> None:
    case = CASES["one large shard"]
    assert growth(tmp_path, "down", **case) <= STREAMS * BUFFER + SLACK
