"""Who we are, what keeps us from a file, and what lets us at it."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

READ, CHANGE = "read", "change"
_MANY = 4


@dataclass(frozen=True)
class User:
    """Who a process is to the file system."""

    uid: int
    gids: frozenset[int]

    def __str__(self) -> str:
        groups = " ".join(str(gid) for gid in sorted(self.gids))
        return f"uid {self.uid}, groups {groups}"


def ourselves() -> User:
    """Who this process is."""
    return User(os.geteuid(), frozenset((os.getegid(), *os.getgroups())))


def owner(state: os.stat_result) -> str:
    """Whose a file is, and its mode."""
    return f"uid {state.st_uid}, gid {state.st_gid}, mode {state.st_mode & 0o7777:04o}"


def blocked_by(path: str) -> str:
    """The first folder above a path that this process may not search; empty if there is none."""
    for folder in _above(path):
        if not os.access(folder, os.X_OK, effective_ids=True) and os.path.isdir(folder):
            return folder
    return ""


def _above(path: str) -> Iterator[str]:
    parts = path.strip("/").split("/")[:-1]
    for count in range(1, len(parts) + 1):
        yield "/" + "/".join(parts[:count])


def why(state: os.stat_result) -> str:
    """What the mode tells of whoever wrote it; empty if nothing."""
    if state.st_mode & 0o077:
        return ""
    who = "root" if state.st_uid == 0 else f"uid {state.st_uid}"
    return f"; only its owner may use it: the trainer runs as {who} with umask 077"


def remedy(paths: Sequence[str], state: os.stat_result, us: User, need: str) -> str:
    """What lets us read files, or make and remove names in folders: now, and for good.

    Args:
        paths: files or folders that exist, all with the same owner and mode.
        state: of the first of them.
        us: who is kept from them.
        need: ``READ``, or ``CHANGE`` for folders and for files of the agent's own memory.
    """
    folder = stat.S_ISDIR(state.st_mode)
    bits = (0o050 if folder else 0o040) | (0o020 if need == CHANGE else 0)
    letters = "".join(
        letter for letter, bit in (("r", 0o040), ("w", 0o020), ("x", 0o010)) if bits & bit
    )
    if state.st_uid == us.uid:
        return _command("chmod", f"u+{letters}", paths)
    if state.st_mode & bits == bits and state.st_gid not in us.gids:
        return (
            f"its group may: give the pod securityContext.supplementalGroups: [{state.st_gid}], "
            f"or the sidecar's container securityContext.runAsUser: {state.st_uid}"
        )
    now = _command("chmod", f"g+{letters}{'s' if folder and need == CHANGE else ''}", paths)
    if state.st_gid not in us.gids:
        now = f"{_command('chgrp', str(min(us.gids)), paths)} && {now}"
    if need == CHANGE and not folder:
        return (
            f"now, as uid {state.st_uid}: {now}. For good, one of: the sidecar's container "
            f"securityContext.runAsUser: {state.st_uid}; or remove it while no agent runs, which "
            "loses nothing: an agent of this version lets the group of its volume in"
        )
    umask = "0002" if folder else "0027"
    return (
        f"now, as uid {state.st_uid}: {now}. For good, one of: the sidecar's container "
        f"securityContext.runAsUser: {state.st_uid}; or a common group (the pod's "
        f"securityContext.fsGroup), with umask {umask} in the trainer or a hook that widens modes "
        "(upgrade ds-ckpt-sidecar in the trainer's image)"
    )


def _command(program: str, what: str, paths: Sequence[str]) -> str:
    """A command for some paths; for many, for the folders that they lie in."""
    if len(paths) > _MANY:
        program = f"{program} -R"
        what = what.replace("x", "X")
        paths = sorted({os.path.dirname(path) for path in paths})
    if len(paths) > _MANY:
        paths = [os.path.commonpath(paths)]
    return shlex.join((*program.split(), what, *paths))
