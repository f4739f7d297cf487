"""Who is kept from a file of the volume, by what, and what lets them in: one sentence.

Trainer and sidecar are two containers, and often two users. The system says "Permission denied" and
a name; a user needs to know whose file it is, who asked for it, and what to set.
"""

from __future__ import annotations

import errno
import os
import stat

from ds_ckpt_store.contract.filesystem import FileStat, Filesystem

REMEDY = (
    "run trainer and sidecar as the same user, or give both a common group (fsGroup in the pod's "
    "securityContext) and make the trainer's files group-readable (the hook of this version does "
    "it unless DS_CKPT_WIDEN_MODES=0; otherwise umask 0027)"
)


def denied(error: BaseException, fs: Filesystem, path: str = "") -> str:
    """What lets this process do what it was denied; empty if ``error`` is no denial.

    Args:
        error: what the system said.
        fs: the volume's filesystem.
        path: absolute path of what was asked for; that of the error if empty.
    """
    if not isinstance(error, PermissionError):
        return ""
    path = path or os.fsdecode(error.filename or "")
    return barred(fs, path) if path.startswith("/") else REMEDY


def unwritable(error: OSError) -> str:
    """What lets a volume take files that it takes from nobody; empty if it is not that."""
    if error.errno == errno.EROFS:
        return (
            "the volume is mounted read-only: take readOnly: true out of the volumeMount and the "
            "volume; if it is not set there, the disk has an error and must be looked at"
        )
    path = os.fsdecode(error.filename or "")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENOTSUP):
        return (
            "files cannot be made there: it is gone, or no filesystem that keeps files (such as "
            "/proc); name the folder that trainer and sidecar share"
        )
    if error.errno != errno.ENOSPC or not path.startswith("/"):
        return ""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    left = os.statvfs(path)
    if left.f_files and not left.f_favail and left.f_bavail:
        return (
            "the volume has free bytes and no inodes left: remove files that are not needed, "
            "however small, or make the filesystem anew with more inodes"
        )
    return "the volume is full: make room there, or make it larger"


def barred(fs: Filesystem, path: str) -> str:
    """What keeps this process from a path: the folder on the way, or what has the path.

    A folder that names cannot be changed in is given with a slash at the end.
    """
    what, state = _bar(fs, path)
    groups = " ".join(str(gid) for gid in sorted({os.getegid(), *os.getgroups()}))
    us = f"this process runs as uid {os.geteuid()} with the groups {groups}"
    if state is None:
        return f"{us}: {REMEDY}"
    sticky = state.is_folder and state.mode & stat.S_ISVTX and os.geteuid() not in (0, state.uid)
    also = f"; and take its sticky bit: chmod -t {what}" if sticky else ""
    return (
        f"{what} has mode {state.mode & 0o7777:04o} of uid {state.uid} and group {state.gid}, and "
        f"{us}: {REMEDY}{also}"
    )


def _bar(fs: Filesystem, path: str) -> tuple[str, FileStat | None]:
    above = path.split("/")[1:-1]
    for count in range(1, len(above) + 1):
        folder = "/" + "/".join(above[:count])
        if fs.is_folder(folder) and not os.access(folder, os.X_OK, effective_ids=True):
            return folder, fs.stat(folder)
    state = fs.stat(path)
    folder = os.path.dirname(path)
    # What may be read and written itself was to be renamed or removed: its folder forbids that.
    if state is None or os.access(path, os.R_OK | os.W_OK, effective_ids=True):
        return folder, fs.stat(folder)
    return path.rstrip("/"), state
