"""The volume as a file system: is it shared, may we work on it, has it room, what time is it?"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.filesize import decimal

from ds_ckpt_sidecar.examine.finding import Finding
from ds_ckpt_sidecar.examine.users import CHANGE, User, blocked_by, owner, remedy
from ds_ckpt_store.contract.clock import SystemClock, fresh_token, system_random
from ds_ckpt_store.contract.volume import Volume

MOUNTS = "/proc/self/mountinfo"
SKEW_SECONDS = 5.0
LEAST_INODES = 1000
_LAYERS = ("overlay", "fuse-overlayfs", "fuse.fuse-overlayfs", "aufs")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """Where a path is mounted, as the kernel tells.

    Attributes:
        point: the mount point.
        kind: of file system.
        options: of the mount and of the file system.
    """

    point: str
    kind: str
    options: frozenset[str]


def mount_of(path: str, mounts: str) -> Mount | None:
    """The mount that a path lies on.

    Args:
        path: real, absolute.
        mounts: text of ``/proc/self/mountinfo``.
    """
    found = None
    for line in mounts.splitlines():
        left, dash, right = line.partition(" - ")
        fields, kinds = left.split(" "), right.split(" ")
        if not dash or len(fields) < 6 or len(kinds) < 3:
            continue
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])
        below = point if point.endswith("/") else point + "/"
        if f"{path}/".startswith(below) and (found is None or len(point) >= len(found.point)):
            options = frozenset((*fields[5].split(","), *kinds[2].split(",")))
            found = Mount(point, kinds[0], options)
    return found


def look_at_mount(path: str, *, shared: bool) -> Iterator[Finding]:
    """Whether a folder is what two containers share.

    Args:
        path: of the volume; it exists.
        shared: a trainer was seen to write there.
    """
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            mount = mount_of(os.path.realpath(path), file.read())
    except OSError:
        mount = None
    if mount is None:
        yield Finding("note", path, "what it is mounted from cannot be found out")
        return
    if "ro" in mount.options:
        yield Finding(
            "error",
            path,
            f"it lies on {mount.point} ({mount.kind}), which is mounted read-only",
            "take readOnly: true away from the sidecar's volumeMounts",
        )
    if mount.kind in _LAYERS and not shared:
        yield Finding(
            "error" if os.environ.get("KUBERNETES_SERVICE_HOST") else "warning",
            path,
            f"it lies on this container's own file system ({mount.kind}), which no other container "
            "sees, and no trainer was seen to write there",
            f"mount one volume (an emptyDir or a claim) at {path} in the sidecar's container, and "
            "the same one in the trainer's; DS_CKPT_VOLUME must be its mount path here",
        )
    elif mount.kind == "tmpfs":
        yield Finding(
            "note",
            path,
            f"it lies in memory (tmpfs on {mount.point}): what it holds counts against the pod's "
            "memory limits, and is lost with the pod",
        )
    elif mount.kind.startswith("nfs"):
        yield Finding(
            "note",
            path,
            f"it lies on NFS ({mount.point}): one folder of its own for each node, since each "
            "node's agent takes all that is handed over there",
        )
    else:
        yield Finding("ok", path, f"it lies on {mount.kind}, mounted on {mount.point}")


def look_at_work(volume: Volume, us: User) -> Iterator[Finding]:
    """Do what the agent does there, with files of our own: make, sync, link, rename, remove.

    They lie in our own folder if there is one, else in the volume itself.
    """
    place = volume.own if os.path.isdir(volume.own) else volume.path
    trial = f"{place}/.doctor-{fresh_token(system_random())}"
    first, second = f"{trial}/first", f"{trial}/second"
    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("make a folder", lambda: os.mkdir(trial)),
        ("write and sync a file", lambda: _write(first)),
        ("rename a file", lambda: os.rename(first, second)),
        ("sync a folder", lambda: volume.fs.sync_folder(trial)),
        ("remove a file", lambda: os.unlink(second)),
        ("remove a folder", lambda: os.rmdir(trial)),
    )
    links: Finding | None = None
    try:
        for what, step in steps:
            try:
                step()
            except OSError as error:
                yield _cannot(place, what, error, us)
                return
            if what.startswith("write"):
                yield from _look_at_written(place, first, us)
                links = _look_at_links(place, first, f"{trial}/link")
        yield links or Finding(
            "ok", place, f"files can be made, synced, linked, renamed and removed by {us}"
        )
    finally:
        volume.fs.remove_tree(trial)


def _write(path: str) -> None:
    with open(path, "xb") as file:
        file.write(b"written by ds-ckpt doctor\n")
        file.flush()
        os.fsync(file.fileno())


def _look_at_links(place: str, path: str, link: str) -> Finding | None:
    try:
        os.link(path, link)
        os.unlink(link)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            return Finding("error", place, f"a hard link cannot be made: {error.strerror}")
        return Finding(
            "warning",
            place,
            f"it knows no hard links ({error.strerror}): a shard that the trainer removes or "
            "replaces before it is uploaded is kept only by a copy, if there is room",
            "use an emptyDir or a file system with hard links (ext4, XFS, tmpfs, NFS), or keep "
            "tag folders until the next save is committed",
        )
    return None


def _look_at_written(place: str, path: str, us: User) -> Iterator[Finding]:
    now = SystemClock().time()
    with contextlib.suppress(OSError):
        state = os.stat(path)
        if state.st_uid != us.uid:
            yield Finding(
                "note",
                place,
                f"what uid {us.uid} writes belongs to uid {state.st_uid} there (root_squash, or "
                "another mapping of users)",
            )
        skew = state.st_mtime - now
        if abs(skew) > SKEW_SECONDS:
            yield Finding(
                "warning",
                place,
                f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this "
                "machine's: ages of files are misjudged",
                "set both clocks by NTP",
            )


def _cannot(place: str, what: str, error: OSError, us: User) -> Finding:
    sentence = f"{us} cannot {what} there: {error.strerror}"
    if error.errno in (errno.EACCES, errno.EPERM):
        path = blocked_by(f"{place}/x") or place
        with contextlib.suppress(OSError):
            state = os.stat(path)
            sentence = f"{sentence}; it has {owner(state)}"
            return Finding("error", path, sentence, remedy([path], state, us, CHANGE))
    remedies = {
        errno.EROFS: "take readOnly: true away from the sidecar's volumeMounts",
        errno.ENOSPC: "make room, or give the volume more (emptyDir.sizeLimit, or the claim's "
        "request)",
        errno.EDQUOT: "make room, or raise the quota of this user or group",
    }
    return Finding(
        "error", place, sentence, remedies.get(error.errno or 0, "look at the disk it lies on")
    )


def look_at_room(path: str, newest: int, files: int) -> Iterator[Finding]:
    """Free bytes and inodes, beside what the newest save takes.

    Args:
        path: of the volume.
        newest: bytes of the newest save; 0 if there is none.
        files: in it.
    """
    try:
        found = os.statvfs(path)
    except OSError as error:
        yield Finding("note", path, f"its free space cannot be found out: {error.strerror}")
        return
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    beside = f", and the newest save takes {decimal(newest)}" if newest else ""
    sentence = f"{decimal(free)} of {decimal(total)} are free{beside}"
    if free < newest or not free:
        yield Finding(
            "warning",
            path,
            f"{sentence}: the next one does not fit",
            "make the volume larger (emptyDir.sizeLimit, or the claim's request), save less often, "
            "or set DS_CKPT_KEEP_LOCAL=0 for the sidecar",
        )
    else:
        yield Finding("ok", path, sentence)
    if found.f_files and found.f_favail < max(LEAST_INODES, 2 * files):
        yield Finding(
            "warning",
            path,
            f"{found.f_favail} of {found.f_files} inodes are free: no more files than that can be "
            "made, however many bytes are free",
            "remove small files there, or make a file system with more inodes",
        )
