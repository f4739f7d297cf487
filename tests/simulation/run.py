"""One run: from a seed to an outcome."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation import seams
from tests.simulation.chance import Chance
from tests.simulation.cloud import Cloud
from tests.simulation.kernel import EPOCH, Kernel, StuckError
from tests.simulation.story import LEAST_SAVES, World


@dataclass
class Outcome:
    """What one run showed.

    Attributes:
        seed: of the run.
        broken: invariants, the first first; empty if all hold.
        accidents: names of all that went wrong, in order; see :mod:`~tests.simulation.chance`.
        counts: how often what happened.
        nodes, saves: of the main job.
        seconds: of simulated time.
        cpu: seconds of processor time.
    """

    seed: str
    broken: list[str] = field(default_factory=list)
    accidents: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    nodes: int = 0
    saves: int = 0
    seconds: float = 0.0
    cpu: float = 0.0

    @property
    def counts_as_one(self) -> bool:
        """Whether it had enough of what is to be tried."""
        deaths = sum(self.counts.get(kind, 0) for kind in ("death", "kill agent", "kill trainers"))
        deaths += self.counts.get("replace pods", 0)
        return self.saves >= LEAST_SAVES and deaths > 0


def run(
    seed: str,
    *,
    only: frozenset[str] | None = None,
    trace: Callable[[str], None] | None = None,
) -> Outcome:
    """Make one run.

    Args:
        seed: from which everything follows.
        only: accidents that may happen; None: all.
        trace: told of every change, one line each.
    """
    began = time.process_time()
    chance = Chance(seed, only)
    kernel = Kernel(chance)
    kernel.trace = trace
    Kernel.current = kernel
    world = World(kernel, chance)
    clouds: list[Cloud] = [world.cloud]

    def open_store(url: str) -> Any:
        return clouds[0].connect(seams.here())

    def watch(folder: str, wake: Any, warn: Any) -> Callable[[], None]:
        return lambda: None  # the pod wakes its agent

    gc.disable()
    try:
        with seams.swapped(open_store, watch):
            try:
                world.run()
            except StuckError as error:
                world.checker.fails(f"I5: {error}")
            finally:
                world.close()
    finally:
        gc.enable()
    return Outcome(
        seed=seed,
        broken=world.checker.broken,
        accidents=chance.happened,
        counts=chance.counts,
        nodes=world.job.nodes,
        saves=chance.counts.get("saves", 0),
        seconds=kernel.now,
        cpu=time.process_time() - began,
    )


__all__ = ["EPOCH", "Outcome", "run"]
