"""The simulation: it repeats, it sees, it shrinks; and a share of its runs, with fresh seeds."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from ds_ckpt_sidecar import lifecycle, syncer
from tests.simulation import mutants
from tests.simulation.campaign import campaign, shrink
from tests.simulation.run import run


def in_a_process_of_its_own(*arguments: str, hash_seed: str = "0") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_a_seed_repeats_to_the_last_call() -> None:
    seed = f"{random.SystemRandom().randrange(1 << 32)}.1"
    first, second = (
        in_a_process_of_its_own("--one", seed, "--trace", hash_seed=each)
        for each in ("0", "random")
    )
    lines = [[x for x in text.splitlines() if "CPU s" not in x] for text in (first, second)]
    assert len(lines[0]) > 200
    assert lines[0] == lines[1]


def test_a_share_of_the_runs_holds_every_invariant() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    figures = campaign(seed, 24, 2)
    assert not figures.broken, figures.broken
    assert figures.runs == 24
    assert figures.nodes >= 4 * 24
    assert figures.saves >= 5 * 24


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_changes_lines_that_are_in_the_code(
    mutant: mutants.Mutant, tmp_path: Path
) -> None:
    mutants.make(mutant, tmp_path)


@pytest.mark.parametrize("name", ["commits with one receipt", "points before the commit"])
def test_a_mutant_is_caught_and_named_by_its_invariant(name: str) -> None:
    (mutant,) = [each for each in mutants.MUTANTS if each.name == name]
    took, seen = mutants.hunt(mutant, 60, 1, 2)
    assert took, seen
    assert re.match(r"I[1-8]: ", seen), seen


def test_a_run_that_breaks_is_made_small() -> None:
    """Removing shards as soon as they are stored, as if other nodes could not be waited for."""
    wrong = lifecycle.DECIDED | {"stored"}
    with (
        mock.patch.object(lifecycle, "DECIDED", wrong),
        mock.patch.object(syncer, "DECIDED", wrong),
    ):
        broken = next(o for o in (run(f"3.{n}") for n in range(40)) if o.broken)
        small = shrink(broken)
        again = run(small.seed, only=frozenset(small.accidents))
    assert small.broken[0][:3] == broken.broken[0][:3]
    assert len(small.accidents) < len(broken.accidents)
    assert again.broken == small.broken
    assert not run(small.seed, only=frozenset(small.accidents)).broken, "it is the code, not chance"
