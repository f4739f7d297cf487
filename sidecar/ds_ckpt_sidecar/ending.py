"""Whether this process is going to end, and how much time it has: SIGTERM, preStop, the trainer.

* :meth:`Ending.stop`, of a signal: what is left may take ``drain_seconds`` from then on.
* :meth:`Ending.notice`, of a preStop hook: the pod is going to end, and the signal comes when the
  trainer has used as much of the pod's grace as it likes; that may leave 2 s. So the time is
  planned from the notice on. Without a signal it is taken back after :data:`NOTICE_SECONDS`.
* :class:`TrainerWatch`, for an agent that ends by itself: whether the trainer is over.
* :class:`Impatient`, a clock by which nobody waits long while there is little time.

The first two may be called from any thread; they set a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.manifest import TrainerStatus
from ds_ckpt_store.errors import PausedError

NOTICE_SECONDS = 600.0
FLOOR_SECONDS = 2.0
"""What the kubelet leaves a sidecar at least after SIGTERM."""

END_SECONDS = 0.5
"""What an agent needs from the last look at the time to the end of its process, at most.

A look comes every quarter of a second while requests run; then the last status, the log, the
journal, reports to the cluster.
"""

_LEAST_SECONDS = 0.1

LIVES_SECONDS = 15.0
"""A trainer that was silent for longer will not save any more: it beats every 5 s."""

UNSEEN_SECONDS = 3600.0
"""After which a trainer that this agent has never heard of is over, although saves of one are here.

Or its last word is. A trainer that takes longer to start must beat before: it does from
``agree_on_resume`` or its first save on.
"""

NAP_SECONDS = 0.25
HURRIED_SECONDS = 1.0
OVER = "the time for draining is over"

Verdict = Literal["", "finished", "gone"]


class Ending:
    """Whether this process is going to end, and when.

    Args:
        clock: time.
        drain_seconds: from the signal to the end of the process. The last of them, at most
            :data:`END_SECONDS`, are for that end.
    """

    def __init__(self, clock: Clock, drain_seconds: float) -> None:
        self._clock = clock
        self._process_seconds = drain_seconds
        self._drain_seconds = max(drain_seconds - END_SECONDS, drain_seconds / 2)
        self._stopped_at: float | None = None
        self._noticed_at: float | None = None

    # ---- from any thread

    def stop(self) -> None:
        """Told to end. Told again: it ends no later, and no sooner."""
        if self._stopped_at is None:
            self._stopped_at = self._clock.monotonic()

    def notice(self) -> None:
        """Told that the pod is going to end."""
        self._noticed_at = self._clock.monotonic()

    # ---- asked by the agent

    @property
    def stopping(self) -> bool:
        """Told to end."""
        return self._stopped_at is not None

    @property
    def noticed(self) -> bool:
        """Told that the pod is going to end, not long ago."""
        at = self._noticed_at
        return at is not None and self._clock.monotonic() - at < NOTICE_SECONDS

    @property
    def hurried(self) -> bool:
        """What can become durable soon comes before all else."""
        return self.stopping or self.noticed

    @property
    def over(self) -> bool:
        """The time for draining is over."""
        return self.seconds_to_over() <= 0

    def seconds_to_over(self) -> float:
        """Until :attr:`over`; without end before the signal."""
        if self._stopped_at is None:
            return math.inf
        return self._stopped_at + self._drain_seconds - self._clock.monotonic()

    def seconds_left(self) -> float:
        """In which what is begun now must be done: a plan, not the end of all tries."""
        began = [at for at in (self._noticed_at, self._stopped_at) if at is not None]
        if not began:
            return self._drain_seconds
        now = self._clock.monotonic()
        left = (began[0] if self.noticed else began[-1]) + self._drain_seconds - now
        end = FLOOR_SECONDS
        end = min(end, self.seconds_to_over())
        return max(left, end, _LEAST_SECONDS)

    def seconds_to_exit(self, most: float) -> float:
        """For what comes last: at most so many, and hardly any if the process should be gone."""
        if self._stopped_at is None:
            return most
        left = self._stopped_at + self._process_seconds - self._clock.monotonic()
        return max(_LEAST_SECONDS, min(left - _LEAST_SECONDS, most))


class Impatient:
    """The time; who sleeps by it is woken after a moment while there is little of it.

    So a call that was to be made again in a minute is made at once when the pod is going to end,
    and is not made again when it ends.

    Args:
        clock: time.
        hurried: whether there is little time; asked four times a second.
        over: whether there is none.
        awake: called as often; must not raise.
    """

    def __init__(
        self,
        clock: Clock,
        hurried: Callable[[], bool],
        over: Callable[[], bool],
        awake: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._hurried = hurried
        self._over = over
        self._awake = awake

    def time(self) -> float:
        """As the clock says."""
        return self._clock.time()

    def monotonic(self) -> float:
        """As the clock says."""
        return self._clock.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait, in a hurry for no more than a second.

        Raises:
            PausedError: there is no time to do it again.
        """
        began = self._clock.monotonic()
        while (left := began + seconds - self._clock.monotonic()) > 0:
            self._clock.sleep(min(left, NAP_SECONDS))
            self._awake()
            if self._over():
                raise PausedError(OVER)
            if self._hurried() and self._clock.monotonic() - began >= HURRIED_SECONDS:
                return


