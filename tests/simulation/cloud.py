"""The object store: the in-memory one, behind a network on which everything can go wrong.

Of a call the request can be lost, the store can refuse it, the answer can be lost, the call can be
applied long after it was given up, or twice; a listing can take a minute, in pages, while others
write; a body can be changed on its way. A process that dies leaves what it had sent on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from ds_ckpt_store.contract.names import is_data
from ds_ckpt_store.errors import (
    AmbiguousError,
    PreconditionError,
    StoreError,
    ThrottledError,
    TransientError,
)
from ds_ckpt_store.stores.forwarding import Forwarding
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore, StoredObject
from ds_ckpt_store.stores.port import (
    BytesSource,
    Capabilities,
    Condition,
    Limits,
    ObjectInfo,
    Part,
    Proof,
    Sink,
    Source,
    Upload,
)
from tests.simulation.kernel import Kernel, Killed, Process, WorldClock

T = TypeVar("T")
URL = "memory://cloud/run"
PART = 192  # bytes
PAGE = 7  # keys
LIMITS = Limits(min_part=16, max_part=1 << 20, max_parts=1000, max_object=1 << 30, max_put=1 << 20)
LATEST_SECONDS = 300.0


class Objects(dict[str, StoredObject]):
    """The bucket's objects; tells of every change before the next call is made."""

    def __init__(self, changed: Callable[[str, StoredObject | None], None]) -> None:
        super().__init__()
        self._changed = changed

    def __setitem__(self, key: str, value: StoredObject) -> None:
        before = self.get(key)
        super().__setitem__(key, value)
        self._changed(key, before)

    def pop(self, key: str, *default: object) -> StoredObject | None:  # type: ignore[override]
        before = self.get(key)
        if before is not None:
            super().pop(key)
            self._changed(key, before)
        return before


class Cloud:
    """One bucket with its network.

    Args:
        kernel: the world.
        ahead: seconds that the store's clock is ahead of the world's.
        proof: what the store can show.
        changed: called at each change of an object, with what was there before.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        ahead: float,
        proof: Proof,
        changed: Callable[[str, StoredObject | None], None],
    ) -> None:
        self.kernel = kernel
        self.clock = WorldClock(kernel, ahead)
        self.bucket = MemoryBucket(self.clock)
        self.bucket.objects = Objects(changed)
        self.proof = proof
        self.down_until = 0.0
        self.throttled_until = 0.0
        self.pending: list[Callable[[], object]] = []

    def connect(self, process: Process) -> SimStore:
        """One process's connection."""
        proofs = tuple(dict.fromkeys((self.proof, Proof.READ_BACK)))
        inner = MemoryStore(
            self.bucket,
            Capabilities(proofs=proofs, limits=LIMITS, request_memory=1),
            returns_crc32c=self.proof is Proof.STORED_CHECKSUM,
            refuses_corruption=self.proof is not Proof.READ_BACK,
            url=URL,
        )
        inner.use_proof(self.proof)
        return SimStore(inner, self, process)

    def later(self, apply: Callable[[], object], seconds: float) -> None:
        """Apply a write that its sender has given up."""
        self.pending.append(apply)

        def land() -> None:
            if apply in self.pending:
                self.pending.remove(apply)
                with suppress(StoreError):
                    apply()

        self.kernel.at(self.kernel.now + seconds, land)

    def land_all(self) -> None:
        """Whatever is still on its way arrives."""
        pending, self.pending = self.pending, []
        for apply in pending:
            with suppress(StoreError):
                apply()


class _Changed(BytesSource):
    """A body of which a byte was changed on its way: its sender knows the right checksum."""

    def __init__(self, data: bytes, crc32c: int) -> None:
        flipped = bytes([data[0] ^ 1]) + data[1:] if data else data
        super().__init__(flipped)
        self.crc32c = crc32c


def _captured(source: Source) -> BytesSource:
    with source.open() as reader:
        data = b"".join(iter(lambda: bytes(reader.read(1 << 20)), b""))
    captured = BytesSource(data)
    captured.crc32c = source.crc32c
    return captured


