"""``s3://bucket/prefix``: the only room that knows boto3."""

from __future__ import annotations

from collections.abc import Mapping

from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.s3.options import S3Options
from ds_ckpt_store.stores.s3.store import S3Store

__all__ = ["S3Options", "S3Store", "open_url"]


def open_url(url: str, environ: Mapping[str, str], stall_seconds: float) -> Store:
    """See :func:`ds_ckpt_store.stores.open_store`."""
    return S3Store.from_url(url, S3Options.from_environ(environ), stall_seconds)
