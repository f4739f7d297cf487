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

import base64
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore import exceptions as aws
from botocore.config import Config
from botocore.parsers import ResponseParserError

from ds_ckpt_store.contract import digest
from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    CkptError,
    CorruptionError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    SettingsError,
    StoreError,
    TransientError,
)
from ds_ckpt_store.stores import STALL_SECONDS
from ds_ckpt_store.stores.body import Body
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
from ds_ckpt_store.stores.s3.answers import REMEDIES, kind_of
from ds_ckpt_store.stores.s3.options import S3Options
from ds_ckpt_store.stores.s3.signing import prepare

CONNECTIONS = 64
PROOFS = (Proof.STORED_CHECKSUM, Proof.SIGNED_PAYLOAD, Proof.CONTENT_MD5, Proof.READ_BACK)

_NO_CREDENTIALS = (
    aws.NoCredentialsError,
    aws.PartialCredentialsError,
    aws.CredentialRetrievalError,
    aws.TokenRetrievalError,
    aws.SSOError,
)
_NOT_SENT = (aws.EndpointConnectionError, aws.ConnectTimeoutError, aws.ProxyConnectionError)


class S3Store:
    """One prefix of one bucket.

    Args:
        bucket: its name.
        prefix: without slashes at its ends; may be empty.
        options: where the server is.
        stall_seconds: a connection on which nothing moves for so long is given up.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        options: S3Options,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._root = prefix + "/" if prefix else ""
        self._options = options
        self._stall_seconds = stall_seconds
        self._proof = Proof.STORED_CHECKSUM
        self._lock = threading.Lock()
        self._clients: dict[bool, Any] = {}

    @classmethod
    def from_url(
        cls, url: str, options: S3Options, stall_seconds: float = STALL_SECONDS
    ) -> S3Store:
        """Open ``s3://bucket/prefix``; nothing is sent yet.

        Raises:
            SettingsError: no bucket, or credentials in the URL.
        """
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise SettingsError("s3://...@...: credentials do not belong into a URL")
        if not parts.netloc:
            raise SettingsError(f"{url!r}: names no bucket; write s3://bucket/prefix")
        return cls(parts.netloc, parts.path.strip("/"), options, stall_seconds)

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

    def close(self) -> None:
        """Close the pools of connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    # ---- objects

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """PutObject, with If-None-Match or If-Match."""
        return self._put(self._client(self._proof), self._proof, key, source, condition)

    def _put(
        self, client: Any, proof: Proof, key: str, source: Source, condition: Condition = None
    ) -> ObjectInfo:
        parameters = _checksums(proof, source)
        if isinstance(condition, IfAbsent):
            parameters["IfNoneMatch"] = "*"
        elif isinstance(condition, IfVersion):
            parameters["IfMatch"] = condition.version
        with contextlib.closing(Body(source)) as body:
            try:
                answer = self._write("put", key, client.put_object, Body=body, **parameters)
            except NotFoundError as error:
                if not isinstance(condition, IfVersion):
                    raise
                # With If-Match, 404 says that there is no object to match.
                raise PreconditionError("put", key, error.answer) from error
        return ObjectInfo(key, source.size, answer["ETag"], 0.0, _crc(answer))

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """GetObject, whole."""
        with self._errors("get", key):
            answer = self._client().get_object(Bucket=self._bucket, Key=self._root + key)
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
        with self._errors("read", key):
            answer = self._client().get_object(
                Bucket=self._bucket, Key=self._root + key, Range=f"bytes={offset}-{last}"
            )
        with contextlib.closing(answer["Body"]) as body:
            self._check_range(key, offset, last, answer)
            left = length
            while left:
                with self._errors("read", key):
                    data = body.read(min(digest.CHUNK, left))
                if not data:
                    raise TransientError("read", key, f"ended {left} bytes early")
                sink(memoryview(data))
                left -= len(data)
            with self._errors("read", key):
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
        parameters = {}
        if self._proof is Proof.STORED_CHECKSUM:
            parameters["ChecksumMode"] = "ENABLED"
        with self._errors("head", key):
            answer = self._client().head_object(
                Bucket=self._bucket, Key=self._root + key, **parameters
            )
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
        with self._errors("list", prefix):
            pages = self._client().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._root + prefix):
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
            self._write("delete", key, self._client().delete_object)

    # ---- multipart uploads

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """CreateMultipartUpload; a token is S3's UploadId."""
        del size
        return self._begin(self._proof, key, metadata)

    def _begin(self, proof: Proof, key: str, metadata: Mapping[str, str]) -> Upload:
        parameters: dict[str, Any] = {}
        if proof is Proof.STORED_CHECKSUM:
            parameters = {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}
        # Proxies drop headers with underscores, which breaks the signature.
        named = {name.replace("_", "-"): value for name, value in metadata.items()}
        create = self._client().create_multipart_upload
        answer = self._write("begin", key, create, Metadata=named, **parameters)
        return Upload(key, answer["UploadId"])

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        """UploadPart; a part's token is its ETag."""
        return self._put_part(self._client(self._proof), self._proof, upload, number, source)

    def _put_part(
        self, client: Any, proof: Proof, upload: Upload, number: int, source: Source
    ) -> Part:
        with contextlib.closing(Body(source)) as body:
            answer = self._write(
                "put_part",
                upload.key,
                client.upload_part,
                UploadId=upload.token,
                PartNumber=number,
                Body=body,
                **_checksums(proof, source),
            )
        return Part(number, source.size, source.crc32c, answer["ETag"])

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """ListParts over all pages."""
        found = {}
        with self._errors("parts", upload.key):
            pages = (
                self._client()
                .get_paginator("list_parts")
                .paginate(Bucket=self._bucket, Key=self._root + upload.key, UploadId=upload.token)
            )
            for page in pages:
                for item in page.get("Parts", ()):
                    found[int(item["PartNumber"])] = (int(item["Size"]), str(item["ETag"]))
        return found

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """CompleteMultipartUpload, with the whole's checksum and size if that is the proof."""
        whole = digest.combine_all((part.crc32c, part.size) for part in parts)
        return self._complete(self._proof, upload, parts, whole)

    def _complete(
        self, proof: Proof, upload: Upload, parts: Sequence[Part], whole: int
    ) -> ObjectInfo:
        size = sum(part.size for part in parts)
        listed: list[dict[str, Any]] = [
            {"PartNumber": part.number, "ETag": part.token} for part in parts
        ]
        parameters: dict[str, Any] = {}
        if proof is Proof.STORED_CHECKSUM:
            for part, entry in zip(parts, listed, strict=True):
                entry["ChecksumCRC32C"] = digest.to_base64(part.crc32c)
            parameters = {
                "ChecksumCRC32C": digest.to_base64(whole),
                "ChecksumType": "FULL_OBJECT",
                "MpuObjectSize": size,
            }
        answer = self._write(
            "complete",
            upload.key,
            self._client().complete_multipart_upload,
            UploadId=upload.token,
            MultipartUpload={"Parts": listed},
            **parameters,
        )
        return ObjectInfo(upload.key, size, answer["ETag"], 0.0, _crc(answer))

    def abort(self, upload: Upload) -> None:
        """AbortMultipartUpload."""
        with contextlib.suppress(NotFoundError):
            self._write(
                "abort", upload.key, self._client().abort_multipart_upload, UploadId=upload.token
            )

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """ListMultipartUploads over all pages."""
        found = []
        with self._errors("uploads", prefix):
            pages = self._client().get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._root + prefix):
                for item in page.get("Uploads", ()):
                    key = item["Key"].removeprefix(self._root)
                    found.append(Upload(key, item["UploadId"]))
        yield from found

    # ---- the proof of a proof

    def refuses_corruption(self, proof: Proof, key: str) -> bool:
        """Send bodies whose first byte is changed after checksum and signature were made."""
        if proof is Proof.READ_BACK:
            return True
        self._put(self._client(), Proof.READ_BACK, key, BytesSource(b"plain"))  # may we write?
        uploads: MutableSequence[Upload] = []
        try:
            return self._refuses_corruption(proof, key, uploads)
        except (CorruptionError, RefusedError, AccessError, NotFoundError):
            return False  # what is right was refused: this proof is not for this server
        finally:
            with contextlib.suppress(StoreError):
                for upload in uploads:
                    self.abort(upload)
                self.delete(key)

    def _refuses_corruption(self, proof: Proof, key: str, uploads: MutableSequence[Upload]) -> bool:
        honest = self._client(proof)
        lying = self._new_client(proof)
        lying.meta.events.register("before-send.s3", _change_a_byte)
        small = BytesSource(b"a small object")
        # Two parts, so that a whole's checksum differs from that of its only part.
        bodies = BytesSource(bytes(5 << 20)), BytesSource(b"the second part")
        try:
            self._put(honest, proof, key, small)
            if proof is Proof.STORED_CHECKSUM and self._stored_crc(key) != small.crc32c:
                return False
            if not _refused(lambda: self._put(lying, proof, key, small)):
                return False
            upload = self._begin(proof, key, {})
            uploads.append(upload)
            if not _refused(lambda: self._put_part(lying, proof, upload, 1, small)):
                return False
        finally:
            lying.close()
        if proof is not Proof.STORED_CHECKSUM:
            return True
        whole = digest.combine_all((body.crc32c, body.size) for body in bodies)
        parts = self._put_all(proof, upload, bodies)
        if not _refused(lambda: self._complete(proof, upload, parts, whole ^ 1)):
            return False
        again = self._begin(proof, key, {})
        uploads.append(again)
        self._complete(proof, again, self._put_all(proof, again, bodies), whole)
        return self._stored_crc(key) == whole

    def _put_all(self, proof: Proof, upload: Upload, bodies: Sequence[Source]) -> Sequence[Part]:
        client = self._client(proof)
        return [
            self._put_part(client, proof, upload, number, body)
            for number, body in enumerate(bodies, 1)
        ]

    def _stored_crc(self, key: str) -> int | None:
        with self._errors("head", key):
            answer = self._client().head_object(
                Bucket=self._bucket, Key=self._root + key, ChecksumMode="ENABLED"
            )
        return _crc(answer)

    # ---- boto3

    def _client(self, proof: Proof = Proof.READ_BACK) -> Any:
        """The client whose bodies are signed, or the one whose bodies are not."""
        signed = proof is Proof.SIGNED_PAYLOAD
        with self._lock:
            if signed not in self._clients:
                self._clients[signed] = self._new_client(proof)
            return self._clients[signed]

    def _new_client(self, proof: Proof) -> Any:
        s3: Any = {"payload_signing_enabled": proof is Proof.SIGNED_PAYLOAD}
        if self._options.path_style is not None:
            s3["addressing_style"] = "path" if self._options.path_style else "virtual"
        config: Any = Config(
            s3=s3,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"mode": "standard", "total_max_attempts": 1},
            max_pool_connections=CONNECTIONS,
            # urllib3 gives this one also to the sending of one piece.
            connect_timeout=self._stall_seconds,
            read_timeout=self._stall_seconds,
            tcp_keepalive=True,
            parameter_validation=False,  # ours are made by this module alone
            user_agent_extra="ds-ckpt-sidecar",
        )
        try:
            client = boto3.session.Session().client(
                "s3",
                endpoint_url=self._options.endpoint_url,
                region_name=self._options.region,
                verify=self._options.ca_bundle,
                config=config,
            )
        except (aws.BotoCoreError, ValueError) as error:
            raise SettingsError(f"{self.url}: boto3 cannot make a client: {error}") from error
        prepare(client)
        return client

    def _write(self, operation: str, key: str, call: Callable[..., Any], **parameters: Any) -> Any:
        with self._errors(operation, key, write=True):
            return call(Bucket=self._bucket, Key=self._root + key, **parameters)

    @contextlib.contextmanager
    def _errors(self, operation: str, key: str, *, write: bool = False) -> Iterator[None]:
        try:
            yield
        except aws.ClientError as error:
            raise self._from_answer(operation, key, error, write) from error
        except (aws.BotoCoreError, ResponseParserError) as error:
            raise self._from_failure(operation, key, error, write) from error

    def _from_answer(
        self, operation: str, key: str, error: aws.ClientError, write: bool
    ) -> StoreError:
        """What an answer of the server means."""
        code = str(error.response.get("Error", {}).get("Code", ""))
        message = str(error.response.get("Error", {}).get("Message", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        text = f"{status} {code}: {message}"
        kind = kind_of(code, status, write)
        if kind is AccessError:
            remedy = REMEDIES.get(code, REMEDIES["AccessDenied"])
            text = f"{text} (bucket {self._bucket} at {self._where()}); {remedy}"
        elif code == "NoSuchBucket":
            text = (
                f"bucket {self._bucket!r} does not exist at {self._where()}; "
                f"create it or correct the destination"
            )
        return kind(operation, key, text)

    def _from_failure(self, operation: str, key: str, error: Exception, write: bool) -> CkptError:
        """What it means that there is no answer."""
        cause = getattr(error, "kwargs", {}).get("error")
        if isinstance(cause, CkptError):  # the source of a body raised it while it was sent
            return cause
        where = self._where()
        if isinstance(error, _NO_CREDENTIALS):
            return AccessError(operation, key, f"{error}; {REMEDIES['NoCredentials']}")
        if isinstance(error, aws.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
            remedy = "set DS_CKPT_S3_CA_BUNDLE to a file with its certificate authority"
            return RefusedError(operation, key, f"{where} is not trusted: {error}; {remedy}")
        if isinstance(error, _NOT_SENT):
            return TransientError(operation, key, f"{where} cannot be reached: {error}")
        if isinstance(error, (aws.HTTPClientError, aws.IncompleteReadError, ResponseParserError)):
            lost = AmbiguousError if write else TransientError
            return lost(operation, key, f"connection to {where} failed: {error}")
        return RefusedError(operation, key, f"{where}: {error}")

    def _where(self) -> str:
        return str(self._client().meta.endpoint_url)


def _checksums(proof: Proof, source: Source) -> dict[str, Any]:
    """Headers that let the server check a body."""
    if proof is Proof.STORED_CHECKSUM:
        return {"ChecksumCRC32C": digest.to_base64(source.crc32c)}
    if proof is Proof.CONTENT_MD5:
        md5 = hashlib.md5(usedforsecurity=False)
        with contextlib.closing(Body(source)) as body:
            while piece := body.read():
                md5.update(piece)
        return {"ContentMD5": base64.b64encode(md5.digest()).decode()}
    return {}


def _crc(answer: Mapping[str, Any]) -> int | None:
    """CRC32C of the whole object, if the answer holds it and not one of a list of parts."""
    value = str(answer.get("ChecksumCRC32C", ""))
    if len(value) != 8 or answer.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    return digest.from_base64(value)


def _change_a_byte(request: Any, **_: object) -> None:
    """Change the first byte of a body that is about to be sent."""
    if request.method == "PUT":
        body = request.body
        data = bytearray(body if isinstance(body, bytes) else b"".join(iter(body.read, b"")))
        data[0] ^= 1
        request.body = bytes(data)


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except (CorruptionError, RefusedError, AccessError):
        return True
    return False
