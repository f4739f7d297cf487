"""The pod dies in the upload of a tag; the run resumes and saves the same tag again.

The agent is a process of its own on a real S3, and dies of SIGKILL at one chosen request.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ds_ckpt_store.stores.port import BytesSource
from tests.faultproxy import Fault
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import Process, agent_process
from tests.stories.places import MIB, Stage

TAG = "global_step100"
FIRST = {"mp_rank_00_model_states.pt": b"first" * 1000, "zero.pt": b"1" * (11 * MIB)}
SECOND = {"mp_rank_00_model_states.pt": b"other" * 900, "zero.pt": b"2" * (11 * MIB)}
DIES_AT = {
    "part": r"^PUT .*zero\.pt\?.*partNumber=2",
    "completion": r"^POST .*zero\.pt\?.*uploadId=",
    "record": r"^PUT [^?]*checkpoints/",
}


@pytest.mark.parametrize(
    ("dies_at", "in_place"), [*((each, True) for each in DIES_AT), ("part", False)]
)
def test_a_tag_that_is_saved_again_after_a_kill_needs_no_hand_and_mixes_nothing(
    stage: Stage, trainer: Trainer, tmp_path: Path, dies_at: str, in_place: bool
) -> None:
    proxy, _ = stage.place.network
    agents: list[Process] = []
    started = trainer.save(TAG, FIRST)
    # Of another run: no start of ours has anything to do with it.
    foreign = stage.looked.begin("foreign@018bcfe56800-0000000000000001/x", 5, {"part_size": "1"})
    stage.looked.put_part(foreign, 1, BytesSource(b"alien"))

    def kill() -> None:
        os.kill(agents[0].process.pid, signal.SIGKILL)

    death = proxy.add(Fault(DIES_AT[dies_at], "stall", then=kill))
    where = stage.place.url, "--once", "--part-mib", "5", "--streams", "1"
    environ = stage.place.environ
    with agent_process(tmp_path / "1.log", trainer.volume.path, *where, environ=environ) as agent:
        agents.append(agent)
        assert agent.process.wait(60) == -signal.SIGKILL, agent.output()
    assert proxy.hits(death) == 1
    assert stage.latest() is None
    proxy.clear()

    resumed = Trainer(trainer.volume.path, time_ms=trainer.time_ms + 60_000, seed=2)
    resumed.say()
    again = resumed.save(TAG, SECOND, in_place=in_place)
    with agent_process(tmp_path / "2.log", trainer.volume.path, *where, environ=environ) as agent:
        code = agent.process.wait(60)
    states = {record.save_id: record.state for record in stage.catalog.records()}
    durable = dies_at == "record" or not in_place
    assert states == {
        started.save_id: "committed" if durable else "abandoned",
        again.save_id: "committed",
    }
    assert code == (0 if durable else 1), "a save that was lost is told once"
    assert stage.latest() == TAG
    stage.check_whole()
    assert stage.restored(tmp_path / "new", tag=TAG) == SECOND
    if durable:
        assert stage.restored(tmp_path / "old", save_id=started.save_id) == FIRST
    assert stage.unfinished() == [foreign.key]
    # The same save once more is a no-op: nothing is sent.
    before = proxy.lines(r"^(PUT|POST) .*\.pt")
    assert stage.once(trainer.volume.path, part_mib=5) == 0
    assert proxy.lines(r"^(PUT|POST) .*\.pt") == before
