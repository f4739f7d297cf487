"""One of two nodes' agents is killed at each of its calls, and the other comes by meanwhile.

Neither takes what is there for more than it is: the record is committed once, over all nodes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sidecar.crashes.campaign import run_in_parallel

PROGRAM = "tests.sidecar.crashes.dying_nodes"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mortal", ["first", "second"])
def test_one_dies_at_every_call(mortal: str, tmp_path: Path) -> None:
    points, kinds, broken = run_in_parallel(PROGRAM, mortal, str(tmp_path), {})
    assert not broken, "\n".join(broken)
    assert points > 60
    assert kinds >= {"fs.write_atomic", "journal.write", "store.get", "store.list", "store.put"}
