"""``az://container/prefix`` and ``https://account.blob...``: the only room that knows azure."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ds_ckpt_store.stores.azure.options import AzureOptions
from ds_ckpt_store.stores.azure.store import AzureStore
from ds_ckpt_store.stores.port import Store

__all__ = ["AzureOptions", "AzureStore", "open_url"]

# The SDK warns through its loggers of what it also raises; without a handler that is for stderr.
logging.getLogger("azure").addHandler(logging.NullHandler())


def open_url(url: str, environ: Mapping[str, str], stall_seconds: float) -> Store:
    """See :func:`ds_ckpt_store.stores.open_store`."""
    return AzureStore(AzureOptions.read(url, environ), stall_seconds)
