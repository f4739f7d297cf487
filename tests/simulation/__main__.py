"""``python -m tests.simulation``: many runs, one run with its trace, or a failing one made small.

The last line gives the number of runs, of violations, and the first seed that broke an invariant.
Exit code 0: no invariant broken and everything that must happen has happened.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys

from tests.simulation.campaign import Figures, campaign, shrink
from tests.simulation.run import Outcome, run


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="how many; default: 300")
    parser.add_argument("--seed", type=int, help="of all runs; default: a fresh one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--one", metavar="SEED", help="one run only, like 7.42")
    parser.add_argument(
        "--only",
        action="append",
        metavar="ACCIDENT",
        help="with --one: nothing else may go wrong; may be repeated",
    )
    parser.add_argument(
        "--trace", action="store_true", help="with --one: every change, a line each"
    )
    parser.add_argument("--until-broken", action="store_true", help="stop at the first violation")
    parser.add_argument("--no-shrink", action="store_true", help="do not make a failing run small")
    chosen = parser.parse_args()
    if chosen.jobs < 1:
        parser.error("--jobs: at least one process")
    if chosen.one is None and (chosen.only or chosen.trace):
        parser.error("--only and --trace are for one run: give --one SEED")
    if chosen.one is not None:
        logging.disable(logging.CRITICAL)
        only = frozenset(chosen.only) if chosen.only else None
        outcome = run(chosen.one, only=only, trace=print if chosen.trace else None)
        tell(outcome)
        for each in sorted((only or frozenset()) - set(outcome.accidents)):
            print(f"  did not happen: {each}")
        return 1 if outcome.broken else 0
    seed = chosen.seed if chosen.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}: {chosen.runs} runs in {chosen.jobs} processes", flush=True)
    figures = campaign(
        seed, chosen.runs, chosen.jobs, until_broken=chosen.until_broken, progress=Progress()
    )
    for line in figures.lines():
        print(line)
    if figures.first is not None and not chosen.no_shrink:
        print(f"making seed {figures.first.seed} small: {figures.first.broken[0]}", flush=True)
        tell(shrink(figures.first, print))
    missing = figures.missing()
    if missing:
        print(f"these never happened: {', '.join(missing)}")
    first = figures.first.seed if figures.first is not None else "none"
    print(f"runs {figures.runs}, violations {figures.violations}, first failing seed {first}")
    return 1 if figures.violations or missing else 0


def tell(outcome: Outcome) -> None:
    """What one run showed."""
    for sentence in outcome.broken[:5]:
        print(f"  {sentence}")
    print(
        f"  {outcome.saves} saves, {len(outcome.accidents)} accidents, "
        f"{outcome.seconds:.0f} s simulated, {outcome.cpu:.2f} CPU s"
    )
    if outcome.broken:
        chosen = " ".join(f"--only '{each}'" for each in outcome.accidents[:40])
        print(f"  again: python -m tests.simulation --one {outcome.seed} --trace {chosen}")


class Progress:
    """One line now and then."""

    def __init__(self) -> None:
        self._said = 0.0

    def __call__(self, figures: Figures) -> None:
        if figures.wall - self._said >= 30:
            self._said = figures.wall
            print(
                f"{figures.wall:6.0f} s: {figures.runs} runs, {figures.violations} violations",
                flush=True,
            )


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets must be the same again
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    sys.exit(main())
