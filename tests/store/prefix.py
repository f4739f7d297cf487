"""One prefix as sidecars leave it, for stories about the catalog and what stands on it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract import digest, names
from ds_ckpt_store.contract.manifest import NodeManifest, Shard
from ds_ckpt_store.records import Intent, Receipt, Record, StoredFile
from ds_ckpt_store.stores.faulty import FaultyStore, Rule
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import BytesSource, Store

NODE, OTHER, THIRD = ("a" * 32, "b" * 32, "c" * 32)
START_MS = 1_700_000_000_000


class HandClock:
    """Time that passes only when a story says so."""

    def __init__(self, now: float = START_MS / 1000) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Prefix:
    """A catalog over a store whose faults can be scripted.

    Args:
        store: the store underneath; one in memory, whose clock is :attr:`clock`, if None.
    """

    def __init__(self, store: Store | None = None) -> None:
        self.clock = HandClock()
        self.bucket = MemoryBucket(self.clock)
        self.store = FaultyStore(store or MemoryStore(self.bucket))
        self.rng = random.Random(7)
        self.catalog = Catalog(self.store, self.rng)
        self._time_ms = START_MS

    def another(self) -> Catalog:
        """The catalog of another process."""
        return Catalog(self.store.store, random.Random(self.rng.random()))

    def fault(self, *arguments: object, **options: object) -> Rule:
        """Add a rule to the store's script."""
        rule = Rule(*arguments, **options)  # type: ignore[arg-type]
        self.store.script.append(rule)
        return rule

    def put(self, key: str, data: bytes) -> None:
        """Write an object past the catalog."""
        self.store.store.put(key, BytesSource(data))

    def text(self, key: str) -> str:
        return self.store.store.get(key)[0].decode()

    def stored_keys(self, prefix: str = "") -> list[str]:
        return [info.key for info in self.store.store.list(prefix)]

    # ---- saves

    def attempt(self, number: int = 0) -> str:
        """The id of the n-th attempt of the run."""
        return f"{START_MS - 10_000 + number:012x}-{number:016x}"

    def manifest(
        self,
        tag: str = "step1",
        files: Mapping[str, bytes] | None = None,
        *,
        node: str = NODE,
        nodes: Sequence[str] | None = None,
        companions: Mapping[str, bytes] | None = None,
        save_id: str | None = None,
        run_id: str = "run",
        **fields: object,
    ) -> NodeManifest:
        """What a hook would hand over; each save a second after the one before."""
        self._time_ms += 1000
        save_id = save_id or names.new_save_id(self._time_ms, self.rng)
        self._bodies = getattr(self, "_bodies", {})
        files = {"shard.pt": self.rng.randbytes(100)} if files is None else files
        self._bodies[save_id, node] = (files, companions or {})
        return NodeManifest.model_validate(
            {
                "schema": 1,
                "run_id": run_id,
                "attempt": self.attempt(),
                "save_id": save_id,
                "tag": tag,
                "time_ms": self._time_ms,
                "nodes": list(nodes if nodes is not None else [node]),
                "node": node,
                "shards": [_shard(*item) for item in files.items()],
                "companions": [_shard(*item) for item in (companions or {}).items()],
                **fields,
            }
        )

    def upload(self, manifest: NodeManifest) -> None:
        """Put the objects of a manifest."""
        files, companions = self._bodies[manifest.save_id, manifest.node]
        for path, data in files.items():
            self.put(f"{manifest.folder}/{path}", data)
        for path, data in companions.items():
            self.put(f"{manifest.folder}/.companions/{path}", data)

    def receipt(self, manifest: NodeManifest) -> Receipt:
        """What the node's sidecar says once all is stored."""

        def stored(shards: Sequence[Shard]) -> list[StoredFile]:
            return [
                StoredFile(path=s.path, size=s.size, crc32c=s.crc32c, node=manifest.node)
                for s in shards
            ]

        return Receipt(
            save_id=manifest.save_id,
            node=manifest.node,
            files=stored(manifest.shards),
            companions=stored(manifest.companions),
            proof="stored-checksum",
        )

    def store_all(self, manifest: NodeManifest, epoch: int = 1) -> Intent:
        """Steps 2 to 5 of the protocol for one node."""
        intent = self.catalog.intend(manifest, epoch)
        self.upload(manifest)
        self.catalog.put_receipt(self.receipt(manifest))
        return intent

    def commit(
        self,
        tag: str = "step1",
        files: Mapping[str, bytes] | None = None,
        *,
        epoch: int = 1,
        **fields: object,
    ) -> Record:
        """A whole save of one node, decided."""
        intent = self.store_all(self.manifest(tag, files, **fields), epoch)  # type: ignore[arg-type]
        record = self.catalog.commit(intent).record
        assert record is not None
        assert record.state == "committed"
        return record


def _shard(path: str, data: bytes) -> dict[str, object]:
    return {
        "path": path,
        "size": len(data),
        "crc32c": digest.to_hex(digest.crc32c(data)),
        "device": 1,
        "inode": 1,
        "mtime_ns": 1,
        "rank": 0,
    }
