"""What has happened since the process began, in plain numbers.

No metrics library: the agent counts whether or not anybody asks, and also in the simulation. Any
thread may count.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

SECONDS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600)
"""Upper bounds of the histograms' buckets."""

Phase = Literal["hashing", "waiting", "uploading", "verifying", "nodes"]
PHASES: tuple[Phase, ...] = ("hashing", "waiting", "uploading", "verifying", "nodes")
PartOutcome = Literal["sent", "resumed", "retried"]
ENDS = ("committed", "superseded", "abandoned", "quarantined", "failed")
"""States in which a save ends, or rests until somebody does something."""


@dataclass
class Histogram:
    """Seconds, by bucket; the last bucket has no bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds


@dataclass(frozen=True)
class Timing:
    """How long a save took, from its being saved to its commit, and in which part of the way.

    Times are seconds since the epoch; those that this process has not seen (it was started again
    on the way) are None, and their phase counts as the one after it.

    Attributes:
        saved: by the trainer's clock.
        published: its manifest was complete: all shards had their checksums.
        begun: the first byte went out.
        sent: the last.
        stored: this node's part was verified, and its receipt put.
        committed: all nodes' parts were.
    """

    saved: float
    published: float
    committed: float
    begun: float | None = None
    sent: float | None = None
    stored: float | None = None

    def phases(self) -> dict[Phase, float]:
        """Seconds in each phase; their sum is the whole."""
        marks = [self.published, self.begun, self.sent, self.stored, self.committed]
        spent: dict[Phase, float] = {}
        before = self.saved
        for phase, mark in zip(PHASES, marks, strict=True):
            at = before if mark is None else max(before, min(mark, self.committed))
            spent[phase] = at - before
            before = at
        return spent

    @property
    def seconds(self) -> float:
        """From saved to committed; clocks of two nodes may disagree, so never below 0."""
        return max(0.0, self.committed - self.saved)


class Tally:
    """The numbers.

    Attributes:
        sent_bytes: gives the bytes that went onto the network.
        uploaded_bytes: of shards, that the store took.
        parts: requests that carried bytes of a shard, by outcome.
        errors: calls and steps that failed, by operation and class of error.
        verify_failures: bytes that were found to be other than they should be.
        decided: saves, by the state in which they ended.
        retained: checkpoints that retention gave up, and objects that it deleted.
        commit: seconds from save to commit.
        phases: the same, split.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent_bytes: Callable[[], int] = lambda: 0
        self.uploaded_bytes = 0
        self.parts: Counter[PartOutcome] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()
        self.verify_failures = 0
        self.decided: Counter[str] = Counter()
        self.retained_checkpoints = 0
        self.retained_objects = 0
        self.commit = Histogram()
        self.phases: Mapping[Phase, Histogram] = {phase: Histogram() for phase in PHASES}

    def sent(self, size: int) -> None:
        """The store took a part, or a small shard whole."""
        with self._lock:
            self.uploaded_bytes += size
            self.parts["sent"] += 1

    def resumed(self, parts: int) -> None:
        """So many parts had been stored by an earlier start."""
        with self._lock:
            self.parts["resumed"] += parts

    def failed(self, operation: str, kind: str) -> None:
        """A call to the store, or a step, failed; it may be tried again."""
        with self._lock:
            self.errors[operation, kind] += 1
            if operation in ("put", "put_part"):
                self.parts["retried"] += 1

    def unlike(self) -> None:
        """Bytes were found to be other than they should be."""
        with self._lock:
            self.verify_failures += 1

    def ended(self, state: str) -> None:
        """A save is decided."""
        with self._lock:
            self.decided[state] += 1

    def committed(self, timing: Timing) -> None:
        """A save of this volume is a checkpoint."""
        with self._lock:
            self.commit.observe(timing.seconds)
            for phase, seconds in timing.phases().items():
                self.phases[phase].observe(seconds)

    def retained(self, checkpoints: int, objects: int) -> None:
        """Retention gave up checkpoints, and deleted objects."""
        with self._lock:
            self.retained_checkpoints += checkpoints
            self.retained_objects += objects
