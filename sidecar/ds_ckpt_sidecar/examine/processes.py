"""Who works on the volume now: what agent and trainer last said, and the locks that are held."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import TypeVar

from ds_ckpt_sidecar.examine.finding import Finding, Severity
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.manifest import RESTING
from ds_ckpt_store.contract.names import is_save_id
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import InputError

AHEAD_SECONDS = 5.0
OVER = frozenset({"superseded", "abandoned"})

StatusT = TypeVar("StatusT")


def look_at_processes(volume: Volume) -> Iterator[Finding]:
    """What agent and trainer last said, and who holds a lock."""
    now = SystemClock().time()
    alive = yield from _agent(volume, now)
    yield from _trainer(volume, now)
    yield from _saves(volume)
    for path, who in (
        (volume.restore_lock, "a restore is at work on this volume"),
        (volume.cleaning_lock, "an agent removes saves, or a trainer chooses what to resume from"),
        *(() if alive else ((volume.lock, "an agent is there, and says nothing"),)),
    ):
        if _is_locked(path):
            yield Finding("note", path, f"{who}: it is locked, until that process ends")


def _agent(volume: Volume, now: float) -> Generator[Finding, None, bool]:
    """Yields findings; returns whether an agent is at work."""
    status = _read(volume.sidecar_status)
    what = f"{volume.status}/sidecar.json"
    if status is None:
        yield Finding("note", what, "no agent has worked on this volume yet")
        return False
    age = now - status.time
    said = f"an agent (version {status.version}) said {status.state!r} {age:.0f} s ago"
    if status.last_error:
        said = f"{said}, and as its last error: {status.last_error}"
    if status.state == "stopped":
        yield Finding("warning" if status.last_error else "ok", what, said)
        return False
    if status.is_silent(now):
        yield Finding(
            "warning",
            what,
            f"{said}, and nothing since: it was killed, or it hangs",
            "start it again; what is on the volume it goes on with",
        )
        return False
    severity: Severity = (
        "error" if status.state == "refused" else "warning" if status.last_error else "ok"
    )
    yield Finding(severity, what, said, "" if severity == "ok" else "do what the error says")
    return True


def _trainer(volume: Volume, now: float) -> Iterator[Finding]:
    status = _read(volume.trainer_status)
    what = f"{volume.status}/trainer.json"
    if status is None:
        yield Finding("note", what, "no trainer with the hook was seen on this volume yet")
        return
    state = "finished" if status.finished else "running"
    said = f"the trainer of run {status.run_id!r} was {state} {max(now - status.time, 0):.0f} s ago"
    if status.time - now > AHEAD_SECONDS:
        yield Finding(
            "warning",
            what,
            f"its clock is {status.time - now:.0f} s ahead of this machine's",
            "set both clocks by NTP",
        )
    if status.error:
        yield Finding("warning", what, f"{said}, and said: {status.error}", "do what it says")
    else:
        yield Finding("ok", what, said)


def _saves(volume: Volume) -> Iterator[Finding]:
    """Saves that will not become durable by themselves: those that rest, a newest that is over."""
    files = sorted(name for name in volume.fs.names(volume.status) if is_save_id(name[:-5]))
    for name in reversed(files):
        save = _read(partial(volume.save_status, name[: -len(".json")]))
        if (
            save is None or not save.tag
        ):  # what is no manifest is said by whoever looks at the files
            continue
        what, said = f"save {save.save_id}", f"tag {save.tag!r} is {save.state}: {save.reason}"
        if save.state in RESTING:
            remedy = "do what the reason says; its shards stay on the volume until then"
            yield Finding("error", what, said, remedy)
        elif save.state in OVER and name == files[-1]:
            remedy = "save again: until that is durable, a resume takes an older checkpoint"
            yield Finding("warning", what, said, remedy)


def _read(read: Callable[[], StatusT | None]) -> StatusT | None:
    """One that cannot be read is said by whoever looks at the files."""
    with contextlib.suppress(InputError, OSError):
        return read()
    return None


def _is_locked(path: str) -> bool:
    """Whether another process holds a lock; ours is shared, and gone at once."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
