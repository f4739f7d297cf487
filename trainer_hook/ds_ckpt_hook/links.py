"""Keeping a save's bytes from the trainer: hard link, else reflink, else copy, else nothing.

The trainer's own rotation may unlink a folder while the sidecar still uploads from it. A hard
link costs nothing and is made on the training thread. A copy costs the whole file, so it is made
in the background, while the bytes are hashed, and only if there is ample room.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from dataclasses import dataclass, replace

from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.digest import CHUNK, crc32c_of_fd
from ds_ckpt_store.contract.filesystem import FileStat, Filesystem
from ds_ckpt_store.contract.manifest import Protection
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError, ShardChangedError

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
        state: of the trainer's own file, by which the sidecar later knows it again.
        crc32c: of the bytes that were written, if they were summed on their way.
    """

    path: str
    source: str
    target: str
    protection: Protection
    state: FileStat
    crc32c: int | None = None


def weakest(found: list[Protection]) -> Protection:
    """The protection that holds for all."""
    return min(found, key=_STRENGTH.index, default="hardlink")


def keep(fs: Filesystem, source: str, path: str, target: str, gid: int | None = None) -> Kept:
    """Protect one file as well as the filesystem can without reading it, and let the sidecar at it.

    Args:
        fs: the volume's filesystem.
        source: absolute folder that the file is in.
        path: of the file, in there.
        target: absolute folder of the protected names.
        gid: the group to let in, -1 for whichever it has; None to leave the modes as they are.

    Raises:
        FileNotFoundError: it is gone.
        OSError: as the system says.
    """
    original, name = f"{source}/{path}", f"{target}/{path}"
    state = fs.stat(original)
    if state is None or not state.is_regular:
        raise FileNotFoundError(errno.ENOENT, "no regular file, or gone", original)
    if gid is not None:
        fs.let_group_in(original, gid)
    fs.make_folder(os.path.dirname(name))
    protection: Protection = "hardlink"
    try:
        fs.link(original, name)
    except FileNotFoundError:
        raise
    except OSError:
        protection = "reflink" if _reflink(fs, source, path, name) else "copy"
    return Kept(path, source, target, protection, state)


def _reflink(fs: Filesystem, source: str, path: str, name: str) -> bool:
    try:
        with contextlib.ExitStack() as stack:
            reader = fs.open_beneath(source, path)
            stack.callback(os.close, reader)
            writer = fs.open_write(name)
            stack.callback(os.close, writer)
            _like(reader, writer)
            fcntl.ioctl(writer, _FICLONE, reader)
    except OSError:
        fs.unlink(name)
        return False
    return True


def hash_kept(fs: Filesystem, kept: Kept) -> tuple[Kept, int]:
    """CRC32C of a protected file; makes its copy on the way if it needs one and there is room.

    It is read for that, unless its sum was taken when it was written and its name is a link. What
    is read and has another sum was damaged since.

    Returns:
        What is now kept, and its sum.

    Raises:
        ShardChangedError: the bytes are no longer those of the save.
        OSError: as the system says.
    """
    if kept.protection == "copy":
        parent = os.path.dirname(f"{kept.target}/{kept.path}")
        if fs.space(parent).free >= ROOM * kept.state.size:
            _copy(fs, kept)
        else:
            kept = replace(kept, protection="none")
    fd = fs.open_beneath(kept.source if kept.protection == "none" else kept.target, kept.path)
    try:
        before = fs.fstat(fd)
        known = kept.crc32c if kept.protection in ("hardlink", "reflink") else None
        if known is None:
            value, count = crc32c_of_fd(fd, 0, kept.state.size)
        else:
            value, count = known, kept.state.size
        after = fs.fstat(fd)
    finally:
        os.close(fd)
    # A clone and a copy are files of our own, with an identity of their own.
    shared = kept.protection in ("hardlink", "none")
    unchanged = before.identity == after.identity and after.size == count == kept.state.size
    if not unchanged or (shared and before.identity != kept.state.identity):
        raise _changed(kept)
    if kept.crc32c not in (None, value):
        raise ShardChangedError(
            f"{kept.source}/{kept.path} has CRC32C {value:08x}, and {kept.crc32c:08x} was written: "
            "it was damaged on the disk, or on its way to it; save again"
        )
    return kept, value


def _copy(fs: Filesystem, kept: Kept) -> None:
    name = f"{kept.target}/{kept.path}"
    with contextlib.ExitStack() as stack:
        reader = fs.open_beneath(kept.source, kept.path)
        stack.callback(os.close, reader)
        writer = fs.open_write(name)
        stack.callback(os.close, writer)
        _like(reader, writer)
        done = 0
        while chunk := os.pread(reader, CHUNK, done):
            view = memoryview(chunk)
            done += len(view)
            while view:
                view = view[os.write(writer, view) :]
        if fs.fstat(reader).identity != kept.state.identity:
            raise _changed(kept)


def _like(reader: int, writer: int) -> None:
    """Give a copy the mode of the original, before there is a byte in it."""
    with contextlib.suppress(OSError):
        os.fchmod(writer, os.fstat(reader).st_mode & 0o777)


def _changed(kept: Kept) -> ShardChangedError:
    return ShardChangedError(
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
    data = fs.read(f"{source}/{path}", limit)
    fs.write_atomic(f"{target}/{path}", data, durable=False)
    state = fs.stat(f"{target}/{path}")
    if state is None:
        raise FileNotFoundError(errno.ENOENT, "vanished while it was copied", path)
    return Kept(path, source, target, "reflink", state)


def widen(fs: Filesystem, root: str, folder: str, gid: int) -> None:
    """Let the sidecar, which may be another user of the group, rename in the trainer's folders.

    Args:
        fs: the volume's filesystem.
        root: absolute path to stop at; it is widened too.
        folder: absolute path to begin with, ``root`` or below it.
        gid: the group to let in.
    """
    while len(folder) >= len(root):
        fs.let_group_in(folder, gid)
        folder = os.path.dirname(folder)


def widen_earlier(volume: Volume, gid: int) -> None:
    """Let the sidecar at what was handed over before: by an earlier version, or another user."""
    fs = volume.fs
    for path, _ in fs.walk(volume.links):
        fs.let_group_in(f"{volume.links}/{path}", gid)
    for name in volume.manifests():
        with contextlib.suppress(CkptError, OSError):
            manifest = volume.manifest(name)
            folder = f"{volume.path}/{volume.tag_folder(manifest)}"
            fs.let_group_in(f"{folder[: -len(manifest.tag) - 1]}/{names.LATEST}", gid)
            for shard in (*manifest.shards, *manifest.replicas):
                fs.let_group_in(f"{folder}/{shard.path}", gid)
                widen(fs, volume.path, os.path.dirname(f"{folder}/{shard.path}"), gid)
