"""A notice that this process is going to end: one recovery save of all ranks, at one step.

Whoever is told (SIGTERM, or a cloud's notice by :meth:`Preemption.notify`) says so at its next
step boundary. The ranks ask each other there without waiting: the answer to what was asked at one
boundary is read at the next, so all ranks read the same answer at the same step and a step costs
one message in the background. Then they compare what time is left with what a save took so far,
and save, or say that they do not.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_ckpt_hook import saving
from ds_ckpt_hook.core import DURABLE, Hook, reason_of
from ds_ckpt_hook.errors import NotPublishedError
from ds_ckpt_hook.feedback import Save
from ds_ckpt_hook.session import Session
from ds_ckpt_store.contract.manifest import RECOVERY
from ds_ckpt_store.errors import CkptError

logger = logging.getLogger("ds_ckpt_hook")

COMMIT_SECONDS = 1.0  # receipts, commit and pointer


@dataclass(frozen=True)
class Told:
    """What one rank says once all know of a notice: seconds, and why its process is to end."""

    left: float
    needed: float
    reason: str
    error: str


class Preemption:
    """Leads all ranks to one last save; made by :func:`ds_ckpt_hook.on_preemption`.

    Attributes:
        save: the recovery save; None if there was none.
    """

    def __init__(
        self,
        hook: Hook,
        engine: Any,
        *,
        save_dir: str | os.PathLike[str] | None,
        client_state: Callable[[], Mapping[str, Any]] | None,
        grace: float | None,
    ) -> None:
        self.save: Save | None = None
        self._hook = hook
        self._engine = engine
        self._save_dir = save_dir
        self._client_state = client_state
        self._grace = hook.settings.grace if grace is None else grace
        self._ends_at = math.inf
        self._reason = ""
        self._asked: Callable[[], bool] | None = None
        self._over = False
        self._deaf = False
        self._write_seconds = 0.0
        self._saved_at: int | None = None
        self._before: Any = None
        self._time_saves()
        self._take_signal()

    def notify(self, reason: str, seconds_left: float | None = None) -> None:
        """This process is going to end: what a cloud's notice tells. From any thread.

        Args:
            reason: for the log.
            seconds_left: until then; the grace of a pod if None.
        """
        left = self._grace if seconds_left is None else seconds_left
        self._ends_at = min(self._ends_at, self._hook.clock.monotonic() + left)
        self._reason = self._reason or reason

    def should_stop(self) -> bool:
        """Whether training ends here. Every rank calls it after each optimizer step.

        At the same step on all ranks it saves and hands over, or says why not, and is True from
        then on. It never raises, and waits for nobody longer than for a rank that is late.
        """
        if self._over:
            return True
        if self._deaf:
            return False
        asked, self._asked = self._asked, None
        try:
            if asked is not None and asked():
                self._over = True
            else:
                self._asked = self._hook.exchange.ask_any(self._reason != "")
        except CkptError as error:
            self._deaf = True
            self._hook.warn(
                "preempted",
                f"the ranks no longer hear of each other's notices, so none leads to a recovery "
                f"save: {error}",
            )
        if self._over:
            self._end()
        return self._over

    @property
    def seconds_left(self) -> float | None:
        """Until this process is expected to be killed; None without a notice."""
        return None if math.isinf(self._ends_at) else self._left()

    def _left(self) -> float:
        return max(0.0, self._ends_at - self._hook.clock.monotonic())

    # ---- the end

    def _end(self) -> None:
        try:
            why_not = self._agree()
            if why_not:
                self._hook.warn("preempted", f"no recovery save: {why_not}")
            else:
                self._save()
        except Exception as error:  # noqa: BLE001 - the loop must come to its end
            self._hook.warn("preempted", f"no recovery save: {reason_of(error)}")
        finally:
            self._give_signal_back()

    def _agree(self) -> str:
        """Why there is to be no save; empty if there is; the same on all ranks.

        Raises:
            HookError: not all ranks could say something.
        """
        needed, error = 0.0, ""
        try:
            session = self._hook.session(*self._hook.locate(self._save_dir))
            if session.is_leader:
                needed = self._needed(session)
        except (CkptError, OSError) as failure:
            error = reason_of(failure)
        said = Told(self._left(), needed, self._reason, error)
        told: list[Told] = self._hook.exchange.gather("preemption", said)
        left, needed = min(each.left for each in told), max(each.needed for each in told)
        self._ends_at = min(self._ends_at, self._hook.clock.monotonic() + left)
        reasons = [f"rank {rank}: {each.reason}" for rank, each in enumerate(told) if each.reason]
        logger.warning(
            "all ranks end at step %s, %.0f s are left (%s)", self._step, left, "; ".join(reasons)
        )
        errors = [f"rank {rank}: {each.error}" for rank, each in enumerate(told) if each.error]
        if errors:
            return "; ".join(errors[:4])
        if self._saved_at is not None and self._saved_at == self._step:
            return f"step {self._step} is saved already"
        if needed > left:
            return (
                f"{left:.0f} s are left, and to write and store it takes {needed:.0f} s, as long "
                "as the last one did: the newest durable checkpoint is what a restart resumes from"
            )
        return ""

    def _save(self) -> None:
        place, problem = self._hook.locate(self._save_dir)
        if place is None:
            raise NotPublishedError(problem)
        tag = f"{RECOVERY}_step{self._step}"
        state = dict(self._client_state()) if self._client_state is not None else {}
        self._engine.save_checkpoint(place.save_dir, tag, client_state=state)
        self.save = saving.after_save(
            self._hook, self._engine, tag, save_dir=self._save_dir, kind=RECOVERY
        )

    def _needed(self, session: Session) -> float:
        """Seconds for one more save on this node: as the last took to be written and stored."""
        sizes = session.last_bytes
        for known in reversed(self._hook.saves):
            status = known.look()
            took = status.durable_since - status.handed_over
            if status.state in DURABLE and status.handed_over and took > 0 and status.bytes_total:
                stored = sizes * took / status.bytes_total
                return self._write_seconds + stored + COMMIT_SECONDS
        return self._write_seconds + COMMIT_SECONDS if self._write_seconds else 0.0

    # ---- what is watched

    @property
    def _step(self) -> int | None:
        step = getattr(self._engine, "global_steps", None)
        return step if isinstance(step, int) else None

    def _time_saves(self) -> None:
        save = self._engine.save_checkpoint

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._hook.clock.monotonic()
            result = save(*args, **kwargs)
            self._write_seconds = self._hook.clock.monotonic() - began
            self._saved_at = self._step
            return result

        self._engine.save_checkpoint = timed

    def _take_signal(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "on_preemption was not called by the main thread, so SIGTERM is not noticed here: "
                "call preemption.notify() instead"
            )
            return
        self._before = signal.signal(signal.SIGTERM, lambda *_: self.notify("SIGTERM"))

    def _give_signal_back(self) -> None:
        """A second one, and one after the last save, does what it did before."""
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            self._before = None
