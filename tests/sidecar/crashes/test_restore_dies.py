"""A restore is killed before, in and after each of its steps, and run again.

At the moment of death nothing that is half restored looks whole, and nothing that was there before
is lost. Run again, it completes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sidecar.crashes.campaign import run_in_parallel

PROGRAM = "tests.sidecar.crashes.dying_restore"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["empty", "occupied"])
def test_it_dies_at_every_call(target: str, tmp_path: Path) -> None:
    points, kinds, broken = run_in_parallel(PROGRAM, target, str(tmp_path), {})
    assert not broken, "\n".join(broken)
    assert points > 60
    assert kinds >= {"fs.open_write", "fs.rename", "fs.write_atomic", "store.put", "store.read"}