class SimStore(Forwarding):
    """The store as one process sees it."""

    def __init__(self, store: MemoryStore, cloud: Cloud, process: Process) -> None:
        super().__init__(store)
        self._cloud = cloud
        self._process = process
        self._stream = process.stream

    # ---- the network

    def _latency(self) -> float:
        return 0.002 + self._stream.rng.random() ** 4 * 0.5

    def _call(
        self,
        operation: str,
        key: str,
        apply: Callable[[], T],
        *,
        changes: bool,
        apply_late: Callable[[], object] | None = None,
    ) -> T:
        process, stream = self._process, self._stream
        kernel = process.kernel
        if kernel.trace is not None and changes:
            kernel.say(f"{operation} {key}")
        process.step(operation)
        try:
            process.wait(self._latency())
        except Killed:
            self._leave(apply_late or apply, changes=changes)
            raise
        self._refuse(operation, key)
        if stream.strikes("lost request"):
            process.wait(stream.rng.random() * 20)
            raise self._lost(operation, key, changes=changes)
        if changes and stream.strikes("late"):
            process.wait(stream.rng.random() * 20)
            self._cloud.later(apply_late or apply, stream.rng.random() ** 2 * LATEST_SECONDS)
            raise AmbiguousError(operation, key, "no answer; applied later")
        result = apply()
        if changes and stream.strikes("doubled"):
            kernel.say(f"{operation} {key} is doubled")
            result = apply()
        if stream.strikes("lost answer"):
            kernel.say(f"{operation} {key} loses its answer")
            process.wait(stream.rng.random() * 20)
            raise self._lost(operation, key, changes=changes)
        process.step(f"{operation} answered")
        process.wait(self._latency())
        return result

    def _leave(self, apply: Callable[[], object], *, changes: bool) -> None:
        """The process is dead, and its request on the way."""
        if changes and self._stream.strikes("outlives its sender"):
            self._cloud.later(apply, self._stream.rng.random() ** 2 * LATEST_SECONDS)

    def _refuse(self, operation: str, key: str) -> None:
        cloud, kernel = self._cloud, self._process.kernel
        if cloud.down_until > kernel.now:
            self._process.wait(1.0)
            raise TransientError(operation, key, "the store is down")
        if cloud.throttled_until > kernel.now and self._stream.rng.random() < 0.5:
            raise ThrottledError(operation, key, "slow down")
        if self._stream.strikes("refused"):
            raise TransientError(operation, key, "503, not applied")

    @staticmethod
    def _lost(operation: str, key: str, *, changes: bool) -> TransientError:
        error = AmbiguousError if changes else TransientError
        return error(operation, key, "no answer")

    def _body(self, source: Source) -> Source:
        captured = _captured(source)
        if self._stream.strikes("changed on its way up"):
            with captured.open() as reader:
                return _Changed(reader.read(), captured.crc32c)
        return captured

    # ---- the port

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        # A store that checks nothing keeps a changed document, which is mended at once; but with
        # the answer lost, or its writer dead, as well it is left to people: one fault too many. So
        # is a shard that is changed on its way and then arrives long after it was given up.
        checks_nothing = self.proof is Proof.READ_BACK
        whole = _captured(source)
        body = whole if checks_nothing and not is_data(key) else self._body(whole)
        late = whole if checks_nothing else body
        if condition is not None and self._stream.strikes("conflict"):
            self._process.wait(self._latency())
            raise PreconditionError("put", key, "409, another write is under way")
        return self._call(
            "put",
            key,
            lambda: self.store.put(key, body, condition=condition),
            changes=True,
            apply_late=lambda: self.store.put(key, late, condition=condition),
        )

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        return self._call("get", key, lambda: self.store.get(key), changes=False)

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        if self._stream.strikes("cut"):
            cut = length // 2
            self._call("read", key, lambda: self.store.read(key, offset, cut, sink), changes=False)
            raise TransientError("read", key, "cut")
        flips = self._stream.strikes("changed on its way down")
        found: list[bytes] = []
        self._call(
            "read",
            key,
            lambda: self.store.read(key, offset, length, lambda view: found.append(bytes(view))),
            changes=False,
        )
        data = b"".join(found)
        if data:
            sink(memoryview(bytes([data[0] ^ 2]) + data[1:] if flips else data))

    def head(self, key: str) -> ObjectInfo:
        return self._call("head", key, lambda: self.store.head(key), changes=False)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """In pages, each of the time when it was asked for."""
        slow = self._stream.strikes("slow listing")
        objects = self._cloud.bucket.objects
        last = ""
        while True:

            def page(after: str = last) -> list[ObjectInfo]:
                keys = sorted(key for key in objects if key.startswith(prefix) and key > after)
                return [
                    ObjectInfo(key, len(item.data), item.version, item.modified)
                    for key in keys[: PAGE + 1 if slow else None]
                    for item in (objects[key],)
                ]

            found = self._call("list", prefix, page, changes=False)
            yield from found[: PAGE if slow else None]
            if not slow or len(found) <= PAGE:
                return
            last = found[PAGE - 1].key
            self._process.wait(self._stream.rng.random() * 20)

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self.store.delete(key), changes=True)

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        return self._call("begin", key, lambda: self.store.begin(key, size, metadata), changes=True)

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        body = self._body(source)
        return self._call(
            "put_part",
            upload.key,
            lambda: self.store.put_part(upload, number, body),
            changes=True,
        )

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        return self._call("parts", upload.key, lambda: self.store.parts(upload), changes=False)

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        return self._call(
            "complete", upload.key, lambda: self.store.complete(upload, parts), changes=True
        )

    def abort(self, upload: Upload) -> None:
        self._call("abort", upload.key, lambda: self.store.abort(upload), changes=True)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        found = self._call(
            "uploads", prefix, lambda: list(self.store.uploads(prefix)), changes=False
        )
        yield from found
