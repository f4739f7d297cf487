"""``file://``: a folder as a store: NFS, a persistent volume, a disk, a RAM disk.

An object is a plain file whose path below the root is its key, so any tool may copy the folder.
It appears whole or not at all: it is written under ``.ds_ckpt-tmp/``, read again for its checksum,
synced, and then renamed. The rooms: :mod:`.copying` moves bytes and reads them again,
:mod:`.folder` gives files their names under conditions, :mod:`.uploads` keeps what is sent in
parts, :mod:`.answers` turns the system's answers into ours, :mod:`.store` is the port.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_ckpt_store.stores.file.folder import TEMPORARY
from ds_ckpt_store.stores.file.store import FileStore

__all__ = ["TEMPORARY", "FileStore", "open_url"]


def open_url(url: str, environ: Mapping[str, str], stall_seconds: float) -> FileStore:
    """See :func:`ds_ckpt_store.stores.open_store`; a folder has no settings."""
    del environ, stall_seconds
    return FileStore.from_url(url)
