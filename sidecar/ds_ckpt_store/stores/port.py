"""The storage port: what every store promises, and the flags that say what it does not.

Keys are relative to the store's prefix, ``/``-separated, never absolute. All methods are safe to
call from many threads. A method raises only errors of :mod:`ds_ckpt_store.errors`; a provider
turns its SDK's errors into them and is the only judge of what is transient. No method retries:
retries, limits, metrics and faults are decorators around a store, each with one job.

Listing and reading are strongly consistent: what a finished write stored, the next call sees.
"""

from __future__ import annotations

import enum
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from ds_ckpt_store.contract.digest import crc32c

Sink = Callable[[memoryview], None]


class Proof(enum.Enum):
    """How a store shows that it holds the bytes that were sent, strongest first."""

    STORED_CHECKSUM = "stored-checksum"
    """Refuses a wrong CRC32C, and returns the whole object's CRC32C when asked."""
    WRITTEN_CHECKSUM = "written-checksum"
    """Reads again what it has written, and returns the CRC32C of that with each part and object."""
    SIGNED_PAYLOAD = "signed-payload"
    """Refuses a body that does not match the SHA-256 in the request's signature."""
    CONTENT_CRC64 = "content-crc64"
    """Refuses a body that does not match its CRC-64/NVME."""
    CONTENT_MD5 = "content-md5"
    """Refuses a body that does not match its MD5."""
    READ_BACK = "read-back"
    """Shows nothing: the object is read again and compared."""


@dataclass(frozen=True)
class Limits:
    """What a provider allows; bytes, and numbers of parts."""

    min_part: int = 5 << 20
    max_part: int = 5 << 30
    max_parts: int = 10_000
    max_object: int = 5 << 40
    max_put: int = 5 << 30


@dataclass(frozen=True)
class Capabilities:
    """What a store promises by its provider's documentation; the probe checks what it does.

    Attributes:
        conditional_create: a put with :class:`IfAbsent` fails if the object exists.
        swap: a put with :class:`IfVersion` fails if the object has another version.
        parts: an object can be sent in parts; without them each object is sent by one put.
        resumable: parts of an unfinished upload survive this process.
        request_memory: bytes that one request with a body holds at most, beside its source's
            buffer: what the SDK copies.
        proofs: the proofs that may be tried, strongest first; READ_BACK always works.
        limits: sizes and counts.
    """

    conditional_create: bool = True
    swap: bool = True
    parts: bool = True
    resumable: bool = True
    request_memory: int = 1 << 20
    proofs: tuple[Proof, ...] = (Proof.STORED_CHECKSUM, Proof.READ_BACK)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class ObjectInfo:
    """What the store says of one object.

    Attributes:
        key: relative to the prefix.
        size: bytes.
        version: opaque token for :class:`IfVersion`; never a checksum.
        modified: seconds since the epoch by the store's own clock, or 0 if the call does not tell.
        crc32c: of the whole object, as the store computed or checked it; None if it does not say.
    """

    key: str
    size: int
    version: str = ""
    modified: float = 0.0
    crc32c: int | None = None


@dataclass(frozen=True)
class IfAbsent:
    """Write only if there is no such object."""


@dataclass(frozen=True)
class IfVersion:
    """Write only over this version of the object."""

    version: str


Condition = IfAbsent | IfVersion | None


class Source(Protocol):
    """Bytes to send: a whole small object or one part. Can be opened again for a retry."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def crc32c(self) -> int:
        """CRC32C of those bytes; computed when it is first asked for, which reads them all."""

    def open(self) -> BinaryIO:
        """A seekable reader over exactly those bytes; ``read`` may return a memoryview."""


class FileSource:
    """Base of a source that is a range of an open file; a store may copy it within the kernel.

    Attributes:
        fd: descriptor opened for reading.
        offset: where its bytes begin.
        size: bytes.
    """

    def __init__(self, fd: int, offset: int, size: int) -> None:
        self.fd = fd
        self.offset = offset
        self.size = size

    def pace(self, size: int) -> None:
        """Wait until ``size`` more bytes may move; whoever reads through ``open`` need not."""


@dataclass(frozen=True)
class Upload:
    """An unfinished multipart upload.

    Attributes:
        key: of the object to be.
        token: the provider's own text, for the journal.
        modified: when it was begun or last written to, as far as a listing tells: seconds since
            the epoch by the store's own clock, or 0.
    """

    key: str
    token: str
    modified: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Part:
    """A stored part. ``number`` counts from 1; ``token`` is the provider's own text."""

    number: int
    size: int
    crc32c: int
    token: str


