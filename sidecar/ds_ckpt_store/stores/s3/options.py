"""Where an S3 is, and how objects are stored there: ``DS_CKPT_S3_*``.

Some settings are for every object, some for data only, which means shards and their companions:
all keys but those of the protocol's own small objects (``.ds_ckpt/...`` and ``latest``). Those are
read and replaced all the time: in an archive, or locked, they would stop every save.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qsl, urlencode

from ds_ckpt_store.contract.names import is_data
from ds_ckpt_store.errors import SettingsError
from ds_ckpt_store.stores import shown, shown_path

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_PREFIX = "DS_CKPT_S3_"
_ENCRYPTIONS = {"sse-s3": "AES256", "sse-kms": "aws:kms", "sse-c": ""}
_ACLS = ("private", "bucket-owner-read", "bucket-owner-full-control")
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
_KEY_BYTES = 32
_MOST_DAYS = 36_500
_MOST_TAGS, _TAG_KEY, _TAG_VALUE = 10, 128, 256


@dataclass(frozen=True)
class S3Options:
    """Where an S3 is; who we are is left to boto3's own chain of credentials.

    Attributes:
        endpoint_url: ``http(s)://host[:port]``; None: boto3's own (``AWS_ENDPOINT_URL``, else AWS).
        region: None: boto3's own.
        path_style: bucket in the path (True) or in the host name (False); None: in the path if an
            endpoint is set.
        ca_bundle: file of certificates to trust; None: boto3's own.
        requester_pays: we agree to pay for what we ask of a bucket that asks for that.
        acl: canned ACL of every object.
        encryption: ``AES256`` or ``aws:kms`` of every object; None: the bucket's own default.
        kms_key: id or ARN of the key; None: the account's own for S3.
        kms_context: the encryption context, JSON in base64 as S3 wants it.
        kms_bucket_key: whether to use a bucket key; None: as the bucket says.
        customer_key: key of 32 bytes that the server encrypts with and does not keep.
        storage_class: of data.
        tags: of data, encoded as in a URL's query.
        lock_mode: ``GOVERNANCE`` or ``COMPLIANCE``: the object lock of data.
        lock_days: how long from the upload on.
        legal_hold: whether data is held until somebody lifts that.
    """

    endpoint_url: str | None = None
    region: str | None = None
    path_style: bool | None = None
    ca_bundle: str | None = None
    requester_pays: bool = False
    acl: str | None = None
    encryption: str | None = None
    kms_key: str | None = None
    kms_context: str | None = None
    kms_bucket_key: bool | None = None
    customer_key: bytes | None = field(default=None, repr=False)
    storage_class: str | None = None
    tags: str | None = None
    lock_mode: str | None = None
    lock_days: int = 0
    legal_hold: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> S3Options:
        """Read ``DS_CKPT_S3_*``; docs/stores/s3.md lists them.

        Raises:
            SettingsError: a value, or two together, cannot work.
        """
        read = _Reader(environ)
        endpoint = read.text("ENDPOINT", r"https?://[^/?#@]+/?", "http(s)://host[:port]")
        bundle = read.text("CA_BUNDLE")
        if bundle is not None and not os.path.exists(bundle):
            raise read.wrong("CA_BUNDLE", "there is no such file")
        storage_class = read.text("STORAGE_CLASS", r"[A-Z0-9_-]+", "a class as S3 spells it")
        if storage_class in _ARCHIVES:
            raise read.wrong(
                "STORAGE_CLASS",
                "what is archived cannot be read when it is to be restored; write GLACIER_IR, or "
                "let a rule of the bucket archive old checkpoints",
            )
        encryption = read.one_of("ENCRYPTION", tuple(_ENCRYPTIONS))
        options = cls(
            endpoint_url=endpoint,
            region=read.text("REGION"),
            path_style=read.flag("PATH_STYLE"),
            ca_bundle=bundle,
            requester_pays=read.one_of("REQUEST_PAYER", ("requester",)) is not None,
            acl=read.one_of("ACL", _ACLS),
            encryption=_ENCRYPTIONS[encryption] or None if encryption else None,
            kms_key=read.needs("KMS_KEY_ID", "ENCRYPTION", "sse-kms"),
            kms_context=_context(read),
            kms_bucket_key=read.flag("KMS_BUCKET_KEY"),
            customer_key=_customer_key(read),
            storage_class=storage_class,
            tags=_tags(read),
            lock_mode=_upper(read.one_of("OBJECT_LOCK", ("governance", "compliance"))),
            lock_days=_days(read),
            legal_hold=bool(read.flag("LEGAL_HOLD")),
        )
        read.needs("KMS_BUCKET_KEY", "ENCRYPTION", "sse-kms")
        if options.endpoint_url is not None:
            options.check_endpoint(options.endpoint_url)
        return options

    def check_endpoint(self, url: str) -> None:
        """Refuse to send a customer's key in the clear.

        Raises:
            SettingsError: there is one, and the endpoint does not speak TLS.
        """
        if self.customer_key is not None and not url.startswith("https://"):
            raise SettingsError(
                f"DS_CKPT_S3_ENCRYPTION=sse-c: the key would go to {url} in the clear; "
                f"use an endpoint with https"
            )

    @property
    def locks(self) -> bool:
        """Whether data is locked, for which S3 demands a checksum with each body."""
        return self.lock_mode is not None or self.legal_hold

    # ---- parameters of calls

    def for_any(self) -> dict[str, Any]:
        """Of every call."""
        return {"RequestPayer": "requester"} if self.requester_pays else {}

    def for_bytes(self) -> dict[str, Any]:
        """Of a call that sends or takes an object's bytes, or says what it is."""
        parameters = self.for_any()
        if self.customer_key is not None:
            # boto3 would do this for some calls only.
            md5 = hashlib.md5(self.customer_key, usedforsecurity=False).digest()
            parameters["SSECustomerAlgorithm"] = "AES256"
            parameters["SSECustomerKey"] = base64.b64encode(self.customer_key).decode()
            parameters["SSECustomerKeyMD5"] = base64.b64encode(md5).decode()
        return parameters

    def for_new(self, key: str, now: float) -> dict[str, Any]:
        """Of a call that creates an object, whole or in parts.

        Args:
            key: relative to the store's prefix.
            now: seconds since the epoch, from which a lock's days are counted.
        """
        parameters = {
            **self.for_bytes(),
            "ACL": self.acl,
            "ServerSideEncryption": self.encryption,
            "SSEKMSKeyId": self.kms_key,
            "SSEKMSEncryptionContext": self.kms_context,
            "BucketKeyEnabled": self.kms_bucket_key,
        }
        if is_data(key):
            parameters["StorageClass"] = self.storage_class
            parameters["Tagging"] = self.tags
            if self.lock_mode is not None:
                until = datetime.fromtimestamp(now, timezone.utc) + timedelta(days=self.lock_days)
                parameters["ObjectLockMode"] = self.lock_mode
                parameters["ObjectLockRetainUntilDate"] = until
            if self.legal_hold:
                parameters["ObjectLockLegalHoldStatus"] = "ON"
        return {name: value for name, value in parameters.items() if value is not None}

    def permissions(self) -> str:
        """What these settings need beside the usual, for a message."""
        needed = [
            ("s3:PutObjectTagging", self.tags),
            ("s3:PutObjectAcl", self.acl),
            ("s3:PutObjectRetention", self.lock_mode),
            ("s3:PutObjectLegalHold", self.legal_hold),
            ("kms:GenerateDataKey and kms:Decrypt on the key", self.encryption == "aws:kms"),
        ]
        return "".join(f", and {name}" for name, used in needed if used)


