"""Parts by the XML API's multipart uploads: no temporary objects, any process may go on.

The wire format is that of Google's own client, whose helper reads parts whole and cannot go on
with an upload. The service checks the CRC32C of each part; of the whole it takes none, so whoever
completes compares what it says of the object afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.names import is_data
from ds_ckpt_store.errors import AmbiguousError, CorruptionError, NotFoundError, TransientError
from ds_ckpt_store.stores.body import Body
from ds_ckpt_store.stores.gcs.answers import (
    Answer,
    AnsweredError,
    answer_of,
    child_text,
    children,
    local_name,
    parse_xml,
)
from ds_ckpt_store.stores.gcs.objects import TYPE, crc32c_of_header
from ds_ckpt_store.stores.gcs.service import Link, Service
from ds_ckpt_store.stores.port import Part, Source

PATIENCE = 10.0  # times a stall; Google says that a completion may take minutes
PAGE_BYTES = 16 << 20  # of a page of a listing: a thousand entries take far less


class UnknownError(Exception):
    """The server does not know the XML API's multipart uploads."""


class XMLParts:
    """Multipart uploads under one prefix of one bucket.

    Args:
        service: the connection.
        root: of names: the prefix with a slash, or empty.
    """

    def __init__(self, service: Service, root: str) -> None:
        self._service = service
        self._root = root

    def begin(self, key: str, metadata: Mapping[str, str]) -> str:
        """Initiate an upload; its id.

        Raises:
            UnknownError: the server does not know how.
        """
        options = self._service.options
        headers = {"Content-Type": TYPE, "Content-Length": "0"}
        headers.update({f"x-goog-meta-{name}": value for name, value in metadata.items()})
        if options.storage_class is not None and is_data(key):
            headers["x-goog-storage-class"] = options.storage_class
        if options.kms_key is not None:
            headers["x-goog-encryption-kms-key-name"] = options.kms_key
        with self._service.asking("begin", key, write=True) as link, _or_unknown():
            answer = self._send(link, "POST", self._root + key, {"uploads": ""}, headers)
            token = child_text(_document(answer, "InitiateMultipartUploadResult"), "UploadId")
            if not token:
                raise UnknownError
            return token

    def put_part(self, key: str, token: str, number: int, source: Source, *, checked: bool) -> Part:
        """Send one part; a part's token is its ETag."""
        headers = {"Content-Type": TYPE}
        if checked:
            headers["x-goog-hash"] = f"crc32c={digest.to_base64(source.crc32c)}"
        query = {"partNumber": str(number), "uploadId": token}
        with (
            contextlib.closing(Body(source)) as body,
            self._service.asking("put_part", key, write=True, missing="upload") as link,
            contextlib.closing(
                self._send(link, "PUT", self._root + key, query, headers, body)
            ) as answer,
        ):
            answer.raw.read()  # nothing, or the service's words: the pool keeps the connection
            etag = answer.headers.get("etag", "").strip('"')
            told = crc32c_of_header(answer.headers.get("x-goog-hash", ""))
        if not etag:
            raise TransientError("put_part", key, f"part {number}: the answer has no ETag")
        if checked and told not in (None, source.crc32c):
            raise CorruptionError(
                "put_part",
                key,
                f"part {number} was stored with CRC32C {digest.to_hex(told or 0)}, "
                f"{digest.to_hex(source.crc32c)} was sent",
            )
        return Part(number, source.size, source.crc32c, etag)

    def parts(self, key: str, token: str) -> dict[int, tuple[int, str]]:
        """List what the service holds of an upload, over all pages."""
        found = {}
        query = {"uploadId": token, "max-parts": "1000"}
        for page in self._pages("parts", key, self._root + key, query, "ListPartsResult"):
            for part in children(page, "Part"):
                number = int(child_text(part, "PartNumber"))
                found[number] = int(child_text(part, "Size")), child_text(part, "ETag").strip('"')
        return found

    def complete(self, key: str, token: str, parts: Sequence[Part]) -> None:
        """Complete an upload of exactly these parts."""
        listed = "".join(
            f"<Part><PartNumber>{part.number}</PartNumber>"
            f'<ETag>"{escape(part.token)}"</ETag></Part>'
            for part in parts
        )
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        headers = {"Content-Type": "application/xml"}
        with self._service.asking("complete", key, write=True, missing="upload") as link:
            name, query = self._root + key, {"uploadId": token}
            answer = self._send(link, "POST", name, query, headers, body, patience=PATIENCE)
            try:
                _document(answer, "CompleteMultipartUploadResult")
            except UnknownError as error:
                text = f"the answer is unreadable: {error}"
                raise AmbiguousError("complete", key, text) from error

    def abort(self, key: str, token: str) -> None:
        """Abort an upload; no error if it is gone."""
        with (
            contextlib.suppress(NotFoundError),
            self._service.asking("abort", key, write=True, missing="upload") as link,
        ):
            self._send(link, "DELETE", self._root + key, {"uploadId": token}).close()

    def uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Key and id of each unfinished upload under a prefix, over all pages.

        Raises:
            UnknownError: the server does not know how to list them.
        """
        query = {"uploads": "", "prefix": self._root + prefix, "max-uploads": "1000"}
        for page in self._pages("uploads", prefix, "", query, "ListMultipartUploadsResult"):
            for upload in children(page, "Upload"):
                name = child_text(upload, "Key")
                yield name.removeprefix(self._root), child_text(upload, "UploadId")

    # ---- how

    def _pages(
        self, operation: str, key: str, name: str, query: dict[str, str], expected: str
    ) -> Iterator[ElementTree.Element]:
        while True:
            with self._service.asking(operation, key, missing="upload") as link, _or_unknown():
                page = _document(self._send(link, "GET", name, query), expected)
            yield page
            if child_text(page, "IsTruncated") != "true":
                return
            if expected == "ListPartsResult":
                after = {"part-number-marker": child_text(page, "NextPartNumberMarker")}
            else:
                after = {
                    "key-marker": child_text(page, "NextKeyMarker"),
                    "upload-id-marker": child_text(page, "NextUploadIdMarker"),
                }
            if all(query.get(mark) == value for mark, value in after.items()):
                raise TransientError(operation, key, "a listing does not come to its end")
            query = {**query, **after}

    def _send(
        self,
        link: Link,
        method: str,
        name: str,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        *,
        patience: float = 1,
    ) -> Any:
        sent = dict(headers or {})
        if self._service.options.user_project is not None:
            sent["x-goog-user-project"] = self._service.options.user_project
        path = f"/{self._service.bucket}" + (f"/{quote(name, safe='/~')}" if name else "")
        return self._service.send(
            link, method, path, query=query, headers=sent, body=body, patience=patience
        )


@contextlib.contextmanager
def _or_unknown() -> Iterator[None]:
    """Tell a server that lacks these requests from one that refuses this one."""
    try:
        yield
    except AnsweredError as error:
        answer = error.answer
        if answer.status in (400, 404, 405, 501) and not answer.xml:
            raise UnknownError(str(answer)) from error
        raise


def _document(answer: Any, expected: str) -> ElementTree.Element:
    """The document of an answer; an error may come with status 200 after a long wait.

    Raises:
        UnknownError: it is none of what the XML API answers.
    """
    with contextlib.closing(answer):
        body = answer.raw.read(PAGE_BYTES, decode_content=True)
    try:
        root = parse_xml(body)
    except ValueError as error:
        raise UnknownError(str(error)) from error
    if local_name(root) == "Error":
        told = answer_of(500, body)
        raise AnsweredError(Answer(_STATUS.get(told.code, 500), told.code, told.message, xml=True))
    if local_name(root) != expected:
        raise UnknownError(f"{local_name(root)} is no {expected}")
    return root


_STATUS = {"NoSuchUpload": 404, "NoSuchKey": 404, "AccessDenied": 403, "SlowDown": 429}