class Store(Protocol):
    """One prefix of one bucket, container or folder."""

    @property
    def url(self) -> str:
        """The URL that the store was opened with, without credentials."""

    @property
    def capabilities(self) -> Capabilities:
        """What it promises."""

    @property
    def proof(self) -> Proof:
        """The proof that writes are made with."""

    def use_proof(self, proof: Proof) -> None:
        """Make all later writes with this proof. One of ``capabilities.proofs``."""

    def refuses_corruption(self, proof: Proof, key: str) -> bool:
        """Whether a body changed on its way is refused under ``proof``.

        Sends a small object and a small multipart upload under ``key``, each with a byte changed
        after its checksums were made, and a completion with a wrong whole-object checksum where
        the proof has one. Removes what it wrote. For STORED_CHECKSUM the right checksum must also
        come back from :meth:`head`. READ_BACK returns True without a call.
        """

    # ---- objects

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Store one object whole, with the proof in use.

        Raises:
            PreconditionError: the condition did not hold (also when the store cannot tell which of
                two writers won).
            CorruptionError: the store refused the bytes.
            AmbiguousError: the answer was lost; the write may be applied now, later or never.
        """

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """A small object whole, with the version that was read.

        Raises:
            NotFoundError: there is none.
        """

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """A range, handed to ``sink`` in order, in views that are valid during the call only.

        Raises:
            NotFoundError: there is no such object.
            TransientError: fewer bytes came than were asked for; what came was handed over.
            CorruptionError: the object is shorter than ``offset + length``, or the store answered
                another range than it was asked for.
        """

    def head(self, key: str) -> ObjectInfo:
        """What the store says of the object.

        Raises:
            NotFoundError: there is none.
        """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in order of key, over all pages."""

    def delete(self, key: str) -> None:
        """Remove an object; it is no error if there is none."""

    # ---- multipart uploads

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """Start an upload of ``size`` bytes; the key shows nothing until it is completed.

        Args:
            key: of the object to be.
            size: bytes of the whole.
            metadata: kept with the object where the provider can; ``part_size`` (bytes, decimal)
                must be among it if there will be more than one part.
        """

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        """Store one part, with the proof in use; sent again, it replaces the earlier one.

        Raises:
            NotFoundError: the upload is gone: begin anew.
            CorruptionError: the store refused the bytes.
        """

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """What the store holds of an upload: part number to (size, token).

        Raises:
            NotFoundError: the upload is gone.
        """

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """Make the object of exactly these parts, in order of number.

        Under STORED_CHECKSUM the whole's CRC32C, combined from the parts', is sent and checked.

        Raises:
            NotFoundError: the upload is gone: it may have been completed by an earlier call.
            CorruptionError: the store holds other parts or bytes.
        """

    def abort(self, upload: Upload) -> None:
        """Drop an upload and its parts; no error if it is gone."""

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Unfinished uploads of keys that start with ``prefix``."""

    def credentials_expiry(self) -> float | None:
        """When the credentials in use end: seconds since the epoch.

        Of those that renew themselves, what is held just now ends then; it is renewed some minutes
        before. None: it is not known, or they do not end. Asks nobody, waits for nothing, and never
        raises.
        """

    def close(self) -> None:
        """Free connections."""


class BytesSource:
    """A small object from memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)
        self.crc32c = crc32c(data)

    def open(self) -> BinaryIO:
        """A reader over the bytes."""
        return io.BytesIO(self._data)
