"""``latest`` moves when every shard of every node is stored and verified, however slow one is."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.faultproxy import Fault
from tests.sidecar.handoff import Trainer, save_together
from tests.sidecar.world import check_whole, until
from tests.stories.places import MIB, Stage

SLOW = {
    "small shard": r"^PUT [^?]*rank1\.pt$",
    "part": r"^PUT [^?]*rank1\.pt\?.*partNumber=2",
    "completion": r"^POST [^?]*rank1\.pt\?uploadId",
    "receipt": r"^PUT [^?]*receipts/",
}


@pytest.mark.parametrize("what", SLOW)
def test_a_slow_shard_of_one_node_holds_back_record_and_pointer(
    stage: Stage, tmp_path: Path, what: str
) -> None:
    proxy, _ = stage.place.network
    nodes = [Trainer(tmp_path / name, seed=n) for n, name in enumerate("ab")]
    size = 1000 if what == "small shard" else 11 * MIB
    go_on, came = threading.Event(), threading.Event()

    def hold() -> None:
        came.set()
        go_on.wait(30)

    # All of them: who hears nothing for the stage's stall asks again.
    slow = proxy.add(Fault(SLOW[what], "delay", times=None, then=hold))
    (manifest, _) = save_together(nodes, "t", [{"rank0.pt": 1000}, {"rank1.pt": size}])
    with stage.running(nodes[0].volume.path), stage.running(nodes[1].volume.path):
        assert came.wait(30)
        until(lambda: stage.log.of("save.waiting") or what == "receipt")
        assert stage.latest() is None
        assert stage.states() == {}
        go_on.set()
        until(lambda: stage.latest() == "t")
        # Whoever sees the pointer sees all of the checkpoint.
        check_whole(stage.looked, stage.catalog.committed()[0])
    assert proxy.hits(slow) >= 1
    lines = proxy.lines(r"^(PUT|POST)")
    pointer = next(n for n, line in enumerate(lines) if line.endswith("/latest"))
    record = next(n for n, line in enumerate(lines) if f"checkpoints/{manifest.save_id}" in line)
    before = [n for n, line in enumerate(lines) if "rank" in line or "receipts/" in line]
    assert max(before) < record < pointer
