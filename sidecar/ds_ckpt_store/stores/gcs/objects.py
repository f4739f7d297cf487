"""Whole objects over the JSON API.

google-cloud-storage does head, list and delete. The others go by requests of our own over the same
session, because the SDK reads an upload into memory and copies it, hands a download out in small
pieces, does not show which range was answered, and composes without the key that is to encrypt.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.clock import fresh_token, system_random
from ds_ckpt_store.contract.names import is_data
from ds_ckpt_store.errors import (
    CorruptionError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    StoreError,
    TransientError,
)
from ds_ckpt_store.stores.body import Body
from ds_ckpt_store.stores.gcs.service import Service
from ds_ckpt_store.stores.port import Condition, IfAbsent, IfVersion, ObjectInfo, Sink, Source

LARGEST = (1 << 63) - 1  # generation
TYPE = "application/octet-stream"
AS_STORED = {"Accept-Encoding": "gzip"}  # else an object stored as gzip would come unpacked
LISTED = "items(name,size,generation,timeCreated,crc32c,metadata),nextPageToken"


@dataclass(frozen=True)
class Stored:
    """An object as the service shows it.

    Attributes:
        key: relative to the prefix.
        size: bytes.
        generation: changes with each write.
        modified: seconds since the epoch.
        crc32c: of the whole; None if the answer does not tell.
        metadata: what was kept with it.
    """

    key: str
    size: int
    generation: str
    modified: float = 0.0
    crc32c: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def info(self, *, checksum: bool) -> ObjectInfo:
        """As the port shows it; the checksum only where it was seen to be checked."""
        crc = self.crc32c if checksum else None
        return ObjectInfo(self.key, self.size, self.generation, self.modified, crc)


class Objects:
    """Objects under one prefix of one bucket.

    Args:
        service: the connection.
        root: of names: the prefix with a slash, or empty.
    """

    def __init__(self, service: Service, root: str) -> None:
        self._service = service
        self.root = root

    # ---- writing

    def put(
        self,
        key: str,
        source: Source,
        *,
        checked: bool,
        condition: Condition = None,
        metadata: Mapping[str, str] | None = None,
        part_of: str | None = None,
        operation: str = "put",
    ) -> Stored:
        """Write one object by one request, its body streamed.

        Args:
            key: relative to the prefix.
            source: the bytes.
            checked: send the CRC32C along, for the service to check.
            condition: on the object that is there.
            metadata: kept with the object.
            part_of: the key of the object that it will be a part of: that one's storage class is
                its own, and messages name it.
            operation: for messages.
        """
        name = self.root + key
        resource: dict[str, Any] = {"name": name, "contentType": TYPE}
        if checked:
            resource["crc32c"] = digest.to_base64(source.crc32c)
        if metadata:
            resource["metadata"] = dict(metadata)
        named = part_of or key
        options = self._service.options
        if options.storage_class is not None and is_data(named):
            resource["storageClass"] = options.storage_class
        query = {
            "uploadType": "multipart",
            "name": name,
            **self._generation(key, condition),
            **self._written(),
        }
        body = _Related(resource, source)
        with (
            contextlib.closing(body),
            self._service.asking(operation, named, write=True, missing="bucket") as link,
        ):
            path = f"/upload/storage/v1/b/{self._service.bucket}/o"
            headers = {"Content-Type": body.content_type}
            answer = self._service.send(
                link, "POST", path, query=query, headers=headers, body=body
            ).json()
        if answer.get("name") != name:
            raise CorruptionError(operation, named, f"was stored as {answer.get('name')!r}")
        return _stored(key, answer)

    def _written(self) -> dict[str, str]:
        """Parameters of whatever makes an object."""
        kms_key = self._service.options.kms_key
        return self._paid() if kms_key is None else {"kmsKeyName": kms_key, **self._paid()}

    def _paid(self) -> dict[str, str]:
        """Parameters of every request of our own."""
        project = self._service.options.user_project
        return {} if project is None else {"userProject": project}

    def _path(self, key: str) -> str:
        return f"/storage/v1/b/{self._service.bucket}/o/{quote(self.root + key, safe='')}"

    def _generation(self, key: str, condition: Condition) -> dict[str, str]:
        if isinstance(condition, IfAbsent):
            return {"ifGenerationMatch": "0"}
        if isinstance(condition, IfVersion):
            version = condition.version
            if not version.isdecimal() or not 0 < int(version) <= LARGEST:
                raise PreconditionError("put", key, f"has no version {condition.version!r}")
            return {"ifGenerationMatch": condition.version}
        return {}

    def compose(
        self,
        key: str,
        parts: Sequence[Stored],
        metadata: Mapping[str, str],
        *,
        part_of: str,
        consume: bool,
    ) -> Stored:
        """Put up to 32 objects together into one, which gets their storage class.

        Args:
            key: of the object to be.
            parts: in order; none of another generation is taken.
            metadata: kept with the object.
            part_of: the key that messages name.
            consume: remove the parts in the same step, without fees and soft-deleted copies.
        """
        # By a request of our own: the SDK leaves out the key that encrypts what is made.
        request = {
            "sourceObjects": [
                {
                    "name": self.root + part.key,
                    "generation": part.generation,
                    "objectPreconditions": {"ifGenerationMatch": part.generation},
                }
                for part in parts
            ],
            "destination": {"contentType": TYPE, "metadata": dict(metadata)},
            "deleteSourceObjects": consume,
        }
        with self._service.asking("complete", part_of, write=True) as link:
            answer = self._service.send(
                link,
                "POST",
                f"{self._path(key)}/compose",
                query=self._written(),
                headers={"Content-Type": "application/json"},
                body=json.dumps(request).encode(),
            ).json()
        return _stored(key, answer)

    def delete(self, key: str, generation: str | None = None) -> None:
        """Remove an object, or one generation of it for good; no error if it is not there."""
        number = int(generation) if generation is not None else None
        with (
            contextlib.suppress(NotFoundError),
            self._service.asking("delete", key, write=True) as link,
        ):
            link.bucket.blob(self.root + key, generation=number).delete(
                timeout=self._service.stall_seconds, retry=None
            )

    # ---- reading

    def get(self, key: str) -> tuple[bytes, Stored]:
        """A small object whole, checked against what the service says of it."""
        with self._service.asking("get", key) as link:
            answer = self._service.send(
                link,
                "GET",
                self._path(key),
                query={"alt": "media", **self._paid()},
                headers=AS_STORED,
            )
            with contextlib.closing(answer):
                data = answer.raw.read(decode_content=False)
            headers = answer.headers
        generation = headers.get("x-goog-generation")
        if not generation:
            raise RefusedError(
                "get", key, f"{link.url} does not tell a generation, so nothing could be swapped"
            )
        told = crc32c_of_header(headers.get("x-goog-hash", ""))
        if told is not None and told != digest.crc32c(data):
            raise TransientError("get", key, "arrived changed")
        modified = _seconds(headers.get("last-modified", ""))
        return data, Stored(key, len(data), generation, modified, told)

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """A range, in pieces of at most 1 MiB; the answer must be the range asked for."""
        last = offset + length - 1
        with self._service.asking("read", key) as link:
            answer = self._service.send(
                link,
                "GET",
                self._path(key),
                query={"alt": "media", **self._paid()},
                headers={**AS_STORED, "Range": f"bytes={offset}-{last}"},
            )
        with contextlib.closing(answer):
            _check_range(key, offset, last, answer.headers)
            left = length
            while left:
                with self._service.asking("read", key):
                    piece = answer.raw.read(min(digest.CHUNK, left), decode_content=False)
                if not piece:
                    raise TransientError("read", key, f"ended {left} bytes early")
                sink(memoryview(piece))
                left -= len(piece)
            with self._service.asking("read", key):
                answer.raw.read(decode_content=False)  # nothing: the pool keeps the connection

    def head(self, key: str, operation: str = "head", *, part_of: str | None = None) -> Stored:
        """What the service says of an object; ``part_of`` is the key that messages name."""
        with self._service.asking(operation, part_of or key) as link:
            blob = link.bucket.blob(self.root + key)
            blob.reload(projection="noAcl", timeout=self._service.stall_seconds, retry=None)
            return _of_blob(key, blob)

    def list(self, prefix: str, operation: str = "list") -> list[Stored]:
        """All objects under a prefix, over all pages, in order of the bytes of their keys."""
        with self._service.asking(operation, prefix, missing="bucket") as link:
            blobs = link.client.list_blobs(
                link.bucket,
                prefix=self.root + prefix or None,
                projection="noAcl",
                fields=LISTED,
                timeout=self._service.stall_seconds,
                retry=None,
            )
            found = [_of_blob(blob.name.removeprefix(self.root), blob) for blob in blobs]
        return sorted(found, key=lambda each: each.key.encode())


class _Related:
    """Body of an upload in two parts: what the object is to be, and its bytes, streamed."""

    def __init__(self, resource: Mapping[str, Any], source: Source) -> None:
        boundary = fresh_token(system_random())
        self.content_type = f'multipart/related; boundary="{boundary}"'
        self._head = (
            f"--{boundary}\r\ncontent-type: application/json; charset=UTF-8\r\n\r\n"
            f"{json.dumps(resource)}\r\n--{boundary}\r\ncontent-type: {TYPE}\r\n\r\n"
        ).encode()
        self._tail = f"\r\n--{boundary}--".encode()
        self._body = Body(source)
        self._size = len(self._head) + source.size + len(self._tail)

    def __len__(self) -> int:
        return self._size

    def read(self, _amount: int = -1) -> bytes | memoryview:
        """The next piece; more than was asked for, and nothing at the end."""
        piece: bytes | memoryview
        if self._head:
            piece, self._head = self._head, b""
        elif not (piece := self._body.read()):
            piece, self._tail = self._tail, b""
        return piece

    def close(self) -> None:
        """Close the reader of the source."""
        self._body.close()


def refuse_other_bytes(
    objects: Objects, operation: str, stored: Stored, crc32c: int, size: int, key: str
) -> None:
    """Compare what the service says that it stored; if it differs, remove that again.

    Raises:
        CorruptionError: it differs; the message names ``key``.
    """
    if (stored.crc32c, stored.size) == (crc32c, size):
        return
    with contextlib.suppress(StoreError):  # whoever looks finds the wrong checksum
        objects.delete(stored.key, stored.generation)
    told = "no CRC32C" if stored.crc32c is None else f"CRC32C {digest.to_hex(stored.crc32c)}"
    raise CorruptionError(
        operation,
        key,
        f"{told} and {stored.size} bytes were stored, CRC32C {digest.to_hex(crc32c)} was sent",
    )


def _check_range(key: str, offset: int, last: int, headers: Mapping[str, str]) -> None:
    given = headers.get("content-range", "")
    length = headers.get("content-length", "")
    if not given:  # 200: the whole object, which is right only if it was asked for
        wrong = offset != 0 or length != str(last + 1)
    else:
        wrong = not given.startswith(f"bytes {offset}-{last}/")
    if wrong:
        raise CorruptionError(
            "read",
            key,
            f"asked for bytes {offset}-{last}, got {given or 'the whole object'} ({length} bytes)",
        )


def _stored(key: str, resource: Mapping[str, Any]) -> Stored:
    checksum = resource.get("crc32c")
    return Stored(
        key,
        int(resource["size"]),
        str(resource["generation"]),
        0.0,
        digest.from_base64(checksum) if checksum else None,
    )


def _of_blob(key: str, blob: Any) -> Stored:
    return Stored(
        key,
        int(blob.size),
        str(blob.generation),
        blob.time_created.timestamp() if blob.time_created else 0.0,
        digest.from_base64(blob.crc32c) if blob.crc32c else None,
        dict(blob.metadata or {}),
    )


def crc32c_of_header(value: str) -> int | None:
    """CRC32C out of ``crc32c=...,md5=...``."""
    for each in value.split(","):
        name, _, text = each.strip().partition("=")
        if name == "crc32c" and len(text) == 8:
            return digest.from_base64(text)
    return None


def _seconds(date: str) -> float:
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return 0.0
