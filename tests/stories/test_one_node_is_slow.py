"""One node of three meets a store that throttles, or never answers: the others go on, nothing is
committed without it, and whoever looks can see which node it is and how far behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ds_ckpt_store.contract.manifest import SidecarStatus
from tests.faultproxy import Fault
from tests.sidecar.handoff import Trainer, save_together
from tests.sidecar.world import until
from tests.stories.places import MIB, Stage

SIZE = 11 * MIB
TROUBLES = {
    "throttled at the start of an upload": Fault(
        r"^POST .*rank2\.pt\?uploads", "status", times=None
    ),
    "throttled at each part": Fault(r"^PUT .*rank2\.pt\?", "status", times=None),
    "no answer to a part": Fault(r"^PUT .*rank2\.pt\?", "stall", times=None),
}


@pytest.mark.parametrize("what", TROUBLES)
def test_the_others_store_their_part_and_the_commit_waits(
    stage: Stage, tmp_path: Path, what: str
) -> None:
    proxy, _ = stage.place.network
    nodes = [Trainer(tmp_path / name, seed=n) for n, name in enumerate("abc")]
    paths = [node.volume.path for node in nodes]
    trouble = proxy.add(TROUBLES[what])
    files = [{f"rank{n}.pt": SIZE if n == 2 else 1000} for n in range(3)]
    (manifest, _, _) = save_together(nodes, "t", files)

    def heartbeat(path: str) -> SidecarStatus:
        said = nodes[paths.index(path)].volume.sidecar_status()
        assert said is not None
        return said

    def waited_for(path: str) -> list[str]:
        said = nodes[paths.index(path)].volume.save_status(manifest.save_id)
        return said.waiting_for if said is not None else []

    settings = {"stall_seconds": 1, "drain_seconds": 0}
    with (
        stage.running(paths[0], **settings),
        stage.running(paths[1], **settings),
        stage.running(paths[2], **settings),
    ):
        until(lambda: proxy.hits(trouble))
        for path in paths[:2]:
            until(lambda path=path: nodes[2].node in waited_for(path))
        if trouble.do == "stall":
            until(lambda: stage.log.of("transfer.stalled"))
        until(lambda: heartbeat(paths[2]).last_error)
        late = heartbeat(paths[2])
        assert (late.backlog_saves, late.backlog_bytes) == (1, SIZE)
        assert time.time() - late.time < 10
        assert "rank2.pt" in late.last_error or "no byte moved" in late.last_error
        assert [heartbeat(path).backlog_bytes for path in paths[:2]] == [0, 0]
        assert stage.states() == {}
        assert stage.latest() is None
        # The trainers are not kept from anything: another save of the others is committed.
        nodes[0].save("alone", {"x": 10})
        until(lambda: stage.states() == {"alone": "committed"})
        proxy.clear()
        until(lambda: stage.states() == {"alone": "committed", "t": "committed"})
        until(lambda: heartbeat(paths[2]).backlog_saves == 0)
    stage.check_whole()
    assert len(stage.log.of("store.retried")) <= 6, "said at growing intervals, not each time"
