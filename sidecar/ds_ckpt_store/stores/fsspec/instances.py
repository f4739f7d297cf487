"""Instances of a file system: one for all threads, or one for each that is at work.

Many file systems hold one connection and are not safe to share (FTP, SFTP); those made of
coroutines run in one loop and are. An instance that failed is not used again, and those that lay
idle beside it neither: what broke one connection has mostly broken all.
"""

from __future__ import annotations

import threading
from typing import Any

from fsspec.implementations.ftp import FTPFileSystem

from ds_ckpt_store.errors import SettingsError
from ds_ckpt_store.stores.fsspec.access import (
    Access,
    FolderAccess,
    LocalAccess,
    SftpAccess,
    is_local,
    is_shared,
)
from ds_ckpt_store.stores.fsspec.ftp import FtpAccess
from ds_ckpt_store.stores.fsspec.options import FsspecOptions

WITH_FOLDERS = {"smb", "webdav", "hdfs", "arrow_hdfs", "webhdfs", "webHDFS", "dbfs"}


class Instances:
    """Lends instances.

    Args:
        options: what they are made of.
    """

    def __init__(self, options: FsspecOptions) -> None:
        self._options = options
        self._shared = is_shared(options.kind)
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._idle: list[Access] = []

    def take(self) -> Access:
        """An instance to work with; give it back, unless it failed.

        Raises:
            SettingsError: it cannot be made with these options.
        """
        if self._shared:
            with self._making:
                if not self._idle:
                    self._idle.append(self._make())
                return self._idle[0]
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._make()

    def give_back(self, access: Access) -> None:
        """It can be used again."""
        if not self._shared and not access.spent:
            with self._lock:
                self._idle.append(access)

    def clear(self) -> None:
        """Let go of those that are idle; a shared one finds new connections by itself."""
        if not self._shared:
            with self._lock:
                self._idle.clear()

    def close(self) -> None:
        """Let go of all."""
        with self._lock:
            self._idle.clear()

    def _make(self) -> Access:
        options = self._options
        try:
            fs = options.kind(**options.arguments, skip_instance_cache=True)
        except (TypeError, ValueError, ImportError) as error:
            raise SettingsError(
                f"{options.url}: fsspec cannot open {options.protocol}:// with the options "
                f"{sorted(options.arguments)}: {options.hide(str(error))}"
            ) from error
        return access_class(options)(fs, options.block)


def access_class(options: FsspecOptions) -> type[Access]:
    """How a kind of file system is used."""
    kind: Any = options.kind
    if is_local(kind):
        return LocalAccess
    if issubclass(kind, FTPFileSystem):
        return FtpAccess
    if options.protocol in ("sftp", "ssh"):
        return SftpAccess
    return FolderAccess if options.protocol in WITH_FOLDERS else Access
