"""``transfer/`` alone, against a server that keeps nothing and so has no records and no checksums.

    transfer_only.py upload|download JOB

JOB as for ``worker.py``. What the agent and ``ds-ckpt restore`` do with shards is done here by the
same classes with their default settings, behind the same retries: the checksum of each part before
it is sent and of the whole against what the hook handed in, parts streamed, completion, HEAD; or
ranges fetched, their checksums combined and compared, files synced. What is missing is what needs
a store that remembers: probe, lease, receipts, record, pointer, journal. The one thing that is made
up is the checksum in answers, which a store that checks would tell.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from ds_ckpt_sidecar.settings import AgentSettings
from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.clock import SystemClock, system_random
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.forwarding import Forwarding
from ds_ckpt_store.stores.port import Condition, ObjectInfo, Part, Proof, Source, Upload
from ds_ckpt_store.stores.retry import RetryStore
from ds_ckpt_store.transfer.budget import MIB, Budget, streams_within
from ds_ckpt_store.transfer.download import Downloader, RemoteShard
from ds_ckpt_store.transfer.upload import LocalShard, MemoryUploadLog, Uploader


class Remembering(Forwarding):
    """Answers as a store would that had checked and kept what was sent."""

    def __init__(self, url: str) -> None:
        super().__init__(open_store(url))
        self.use_proof(Proof.STORED_CHECKSUM)
        self._sums: dict[str, int] = {}

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        info = super().put(key, source, condition=condition)
        self._sums[key] = source.crc32c
        return replace(info, crc32c=source.crc32c)

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        info = super().complete(upload, parts)
        whole = digest.combine_all((part.crc32c, part.size) for part in parts)
        self._sums[upload.key] = whole
        return replace(info, crc32c=whole)

    def head(self, key: str) -> ObjectInfo:
        return replace(super().head(key), crc32c=self._sums.get(key))


def crc32c_of_zeros(size: int) -> int:
    value = done = 0
    piece = bytes(MIB)
    while done < size:
        count = min(len(piece), size - done)
        value = digest.crc32c(memoryview(piece)[:count], value)
        done += count
    return value


def upload(store: RetryStore, folder: Path, sums: Mapping[str, str]) -> None:
    settings = AgentSettings(volume=str(folder), destination=store.url)
    shards = [
        LocalShard(
            path.name,
            path.stat().st_size,
            digest.from_hex(sums[path.name]),
            partial(os.open, path, os.O_RDONLY),
        )
        for path in sorted(folder.iterdir())
    ]
    budget = Budget(
        SystemClock(),
        streams=settings.streams,
        fit=streams_within(settings.memory_mib * MIB, store.capabilities),
    )
    with ThreadPoolExecutor(budget.fit) as pool:
        uploader = Uploader(
            store,
            pool,
            budget=budget,
            part_size=settings.part_mib * MIB,
            clock=SystemClock(),
            keep_cached=settings.page_cache == "keep",
        )
        uploader.upload(
            shards,
            MemoryUploadLog(),
            check=lambda: None,
            progress=lambda _: None,
            stored=lambda _: None,
        )


def download(store: RetryStore, folder: Path, sizes: Mapping[str, int]) -> None:
    sums = {size: crc32c_of_zeros(size) for size in set(sizes.values())}
    lists = folder.parent / "ranges"
    lists.mkdir()
    shards = [
        RemoteShard(key, size, sums[size], str(folder / key), str(lists / key))
        for key, size in sizes.items()
    ]
    budget = Budget(SystemClock())
    with ThreadPoolExecutor(budget.fit) as pool:
        downloader = Downloader(store, pool, budget=budget, fs=Filesystem(), clock=SystemClock())
        downloader.fetch(shards, check=lambda: None, progress=lambda _: None, done=lambda _: None)


def main() -> None:
    way, path = sys.argv[1:]
    job = json.loads(Path(path).read_text())
    store = RetryStore(
        Remembering(f"s3://{job['bucket']}/{job['prefix']}"), SystemClock(), system_random()
    )
    folder = Path(job["folder"])
    if way == "upload":
        upload(store, folder, job["sums"])
    else:
        sizes = {key.removeprefix(f"{job['prefix']}/"): size for key, size in job["keys"].items()}
        download(store, folder, sizes)
    store.close()


if __name__ == "__main__":
    main()
