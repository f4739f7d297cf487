"""Two nodes without a shared filesystem, the hook's real code on each, and a real store between
them: one node is lost before its part of a save is stored."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hook.standin import Job, end_earlier_attempts
from tests.sidecar.world import contents
from tests.stories.places import Stage

MODEL = "mp_rank_00_model_states.pt"


def optimizer(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


@pytest.fixture(autouse=True)
def _no_heartbeat_outlives_its_test() -> Iterator[None]:
    yield
    end_earlier_attempts()


@pytest.mark.parametrize(
    ("place", "lost"),
    [("file", 0), ("file", 1), ("seaweed", 1), ("azure", 0), ("gcs", 1)],
    indirect=["place"],
)
def test_its_save_is_never_committed_and_both_resume_from_the_one_before(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    for name, value in stage.place.environ.items():
        monkeypatch.setenv(name, value)
    volumes = [tmp_path / "node0", tmp_path / "node1"]
    for volume in volumes:
        volume.mkdir()
    job = Job(volumes)
    one = job.save("global_step1")[0]
    for volume in volumes:
        assert stage.once(volume) == 0
    job.save("global_step2")
    other = volumes[1 - lost]
    stage.once(other)
    assert stage.states() == {"global_step1": "committed"}
    assert stage.log.of("save.left_waiting")

    shutil.rmtree(volumes[lost])
    volumes[lost].mkdir()
    again = Job(volumes)
    assert again.resume(destination=stage.place.url) == ["global_step1", "global_step1"]
    for rank, volume in enumerate(volumes):
        found = contents(volume / "global_step1")
        assert {MODEL, optimizer(rank)} <= found.keys(), "each node has what its ranks load"
        assert found[optimizer(rank)] == b"optimizer global_step1 at step 1 of rank %d" % rank
        assert (volume / "latest").read_text() == "global_step1"
        assert not (volume / "global_step2").exists()
    three = again.save("global_step3")[0]
    assert three.save_id > one.save_id
    for volume in volumes:  # nobody waits in vain for what both are about to store
        stage.once(volume)
    for volume in (*volumes, *volumes):
        stage.once(volume, abandon_seconds=0)
    assert stage.states() == {
        "global_step1": "committed",
        "global_step2": "abandoned",
        "global_step3": "committed",
    }
    assert stage.latest() == "global_step3"
    assert stage.keys("global_step2@") == []
    stage.check_whole()
