"""Stores behind one port; :func:`open_store` opens one by its URL.

Only ``stores/<provider>`` knows a provider's SDK, and it is imported when a URL asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from ds_ckpt_store.errors import MissingExtraError, SettingsError
from ds_ckpt_store.stores.port import Store

SCHEMES = ("file", "s3")


def open_store(url: str, environ: Mapping[str, str] | None = None) -> Store:
    """Open the store at a URL; nothing is sent yet.

    Args:
        url: ``s3://bucket/prefix`` or ``file:///folder``.
        environ: where the provider's settings are looked up (``DS_CKPT_S3_*``); the process's
            environment if None. Credentials are the SDK's own business.

    Raises:
        SettingsError: the URL or a setting cannot work.
        MissingExtraError: the provider's SDK is not installed.
    """
    environ = os.environ if environ is None else environ
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise SettingsError(f"{url!r}: a destination has no query and no fragment")
    if parts.scheme == "file":
        from ds_ckpt_store.stores.file import FileStore

        return FileStore.from_url(url)
    if parts.scheme == "s3":
        try:
            from ds_ckpt_store.stores.s3 import S3Options, S3Store
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"{parts.scheme}:// ({error.name})", "s3") from None
        return S3Store.from_url(url, S3Options.from_environ(environ))
    raise SettingsError(
        f"{url!r}: unknown kind of store {parts.scheme!r}; known are "
        + ", ".join(f"{scheme}://" for scheme in SCHEMES)
    )
