"""What is still to be sent, and when it may be: no thread, no network, no clock of its own.

What waits is bounded by what it means, not by a queue: of annotations only the newest save counts,
of commits the newest stands for those before it, an equal failure is counted instead of repeated.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ds_ckpt_sidecar.observe.kubernetes import events
from ds_ckpt_sidecar.observe.kubernetes.events import Commit, Pod, Series
from ds_ckpt_store.contract.clock import Clock, fresh_token

Right = Literal["events", "annotations"]

MOST_FAILING = 8  # different sentences that wait at a time
MOST_REMEMBERED = 64  # sentences that were said lately
_RANDOM = re.compile(r"[0-9a-fA-F]{8,}|[0-9A-Z]{12,}")  # names of probes and requests


@dataclass(frozen=True)
class Pace:
    """How much is sent.

    Attributes:
        burst: events that may be sent one after another.
        refill_seconds: until one more may be.
        annotation_seconds: between two annotations.
        repeat_seconds: for which an equal failure is not said again.
    """

    burst: int = 10
    refill_seconds: float = 30.0
    annotation_seconds: float = 10.0
    repeat_seconds: float = 600.0


@dataclass(eq=False)
class Report:
    """One request to be made."""

    right: Right
    document: dict[str, Any]
    tries: int = 0


@dataclass
class _Said:
    """A failing sentence: when it was taken, and how often it was heard since."""

    at: float
    since: int = 0
    last: float = 0.0


class Pending:
    """Takes what is heard, and gives what may be sent; not for several threads at a time.

    Args:
        pod: the own pod.
        pace: how much.
        clock: time.
        rng: for names of events.
    """

    def __init__(self, pod: Pod, pace: Pace, clock: Clock, rng: random.Random) -> None:
        self._pod = pod
        self._pace = pace
        self._clock = clock
        self._rng = rng
        self._tokens = float(pace.burst)
        self._counted = clock.monotonic()
        self._annotation_due = 0.0
        self._newest: Commit | None = None
        self._commits = 0
        self._said: dict[str, _Said] = {}
        self._left: tuple[str, ...] = ()
        self._exit: Report | None = None
        self._annotation: Report | None = None
        self._failing: list[Report] = []
        self._more = 0  # sentences that the last of those stands for
        self._begun: Report | None = None
        self._commit: Report | None = None

    # ---- heard

    def committed(self, commit: Commit) -> None:
        """A save is durable."""
        if self._begun is None and self._commit is not None and self._commit.tries:
            self._begun, self._commits = self._commit, 0  # it may be under way
        before = self._commits
        self._commits += 1
        self._commit = self._event(events.committed(commit, before))
        if self._newest is None or commit.time_ms >= self._newest.time_ms:
            self._newest = commit
            self._annotation = Report("annotations", events.last_committed(self._pod, commit))

    def failing(self, sentence: str) -> None:
        """Something fails again and again; sentences that differ by some id are equal."""
        now = self._clock.monotonic()
        alike = _RANDOM.sub("*", sentence)
        said = self._said.get(alike)
        if said is not None and now - said.at < self._pace.repeat_seconds:
            said.since += 1
            said.last = self._clock.time()
            return
        series = Series(said.since + 1, self._clock.time()) if said and said.since else None
        self._said.pop(alike, None)
        self._said[alike] = _Said(now)
        if len(self._said) > MOST_REMEMBERED:
            self._said.pop(next(iter(self._said)))
        if len(self._failing) < MOST_FAILING:
            self._more = 0
        else:
            self._failing.pop()
            self._more += 1
            sentence += f" (and {self._more} more: see `ds-ckpt status`)"
        self._failing.append(self._event(events.failing(sentence), series))

    def not_durable_at_exit(self, sentences: Sequence[str]) -> None:
        """The agent ends, and these saves are no checkpoints."""
        if sentences and tuple(sentences) != self._left:
            self._left = tuple(sentences)
            self._exit = self._event(events.not_durable_at_exit(sentences))

    def _event(self, what: tuple[str, str, str, str], series: Series | None = None) -> Report:
        now, token = self._clock.time(), fresh_token(self._rng)
        return Report("events", events.event(self._pod, what, now, token, series))

    # ---- sent

    def waiting(self) -> list[Report]:
        """All that is not sent, the most important first."""
        reports = [self._exit, self._annotation, *self._failing, self._begun, self._commit]
        return [report for report in reports if report is not None]

    def due(self, report: Report) -> float:
        """In how many seconds the pace lets it be sent; 0 if now."""
        now = self._clock.monotonic()
        if report is self._exit:
            return 0.0
        if report.right == "annotations":
            return max(0.0, self._annotation_due - now)
        grown = (now - self._counted) / self._pace.refill_seconds
        self._tokens = min(float(self._pace.burst), self._tokens + grown)
        self._counted = now
        return max(0.0, (1.0 - self._tokens) * self._pace.refill_seconds)

    def begun(self, report: Report) -> None:
        """It is being sent: that counts, whatever becomes of it, but a repetition does not."""
        report.tries += 1
        if report.tries > 1 or report is self._exit:
            return
        if report.right == "annotations":
            self._annotation_due = self._clock.monotonic() + self._pace.annotation_seconds
        else:
            self._tokens -= 1.0

    def over(self, report: Report) -> None:
        """It is sent, or given up."""
        if report is self._exit:
            self._exit = None
        elif report is self._annotation:
            self._annotation = None
        elif report is self._begun:
            self._begun = None
        elif report is self._commit:
            self._commit, self._commits = None, 0
        elif report in self._failing:
            self._failing.remove(report)
