"""Any other URL that the installed fsspec knows: the only room that knows fsspec.

One adapter for file systems that nobody here has examined, so it promises what all of them can do
and no more: objects are stored whole, read in ranges, listed and deleted. It has no conditions, no
parts and no checksums, so ``probe.fit`` refuses it unless a weak store is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_ckpt_store.stores.fsspec.options import FsspecOptions
from ds_ckpt_store.stores.fsspec.store import FsspecStore
from ds_ckpt_store.stores.port import Store

__all__ = ["FsspecOptions", "FsspecStore", "open_url"]


def open_url(url: str, environ: Mapping[str, str], stall_seconds: float) -> Store:
    """See :func:`ds_ckpt_store.stores.open_store`."""
    return FsspecStore(FsspecOptions.from_url(url, environ, stall_seconds))
