"""The agent is killed before, in and after each step of the protocol, and the next start mends it.

At the moment of death: what is committed is whole, ``latest`` names a committed checkpoint, and
every save that is not decided can still be read on the volume. After the next starts: all is
committed, named, restorable to the byte, and nothing lies about that an undisturbed run does not
leave, in the store, on the volume or in the journal.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers import S3
from tests.sidecar.crashes.campaign import run_in_parallel

PROGRAM = "tests.sidecar.crashes.dying_agent"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_dies_at_every_call_with_a_folder_as_the_store(tmp_path: Path) -> None:
    points, kinds, broken = run_in_parallel(PROGRAM, "file:", str(tmp_path), {})
    assert not broken, "\n".join(broken)
    assert points > 250
    assert kinds >= {
        "fs.remove_tree",
        "fs.take_beneath",
        "fs.unlink",
        "fs.write_atomic",
        "journal.write",
        "store.abort",
        "store.begin",
        "store.complete",
        "store.delete",
        "store.get",
        "store.head",
        "store.list",
        "store.put",
        "store.put_part",
        "store.uploads",
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_dies_at_every_kind_of_call_of_an_s3(seaweed: S3, tmp_path: Path) -> None:
    base = f"s3://{seaweed.bucket()}"
    points, kinds, broken = run_in_parallel(PROGRAM, base, str(tmp_path), seaweed.environ)
    assert not broken, "\n".join(broken)
    assert points > 30
    assert kinds >= {"store.begin", "store.complete", "store.delete", "store.put", "store.put_part"}
