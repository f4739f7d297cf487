"""A store in memory, for tests and simulation: the port's contract, with nothing left to chance.

It does for real what the port promises: checks bodies against their checksums, honours
conditions, keeps unfinished uploads, makes a new version token for each write, and lists
consistently. What it *claims* (its capabilities) and what it *does* (the switches) are set apart,
so that weak and lying stores can be tried too.

The data lies in a :class:`MemoryBucket`; two stores over one bucket are two processes, or two
nodes, that see one object store.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.digest import combine_all, crc32c
from ds_ckpt_store.errors import (
    CorruptionError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    SettingsError,
)
from ds_ckpt_store.stores.port import (
    BytesSource,
    Capabilities,
    Condition,
    IfAbsent,
    IfVersion,
    ObjectInfo,
    Part,
    Proof,
    Sink,
    Source,
    Upload,
)

_READ_VIEW = 1 << 20
_PROBE_BODY = b"a body that is changed on its way"


@dataclass(frozen=True)
class StoredObject:
    """One object: its bytes, and what the store knows of them."""

    data: bytes
    version: str
    modified: float
    crc32c: int | None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Unfinished:
    key: str
    metadata: Mapping[str, str]
    modified: float
    parts: dict[int, tuple[bytes, str]] = field(default_factory=dict)


class MemoryBucket:
    """What the store holds, apart from any connection to it.

    Args:
        clock: the store's own clock; it stamps ``modified``.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.objects: dict[str, StoredObject] = {}
        self.unfinished: dict[str, _Unfinished] = {}
        self._serial = itertools.count(1)

    def fresh(self, kind: str) -> str:
        """A token that this bucket never gave before."""
        return f"{kind}{next(self._serial)}"


