"""Whether the volume can take another checkpoint: asked before a save, agreed over all ranks.

A pod whose emptyDir grows over its limit is evicted, and a write to a full disk leaves a torn
checkpoint. A node's lowest rank compares what the last save took with what is left, by the
filesystem and by the limit that the sidecar knows of; the others believe it.
"""

from __future__ import annotations

import contextlib
import os

from ds_ckpt_hook.core import Hook, reason_of
from ds_ckpt_hook.feedback import sidecar_of
from ds_ckpt_hook.session import Session
from ds_ckpt_hook.settings import WhenFull
from ds_ckpt_store.contract.usage import allocated_below
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError

MORE = 0.02  # of a checkpoint, by which the next may be larger
POLL_SECONDS = 1.0


def ready_to_save(
    hook: Hook,
    size: int | None = None,
    *,
    save_dir: str | os.PathLike[str] | None = None,
    policy: WhenFull | None = None,
    timeout: float | None = None,
) -> bool:
    """See :func:`ds_ckpt_hook.ready_to_save`."""
    policy = policy or hook.settings.when_full
    patience = hook.settings.room_timeout if timeout is None else timeout
    lacking = ""
    try:
        session = hook.session(*hook.locate(save_dir))
        if session.is_leader:
            lacking = _lacking(session, size)
            if lacking and policy == "wait":
                lacking = _wait(hook, session, size, patience)
    except (CkptError, OSError) as error:  # the save itself will say what is wrong
        hook.warn("no room", f"nobody knows whether there is room: {reason_of(error)}")
    try:
        allowed = patience * (policy == "wait") + hook.settings.exchange_timeout
        told: list[str] = hook.exchange.gather("room", lacking, timeout=allowed)
    except CkptError as error:
        hook.warn("no room", f"the ranks cannot agree whether there is room: {error}")
        return True
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
    if not problems:
        return True
    goes_on = policy == "warn"
    what = "saving all the same" if goes_on else "this save is left out on all ranks"
    listed = "; ".join(problems[:4])
    hook.warn("no room", f"the volume cannot take another checkpoint, {what}: {listed}")
    return goes_on


def _wait(hook: Hook, session: Session, size: int | None, patience: float) -> str:
    """Until there is room; else why there is none."""
    began = hook.clock.monotonic()
    while lacking := _lacking(session, size):
        waited = hook.clock.monotonic() - began
        if waited >= patience:
            return f"{lacking}, and after {waited:.0f} s there still is none"
        sidecar = sidecar_of(session.volume)
        if sidecar is None or sidecar.is_silent(hook.clock.time()) or sidecar.state == "refused":
            return f"{lacking}, and no sidecar is at work that would make room"
        if not session.volume.manifests() and hook.worker.drain(0):
            return f"{lacking}, and nothing waits to be stored: all that is there stays"
        hook.clock.sleep(min(POLL_SECONDS, max(patience - waited, 0.001)))
    return ""


def _lacking(session: Session, size: int | None) -> str:
    """What is missing on this node; empty if there is room, or nobody knows how much it takes."""
    volume = session.volume
    needed = size if size is not None else int((1 + MORE) * _last_bytes(session))
    if not needed:
        return ""
    left = left_on(volume)
    if left < needed and volume.fs.names(volume.cache):
        from ds_ckpt_hook.cache import Cache

        Cache(volume.cache, fs=volume.fs).clear()  # it can be fetched again, and a save cannot
        left = left_on(volume)
    if left >= needed:
        return ""
    return (
        f"{max(left, 0) >> 20} MiB are left on {volume.path}, and a save takes {needed >> 20} MiB"
    )


def left_on(volume: Volume) -> int:
    """Bytes that a volume can still take: before its disk is full, and before the pod's limit."""
    left = volume.fs.space(volume.path).free
    sidecar = sidecar_of(volume)
    if sidecar is not None and sidecar.limit_bytes:
        left = min(left, sidecar.limit_bytes - allocated_below(volume))
    return left


def _last_bytes(session: Session) -> int:
    """What the newest save took here: this process's, or what an earlier one handed over."""
    if session.last_bytes:
        return session.last_bytes
    with contextlib.suppress(CkptError, OSError):
        return max(_sizes(session.volume), default=0)
    return 0


def _sizes(volume: Volume) -> list[int]:
    handed_over = [volume.manifest(name) for name in volume.manifests()[-1:]]
    sizes = [sum(s.size for s in (*each.shards, *each.replicas)) for each in handed_over]
    restored = volume.restored_from()
    return [*sizes, sum(file.size for file in restored.files)] if restored else sizes
