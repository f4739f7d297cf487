"""``gs://``: Google Cloud Storage, by google-cloud-storage and google-auth.

Small objects and all that has no body go over the JSON API, with generations as versions. Large
objects go in parts, in one of two ways (:mod:`.parts_xml`, :mod:`.parts_composed`); an upload's
token says which, so that another process goes on in the same way. Nothing here retries.

The service checks the CRC32C of every body that it is sent, and says the CRC32C of every object.
Of a whole put together from parts it takes none to check, so what it says is compared then, and an
object that differs is removed.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from typing import BinaryIO, Literal

from ds_ckpt_store.contract import digest
from ds_ckpt_store.errors import (
    AccessError,
    CorruptionError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    StoreError,
)
from ds_ckpt_store.stores import STALL_SECONDS, bucket_and_prefix
from ds_ckpt_store.stores.gcs.objects import Objects, refuse_other_bytes
from ds_ckpt_store.stores.gcs.options import GCSOptions, Parts
from ds_ckpt_store.stores.gcs.parts_composed import FOLDER, ComposedParts
from ds_ckpt_store.stores.gcs.parts_xml import UnknownError, XMLParts
from ds_ckpt_store.stores.gcs.rules import describe_credentials, read_rules
from ds_ckpt_store.stores.gcs.service import Service
from ds_ckpt_store.stores.port import (
    BytesSource,
    Capabilities,
    Condition,
    IfVersion,
    Limits,
    ObjectInfo,
    Part,
    Proof,
    Sink,
    Source,
    Upload,
)
from ds_ckpt_store.stores.rules import BucketRules

XML: Literal["xml"] = "xml"
COMPOSE: Literal["compose"] = "compose"
PROOFS = (Proof.STORED_CHECKSUM, Proof.READ_BACK)


class GCSStore:
    """One prefix of one bucket.

    Args:
        bucket: its name.
        prefix: without slashes at its ends; may be empty.
        options: where the service is.
        stall_seconds: a connection on which nothing moves for so long is given up.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        options: GCSOptions,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._proof = Proof.STORED_CHECKSUM
        self._way: Parts = options.parts  # "auto" until the server has shown what it knows
        root = prefix + "/" if prefix else ""
        self._service = Service(bucket, options, stall_seconds)
        self._objects = Objects(self._service, root)
        self._xml = XMLParts(self._service, root)
        self._composed = ComposedParts(self._objects)

    @classmethod
    def from_url(
        cls, url: str, options: GCSOptions, stall_seconds: float = STALL_SECONDS
    ) -> GCSStore:
        """Open ``gs://bucket/prefix``; nothing is sent yet.

        Raises:
            SettingsError: no bucket, or credentials in the URL.
        """
        return cls(*bucket_and_prefix(url, r"[a-z0-9][a-z0-9._-]*"), options, stall_seconds)

    # ---- what it is

    @property
    def url(self) -> str:
        """``gs://bucket/prefix``."""
        return f"gs://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def capabilities(self) -> Capabilities:
        """What Google promises; the probe finds out what this server does."""
        smallest = 1 if self._service.options.parts == COMPOSE else Limits.min_part
        return Capabilities(proofs=PROOFS, limits=Limits(min_part=smallest))

    @property
    def proof(self) -> Proof:
        """The proof in use."""
        return self._proof

    def use_proof(self, proof: Proof) -> None:
        """Make later writes with this proof."""
        self._proof = proof

    @property
    def _checked(self) -> bool:
        return self._proof is Proof.STORED_CHECKSUM

    def credentials_expiry(self) -> float | None:
        """As google-auth knows it of the token."""
        return self._service.credentials_expiry()

    def close(self) -> None:
        """Close the pool of connections."""
        self._service.close()

    # ---- objects

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Insert, with ifGenerationMatch."""
        checked = self._checked
        try:
            stored = self._objects.put(key, source, checked=checked, condition=condition)
        except NotFoundError as error:
            if not isinstance(condition, IfVersion):
                raise
            raise PreconditionError("put", key, error.answer) from error
        if checked:
            refuse_other_bytes(self._objects, "put", stored, source.crc32c, source.size, key)
        return stored.info(checksum=checked)

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Get with alt=media, whole."""
        data, stored = self._objects.get(key)
        return data, stored.info(checksum=self._checked)

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """Get with alt=media of a range; the answer must be the range that was asked for."""
        if length == 0:
            self.head(key)
            return
        self._objects.read(key, offset, length, sink)

    def head(self, key: str) -> ObjectInfo:
        """Get of the metadata, with the stored checksum if that is the proof."""
        return self._objects.head(key).info(checksum=self._checked)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List over all pages, without temporary objects of parts."""
        for stored in self._objects.list(prefix):
            if not stored.key.startswith(FOLDER):
                yield stored.info(checksum=self._checked)

    def delete(self, key: str) -> None:
        """Delete."""
        self._objects.delete(key)

    # ---- multipart uploads

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """Begin in the way that is set or that the server knows; the token tells which."""
        del size
        return self._begin(key, metadata, checked=self._checked)

    def _begin(self, key: str, metadata: Mapping[str, str], *, checked: bool) -> Upload:
        if self._way != COMPOSE:
            try:
                token = self._xml.begin(key, metadata)
            except UnknownError as error:
                self._no_xml("begin", key, error)
            else:
                self._way = XML
                return Upload(key, f"{XML}:{token}")
        nonce = self._composed.begin(key, metadata, checked=checked)
        return Upload(key, f"{COMPOSE}:{nonce}")

    def _no_xml(self, operation: str, key: str, error: UnknownError) -> None:
        """Go on by composing, unless it is set otherwise or was otherwise before."""
        if self._way == XML:
            raise RefusedError(
                operation,
                key,
                f"the XML API's multipart uploads are not to be had there ({error}); "
                f"set DS_CKPT_GCS_PARTS=compose or auto",
            ) from error
        self._way = COMPOSE

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        """Send one part."""
        return self._put_part(upload, number, source, checked=self._checked)

    def _put_part(self, upload: Upload, number: int, source: Source, *, checked: bool) -> Part:
        way, token = _way(upload)
        send = self._xml.put_part if way == XML else self._composed.put_part
        return send(upload.key, token, number, source, checked=checked)

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """List the parts over all pages."""
        way, token = _way(upload)
        return (self._xml.parts if way == XML else self._composed.parts)(upload.key, token)

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """Put the parts together, and compare what the service says of the whole."""
        whole = digest.combine_all((part.crc32c, part.size) for part in parts)
        return self._complete(upload, parts, whole, checked=self._checked)

    def _complete(
        self, upload: Upload, parts: Sequence[Part], whole: int, *, checked: bool
    ) -> ObjectInfo:
        way, token = _way(upload)
        if way == XML:
            self._xml.complete(upload.key, token, parts)
            stored = self._objects.head(upload.key, "complete")
        else:
            stored = self._composed.complete(upload.key, token, parts, checked=checked)
        if checked:
            size = sum(part.size for part in parts)
            refuse_other_bytes(self._objects, "complete", stored, whole, size, upload.key)
        return stored.info(checksum=checked)

    def abort(self, upload: Upload) -> None:
        """Drop an upload and its parts."""
        way, token = _way(upload)
        (self._xml.abort if way == XML else self._composed.abort)(upload.key, token)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Unfinished uploads of both ways: another process may have gone the other one."""
        found = [Upload(key, f"{COMPOSE}:{nonce}") for key, nonce in self._composed.uploads(prefix)]
        if self._way != COMPOSE:
            try:
                found += [Upload(key, f"{XML}:{token}") for key, token in self._xml.uploads(prefix)]
            except UnknownError as error:
                self._no_xml("uploads", prefix, error)
        yield from found

    # ---- beside the port, for whoever looks for what is wrong

    def rules(self) -> BucketRules:
        """See :mod:`~ds_ckpt_store.stores.rules`."""
        return read_rules(self._service, self._objects.root)

    def credentials(self) -> str:
        """What kind of credentials google-auth has found."""
        return describe_credentials(self._service)

    # ---- the proof of a proof

    def refuses_corruption(self, proof: Proof, key: str) -> bool:
        """Send bodies with a byte that does not match their checksum."""
        if proof is Proof.READ_BACK:
            return True
        self._objects.put(key, BytesSource(b"plain"), checked=False)  # may we write?
        uploads: MutableSequence[Upload] = []
        try:
            return self._refuses_corruption(key, uploads)
        except (CorruptionError, RefusedError, AccessError, NotFoundError):
            return False  # what is right was refused: this proof is not for this server
        finally:
            with contextlib.suppress(StoreError):
                for upload in uploads:
                    self.abort(upload)
                self.delete(key)

    def _refuses_corruption(self, key: str, uploads: MutableSequence[Upload]) -> bool:
        """Only what the service itself refuses counts: what we compare afterwards was visible."""
        small = BytesSource(b"a small object")
        # Two parts, so that a whole's checksum differs from that of its only part.
        bodies = BytesSource(bytes(Limits.min_part)), BytesSource(b"the second part")
        if self._objects.put(key, small, checked=True).crc32c != small.crc32c:
            return False
        try:
            self._objects.put(key, _Changed(small), checked=True)
        except CorruptionError:
            pass
        else:
            return False
        upload = self._begin(key, {}, checked=True)
        uploads.append(upload)
        try:
            self._put_part(upload, 1, _Changed(bodies[0]), checked=True)
        except CorruptionError:
            pass
        else:
            return False
        parts = self._put_all(upload, bodies)
        whole = digest.combine_all((body.crc32c, body.size) for body in bodies)
        try:
            self._complete(upload, parts, whole ^ 1, checked=True)
        except CorruptionError:
            pass
        else:
            return False
        again = self._begin(key, {}, checked=True)
        uploads.append(again)
        self._complete(again, self._put_all(again, bodies), whole, checked=True)
        return self._objects.head(key).crc32c == whole

    def _put_all(self, upload: Upload, bodies: Sequence[Source]) -> Sequence[Part]:
        return [
            self._put_part(upload, number, body, checked=True)
            for number, body in enumerate(bodies, 1)
        ]


class _Changed:
    """A body whose first byte was changed after its checksum was made."""

    def __init__(self, source: BytesSource) -> None:
        with source.open() as reader:
            data = bytearray(reader.read())
        data[0] ^= 1
        self._data = bytes(data)
        self.size = source.size
        self.crc32c = source.crc32c

    def open(self) -> BinaryIO:
        """A reader over the changed bytes."""
        return io.BytesIO(self._data)


def _way(upload: Upload) -> tuple[str, str]:
    """The way that an upload goes, and its name there."""
    way, _, token = upload.token.partition(":")
    if way not in (XML, COMPOSE) or not token or ("/" in token and way == COMPOSE):
        raise NotFoundError("upload", upload.key, f"{upload.token!r} is no upload of this store")
    return way, token
