"""Where stories happen: each kind of store, on a real server, by way of a proxy that makes faults.

A :class:`Place` is one empty prefix. ``open`` leads there through the proxy, if it has one, and
``look`` past it. A :class:`Stage` is a place with the agents that work for it in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ds_ckpt_sidecar import agent as agents
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.digest import from_hex
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.restore import Restore
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.faulty import FaultyStore
from ds_ckpt_store.stores.forwarding import Forwarding
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import Capabilities, Proof, Store
from ds_ckpt_store.transfer.budget import Budget
from ds_ckpt_store.transfer.download import Damage, Downloader, RemoteShard
from tests.faultproxy import Fault, FaultProxy
from tests.servers import S3
from tests.servers_gcs import GCS
from tests.sidecar.world import Lines, World, contents
from tests.store.stores import test_azure_faults, test_gcs_faults, test_s3_faults
from tests.store.stores.fault_scenarios import Wire

MIB = 1 << 20
STALL_SECONDS = 2.0


@dataclass
class Place:
    """One prefix of one store.

    Attributes:
        url: as a process of its own opens it, by way of the proxy.
        environ: for that process.
        open: a connection by way of the proxy.
        look: one past it, to see what is there.
        proxy: in front of the server; None if there is no network.
        wire: how calls look on it.
        allow_weak: the agent must be told to accept this store.
        proofs: that the agents may choose from; all that the store offers if None.
    """

    name: str
    url: str
    open: Callable[[], Store]
    look: Callable[[], Store]
    environ: Mapping[str, str] = field(default_factory=dict)
    proxy: FaultProxy | None = None
    wire: Wire | None = None
    allow_weak: bool = False
    proofs: tuple[Proof, ...] | None = None

    @property
    def network(self) -> tuple[FaultProxy, Wire]:
        """Proxy and wire, of a place that has them."""
        assert self.proxy is not None
        assert self.wire is not None
        return self.proxy, self.wire

    def putting(self, name: str) -> str:
        """Pattern of the request that puts an object of that name whole."""
        _, wire = self.network
        if wire is test_gcs_faults.WIRE:
            return rf"^POST /upload/.*name=[^&]*{name}(&|$)"
        return rf"^PUT [^?]*{name}$"

    def reading(self, name: str) -> str:
        """Pattern of the request that reads an object of that name."""
        _, wire = self.network
        return rf"^GET [^?]*{name}" + (r"\?.*alt=media" if wire is test_gcs_faults.WIRE else "$")


class _Lasting(Forwarding):
    """A connection that outlives the agents that close it, with a choice of proofs."""

    def __init__(self, store: Store, proofs: tuple[Proof, ...] | None) -> None:
        super().__init__(store)
        self._proofs = proofs
        if proofs:
            store.use_proof(proofs[0])

    @property
    def capabilities(self) -> Capabilities:
        found = self.store.capabilities
        return dataclasses.replace(found, proofs=self._proofs) if self._proofs else found

    def close(self) -> None:
        """Stays open."""


class ActingLines(Lines):
    """A log at whose lines something may happen."""

    def __init__(self) -> None:
        super().__init__()
        self.then: dict[str, Callable[[], object]] = {}

    def _said(self, event: str) -> None:
        if (act := self.then.pop(event, None)) is not None:
            act()

    def info(self, event: str, **values: Any) -> None:
        super().info(event, **values)
        self._said(event)

    def warning(self, event: str, **values: Any) -> None:
        super().warning(event, **values)
        self._said(event)

    def error(self, event: str, **values: Any) -> None:
        super().error(event, **values)
        self._said(event)


class Stage(World):
    """One place, and agents that work for it in this process, one request at a time."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self._opened = [place.open(), place.look()]
        self.store = FaultyStore(_Lasting(self._opened[0], place.proofs))
        self.looked = self._opened[1]
        self.log: ActingLines = ActingLines()
        self.catalog = Catalog(self.looked, random.Random(1))

    def close(self) -> None:
        for store in self._opened:
            store.close()

    def agent(self, volume: Any, **settings: Any) -> agents.Agent:
        chosen = {"streams": 1, "allow_weak_store": self.place.allow_weak, **settings}
        return super().agent(volume, **chosen)

    def at(self, event: str, *faults: Fault) -> None:
        """Add faults when the log says so: what the agent asks before is left alone."""
        proxy, _ = self.place.network
        self.log.then[event] = lambda: [proxy.add(fault) for fault in faults]

    def keys(self, under: str = "") -> list[str]:
        return [info.key for info in self.looked.list(under)]

    def unfinished(self) -> list[str]:
        return sorted(upload.key for upload in self.looked.uploads(""))

    def restored(self, folder: Path, **options: Any) -> dict[str, bytes]:
        """Files of a checkpoint that were fetched by way of the proxy into a new folder."""
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(4) as pool:
            result = Restore(
                self.store,
                pool,
                budget=Budget(SystemClock(), streams=4),
                clock=SystemClock(),
                rng=random.Random(2),
            ).run(Volume(str(folder)), **options)
        return contents(Path(result.folder))

    def verified(self, tag: str) -> list[Damage]:
        """What ``ds-ckpt verify`` finds damaged of a checkpoint."""
        with ThreadPoolExecutor(4) as pool:
            downloader = Downloader(
                self.store,
                pool,
                budget=Budget(SystemClock(), streams=4),
                fs=Filesystem(),
                clock=SystemClock(),
            )
            objects = [
                RemoteShard(key, entry.size, from_hex(entry.crc32c), "")
                for key, entry in self.catalog.find(tag).objects()
            ]
            return downloader.verify(objects, check=lambda: None, progress=lambda _: None)


