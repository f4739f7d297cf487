"""What the transfer tests share: real files, a bucket in memory, a clock nobody waits for."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_ckpt_store.contract.digest import crc32c
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.stores.faulty import FaultyStore, Rule
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import BytesSource, Capabilities, Limits, Proof
from ds_ckpt_store.transfer.budget import Budget
from ds_ckpt_store.transfer.download import Downloader, RemoteShard
from ds_ckpt_store.transfer.upload import (
    LocalShard,
    MemoryUploadLog,
    Stored,
    Uploader,
    UploadLog,
)

KIB = 1 << 10
PART = 64 * KIB
LIMITS = Limits(min_part=1)


class TickingClock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class InlineExecutor(Executor):
    """Runs each job within ``submit``, as a simulation does."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Crash(BaseException):
    """The process dies."""


def nothing(*_: object) -> None:
    """A callback that does nothing."""


def memory_store(bucket: MemoryBucket, proof: Proof = Proof.STORED_CHECKSUM) -> MemoryStore:
    """A store with parts of any size, that writes with one proof."""
    store = MemoryStore(bucket, Capabilities(proofs=(proof, Proof.READ_BACK), limits=LIMITS))
    store.use_proof(proof)
    return store


@dataclass
class Scene:
    """A folder with shards, a bucket, and what an upload and a download need."""

    folder: Path
    executor: Executor = field(default_factory=lambda: ThreadPoolExecutor(4))
    clock: TickingClock = field(default_factory=TickingClock)
    log: MemoryUploadLog = field(default_factory=MemoryUploadLog)
    proof: Proof = Proof.STORED_CHECKSUM
    bandwidth: int = 0
    keep_cached: bool = False
    sent: int = 0
    stored: list[Stored] = field(default_factory=list)
    fetched: int = 0

    def __post_init__(self) -> None:
        self.bucket = MemoryBucket(self.clock)
        self.store = FaultyStore(memory_store(self.bucket, self.proof))

    # ---- upload

    def shard(self, key: str, size: int) -> LocalShard:
        """A file of random bytes and what its manifest says."""
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        data = random.Random(key).randbytes(size)
        path.write_bytes(data)
        return LocalShard(key, size, crc32c(data), lambda: os.open(path, os.O_RDONLY))

    def upload(
        self,
        *shards: LocalShard,
        log: UploadLog | None = None,
        check: Callable[[], None] = nothing,
        streams: int = 4,
    ) -> list[Stored]:
        """One start of the process that uploads."""
        self.sent = 0
        uploader = Uploader(
            self.store,
            self.executor,
            budget=Budget(self.clock, streams=streams, bandwidth=self.bandwidth),
            part_size=PART,
            clock=self.clock,
            keep_cached=self.keep_cached,
        )
        return uploader.upload(
            shards,
            self.log if log is None else log,
            check=check,
            progress=self._count_sent,
            stored=self.stored.append,
        )

    def _count_sent(self, count: int) -> None:
        self.sent += count

    def fault(self, *rules: Rule) -> None:
        """Script faults for what follows, in place of earlier ones."""
        self.store.script[:] = rules

    def parts_sent(self, key: str = "") -> list[int]:
        """Numbers of the parts sent so far, in the order of the calls."""
        return [call.number for call in self.store.asked("put_part", key)]

    def holds(self, *shards: LocalShard) -> bool:
        """Whether the bucket's objects have the shards' bytes, and nothing is left unfinished."""
        return not self.bucket.unfinished and all(
            crc32c(self.bucket.objects[shard.key].data) == shard.crc32c for shard in shards
        )

    # ---- download

    def remote(self, key: str, size: int) -> RemoteShard:
        """An object of random bytes and what its record says."""
        shard = self.shard(key, size)
        self.bucket_put(key, (self.folder / key).read_bytes())
        return RemoteShard(key, size, shard.crc32c, str(self.folder / "restored" / key))

    def bucket_put(self, key: str, data: bytes) -> None:
        """Write an object past all faults."""
        memory_store(self.bucket).put(key, BytesSource(data))

    def downloader(self, streams: int = 4, part_size: int = PART) -> Downloader:
        """As one process makes it."""
        return Downloader(
            self.store,
            self.executor,
            budget=Budget(self.clock, streams=streams, bandwidth=self.bandwidth),
            part_size=part_size,
            fs=Filesystem(),
            clock=self.clock,
        )

    def fetch(
        self,
        *shards: RemoteShard,
        check: Callable[[], None] = nothing,
        streams: int = 4,
        part_size: int = PART,
    ) -> list[RemoteShard]:
        """One start of the process that downloads; the shards that were done."""
        self.fetched = 0
        done: list[RemoteShard] = []
        self.downloader(streams, part_size).fetch(
            shards, check=check, progress=self._count_fetched, done=done.append
        )
        return done

    def _count_fetched(self, count: int) -> None:
        self.fetched += count

    def is_restored(self, shard: RemoteShard) -> bool:
        """Whether the file has the bytes, and no list of ranges is left."""
        path = Path(shard.path)
        return (
            crc32c(path.read_bytes()) == shard.crc32c
            and path.stat().st_size == shard.size
            and not Path(shard.path + ".ranges").exists()
        )
