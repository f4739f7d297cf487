"""What the system says of files and failures, in the words of the port.

The version of an object is its (inode, mtime, size). A publish makes the mtime of a key grow, so a
version does not come back while the key exists, even if the kernel's clock ticks slowly.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from ds_ckpt_store.errors import AccessError, RefusedError, StoreError, TransientError
from ds_ckpt_store.stores.port import ObjectInfo

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_MAY_HEAL = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EMFILE)


def version_of(state: os.stat_result) -> str:
    """The version token of a file."""
    return f"{state.st_ino}-{state.st_mtime_ns}-{state.st_size}"


def info_of(key: str, state: os.stat_result, crc32c: int | None = None) -> ObjectInfo:
    """What the folder says of a file; a checksum only from who has just written it."""
    return ObjectInfo(key, state.st_size, version_of(state), state.st_mtime, crc32c)


@contextlib.contextmanager
def errors(root: str, operation: str, key: str) -> Iterator[None]:
    """Turn the system's errors into those of the port.

    Args:
        root: the store's folder.
        operation: the port's method.
        key: what it was for.
    """
    try:
        yield
    except OSError as error:
        raise _translate(root, operation, key, error) from error


def _translate(root: str, operation: str, key: str, error: OSError) -> StoreError:
    if error.errno in _FULL:
        return TransientError(operation, key, f"{error.strerror}: {_space(root)}; free some")
    if error.errno in _DENIED:
        return AccessError(
            operation,
            key,
            f"{error.strerror}: {error.filename or root}, as uid {os.geteuid()}; "
            f"let this user write there, or mount it writable",
        )
    if error.errno == errno.ENOLCK:
        return RefusedError(
            operation,
            key,
            f"{error.strerror}: {root} has no file locks, which keep writers apart; "
            f"mount NFS with locks (its lock service running, or version 4)",
        )
    if error.errno in _MAY_HEAL:
        return TransientError(operation, key, str(error))
    return RefusedError(operation, key, str(error))


def _space(root: str) -> str:
    try:
        state = os.statvfs(root)
    except OSError as error:
        return f"the filesystem of {root} ({error.strerror})"
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    return f"the filesystem of {root} has {free} of {total} bytes free"