# ---- the places


@contextlib.contextmanager
def _s3(server: S3, name: str, *, allow_weak: bool = False) -> Iterator[Place]:
    bucket, parts = server.bucket(), urlsplit(server.endpoint)
    url = f"s3://{bucket}/run"
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        environ = {**server.environ, "DS_CKPT_S3_ENDPOINT": proxy.url}
        yield Place(
            name,
            url,
            lambda: open_store(url, environ, stall_seconds=STALL_SECONDS),
            lambda: server.store(bucket),
            environ,
            proxy,
            test_s3_faults.WIRE,
            allow_weak,
        )


@contextlib.contextmanager
def _azure(request: pytest.FixtureRequest) -> Iterator[Place]:
    server = request.getfixturevalue("azurite")
    container, parts = server.container(), urlsplit(server.origin)
    url = f"az://{container}/run"
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        through = server.through(proxy.url)
        yield Place(
            "azure",
            url,
            lambda: through.store(container, stall_seconds=STALL_SECONDS),
            lambda: server.store(container),
            through.environ,
            proxy,
            test_azure_faults.WIRE,
        )


@contextlib.contextmanager
def _gcs(request: pytest.FixtureRequest) -> Iterator[Place]:
    server = request.getfixturevalue("fake_gcs")
    bucket, parts = server.bucket(), urlsplit(server.endpoint)
    url = f"gs://{bucket}/run"
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        environ = GCS(proxy.url).environ(parts="compose")

        def look() -> Store:
            store = server.store(bucket, parts="compose")
            store.use_proof(Proof.READ_BACK)  # what it says of checksums proves nothing
            return store

        yield Place(
            "gcs",
            url,
            lambda: open_store(url, environ, stall_seconds=STALL_SECONDS),
            look,
            environ,
            proxy,
            test_gcs_faults.WIRE,
        )


@contextlib.contextmanager
def open_place(request: pytest.FixtureRequest, name: str) -> Iterator[Place]:
    """The place of that name; its server starts when it is first asked for.

    Args:
        request: of the test.
        name: of a kind of store, and perhaps the one proof to use there: ``swift:content-md5``.
    """
    name, _, proof = name.partition(":")
    with _opened(request, name) as place:
        place.proofs = (Proof(proof),) if proof else None
        yield place


@contextlib.contextmanager
def _opened(request: pytest.FixtureRequest, name: str) -> Iterator[Place]:
    if name == "azure":
        with _azure(request) as place:
            yield place
    elif name == "gcs":
        with _gcs(request) as place:
            yield place
    elif name == "file":
        root = request.getfixturevalue("tmp_path") / "store"
        url = root.as_uri()
        yield Place(name, url, lambda: open_store(url), lambda: open_store(url))
    elif name == "memory":
        bucket = MemoryBucket(SystemClock())
        yield Place(
            name, "memory://bucket/run", lambda: MemoryStore(bucket), lambda: MemoryStore(bucket)
        )
    else:
        weak = name != "seaweed"
        with _s3(request.getfixturevalue(name), name, allow_weak=weak) as place:
            yield place


NETWORKED = ["seaweed", "swift", "azure", "gcs"]
EVERY = ["memory", "file", *NETWORKED]
