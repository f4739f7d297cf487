"""What the trainer is told: where its saves stand, and at the end whether all are durable.

The sidecar answers over files on the volume. A sidecar that is silent, stopped or has refused to
work is no reason to wait: the answer says so instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ds_ckpt_hook.core import DURABLE, LOST, Hook, SaveState, reason_of
from ds_ckpt_hook.errors import NotPublishedError
from ds_ckpt_store.contract.manifest import SidecarStatus
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError, SettingsError

logger = logging.getLogger("ds_ckpt_hook")

GRACE_SECONDS = 30.0
_POLL = 0.2


@dataclass(frozen=True)
class Standing:
    """Where one save stands; ``durable`` means that it is committed in the store.

    ``state`` is one of the states of a save in the sidecar, and ``discovered`` before that.
    """

    tag: str
    save_id: str | None
    state: str
    durable: bool
    reason: str = ""


@dataclass(frozen=True)
class Committed:
    """A checkpoint that is committed in the store; ``saved_ms`` in milliseconds since the epoch."""

    tag: str
    save_id: str
    step: int | None
    saved_ms: int


@dataclass(frozen=True)
class Status:
    """What this process knows without asking anybody but its volume.

    Attributes:
        saves: of this process, the oldest first.
        last_committed: the newest checkpoint of the run in the store, whoever saved it; None if
            there is none, or no sidecar has looked yet.
        lag_seconds: age of the oldest save that is on its way; 0 if none is.
        sidecar: its last state; ``silent`` if it was not heard of lately, ``none`` if never.
        last_error: the sidecar's, empty if it has none.
    """

    saves: list[Standing]
    last_committed: Committed | None
    lag_seconds: float
    sidecar: str
    last_error: str


class Save:
    """Handle of one save, from :func:`ds_ckpt_hook.after_save`."""

    def __init__(self, hook: Hook, state: SaveState) -> None:
        self._hook = hook
        self._state = state

    def __repr__(self) -> str:
        return f"Save(tag={self.tag!r}, save_id={self.save_id!r}, state={self.status().state!r})"

    @property
    def tag(self) -> str:
        """Its tag, as a string."""
        return self._state.tag

    @property
    def save_id(self) -> str | None:
        """Its id; None while, or if, the ranks have not agreed on it."""
        return self._state.save_id

    @property
    def held_seconds(self) -> float:
        """How long the hook held the training thread for it."""
        return self._state.held_seconds

    def status(self) -> Standing:
        """Where it stands now."""
        return standing_of(self._state)

    def wait(self, timeout: float | None = None) -> Standing:
        """Wait until it is durable, or cannot become so, or ``timeout`` seconds have passed."""
        return wait_for(self._hook, [self._state], timeout)[0]


@dataclass(frozen=True)
class FinalReport:
    """What :func:`ds_ckpt_hook.finalize` found.

    Attributes:
        durable: tags of the saves of this process that are committed, in order.
        not_durable: the others; each says why.
        seconds: how long it took.
    """

    durable: list[str]
    not_durable: list[Standing]
    seconds: float


def status(hook: Hook) -> Status:
    """See :func:`ds_ckpt_hook.status`."""
    said, now = _heard(hook), hook.clock.time()
    state = "none"
    if said is not None:
        state = "silent" if said.is_silent(now) else said.state
    return Status(
        saves=[standing_of(each) for each in list(hook.saves)],
        last_committed=_committed(said),
        lag_seconds=lag_of(list(hook.saves), now),
        sidecar=state,
        last_error=said.last_error if said is not None else "",
    )


def wait(hook: Hook, tag: str, timeout: float | None) -> Standing:
    """See :func:`ds_ckpt_hook.wait`."""
    for state in reversed(list(hook.saves)):
        if state.tag == tag:
            return wait_for(hook, [state], timeout)[0]
    known = [state.tag for state in hook.saves]
    raise SettingsError(f"this process has saved no tag {tag!r}; it has saved {known[-8:]}")


def _heard(hook: Hook) -> SidecarStatus | None:
    """What a sidecar said last: that of the volume in use, or of the one that is set."""
    for session in hook.sessions.values():
        return sidecar_of(session.volume)
    place, _ = hook.locate(None)
    return sidecar_of(place.volume) if place is not None else None


def _committed(said: SidecarStatus | None) -> Committed | None:
    if said is None or not said.newest_committed_save:
        return None
    return Committed(
        said.newest_committed_tag,
        said.newest_committed_save,
        said.newest_committed_step,
        said.newest_committed_ms,
    )


def lag_of(states: Sequence[SaveState], now: float) -> float:
    """Age in seconds of the oldest of some saves that is neither durable nor lost; 0 if none is.

    ``now`` in seconds since the epoch. A save counts from when it was agreed on.
    """
    for state in states:
        found = standing_of(state)
        if state.agreed_at and not found.durable and found.state not in LOST:
            return max(0.0, now - state.agreed_at)
    return 0.0


def finalize(hook: Hook, timeout: float | None = None, *, strict: bool = False) -> FinalReport:
    """See :func:`ds_ckpt_hook.finalize`."""
    began = hook.clock.monotonic()
    try:
        hook.catch_up()
        if not hook.sessions and hook.settings.directory is not None:
            hook.session(*hook.locate(None))  # without a single save, the end is told all the same
    except Exception as error:  # noqa: BLE001 - training has ended; the report must come
        logger.warning("finalize: %s", reason_of(error))
    for state in hook.saves:
        if state.waiting_for_engine:
            state.waiting_for_engine = False
            state.reason = (
                "the checkpoint engine has not finished writing it: make one more step, or call "
                "engine.destroy(), before finalize"
            )
    hook.worker.drain(timeout)
    # Ranks have waited for their own files for different times: that much more patience.
    usual = hook.settings.publish_timeout if timeout is None else timeout
    _tell_failures(hook, usual + hook.settings.exchange_timeout)
    for session in hook.sessions.values():
        try:
            session.finish()
        except OSError as error:
            logger.warning(
                "the end of training could not be noted on %s: %s", session.volume.path, error
            )
    left = None if timeout is None else max(0.0, timeout - (hook.clock.monotonic() - began))
    standings = wait_for(hook, hook.saves, left)
    report = FinalReport(
        durable=[standing.tag for standing in standings if standing.durable],
        not_durable=[standing for standing in standings if not standing.durable],
        seconds=hook.clock.monotonic() - began,
    )
    told_by_leader = any(session.is_leader for session in hook.sessions.values())
    for standing in report.not_durable if told_by_leader else ():
        logger.warning("tag %r is not durable: %s", standing.tag, standing.reason)
    if strict and report.not_durable:
        listed = "; ".join(f"{s.tag!r} is {s.state}: {s.reason}" for s in report.not_durable[:8])
        raise NotPublishedError(f"{len(report.not_durable)} saves are not durable: {listed}")
    return report


def _tell_failures(hook: Hook, patience: float) -> None:
    """A save that failed on one rank in the background is known to all afterwards."""
    if not hook.sessions:
        return
    own = {state.save_id: state.reason for state in hook.saves if state.save_id and state.reason}
    try:
        told: list[dict[str, str]] = hook.exchange.gather("finalize", own, timeout=patience)
    except CkptError as error:
        logger.warning("the ranks could not compare their saves at the end: %s", error)
        return
    for state in hook.saves:
        for failures in told:
            if state.save_id in failures and not state.reason:
                state.reason = failures[state.save_id]


def wait_for(hook: Hook, states: Sequence[SaveState], timeout: float | None) -> list[Standing]:
    """Wait until each save is durable, or cannot become so, or nobody is there to make it so.

    Args:
        hook: of this process.
        states: the saves.
        timeout: seconds; None to wait as long as the sidecar lives.
    """
    began = hook.clock.monotonic()
    while True:
        waited = hook.clock.monotonic() - began
        standings = [standing_of(state) for state in states]
        open_states = [
            state
            for state, standing in zip(states, standings, strict=True)
            if not standing.durable and standing.state not in LOST
        ]
        if not open_states:
            return standings
        # While the worker still hashes, there is nothing that the sidecar could have done.
        silent = "" if not hook.worker.drain(0) else _silence(hook, open_states, waited)
        expired = timeout is not None and waited >= timeout
        if silent or expired:
            why = silent or f"still {{}} after {waited:.0f} s"
            return [
                _explained(hook, state, standing, why) if state in open_states else standing
                for state, standing in zip(states, standings, strict=True)
            ]
        hook.clock.sleep(_POLL if timeout is None else min(_POLL, max(timeout - waited, 0.001)))


def _explained(hook: Hook, state: SaveState, standing: Standing, why: str) -> Standing:
    sidecar = sidecar_of(state.volume)
    if sidecar is None:
        why = f"no sidecar has ever written its heartbeat to the volume; {start_one(state)}"
    elif sidecar.is_silent(hook.clock.time()):
        age = abs(hook.clock.time() - sidecar.time)
        why = f"the sidecar has been silent for {age:.0f} s; {start_one(state)}"
    elif sidecar.last_error and not standing.reason:
        why = f"{why.format(standing.state)}; the sidecar's last error: {sidecar.last_error}"
    said = f" ({standing.reason})" if standing.reason else ""
    return Standing(
        state.tag, state.save_id, standing.state, False, f"{why.format(standing.state)}{said}"
    )


def start_one(state: SaveState) -> str:
    """How to get a sidecar for the volume of a save."""
    volume = state.session.volume.path if state.session is not None else "DIR"
    return (
        f"start one: ds-ckpt agent --volume {volume} --destination URL, or set DS_CKPT_DIR in the "
        "trainer if the agent has a folder above"
    )


def _silence(hook: Hook, states: Sequence[SaveState], waited: float) -> str:
    """Why no answer can be expected any more; empty if one can."""
    for state in states:
        if state.waiting_for_engine:
            return "the checkpoint engine has not finished writing it"
        sidecar = sidecar_of(state.volume)
        if sidecar is not None and not sidecar.is_silent(hook.clock.time()):
            # A stopped one may be on its way back: its container is restarted, or replaced.
            gone = sidecar.state == "stopped" and waited >= GRACE_SECONDS
            if gone or sidecar.state == "refused":
                gave_up = "has stopped" if sidecar.state == "stopped" else "gave up"
                return f"the sidecar {gave_up}: {sidecar.last_error or 'it said no more'}"
            return ""
    return "there is no sidecar" if waited >= GRACE_SECONDS else ""


def sidecar_of(volume: Volume | None) -> SidecarStatus | None:
    """What the sidecar of a volume last said of itself; None if nothing can be read."""
    if volume is None:
        return None
    try:
        return volume.sidecar_status()
    except (CkptError, OSError):
        return None


def standing_of(state: SaveState) -> Standing:
    """Where one save stands now."""
    try:
        status = state.look()
    except (CkptError, OSError) as error:
        return Standing(state.tag, state.save_id, "discovered", False, reason_of(error))
    return Standing(state.tag, state.save_id, status.state, status.state in DURABLE, status.reason)
