"""Who we are, what keeps us from a file, and what lets us at it."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass

READ, CHANGE = "read", "change"


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


def remedy(path: str, state: os.stat_result, us: User, need: str) -> str:
    """What lets us read a file, or make and remove names in a folder: now, and for good.

    Args:
        path: a file or folder that exists.
        state: its state.
        us: who is kept from it.
        need: ``READ``, or ``CHANGE`` for a folder.
    """
    folder = stat.S_ISDIR(state.st_mode)
    bits = 0o070 if need == CHANGE else 0o050 if folder else 0o040
    letters = "".join(
        letter for letter, bit in (("r", 0o040), ("w", 0o020), ("x", 0o010)) if bits & bit
    )
    name = shlex.quote(path)
    if state.st_uid == us.uid:
        return f"chmod u+{letters} {name}"
    if state.st_mode & bits == bits and state.st_gid not in us.gids:
        return (
            f"its group may: give the pod securityContext.supplementalGroups: [{state.st_gid}], "
            f"or the sidecar's container securityContext.runAsUser: {state.st_uid}"
        )
    now = f"chmod g+{letters} {name}"
    if state.st_gid not in us.gids:
        group = min(us.gids)
        now = f"chgrp {group} {name} && {now}"
    as_owner = f"the sidecar's container securityContext.runAsUser: {state.st_uid}"
    umask = "0002" if folder else "0027"
    return (
        f"now, as uid {state.st_uid}: {now}. For good, one of: {as_owner}; or a common group "
        f"(the pod's securityContext.fsGroup), with umask {umask} in the trainer or a hook that "
        "widens modes (upgrade ds-ckpt-sidecar in the trainer's image)"
    )
