"""Keeping a save's bytes from the trainer: hard link, else reflink, else copy, else nothing.

The trainer's own rotation may unlink a folder while the sidecar still uploads from it. A hard
link costs nothing and is made on the training thread. A copy costs the whole file, so it is made
in the background, while the bytes are hashed, and only if there is ample room.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass

from ds_ckpt_store.contract.digest import CHUNK, crc32c, crc32c_of_fd
from ds_ckpt_store.contract.filesystem import FileStat, Filesystem
from ds_ckpt_store.contract.manifest import Protection
from ds_ckpt_store.errors import ShardChangedError

_FICLONE = 0x40049409  # linux/fs.h: _IOW(0x94, 9, int)
_STRENGTH: tuple[Protection, ...] = ("none", "copy", "reflink", "hardlink")
ROOM = 2  # a copy is made if this many times its size is free


@dataclass(frozen=True)
class Kept:
    """One file as it was when the save was taken.

    Attributes:
        path: relative to the save's folder.
        source: absolute folder that ``path`` is in, as the trainer wrote it.
        target: absolute folder of the protected names.
        protection: how the bytes are kept; ``copy`` while the copy is still to be made.
        state: of the file that ``path`` names under ``target``, or under ``source`` for a copy
            to be made.
    """

    path: str
    source: str
    target: str
    protection: Protection
    state: FileStat


def weakest(found: list[Protection]) -> Protection:
    """The protection that holds for all."""
    return min(found, key=_STRENGTH.index, default="hardlink")


def keep(fs: Filesystem, source: str, path: str, target: str) -> Kept:
    """Protect one file as well as the filesystem can without reading it.

    Raises:
        FileNotFoundError: it is gone.
        OSError: as the system says.
    """
    original, name = f"{source}/{path}", f"{target}/{path}"
    with contextlib.suppress(PermissionError):
        state = os.stat(original, follow_symlinks=False)
        os.chmod(original, state.st_mode & 0o7777 | 0o040)
    fs.make_folder(os.path.dirname(name))
    protection: Protection = "hardlink"
    try:
        fs.link(original, name)
    except FileNotFoundError:
        raise
    except OSError:
        protection = "reflink" if _reflink(fs, source, path, name) else "copy"
    found = fs.stat(original if protection == "copy" else name)
    if found is None:
        raise FileNotFoundError(2, "vanished while it was linked", original)
    return Kept(path, source, target, protection, found)


def _reflink(fs: Filesystem, source: str, path: str, name: str) -> bool:
    try:
        with contextlib.ExitStack() as stack:
            reader = fs.open_beneath(source, path)
            stack.callback(os.close, reader)
            writer = fs.open_write(name)
            stack.callback(os.close, writer)
            fcntl.ioctl(writer, _FICLONE, reader)
    except OSError:
        fs.unlink(name)
        return False
    return True


def hash_kept(fs: Filesystem, kept: Kept) -> tuple[Kept, int]:
    """CRC32C of a protected file; makes its copy on the way if it needs one and there is room.

    Returns:
        What is now kept, and its sum.

    Raises:
        ShardChangedError: the bytes are no longer those of the save.
        OSError: as the system says.
    """
    if kept.protection == "copy":
        parent = os.path.dirname(f"{kept.target}/{kept.path}")
        if fs.space(parent).free < ROOM * kept.state.size:
            kept = Kept(kept.path, kept.source, kept.target, "none", kept.state)
    where = kept.source if kept.protection in ("copy", "none") else kept.target
    fd = fs.open_beneath(where, kept.path)
    try:
        _check(fs.fstat(fd), kept)
        if kept.protection == "copy":
            kept, value = _copy(fs, fd, kept)
        else:
            value, count = crc32c_of_fd(fd, 0, kept.state.size)
            _check(fs.fstat(fd), kept, count)
    finally:
        os.close(fd)
    return kept, value


def _copy(fs: Filesystem, fd: int, kept: Kept) -> tuple[Kept, int]:
    name = f"{kept.target}/{kept.path}"
    writer = fs.open_write(name)
    value = done = 0
    try:
        while chunk := os.pread(fd, CHUNK, done):
            view = memoryview(chunk)
            value = crc32c(view, value)
            done += len(view)
            while view:
                view = view[os.write(writer, view) :]
        _check(fs.fstat(fd), kept, done)
        copied = fs.fstat(writer)
    except BaseException:
        fs.unlink(name)
        raise
    finally:
        os.close(writer)
    return Kept(kept.path, kept.source, kept.target, "copy", copied), value


def _check(now: FileStat, kept: Kept, count: int | None = None) -> None:
    if now.identity != kept.state.identity or count not in (None, kept.state.size):
        raise ShardChangedError(
            f"{kept.source}/{kept.path} was written again before its checksum was taken; "
            "this save is superseded"
        )


def copy_small(fs: Filesystem, source: str, path: str, target: str, limit: int) -> Kept:
    """Copy a small file that the next save writes again in place.

    Raises:
        ManifestError: it is no regular file, or larger than ``limit`` bytes.
        OSError: as the system says.
    """
    fs.make_folder(target)
    fs.write_atomic(f"{target}/{path}", fs.read(f"{source}/{path}", limit), durable=False)
    state = fs.stat(f"{target}/{path}")
    if state is None:
        raise FileNotFoundError(2, "vanished while it was copied", path)
    return Kept(path, source, target, "reflink", state)


def widen(root: str, folder: str) -> None:
    """Let the sidecar, which may be another user of the group, rename in the trainer's folders.

    Args:
        root: absolute path to stop at; it is widened too.
        folder: absolute path to begin with, ``root`` or below it.
    """
    with contextlib.suppress(OSError):
        while len(folder) >= len(root):
            os.chmod(folder, os.stat(folder).st_mode & 0o7777 | 0o2070)  # noqa: S103 - the group is both containers'
            folder = os.path.dirname(folder)