class TrainerWatch:
    """Tells when the trainer on a volume is over.

    What lies on the volume at the agent's start may be of an earlier pod. So a trainer counts once
    its heartbeat was seen to move, or is younger than this agent; then it is over when it says so,
    or is silent for long. A finished mark that was there before, and stays, counts after the same
    time; a heartbeat that stays, and saves without one, after :data:`UNSEEN_SECONDS`.

    Args:
        clock: time; the trainer's is the same, for both are of one pod.
        gone_seconds: of silence.

    Attributes:
        last: what the trainer said last.
    """

    def __init__(self, clock: Clock, gone_seconds: float) -> None:
        self._clock = clock
        self._gone_seconds = gone_seconds
        self._looked = False
        self.last: TrainerStatus | None = None
        self._started = clock.time()
        self._moved_at = clock.monotonic()
        self._newest = ""
        self._seen = False

    def look(self, trainer: TrainerStatus | None, newest: str = "") -> Verdict:
        """Look at what the trainer says now.

        Args:
            trainer: its status; None: nothing that can be read.
            newest: the newest save on the volume, which tells of a trainer without a status.
        """
        now = self._clock.monotonic()
        if trainer is not None and trainer != self.last:
            self._seen = self._seen or self._looked or trainer.time > self._started
            self.last, self._moved_at = trainer, now
        elif self.last is None and newest != self._newest:
            self._newest, self._moved_at = newest, now
        self._looked = True
        silent = now - self._moved_at
        if self.last is None and not self._newest:
            return ""
        if self.last is not None and self.last.finished and not self.last.by_itself:
            return "finished" if self._seen or silent >= self._gone_seconds else ""
        return "gone" if silent >= self.patience else ""

    @property
    def patience(self) -> float:
        """Seconds of silence after which it is gone."""
        return self._gone_seconds if self._seen else max(self._gone_seconds, UNSEEN_SECONDS)

    @property
    def lives(self) -> bool:
        """Whether the trainer may save once more: it was heard of a moment ago."""
        if self.last is None or self.last.finished or not self._seen:
            return False
        return self._clock.monotonic() - self._moved_at < LIVES_SECONDS


@dataclass
class Patience:
    """How long to go on with what is left although nobody says when to end: while it gets less.

    Args:
        clock: time.
        seconds: in which it must get less.
    """

    clock: Clock
    seconds: float
    _least: int | None = None
    _since: float = 0.0

    def is_over(self, left: int) -> bool:
        """Whether nothing has become less for too long; ``left`` in bytes, or in anything."""
        now = self.clock.monotonic()
        if self._least is None or left < self._least:
            self._least, self._since = left, now
        return now - self._since >= self.seconds

    def renew(self) -> None:
        """Begin anew."""
        self._least = None
