"""The bound on memory, measured: 256 MiB pass through, and the process does not grow by them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20
STREAMS = 4

# The bound is streams x 1 MiB of buffers; the rest is the allocator's and the threads' stacks.
BOUND = STREAMS * MIB + 8 * MIB

PROGRAM = """
import os, sys
from concurrent.futures import ThreadPoolExecutor

from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.digest import crc32c, crc32c_of_fd
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import Capabilities, ObjectInfo, Part, Proof
from ds_ckpt_store.transfer.budget import Budget
from ds_ckpt_store.transfer.download import Downloader, RemoteShard
from ds_ckpt_store.transfer.upload import LocalShard, MemoryUploadLog, Uploader

direction, path, streams = sys.argv[1], sys.argv[2], int(sys.argv[3])
view = memoryview(bytes(1 << 20))


class Sieve(MemoryStore):
    "Reads every body, keeps none, and gives zeros back."

    def put_part(self, upload, number, source):
        value = 0
        with source.open() as reader:
            while piece := reader.read(16384):
                value = crc32c(piece, value)
        assert value == source.crc32c
        return Part(number, source.size, value, "token")

    def complete(self, upload, parts):
        self.done = ObjectInfo(upload.key, sum(part.size for part in parts), "v1")
        return self.done

    def head(self, key):
        return getattr(self, "done", None) or super().head(key)

    def read(self, key, offset, length, sink):
        for start in range(0, length, 1 << 20):
            sink(view[: min(1 << 20, length - start)])


def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def nothing(*_):
    pass


store = Sieve(MemoryBucket(SystemClock()), Capabilities(proofs=(Proof.SIGNED_PAYLOAD,)))
size = 256 << 20
with open(path, "rb") as file:
    value, _ = crc32c_of_fd(file.fileno(), 0, size)
budget = Budget(SystemClock(), streams=streams)
with ThreadPoolExecutor(streams) as executor:
    before = peak()
    if direction == "up":
        shard = LocalShard("k", size, value, lambda: os.open(path, os.O_RDONLY))
        uploader = Uploader(store, executor, budget=budget, clock=SystemClock())
        uploader.upload(
            [shard], MemoryUploadLog(), check=nothing, progress=nothing, stored=nothing
        )
    else:
        downloader = Downloader(
            store, executor, budget=budget, fs=Filesystem(), clock=SystemClock()
        )
        downloader.fetch(
            [RemoteShard("k", size, value, path + ".restored")],
            check=nothing,
            progress=nothing,
            done=nothing,
        )
    print(peak() - before)
"""


def growth(tmp_path: Path, direction: str) -> int:
    """Bytes by which the peak resident memory of a fresh process grows."""
    path = tmp_path / "rank0.pt"
    path.touch()
    os.truncate(path, 256 * MIB)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, direction, str(path), str(STREAMS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_an_upload_holds_one_mib_for_each_stream(tmp_path: Path) -> None:
    assert growth(tmp_path, "up") <= BOUND


def test_a_download_holds_no_range_in_memory(tmp_path: Path) -> None:
    assert growth(tmp_path, "down") <= BOUND
