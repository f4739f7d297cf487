"""Where a Cloud Storage is, and how objects are stored there: ``DS_CKPT_GCS_*``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from ds_ckpt_store.errors import SettingsError
from ds_ckpt_store.stores import shown

Parts = Literal["auto", "xml", "compose"]

_WAYS = ("auto", "xml", "compose")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_CLASSES = ("STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE")
_KMS_KEY = r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+"


@dataclass(frozen=True)
class GCSOptions:
    """Where a Cloud Storage is; who we are is left to Application Default Credentials.

    Attributes:
        endpoint: ``http(s)://host[:port]``; None: Google's own.
        anonymous: send no credentials; by default only to an endpoint without TLS, so that no
            token ever travels in the clear unless that was asked for.
        user_project: project that pays for requests to a bucket of requester pays.
        kms_key: name of the Cloud KMS key that new objects are encrypted with; None: the bucket's.
        storage_class: of shards; None: the bucket's own class.
        parts: how large objects are sent: ``xml`` (XML multipart uploads), ``compose`` (temporary
            objects), or ``auto`` (the first, if the server knows it).
        ca_bundle: file of certificates that vouch for the endpoint; None: what requests trusts.
    """

    endpoint: str | None = None
    anonymous: bool = False
    user_project: str | None = None
    kms_key: str | None = None
    storage_class: str | None = None
    parts: Parts = "auto"
    ca_bundle: str | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> GCSOptions:
        """Read ``DS_CKPT_GCS_ENDPOINT``, ``_ANONYMOUS``, ``_USER_PROJECT`` and the others.

        Raises:
            SettingsError: a value cannot work.
        """
        name = "DS_CKPT_GCS_ENDPOINT"
        if not environ.get(name):
            name = "STORAGE_EMULATOR_HOST"  # as Google's own libraries know it
        endpoint = environ.get(name) or None
        if endpoint is not None and not re.fullmatch(r"https?://[^/?#@]+/?", endpoint):
            raise SettingsError(f"{name}={shown(endpoint)}: write http(s)://host[:port]")
        in_the_clear = endpoint is not None and endpoint.startswith("http://")
        return cls(
            endpoint=endpoint.rstrip("/") if endpoint else None,
            anonymous=_anonymous(environ, default=in_the_clear),
            user_project=environ.get("DS_CKPT_GCS_USER_PROJECT") or None,
            kms_key=_kms_key(environ),
            storage_class=_storage_class(environ),
            parts=_parts(environ),
            ca_bundle=_ca_bundle(environ),
        )


def _anonymous(environ: Mapping[str, str], *, default: bool) -> bool:
    text = environ.get("DS_CKPT_GCS_ANONYMOUS", "").strip().lower()
    if text and text not in _TRUE + _FALSE:
        raise SettingsError(f"DS_CKPT_GCS_ANONYMOUS={text!r}: write true or false")
    return text in _TRUE if text else default


def _kms_key(environ: Mapping[str, str]) -> str | None:
    key = environ.get("DS_CKPT_GCS_KMS_KEY") or None
    if key is not None and not re.fullmatch(_KMS_KEY, key):
        raise SettingsError(
            f"DS_CKPT_GCS_KMS_KEY={key!r}: write "
            f"projects/PROJECT/locations/PLACE/keyRings/RING/cryptoKeys/KEY"
        )
    return key


def _storage_class(environ: Mapping[str, str]) -> str | None:
    name = environ.get("DS_CKPT_GCS_STORAGE_CLASS", "").strip().upper()
    if name and name not in _CLASSES:
        raise SettingsError(
            f"DS_CKPT_GCS_STORAGE_CLASS={name!r}: write one of {', '.join(_CLASSES)}"
        )
    return name or None


def _parts(environ: Mapping[str, str]) -> Parts:
    way = environ.get("DS_CKPT_GCS_PARTS", "").strip().lower() or "auto"
    if way not in _WAYS:
        raise SettingsError(f"DS_CKPT_GCS_PARTS={way!r}: write one of {', '.join(_WAYS)}")
    return cast(Parts, way)


def _ca_bundle(environ: Mapping[str, str]) -> str | None:
    bundle = environ.get("DS_CKPT_GCS_CA_BUNDLE") or None
    if bundle is not None and not os.path.exists(bundle):
        raise SettingsError(f"DS_CKPT_GCS_CA_BUNDLE={bundle!r}: there is no such file")
    return bundle