class _Reader:
    """Variables of an environment, each refused with its name."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def wrong(self, name: str, why: str) -> SettingsError:
        return SettingsError(f"{_PREFIX}{name}={self.text(name)!r}: {why}")

    def text(self, name: str, pattern: str = "", shape: str = "") -> str | None:
        value = self._environ.get(_PREFIX + name, "").strip() or None
        if value is not None and pattern and not re.fullmatch(pattern, value):
            raise SettingsError(
                f"{_PREFIX}{name}={shown(value) if '://' in value else value!r}: write {shape}"
            )
        return value

    def flag(self, name: str) -> bool | None:
        value = self.text(name)
        if value is None:
            return None
        if value.lower() not in _TRUE + _FALSE:
            raise self.wrong(name, "write true or false")
        return value.lower() in _TRUE

    def one_of(self, name: str, values: tuple[str, ...]) -> str | None:
        value = self.text(name)
        if value is not None and value.lower() not in values:
            raise self.wrong(name, f"write {' or '.join(values)}, or nothing")
        return value.lower() if value else None

    def needs(self, name: str, other: str, value: str) -> str | None:
        """A text that means something only if another setting has one value."""
        found = self.text(name)
        if found is not None and (self.text(other) or "").lower() != value:
            raise SettingsError(f"{_PREFIX}{name} is set: it needs {_PREFIX}{other}={value}")
        return found


def _upper(value: str | None) -> str | None:
    return value.upper() if value else None


def _context(read: _Reader) -> str | None:
    text = read.needs("KMS_CONTEXT", "ENCRYPTION", "sse-kms")
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise read.wrong("KMS_CONTEXT", 'write a JSON object of strings, such as {"team": "a"}')
    return base64.b64encode(json.dumps(value).encode()).decode()


def _customer_key(read: _Reader) -> bytes | None:
    """The key, from its file: 32 bytes as they are, in base64, or in hexadecimal."""
    name = "SSE_C_KEY_FILE"
    path = read.needs(name, "ENCRYPTION", "sse-c")
    if path is None:
        if (read.text("ENCRYPTION") or "").lower() == "sse-c":
            raise SettingsError(f"{_PREFIX}ENCRYPTION=sse-c needs {_PREFIX}{name}")
        return None
    try:
        with open(path, "rb") as file:
            data = file.read(1000)
    except OSError as error:
        raise SettingsError(
            f"{_PREFIX}{name}={shown_path(path)}: cannot be read: {error.strerror}"
        ) from None
    if len(data) == _KEY_BYTES:
        return data
    text = data.strip()
    for decode in (binascii.unhexlify, lambda each: base64.b64decode(each, validate=True)):
        try:
            key = decode(text)
        except ValueError:
            continue
        if len(key) == _KEY_BYTES:
            return key
    raise read.wrong(name, "holds no key of 32 bytes, as they are, in base64 or in hexadecimal")


def _tags(read: _Reader) -> str | None:
    text = read.text("TAGS")
    if text is None:
        return None
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=True)
    except ValueError:
        raise read.wrong("TAGS", "write key=value&key=value, encoded as in a URL") from None
    if len(pairs) > _MOST_TAGS or len(dict(pairs)) != len(pairs):
        raise read.wrong("TAGS", f"at most {_MOST_TAGS}, each key once")
    for key, value in pairs:
        if not 0 < len(key) <= _TAG_KEY or len(value) > _TAG_VALUE or key.startswith("aws:"):
            raise read.wrong(
                "TAGS",
                f"a key has 1 to {_TAG_KEY} characters and does not begin with aws:, a value at "
                f"most {_TAG_VALUE}",
            )
    return urlencode(pairs)


def _days(read: _Reader) -> int:
    days = read.text("OBJECT_LOCK_DAYS", r"\d+", "a number of days")
    if (days is None) != (read.text("OBJECT_LOCK") is None):
        raise SettingsError(
            f"{_PREFIX}OBJECT_LOCK and {_PREFIX}OBJECT_LOCK_DAYS need each other: set both"
        )
    if days is not None and not 1 <= int(days) <= _MOST_DAYS:
        raise read.wrong("OBJECT_LOCK_DAYS", f"write 1 to {_MOST_DAYS}")
    return int(days or 0)