class MemoryStore:
    """One connection to a :class:`MemoryBucket`.

    Args:
        bucket: where the data lies.
        capabilities: what this store claims.
        honours_create: a put with :class:`IfAbsent` really fails if the object exists.
        honours_swap: a put with :class:`IfVersion` really fails on another version.
        returns_crc32c: ``head`` tells the CRC32C of objects written under STORED_CHECKSUM.
        refuses_corruption: a body or a completion with a wrong checksum is really refused.
        url: what :attr:`url` says.
    """

    def __init__(
        self,
        bucket: MemoryBucket,
        capabilities: Capabilities | None = None,
        *,
        honours_create: bool = True,
        honours_swap: bool = True,
        returns_crc32c: bool = True,
        refuses_corruption: bool = True,
        url: str = "memory://bucket/run",
    ) -> None:
        self.bucket = bucket
        self._capabilities = capabilities or Capabilities()
        self._honours_create = honours_create
        self._honours_swap = honours_swap
        self._returns_crc32c = returns_crc32c
        self._refuses = refuses_corruption
        self._url = url
        self._proof = self._capabilities.proofs[0]

    @property
    def url(self) -> str:
        """What the constructor was told."""
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        """What this store claims."""
        return self._capabilities

    @property
    def proof(self) -> Proof:
        """The proof that writes are made with."""
        return self._proof

    def use_proof(self, proof: Proof) -> None:
        """Make all later writes with this proof."""
        if proof is not Proof.READ_BACK and proof not in self._capabilities.proofs:
            raise SettingsError(f"{self.url} does not offer {proof.value}")
        self._proof = proof

    def refuses_corruption(self, proof: Proof, key: str) -> bool:
        """Whether a body changed on its way is refused under ``proof``."""
        if proof is Proof.READ_BACK:
            return True
        before = self._proof
        self.use_proof(proof)
        try:
            return self._refuses_all(key)
        finally:
            self.use_proof(before)
            self.delete(key)

    def _refuses_all(self, key: str) -> bool:
        good, bad = BytesSource(_PROBE_BODY), BytesSource(_PROBE_BODY)
        bad.crc32c ^= 1
        upload = self.begin(key, bad.size, {})
        try:
            for attempt in (lambda: self.put(key, bad), lambda: self.put_part(upload, 1, bad)):
                try:
                    attempt()
                except CorruptionError:
                    continue
                return False
            if self._proof is not Proof.STORED_CHECKSUM:
                return True
            part = self.put_part(upload, 1, good)
            try:
                self.complete(upload, [Part(1, part.size, bad.crc32c, part.token)])
            except CorruptionError:
                self.put(key, good)
                return self.head(key).crc32c == good.crc32c
            return False
        finally:
            self.abort(upload)

    # ---- objects

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Store one object whole."""
        if source.size > self._capabilities.limits.max_put:
            raise RefusedError("put", key, f"{source.size} bytes are too many for one put")
        data = self._receive("put", key, source)
        with self.bucket.lock:
            self._judge("put", key, condition)
            info = self._store(key, data, {})
        written = self._proof is Proof.WRITTEN_CHECKSUM
        return dataclasses.replace(info, crc32c=crc32c(data)) if written else info

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """A small object whole."""
        with self.bucket.lock:
            found = self._find("get", key)
        return found.data, self._info(key, found)

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """A range, in views of at most 1 MiB."""
        with self.bucket.lock:
            data = self._find("read", key).data
        if offset + length > len(data):
            raise CorruptionError(
                "read", key, f"{offset}+{length} asked for, the object has {len(data)} bytes"
            )
        view = memoryview(data)[offset : offset + length]
        for start in range(0, length, _READ_VIEW):
            sink(view[start : start + _READ_VIEW])

    def head(self, key: str) -> ObjectInfo:
        """What the store says of the object."""
        with self.bucket.lock:
            return self._info(key, self._find("head", key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """The objects as they were when the listing began, in order of key; tells no checksum."""
        with self.bucket.lock:
            found = [
                ObjectInfo(key, len(item.data), item.version, item.modified)
                for key, item in sorted(self.bucket.objects.items())
                if key.startswith(prefix)
            ]
        return iter(found)

    def delete(self, key: str) -> None:
        """Remove an object; it is no error if there is none."""
        with self.bucket.lock:
            self.bucket.objects.pop(key, None)

    # ---- multipart uploads

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """Start an upload."""
        if size > self._capabilities.limits.max_object:
            raise RefusedError("begin", key, f"{size} bytes are too many for one object")
        with self.bucket.lock:
            token = self.bucket.fresh("upload")
            self.bucket.unfinished[token] = _Unfinished(
                key, dict(metadata), self.bucket.clock.time()
            )
        return Upload(key, token)

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        """Store one part; sent again, it replaces the earlier one."""
        limits = self._capabilities.limits
        if not 1 <= number <= limits.max_parts or source.size > limits.max_part:
            raise RefusedError("put_part", upload.key, f"part {number} of {source.size} bytes")
        with self.bucket.lock:
            self._find_upload("put_part", upload)
        data = self._receive("put_part", upload.key, source)
        with self.bucket.lock:
            token = self.bucket.fresh("part")
            unfinished = self._find_upload("put_part", upload)
            unfinished.parts[number] = (data, token)
            unfinished.modified = self.bucket.clock.time()
        written = self._proof is Proof.WRITTEN_CHECKSUM
        return Part(number, len(data), crc32c(data) if written else source.crc32c, token)

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """What the store holds of an upload."""
        with self.bucket.lock:
            held = self._find_upload("parts", upload).parts
            return {number: (len(data), token) for number, (data, token) in sorted(held.items())}

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """Make the object of exactly these parts."""
        with self.bucket.lock:
            unfinished = self._find_upload("complete", upload)
            self._check_parts(upload, unfinished, parts)
            data = b"".join(unfinished.parts[part.number][0] for part in parts)
            whole = combine_all((part.crc32c, part.size) for part in parts)
            if self._proof is Proof.STORED_CHECKSUM and self._refuses and crc32c(data) != whole:
                raise CorruptionError("complete", upload.key, "the whole's checksum differs")
            del self.bucket.unfinished[upload.token]
            return self._store(upload.key, data, unfinished.metadata)

    def abort(self, upload: Upload) -> None:
        """Drop an upload and its parts; no error if it is gone."""
        with self.bucket.lock:
            self.bucket.unfinished.pop(upload.token, None)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Unfinished uploads, as they were when the listing began."""
        with self.bucket.lock:
            found = [
                Upload(item.key, token, item.modified)
                for token, item in self.bucket.unfinished.items()
                if item.key.startswith(prefix)
            ]
        return iter(sorted(found, key=lambda upload: (upload.key, upload.token)))

    def credentials_expiry(self) -> float | None:
        """None: there are no credentials."""
        return None

    def close(self) -> None:
        """Nothing to free: the bucket outlives its connections."""

    # ---- inner workings

    def _receive(self, operation: str, key: str, source: Source) -> bytes:
        with source.open() as reader:
            data = b"".join(iter(lambda: bytes(reader.read(_READ_VIEW)), b""))
        if len(data) != source.size:
            raise RefusedError(operation, key, f"{len(data)} bytes came, {source.size} announced")
        checked = self._refuses and self._proof not in (Proof.READ_BACK, Proof.WRITTEN_CHECKSUM)
        if checked and crc32c(data) != source.crc32c:
            raise CorruptionError(operation, key, "the body does not match its checksum")
        return data

    def _judge(self, operation: str, key: str, condition: Condition) -> None:
        found = self.bucket.objects.get(key)
        if isinstance(condition, IfAbsent) and self._honours_create and found is not None:
            raise PreconditionError(operation, key, f"exists, version {found.version}")
        if isinstance(condition, IfVersion) and self._honours_swap:
            version = found.version if found is not None else "none"
            if version != condition.version:
                raise PreconditionError(operation, key, f"has version {version}")

    def _store(self, key: str, data: bytes, metadata: Mapping[str, str]) -> ObjectInfo:
        checksum = crc32c(data) if self._proof is Proof.STORED_CHECKSUM else None
        item = StoredObject(
            data, self.bucket.fresh("v"), self.bucket.clock.time(), checksum, metadata
        )
        self.bucket.objects[key] = item
        return self._info(key, item)

    def _info(self, key: str, item: StoredObject) -> ObjectInfo:
        checksum = item.crc32c if self._returns_crc32c else None
        return ObjectInfo(key, len(item.data), item.version, item.modified, checksum)

    def _find(self, operation: str, key: str) -> StoredObject:
        try:
            return self.bucket.objects[key]
        except KeyError:
            raise NotFoundError(operation, key, "no such object") from None

    def _find_upload(self, operation: str, upload: Upload) -> _Unfinished:
        try:
            return self.bucket.unfinished[upload.token]
        except KeyError:
            raise NotFoundError(operation, upload.key, f"no upload {upload.token}") from None

    def _check_parts(self, upload: Upload, unfinished: _Unfinished, parts: Sequence[Part]) -> None:
        numbers = [part.number for part in parts]
        if not parts or numbers != sorted(set(numbers)):
            raise RefusedError("complete", upload.key, "no parts, or not in ascending order")
        smallest = self._capabilities.limits.min_part
        for part in parts:
            data, token = unfinished.parts.get(part.number, (b"", ""))
            if token != part.token or len(data) != part.size:
                raise CorruptionError("complete", upload.key, f"part {part.number} is another one")
            if part.number != numbers[-1] and len(data) < smallest:
                raise RefusedError("complete", upload.key, f"part {part.number} is too small")
