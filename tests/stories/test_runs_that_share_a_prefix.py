"""Runs and attempts on one prefix: nobody's checkpoints go for another's sake, and nobody is kept
out for ever."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ds_ckpt_sidecar.settings import AgentSettings
from tests.sidecar.handoff import START_MS, Trainer
from tests.sidecar.world import agent_process, until
from tests.stories.places import Stage

STALE = 4.0


@pytest.mark.parametrize("place", ["memory", "file", "seaweed"], indirect=True)
def test_a_run_that_resumed_from_another_keeps_that_runs_checkpoints_and_its_own(
    stage: Stage, tmp_path: Path
) -> None:
    """Run B begins at a low step; run A's higher steps are stale, and none of B's business."""
    settings = {"keep_last": 1, "retention_pause": 0}
    before = Trainer(tmp_path / "a", run_id="A", seed=1)
    for step in (100, 200, 300):
        source = before.save(f"global_step{step}", {"x": 100}, step=step)
    before.say(finished=True)
    assert stage.once(before.volume.path) == 0
    assert stage.states() == dict.fromkeys(
        ["global_step100", "global_step200", "global_step300"], "committed"
    )

    after = Trainer(tmp_path / "b", run_id="B", time_ms=START_MS + 10**6, seed=2)
    after.say(resumed_from=source.save_id)
    for step in (10, 20, 30):
        last = after.save(f"tune{step}", {"x": 100}, step=step, parent=source.save_id)
        assert stage.once(after.volume.path, **settings) == 0
        assert stage.latest() == f"tune{step}"
    of_run = {record.tag: (record.run_id, record.state) for record in stage.catalog.records()}
    assert of_run == {
        **{f"global_step{step}": ("A", "committed") for step in (100, 200, 300)},
        "tune10": ("B", "deleted"),
        "tune20": ("B", "deleted"),
        "tune30": ("B", "committed"),
    }
    # A restart that has not saved yet gives up nothing more, and never the last one.
    again = Trainer(tmp_path / "b", run_id="B", time_ms=START_MS + 2 * 10**6, seed=3)
    again.say(resumed_from=last.save_id)
    for _ in range(2):
        assert stage.once(again.volume.path, **settings) == 0
    assert stage.states()["tune30"] == "committed"
    stage.check_whole()


def test_two_jobs_on_one_prefix_and_the_first_one_rescheduled(stage: Stage, tmp_path: Path) -> None:
    """The second job is refused while the first lives, in whatever pod; each is a process."""
    url, environ = stage.place.url, stage.place.environ
    first = Trainer(tmp_path / "1", run_id="first", seed=1)
    first.say()
    first.save("one", {"x": b"first"})
    with agent_process(tmp_path / "1.log", first.volume.path, url, environ=environ) as agent:
        agent.wait_for("save.committed")
        second = Trainer(tmp_path / "2", run_id="second", seed=2)
        second.say()
        second.save("one", {"x": b"second"})
        with agent_process(tmp_path / "2.log", second.volume.path, url, environ=environ) as refused:
            said = refused.wait_for("pass.failed")
            assert "belongs to run 'first'" in said["error"]
            assert "use another prefix" in said["error"]
            agent.end(signal.SIGKILL)
            # Another pod of the first job, on another node, with an empty volume.
            moved = Trainer(tmp_path / "3", run_id="first", time_ms=START_MS + 10**6, seed=3)
            moved.say()
            moved.save("two", {"x": b"first again"})
            with agent_process(tmp_path / "3.log", moved.volume.path, url, environ=environ) as new:
                new.wait_for("save.committed")
                assert new.of("lease.taken")[-1]["epoch"] == 4
                assert refused.of("save.committed") == []
                assert new.end() == 0
            assert refused.end() == 1
    assert stage.states() == {"one": "committed", "two": "committed"}
    assert {record.run_id for record in stage.catalog.records()} == {"first"}
    assert stage.latest() == "two"
    assert stage.restored(tmp_path / "new", tag="one") == {"x": b"first"}


def test_a_job_that_died_for_good_does_not_keep_its_prefix(stage: Stage, tmp_path: Path) -> None:
    """Killed without a word, and never rescheduled: after a silence the next run takes over."""
    dead = Trainer(tmp_path / "1", run_id="dead", seed=1)
    dead.save("old", {"x": b"kept"})
    assert stage.once(dead.volume.path) == 0
    heir = Trainer(tmp_path / "2", run_id="heir", time_ms=START_MS + 10**6, seed=2)
    heir.say()
    heir.save("new", {"x": b"new"})
    assert AgentSettings.model_fields["lease_stale_seconds"].default > STALE
    with stage.running(heir.volume.path, lease_stale_seconds=STALE, rescan_seconds=0.2):
        until(lambda: stage.log.of("pass.failed"))
        assert stage.states() == {"old": "committed"}
        until(lambda: stage.states() == {"old": "committed", "new": "committed"})
    assert stage.log.of("lease.took_over")[0]["from_run"] == "dead"
    stage.check_whole()
    assert stage.restored(tmp_path / "again", tag="old") == {"x": b"kept"}
