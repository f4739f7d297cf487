"""``gs://bucket/prefix``: the only room that knows google-cloud-storage."""

from __future__ import annotations

from collections.abc import Mapping

from ds_ckpt_store.stores.gcs.options import GCSOptions
from ds_ckpt_store.stores.gcs.store import GCSStore
from ds_ckpt_store.stores.port import Store

__all__ = ["GCSOptions", "GCSStore", "open_url"]


def open_url(url: str, environ: Mapping[str, str], stall_seconds: float) -> Store:
    """See :func:`ds_ckpt_store.stores.open_store`."""
    return GCSStore.from_url(url, GCSOptions.from_environ(environ), stall_seconds)
