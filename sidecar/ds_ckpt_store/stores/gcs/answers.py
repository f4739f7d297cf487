"""What the error answers of Cloud Storage mean, by status and code.

The JSON API says a ``reason``, the XML API a ``Code``; a HEAD and many a proxy say neither, and
then the status decides. Only a refused checksum has no code of its own in the JSON API: its 400
says ``invalid``, and what was invalid stands in the message.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from xml.etree import ElementTree

from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    CorruptionError,
    IdentityError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    StoreError,
    ThrottledError,
    TransientError,
)

ROLE = (
    "grant roles/storage.objectUser on the bucket (storage.objects.get, list, create and delete, "
    "and storage.multipartUploads.*)"
)
REMEDIES = {
    "NoCredentials": (
        "give the pod a service account by Workload Identity, or set "
        "GOOGLE_APPLICATION_CREDENTIALS to a key file"
    ),
    "UserProjectMissing": "the bucket is of requester pays: set DS_CKPT_GCS_USER_PROJECT",
    "UserProjectAccessDenied": "grant serviceusage.services.use on the project that pays",
    "accessNotConfigured": "enable the Cloud Storage API in the project",
    "accountDisabled": "enable billing for the project",
}
_BAD_BYTES = (
    "BadDigest",
    "InvalidDigest",
    "CrcMismatch",
    "InvalidPart",
    "InvalidPartOrder",
    "InvalidRange",
    "requestedRangeNotSatisfiable",
)
_CHANGED = ("crc32c", "multipart: ", "multipart body")  # our framing is right when it is sent
_THROTTLED = ("rateLimitExceeded", "userRateLimitExceeded", "SlowDown", "TooManyRequests")
_HELD = ("retentionPolicyNotMet", "objectUnderActiveHold", "RetentionPolicyNotMet")


@dataclass(frozen=True)
class Answer:
    """An answer that is no success.

    Attributes:
        status: of HTTP.
        code: reason of the JSON API or code of the XML API; empty if it says none.
        message: for a person.
        xml: it is an error of the XML API.
    """

    status: int
    code: str
    message: str
    xml: bool = False

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}".strip().rstrip(": ")


class AnsweredError(Exception):
    """The server answered a request of ours with something else than success."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(str(answer))
        self.answer = answer


def answer_of(status: int, body: bytes) -> Answer:
    """Find code and message in the body of an answer; what is neither XML nor JSON says none."""
    text = body[:4096].decode("utf-8", "replace").strip()
    if text.startswith("<"):
        try:
            root = parse_xml(body)
        except ValueError:
            return Answer(status, "", text[:200])
        if local_name(root) == "Error":
            message = " ".join(filter(None, (child_text(root, n) for n in ("Message", "Details"))))
            return Answer(status, child_text(root, "Code"), message, xml=True)
        return Answer(status, "", text[:200])
    try:
        error = json.loads(body)["error"]
        if isinstance(error, str):  # of the token endpoint
            return Answer(status, error, text[:200])
        reasons = [str(each.get("reason", "")) for each in error.get("errors", ())]
        return Answer(status, reasons[0] if reasons else "", str(error.get("message", "")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Answer(status, "", text[:200])


def kind_of(answer: Answer, write: bool) -> type[StoreError]:
    """Class of the error that an answer stands for; a 404 is told apart by whoever asked."""
    status, code = answer.status, answer.code
    if code in _BAD_BYTES or status == 416:
        return CorruptionError
    if status == 400 and any(word in answer.message.lower() for word in _CHANGED):
        return CorruptionError
    if status == 429 or code in _THROTTLED:
        return ThrottledError
    if code in _HELD or code == "NoSuchBucket":
        return RefusedError
    if status == 401:
        return IdentityError
    if status == 403 or code in REMEDIES:
        return AccessError
    if status == 412:
        return PreconditionError
    if status in (404, 410):
        return NotFoundError
    if status == 408:  # the request did not arrive whole
        return TransientError
    if status == 409 or (status >= 500 and status not in (501, 505)):
        return AmbiguousError if write else TransientError
    return RefusedError


# ---- XML


def parse_xml(body: bytes) -> ElementTree.Element:
    """Parse an answer of the XML API, without anything that a document type could bring in.

    Raises:
        ValueError: it is no XML in UTF-8, or it declares a document type.
    """
    text = body.decode("utf-8")
    if "<!DOCTYPE" in text or "<!ENTITY" in text or "\0" in text:
        raise ValueError("the answer declares a document type")
    try:
        return ElementTree.fromstring(text)  # noqa: S314  no document type, so no entities
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from error


def local_name(element: ElementTree.Element) -> str:
    """Name of an element without its namespace."""
    return element.tag.rpartition("}")[2]


def children(element: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """Children of a name, in whatever namespace."""
    return [child for child in element if local_name(child) == name]


def child_text(element: ElementTree.Element, name: str) -> str:
    """Text of the first child of a name; empty if there is none."""
    return next((child.text or "" for child in children(element, name)), "")
