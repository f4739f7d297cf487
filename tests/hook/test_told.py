"""A trainer is told where its saves stand when it asks, and by a call; a sidecar, that it ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ds_ckpt_hook
from ds_ckpt_hook import feedback, notices
from ds_ckpt_hook.core import Notice
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.manifest import TrainerStatus
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import SettingsError
from tests.hook.standin import Job
from tests.hook.test_feedback import sidecar, stands

Folders = Callable[[int], list[Path]]
ROOT = Path(__file__).parents[2]


def test_before_the_first_save_nothing_is_known(folders: Folders) -> None:
    (volume,) = folders(1)
    (hook,) = Job([volume]).hooks
    assert feedback.status(hook) == feedback.Status([], None, 0.0, "none", "")


def test_what_the_store_holds_is_known_before_this_process_has_saved(folders: Folders) -> None:
    (volume,) = folders(1)
    sidecar(
        volume,
        "running",
        newest_committed_tag="step7",  # type: ignore[arg-type]
        newest_committed_save="018bcfe56800-cd613e30d8f16adf",  # type: ignore[arg-type]
        newest_committed_ms=5,
        newest_committed_step=7,
    )
    (hook,) = Job([volume], directory=str(volume)).hooks
    told = feedback.status(hook)
    assert told.last_committed == feedback.Committed("step7", "018bcfe56800-cd613e30d8f16adf", 7, 5)
    assert told.sidecar == "running"


def test_lag_is_the_age_of_the_oldest_save_that_is_on_its_way(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    (hook,) = job.hooks
    saves = [job.save(tag)[0] for tag in ("a", "b", "c")]
    hook.saves[0].agreed_at -= 900
    hook.saves[1].agreed_at -= 400
    sidecar(volume, "running")
    assert feedback.status(hook).lag_seconds == pytest.approx(900, abs=30)
    stands(volume, saves[0].save_id, "committed")
    assert feedback.status(hook).lag_seconds == pytest.approx(400, abs=30)
    stands(volume, saves[1].save_id, "superseded", "again")
    assert feedback.status(hook).lag_seconds < 30
    stands(volume, saves[2].save_id, "cleaned")
    told = feedback.status(hook)
    assert told.lag_seconds == 0
    assert [each.state for each in told.saves] == ["committed", "superseded", "cleaned"]


def test_a_sidecar_that_was_not_heard_of_lately_is_silent(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.save("a")
    sidecar(volume, "running", time=SystemClock().time() - 3600, error="no bucket")
    told = feedback.status(job.hooks[0])
    assert (told.sidecar, told.last_error) == ("silent", "no bucket")


def test_the_newest_save_of_a_tag_is_waited_for(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    first, second = (job.save("last")[0] for _ in range(2))
    sidecar(volume, "running")
    stands(volume, first.save_id, "superseded", "again")
    stands(volume, second.save_id, "committed")
    assert feedback.wait(job.hooks[0], "last", 5).durable
    with pytest.raises(SettingsError, match=r"no tag 'lost'; it has saved \['last', 'last'\]"):
        feedback.wait(job.hooks[0], "lost", 5)


def listening(job: Job) -> list[Notice]:
    heard: list[Notice] = []
    for hook in job.hooks:
        hook.listeners.append(heard.append)
    return heard


def test_what_is_warned_of_is_told_to_those_who_listen(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume], max_lag=600)
    heard = listening(job)
    (hook,) = job.hooks
    (lost,) = job.save("lost")
    sidecar(volume, "running", error="slow down")
    stands(volume, lost.save_id, "superseded", "written again")
    job.save("late")
    assert [(each.kind, each.tag) for each in heard] == [("lost", "lost")]
    notices.tell(hook)
    assert len(heard) == 1
    hook.saves[1].agreed_at -= 601
    notices.tell(hook)
    assert (heard[1].kind, heard[1].tag) == ("lag", "late")
    assert "1 save on" in heard[1].sentence
    assert "slow down" in heard[1].sentence
    notices.tell(hook)
    assert len(heard) == 2, "once in ten minutes"


def test_a_save_that_failed_is_told_on_the_rank_that_knows(folders: Folders) -> None:
    one, two = folders(2)
    job = Job([one, two])
    heard = listening(job)
    job.engines[1].save_non_zero_checkpoint = False
    job.engines[1].save_zero_checkpoint = True
    job.engines[1].save_checkpoint = lambda *_: None  # type: ignore[method-assign]
    job.save("torn")
    assert {each.kind for each in heard} == {"not published"}
    assert {each.tag for each in heard} == {"torn"}


def test_a_listener_that_fails_costs_nothing(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    (volume,) = folders(1)
    job = Job([volume])

    def fail(_: Notice) -> None:
        raise RuntimeError("no pager")

    job.hooks[0].listeners.append(fail)
    heard = listening(job)
    (save,) = job.save("a")
    stands(volume, save.save_id, "failed", "no bytes")
    assert job.save("b")[0].save_id
    assert [each.kind for each in heard] == ["lost"]
    assert "no pager" in caplog.text


def test_between_two_saves_the_heartbeat_tells(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_ckpt_hook.session.HEARTBEAT_SECONDS", 0.05)
    (volume,) = folders(1)
    job = Job([volume])
    heard = listening(job)
    told = job.hooks[0].listeners
    (save,) = job.save("a")
    import threading

    came = threading.Event()
    told.append(lambda _: came.set())
    stands(volume, save.save_id, "quarantined", "bits")
    assert came.wait(20)
    assert [each.kind for each in heard] == ["lost"]


# ---- the end of the process

TRAINER = """
import os, signal, sys
from pathlib import Path
import ds_ckpt_hook
from tests.hook.standin import Engine
volume = Path(sys.argv[1])
engine = Engine(0)
engine.save_checkpoint(volume, "a")
ds_ckpt_hook.after_save(engine, "a", save_dir=volume)
print("saved", flush=True)
{end}
"""


def ended(volume: Path, end: str) -> TrainerStatus:
    done = subprocess.run(
        [sys.executable, "-c", TRAINER.format(end=end), str(volume)],
        cwd=ROOT,
        env={**os.environ, "DS_CKPT_RUN_ID": "run"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.startswith("saved"), done.stderr
    status = Volume(str(volume)).trainer_status()
    assert status is not None
    return status


def test_a_trainer_that_ends_by_an_exception_is_finished_and_says_by_which(tmp_path: Path) -> None:
    status = ended(tmp_path, "raise ValueError('loss is nan')")
    assert status.finished
    assert status.by_itself
    assert status.error == "the trainer ended by ValueError: loss is nan"
    assert len(Volume(str(tmp_path)).manifests()) == 1, "what was still hashed came first"


def test_a_trainer_that_forgets_finalize_is_finished(tmp_path: Path) -> None:
    status = ended(tmp_path, "")
    assert (status.finished, status.by_itself, status.error) == (True, True, None)


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "if not os.fork(): sys.exit(0)\nos.wait(); os._exit(0)",
    ],
    ids=["killed", "a fork of it ends"],
)
def test_a_trainer_that_says_nothing_is_not_taken_for_finished(tmp_path: Path, end: str) -> None:
    assert not ended(tmp_path, end).finished


def test_a_trainer_that_saves_again_after_finalize_is_not_finished_yet(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.save("a")
    job.hooks[0].sessions[str(volume)].finish()
    job.save("b")
    status = Volume(str(volume)).trainer_status()
    assert status is not None
    assert not status.finished


def test_the_public_calls_need_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_CKPT_DIR", str(tmp_path))
    monkeypatch.setattr(ds_ckpt_hook, "_process", {})
    heard: list[Notice] = []
    ds_ckpt_hook.on_notice(heard.append)
    assert ds_ckpt_hook.status().saves == []
    assert ds_ckpt_hook.last_committed() is None
    assert ds_ckpt_hook.ready_to_save(1)
    assert not ds_ckpt_hook.ready_to_save(1 << 62, policy="skip")
    assert [each.kind for each in heard] == ["no room"]
    with pytest.raises(SettingsError, match="no policy"):
        ds_ckpt_hook.ready_to_save(1, policy="hope")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="no tag 'x'"):
        ds_ckpt_hook.wait("x")
    ds_ckpt_hook.finalize(1)
    status = Volume(str(tmp_path)).trainer_status()
    assert status is not None
    assert (status.finished, status.by_itself) == (True, False)
