"""Stores behind one port; :func:`open_store` opens one by its URL.

Only ``stores/<provider>`` knows a provider's SDK, and it is imported when a URL asks for it. Each
provider is a module with a function ``open_url(url, environ, stall_seconds)``.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

from ds_ckpt_store.errors import MissingExtraError, SettingsError
from ds_ckpt_store.stores.port import Store

STALL_SECONDS = 60.0

# Scheme of a URL: the provider's module here, and the extra that brings its SDK.
PROVIDERS = {
    "file": ("file", ""),
    "s3": ("s3", "s3"),
    "gs": ("gcs", "gcs"),
    "az": ("azure", "azure"),
    "https": ("azure", "azure"),
}
ANY_OTHER = ("fsspec", "fsspec")


def shown(url: str) -> str:
    """A URL without what may be secret in it: user, password, query and fragment."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    rest = "?..." if parts.query or parts.fragment else ""
    return f"{parts.scheme}://{host}{parts.path}{rest}"


def shown_path(path: str) -> str:
    """A path for a message; one that looks like the secret itself, set in its file's place, is not.

    Keys are written in base64 or hexadecimal, signatures and options with ``=``, ``&`` and ``{``.
    """
    return "..." if re.search(r"[={&]|^[0-9A-Fa-f]{32,}$", path.strip()) else repr(path)


def bucket_and_prefix(url: str, shape: str) -> tuple[str, str]:
    """The bucket of ``scheme://bucket/prefix``, and the prefix without slashes at its ends.

    Args:
        url: the destination.
        shape: regular expression for names of buckets.

    Raises:
        SettingsError: no such bucket, credentials in the URL, or a prefix that is no path.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise SettingsError(f"{parts.scheme}://...@...: credentials do not belong into a URL")
    if not re.fullmatch(shape, parts.netloc):
        raise SettingsError(f"{url!r}: names no bucket; write {parts.scheme}://bucket/prefix")
    prefix = parts.path.strip("/")
    if prefix and any(each in ("", ".", "..") for each in prefix.split("/")):
        raise SettingsError(f"{url!r}: a prefix has no empty part, and none of . and ..")
    return parts.netloc, prefix


def open_store(
    url: str,
    environ: Mapping[str, str] | None = None,
    *,
    stall_seconds: float = STALL_SECONDS,
) -> Store:
    """Open the store at a URL; nothing is sent yet.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``,
            ``https://account.blob.core.windows.net/container/prefix``, ``file:///folder``, or what
            the installed fsspec knows.
        environ: where the provider's settings are looked up (``DS_CKPT_S3_*``); the process's
            environment if None. Credentials are the SDK's own business.
        stall_seconds: a connection on which nothing moves for so long is given up.

    Raises:
        SettingsError: the URL or a setting cannot work.
        MissingExtraError: the provider's SDK is not installed.
    """
    environ = os.environ if environ is None else environ
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise SettingsError(
            f"{shown(url)!r}: a destination has no query and no fragment; credentials belong into "
            "the environment"
        )
    if not parts.scheme:
        raise SettingsError(
            f"{url!r}: names no kind of store; write {_schemes()}, or what fsspec knows"
        )
    module, extra = PROVIDERS.get(parts.scheme, ANY_OTHER)
    try:
        provider = importlib.import_module(f"{__name__}.{module}")
    except ModuleNotFoundError as error:
        if parts.scheme not in PROVIDERS:
            raise SettingsError(
                f"unknown kind of store {parts.scheme!r}; known are {_schemes()}, and what fsspec "
                f"knows once it is there: pip install 'ds-ckpt-sidecar[{extra}]'"
            ) from None
        raise MissingExtraError(f"{parts.scheme}:// ({error.name})", extra) from None
    return cast(Store, provider.open_url(url, environ, stall_seconds))


def _schemes() -> str:
    return ", ".join(f"{scheme}://" for scheme in PROVIDERS)
