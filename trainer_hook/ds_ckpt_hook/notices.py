"""What a trainer is told without asking: in the log, and by a call of its own.

A node's lowest rank looks at each save and every few seconds between, from the thread of the
heartbeat: a few small files, whatever the size of the checkpoints.
"""

from __future__ import annotations

from ds_ckpt_hook.core import LOST, Hook, SaveState
from ds_ckpt_hook.feedback import lag_of, sidecar_of, standing_of, start_one
from ds_ckpt_hook.session import Session

SILENT_SECONDS = 60.0
REMINDER_SECONDS = 600.0


def tell(hook: Hook) -> None:
    """Say what a trainer should hear before the end: lost saves, lag, and that nobody uploads.

    Returns at once if another thread is at it.
    """
    if not hook.telling.acquire(blocking=False):
        return
    try:
        _tell_lost(hook)
        now = hook.clock.monotonic()
        for session in list(hook.sessions.values()):
            if session.is_leader and now >= hook.next_word and _tell_waiting(hook, session, now):
                hook.next_word = now + REMINDER_SECONDS
    finally:
        hook.telling.release()


def _tell_lost(hook: Hook) -> None:
    for state in list(hook.saves):
        if state.told or state.session is None or not state.session.is_leader:
            continue
        found = standing_of(state)
        state.told = found.durable or found.state in LOST
        if found.state in LOST and not state.reason:
            hint = ""
            if found.state == "superseded":
                hint = "; give each save a tag of its own, or save less often than it uploads"
            hook.warn(
                "lost",
                f"tag {state.tag!r} (save {state.save_id}) will not be durable: it is "
                f"{found.state}: {found.reason}{hint}",
                state,
            )


def _tell_waiting(hook: Hook, session: Session, now: float) -> bool:
    waiting = [s for s in hook.saves if s.session is session and not s.told and not s.reason]
    if not waiting:
        return False
    sidecar = sidecar_of(session.volume)
    if sidecar is None or sidecar.is_silent(hook.clock.time()):
        if now - hook.began <= SILENT_SECONDS:
            return False
        hook.warn(
            "no sidecar",
            f"{_count(waiting)} on {session.volume.path} wait for a sidecar, and none has been "
            f"there for {SILENT_SECONDS:.0f} s: not durable; {start_one(waiting[0])}",
            waiting[0],
        )
        return True
    most, lag = hook.settings.max_lag, lag_of(waiting, hook.clock.time())
    if most is None or lag <= most:
        return False
    error = f"; the sidecar's last error: {sidecar.last_error}" if sidecar.last_error else ""
    hook.warn(
        "lag",
        f"{_count(waiting)} on {session.volume.path} not durable yet, the oldest for "
        f"{lag:.0f} s (DS_CKPT_MAX_LAG={most:g}){error}",
        waiting[0],
    )
    return True


def _count(waiting: list[SaveState]) -> str:
    return "1 save" if len(waiting) == 1 else f"{len(waiting)} saves"
