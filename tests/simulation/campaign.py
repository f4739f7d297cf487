"""Many runs on all cores, what happened in them, and the shrinking of one that breaks."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from tests.simulation.run import Outcome, run

BATCH = 20

MUST_HAPPEN = {
    "faults of the network": (
        "lost request",
        "lost answer",
        "late",
        "doubled",
        "refused",
        "conflict",
        "cut",
        "slow listing",
        "changed on its way up",
        "changed on its way down",
        "outlives its sender",
        "outage",
        "throttle",
    ),
    "deaths": (
        "death",
        "kill agent",
        "kill trainers",
        "replace pods",
        "stop agent",
        "notice agent",
        "suspend",
    ),
    "zombies": (
        "freeze agent",
        "freeze trainer",
        "second agent",
        "lock does not hold",
        "agents that stood by",
    ),
    "volumes": ("full disk", "disk waits", "lose journal"),
    "saves": (
        "saves",
        "tags saved again",
        "attempts",
        "records committed",
        "records abandoned",
        "saves that waited for other nodes",
        "saves superseded",
        "uploads resumed",
        "saves cleaned from a volume",
    ),
    "takeovers": (
        "leases taken by a newer attempt",
        "leases passed to a newer attempt",
        "foreign run",
        "leases taken over by another run",
        "passes refused for another run",
    ),
    "the way back": ("restore", "restores", "roll back"),
    "people": (
        "curate",
        "pins by name",
        "deletions by name",
        "checkpoints given up by name",
        "refused by name",
        "moves of latest back, by name",
    ),
    "retention and gc": (
        "checkpoints given up by retention",
        "gc",
        "collections",
    ),
}


@dataclass
class Figures:
    """What many runs showed together."""

    runs: int = 0
    discarded: int = 0
    violations: int = 0
    first: Outcome | None = None
    broken: list[tuple[str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    nodes: int = 0
    saves: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    wall: float = 0.0
    peak_mib: float = 0.0

    def add(self, outcome: Outcome) -> None:
        if outcome.broken:
            self.violations += 1
            self.broken.append((outcome.seed, outcome.broken[0]))
            if self.first is None or _number(outcome.seed) < _number(self.first.seed):
                self.first = outcome
        elif not outcome.counts_as_one:
            self.discarded += 1
            return
        self.runs += 1
        self.nodes += outcome.nodes
        self.saves += outcome.saves
        self.seconds += outcome.seconds
        self.cpu += outcome.cpu
        for what, count in outcome.counts.items():
            self.counts[what] = self.counts.get(what, 0) + count

    def missing(self) -> list[str]:
        """What should have happened and never did."""
        return [
            what for kinds in MUST_HAPPEN.values() for what in kinds if not self.counts.get(what)
        ]

    def lines(self) -> Iterator[str]:
        """A table for people."""
        shown = set()
        for title, kinds in MUST_HAPPEN.items():
            yield f"{title}:"
            for kind in kinds:
                shown.add(kind)
                yield f"  {kind:<42} {self.counts.get(kind, 0):>9}"
        yield "beside them:"
        for kind in sorted(set(self.counts) - shown):
            yield f"  {kind:<42} {self.counts[kind]:>9}"
        for seed, sentence in self.broken[:20]:
            yield f"BROKEN {seed}: {sentence[:300]}"
        runs = max(self.runs, 1)
        yield (
            f"{self.nodes / runs:.1f} nodes and {self.saves / runs:.1f} saves a run, "
            f"{self.seconds / 3600:.0f} h of simulated time, {self.cpu:.0f} CPU s "
            f"({self.cpu / runs:.3f} a run), {self.wall:.0f} s, at most {self.peak_mib:.0f} MiB "
            f"a process; {self.discarded} runs with too few saves or no death do not count"
        )


def _number(seed: str) -> int:
    return int(seed.rpartition(".")[2])


def _batch(seeds: list[str]) -> tuple[list[Outcome], float]:
    outcomes = []
    logging.disable(logging.CRITICAL)
    for seed in seeds:
        outcome = run(seed)
        if not outcome.broken:
            outcome.accidents = []
        outcomes.append(outcome)
    return outcomes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def campaign(
    seed: int,
    runs: int,
    jobs: int,
    *,
    until_broken: bool = False,
    progress: Callable[[Figures], None] = lambda _: None,
) -> Figures:
    """Make runs until so many have counted.

    Args:
        seed: of the campaign; the runs' are ``<seed>.<number>``.
        runs: how many.
        jobs: processes.
        until_broken: stop at the first that breaks an invariant.
    """
    figures = Figures()
    began = time.monotonic()
    number = 0
    with ProcessPoolExecutor(jobs) as pool:
        pending = set()

        def submit() -> None:
            nonlocal number
            size = max(1, min(BATCH, (runs - figures.runs) // (2 * jobs)))
            pending.add(pool.submit(_batch, [f"{seed}.{number + n}" for n in range(size)]))
            number += size

        for _ in range(jobs):
            submit()
        while pending:
            done = next(as_completed(pending))
            pending.discard(done)
            outcomes, peak = done.result()
            figures.peak_mib = max(figures.peak_mib, peak)
            for outcome in outcomes:
                if figures.runs < runs:
                    figures.add(outcome)
            figures.wall = time.monotonic() - began
            progress(figures)
            if figures.runs < runs and not (until_broken and figures.violations):
                submit()
    return figures


def shrink(outcome: Outcome, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """The same seed with as few accidents as still break the same invariant.

    By halves first, then by ever smaller pieces, as delta debugging does.
    """
    kind = _kind(outcome)
    best = outcome
    pieces = 2
    while len(best.accidents) > 1:
        size = max(1, len(best.accidents) // pieces)
        for start in range(0, len(best.accidents), size):
            kept = best.accidents[:start] + best.accidents[start + size :]
            tried = run(outcome.seed, only=frozenset(kept))
            if tried.broken and _kind(tried) == kind:
                best = tried
                say(f"{len(best.accidents)} accidents still break it")
                pieces = max(2, pieces - 1)
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(best.accidents))
    return best


def _kind(outcome: Outcome) -> str:
    """Which invariant was broken first."""
    return outcome.broken[0].partition(":")[0] if outcome.broken else ""
