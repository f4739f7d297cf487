"""``s3://``: S3 and what speaks its protocol, by boto3.

What is taken from boto3 is signing, credentials, connections and parsing. What is not: its
transfer manager (it cannot resume), its retries (``RetryStore`` does that for every store), its
checksum defaults (they hash each body twice) and its chunked framing (many servers lack it).
A body is streamed from its source in large pieces, with one checksum, made before, in a header.

How the store shows that it holds the right bytes is a choice (:class:`Proof`), because S3s differ:
many accept a wrong checksum in silence. Nothing here is trusted by a provider's name: the probe
calls :meth:`S3Store.refuses_corruption`. An ETag is an opaque version and never a checksum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.clock import Clock, SystemClock
from ds_ckpt_store.contract.names import is_data
from ds_ckpt_store.errors import (
    AccessError,
    CorruptionError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    TransientError,
)
from ds_ckpt_store.stores import STALL_SECONDS, bucket_and_prefix
from ds_ckpt_store.stores.body import Body
from ds_ckpt_store.stores.port import (
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
from ds_ckpt_store.stores.rules import BucketRules
from ds_ckpt_store.stores.s3.checks import Checks, check
from ds_ckpt_store.stores.s3.clients import Clients
from ds_ckpt_store.stores.s3.failures import Failures
from ds_ckpt_store.stores.s3.options import S3Options
from ds_ckpt_store.stores.s3.rules import Reader
from ds_ckpt_store.stores.s3.trial import Trial

PROOFS = (Proof.STORED_CHECKSUM, Proof.SIGNED_PAYLOAD, Proof.CONTENT_MD5, Proof.READ_BACK)


class S3Store:
    """One prefix of one bucket.

    Args:
        bucket: its name.
        prefix: without slashes at its ends; may be empty.
        options: where the server is, and how objects are stored there.
        stall_seconds: a connection on which nothing moves for so long is given up.
        clock: for the days of an object lock.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        options: S3Options,
        stall_seconds: float = STALL_SECONDS,
        clock: Clock | None = None,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._root = prefix + "/" if prefix else ""
        self._options = options
        self._proof = Proof.STORED_CHECKSUM
        self._clients = Clients(self.url, options, stall_seconds)
        self._failures = Failures(self._clients, bucket, options.permissions())
        self._clock = clock or SystemClock()

    @classmethod
    def from_url(
        cls, url: str, options: S3Options, stall_seconds: float = STALL_SECONDS
    ) -> S3Store:
        """Open ``s3://bucket/prefix``; nothing is sent yet.

        Raises:
            SettingsError: no bucket, or credentials in the URL.
        """
        return cls(*bucket_and_prefix(url, "[^/]+"), options, stall_seconds)

    # ---- what it is

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def capabilities(self) -> Capabilities:
        """What AWS promises; the probe finds out what this server does."""
        return Capabilities(proofs=PROOFS)

    @property
    def proof(self) -> Proof:
        """The proof in use."""
        return self._proof

    def use_proof(self, proof: Proof) -> None:
        """Make later writes with this proof."""
        self._proof = proof

    def credentials_expiry(self) -> float | None:
        """As botocore knows it of temporary credentials."""
        return self._clients.expiry()

    def close(self) -> None:
        """Close the pools of connections."""
        self._clients.close()

    # ---- objects

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """PutObject, with If-None-Match or If-Match."""
        return self.put_with(self._clients.get(self._proof), self._proof, key, source, condition)

    def put_with(
        self, client: Any, proof: Proof, key: str, source: Source, condition: Condition = None
    ) -> ObjectInfo:
        """Put with another proof, or by another client, than those in use."""
        parameters = self._options.for_new(key, self._clock.time())
        checks = self._check(proof, key, source)
        if checks.crc32c != source.crc32c:
            raise CorruptionError("put", key, "the bytes changed while they were read")
        parameters.update(checks.parameters)
        if isinstance(condition, IfAbsent):
            parameters["IfNoneMatch"] = "*"
        elif isinstance(condition, IfVersion):
            parameters["IfMatch"] = condition.version
        with contextlib.closing(Body(source, checks.sha256)) as body:
            try:
                answer = self._write("put", key, client, "put_object", Body=body, **parameters)
            except NotFoundError as error:
                if not isinstance(condition, IfVersion):
                    raise
                # With If-Match, 404 says that there is no object to match.
                raise PreconditionError("put", key, error.answer) from error
        return ObjectInfo(key, source.size, answer["ETag"], 0.0, _crc(answer))

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """GetObject, whole."""
        with self._asking("get", key) as client:
            answer = client.get_object(
                Bucket=self._bucket, Key=self._root + key, **self._options.for_bytes()
            )
            with contextlib.closing(answer["Body"]) as body:
                data = bytes(body.read())
        modified = answer["LastModified"].timestamp()
        return data, ObjectInfo(key, len(data), answer["ETag"], modified)

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """GetObject of a range; the answer must be the range that was asked for."""
        if length == 0:
            self.head(key)
            return
        last = offset + length - 1
        with self._asking("read", key) as client:
            answer = client.get_object(
                Bucket=self._bucket,
                Key=self._root + key,
                Range=f"bytes={offset}-{last}",
                **self._options.for_bytes(),
            )
        with contextlib.closing(answer["Body"]) as body:
            self._check_range(key, offset, last, answer)
            left = length
            while left:
                with self._failures.turned("read", key, client, write=False):
                    data = body.read(min(digest.CHUNK, left))
                if not data:
                    raise TransientError("read", key, f"ended {left} bytes early")
                sink(memoryview(data))
                left -= len(data)
            with self._failures.turned("read", key, client, write=False):
                body.read()  # nothing is left; says so to the pool, which keeps the connection

    @staticmethod
    def _check_range(key: str, offset: int, last: int, answer: Mapping[str, Any]) -> None:
        given = answer.get("ContentRange", "")
        if not given:  # 200: the whole object, which is right only if it was asked for
            wrong = offset != 0 or answer["ContentLength"] != last + 1
        else:
            wrong = not given.startswith(f"bytes {offset}-{last}/")
        if wrong:
            raise CorruptionError(
                "read",
                key,
                f"asked for bytes {offset}-{last}, got {given or 'the whole object'} "
                f"({answer['ContentLength']} bytes)",
            )

    def head(self, key: str) -> ObjectInfo:
        """HeadObject, with the stored checksum if that is the proof."""
        return self.head_with(self._proof, key)

    def head_with(self, proof: Proof, key: str) -> ObjectInfo:
        """Head under another proof than the one in use."""
        parameters = self._options.for_bytes()
        if proof is Proof.STORED_CHECKSUM:
            parameters["ChecksumMode"] = "ENABLED"
        try:
            with self._asking("head", key) as client:
                answer = client.head_object(Bucket=self._bucket, Key=self._root + key, **parameters)
        except (AccessError, RefusedError):
            # An answer to HEAD has no body that could say why: whoever asks otherwise is told.
            with contextlib.suppress(CorruptionError):
                self.read(key, 0, 1, _nothing)
            raise
        return ObjectInfo(
            key,
            answer["ContentLength"],
            answer["ETag"],
            answer["LastModified"].timestamp(),
            _crc(answer),
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """ListObjectsV2 over all pages; sorted here, since some servers list folder by folder."""
        found = []
        with self._asking("list", prefix) as client:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._root + prefix, **self._options.for_any()
            )
            for page in pages:
                for item in page.get("Contents", ()):
                    found.append(
                        ObjectInfo(
                            item["Key"].removeprefix(self._root),
                            item["Size"],
                            item["ETag"],
                            item["LastModified"].timestamp(),
                        )
                    )
        yield from sorted(found, key=lambda info: info.key.encode())

    def delete(self, key: str) -> None:
        """DeleteObject."""
        with contextlib.suppress(NotFoundError):
            client = self._clients.get()
            self._write("delete", key, client, "delete_object", **self._options.for_any())

    # ---- multipart uploads

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """CreateMultipartUpload; a token is S3's UploadId."""
        del size
        return self.begin_with(self._proof, key, metadata)

    def begin_with(self, proof: Proof, key: str, metadata: Mapping[str, str]) -> Upload:
        """Begin under another proof than the one in use."""
        parameters = self._options.for_new(key, self._clock.time())
        if proof is Proof.STORED_CHECKSUM:
            parameters.update(ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT")
        # Proxies drop headers with underscores, which breaks the signature.
        named = {name.replace("_", "-"): value for name, value in metadata.items()}
        client = self._clients.get()
        answer = self._write(
            "begin", key, client, "create_multipart_upload", Metadata=named, **parameters
        )
        return Upload(key, answer["UploadId"])

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        """UploadPart; a part's token is its ETag."""
        client = self._clients.get(self._proof)
        return self.put_part_with(client, self._proof, upload, number, source)

    def put_part_with(
        self, client: Any, proof: Proof, upload: Upload, number: int, source: Source
    ) -> Part:
        """Put a part with another proof, or by another client, than those in use."""
        parameters = self._options.for_bytes()
        checks = self._check(proof, upload.key, source)
        parameters.update(checks.parameters)
        with contextlib.closing(Body(source, checks.sha256)) as body:
            answer = self._write(
                "put_part",
                upload.key,
                client,
                "upload_part",
                UploadId=upload.token,
                PartNumber=number,
                Body=body,
                **parameters,
            )
        return Part(number, source.size, checks.crc32c, answer["ETag"])

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """ListParts over all pages."""
        found = {}
        with self._asking("parts", upload.key) as client:
            pages = client.get_paginator("list_parts").paginate(
                Bucket=self._bucket,
                Key=self._root + upload.key,
                UploadId=upload.token,
                **self._options.for_bytes(),
            )
            for page in pages:
                for item in page.get("Parts", ()):
                    found[int(item["PartNumber"])] = (int(item["Size"]), str(item["ETag"]))
        return found

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """CompleteMultipartUpload, with the whole's checksum and size if that is the proof."""
        whole = digest.combine_all((part.crc32c, part.size) for part in parts)
        return self.complete_with(self._proof, upload, parts, whole)

    def complete_with(
        self, proof: Proof, upload: Upload, parts: Sequence[Part], whole: int
    ) -> ObjectInfo:
        """Complete under another proof than the one in use; ``whole`` is the CRC32C to send."""
        size = sum(part.size for part in parts)
        listed: list[dict[str, Any]] = [
            {"PartNumber": part.number, "ETag": part.token} for part in parts
        ]
        parameters = self._options.for_bytes()
        if proof is Proof.STORED_CHECKSUM:
            for part, entry in zip(parts, listed, strict=True):
                entry["ChecksumCRC32C"] = digest.to_base64(part.crc32c)
            parameters.update(
                ChecksumCRC32C=digest.to_base64(whole),
                ChecksumType="FULL_OBJECT",
                MpuObjectSize=size,
            )
        answer = self._write(
            "complete",
            upload.key,
            self._clients.get(),
            "complete_multipart_upload",
            UploadId=upload.token,
            MultipartUpload={"Parts": listed},
            **parameters,
        )
        return ObjectInfo(upload.key, size, answer["ETag"], 0.0, _crc(answer))

    def abort(self, upload: Upload) -> None:
        """AbortMultipartUpload."""
        with contextlib.suppress(NotFoundError):
            self._write(
                "abort",
                upload.key,
                self._clients.get(),
                "abort_multipart_upload",
                UploadId=upload.token,
                **self._options.for_any(),
            )

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """ListMultipartUploads over all pages."""
        found = []
        with self._asking("uploads", prefix) as client:
            pages = client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._root + prefix, **self._options.for_any()
            )
            for page in pages:
                for item in page.get("Uploads", ()):
                    key = item["Key"].removeprefix(self._root)
                    begun = item["Initiated"].timestamp() if "Initiated" in item else 0.0
                    found.append(Upload(key, item["UploadId"], begun))
        yield from found

    def refuses_corruption(self, proof: Proof, key: str) -> bool:
        """See :mod:`~ds_ckpt_store.stores.s3.trial`."""
        return Trial(self, self._clients, proof, key).passed()

    # ---- beside the port, for whoever looks for what is wrong

    def rules(self) -> BucketRules:
        """See :mod:`~ds_ckpt_store.stores.rules`."""
        return Reader(self._clients, self._failures, self._bucket, self._root).read()

    def credentials(self) -> str:
        """Where boto3 has found its credentials."""
        with self._asking("credentials", ""):
            return self._clients.source()

    # ---- boto3

    def _check(self, proof: Proof, key: str, source: Source) -> Checks:
        return check(proof, source, locked=self._options.locks and is_data(key))

    def _write(self, operation: str, key: str, client: Any, call: str, **parameters: Any) -> Any:
        with self._failures.turned(operation, key, client, write=True):
            return getattr(client, call)(Bucket=self._bucket, Key=self._root + key, **parameters)

    @contextlib.contextmanager
    def _asking(self, operation: str, key: str) -> Iterator[Any]:
        """The client for calls that change nothing."""
        client = self._clients.get()
        with self._failures.turned(operation, key, client, write=False):
            yield client


def _nothing(_: memoryview) -> None:
    """Take bytes that nobody needs."""


def _crc(answer: Mapping[str, Any]) -> int | None:
    """CRC32C of the whole object, if the answer holds it and not one of a list of parts."""
    value = str(answer.get("ChecksumCRC32C", ""))
    if len(value) != 8 or answer.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    return digest.from_base64(value)
