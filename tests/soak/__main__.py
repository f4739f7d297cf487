"""``python -m tests.soak --seconds 60 --seed 7``: see ``tests/soak/soak.py``."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.soak.soak import Outcome, Plan, Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="that the hand is at work")
    parser.add_argument("--seed", default="", help="of all that is drawn; default: a fresh one")
    parser.add_argument("--keep", type=Path, help="work in this folder, and leave it there")
    options = parser.parse_args()
    plan = Plan(options.seconds, options.seed or os.urandom(4).hex())
    folder = options.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and leave no process behind
    say(f"soak: seed {plan.seed}, {plan.seconds:.0f} s, {len(plan.ranks)} nodes, in {folder}")
    soak = Soak(plan, folder, say)
    ended = False
    try:
        outcome = soak.run()
        ended = True
    finally:
        bad = not ended or bool(outcome.problems)
        for log in (folder / "server").glob("*.log"):
            shutil.move(log, soak.logs)
        if not options.keep:
            for path in folder.iterdir() if bad else [folder]:
                if path != soak.logs:
                    shutil.rmtree(path, ignore_errors=True)
        if bad:
            say(f"soak: seed {plan.seed} failed; the logs are in {soak.logs}")
    show(outcome)
    verdict = f"{len(outcome.problems)} problems" if outcome.problems else "all holds"
    say(f"soak: seed {plan.seed}: {verdict}")
    return 1 if outcome.problems else 0


def show(outcome: Outcome) -> None:
    """The figures as a table, and what does not hold."""
    rows: list[tuple[str, str]] = []
    rows += [(name, f"{count:,}") for name, count in outcome.figures.items()]
    rows += [(name, str(count)) for name, count in {**outcome.faults, **outcome.others}.items()]
    rows += [(f"seconds {name}", f"{taken:.1f}") for name, taken in outcome.seconds.items()]
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        say(f"  {name:<{width}}  {value:>14}")
    for what in outcome.left_out:
        say(f"LEFT OUT: {what}")
    for problem in outcome.problems:
        say(f"PROBLEM: {problem}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
