"""``finalize`` and the handle of a save: the trainer is told what is durable, and why not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from ds_ckpt_hook import feedback, notices
from ds_ckpt_hook.errors import NotPublishedError
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.manifest import SaveStatus, SidecarStatus
from ds_ckpt_store.contract.volume import Volume
from tests.hook.standin import Engine, Job, manifests

Folders = Callable[[int], list[Path]]


class FakeTime:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = SystemClock().time()

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def sidecar(
    volume: Path,
    state: Literal["running", "stopped", "refused"],
    *,
    time: float | None = None,
    error: str = "",
    **values: float,
) -> None:
    place = Volume(str(volume))
    place.prepare()
    place.write_sidecar_status(
        SidecarStatus(
            time=SystemClock().time() if time is None else time,
            pid=1,
            version="1",
            state=state,
            last_error=error,
            **values,
        )
    )


def stands(volume: Path, save_id: str, state: str, reason: str = "") -> None:
    status = {"save_id": save_id, "state": state, "reason": reason, "time": 1.0}
    Volume(str(volume)).write_save_status(SaveStatus.model_validate(status))


def finalize(job: Job, timeout: float | None = None) -> feedback.FinalReport:
    return job.all_ranks(lambda _rank, hook: feedback.finalize(hook, timeout))[0]


def test_committed_saves_are_durable_and_others_say_why_not(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    saves = [job.save(tag)[0] for tag in ("a", "b", "c", "d")]
    sidecar(volume, "running")
    states = ("committed", "cleaned", "superseded", "quarantined")
    for save, state in zip(saves, states, strict=True):
        stands(volume, save.save_id, state, f"because {state}")
    report = finalize(job)
    assert report.durable == ["a", "b"]
    assert [(s.tag, s.state, s.reason) for s in report.not_durable] == [
        ("c", "superseded", "because superseded"),
        ("d", "quarantined", "because quarantined"),
    ]
    status = Volume(str(volume)).trainer_status()
    assert status is not None
    assert status.finished
    assert status.step == 4


def test_finalize_waits_for_a_sidecar_at_work(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    save = job.save("a")[0]
    sidecar(volume, "running")
    stands(volume, save.save_id, "uploading")
    later = threading.Timer(0.3, stands, (volume, save.save_id, "committed"))
    later.start()
    assert finalize(job).durable == ["a"]
    later.join()


def test_without_a_sidecar_it_gives_up_after_a_grace(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.save("a")
    job.hooks[0].clock = FakeTime()
    report = finalize(job)
    assert report.durable == []
    assert "no sidecar has ever written" in report.not_durable[0].reason
    assert "DS_CKPT_DIR in the trainer if the agent has a folder" in report.not_durable[0].reason
    assert feedback.GRACE_SECONDS <= report.seconds < feedback.GRACE_SECONDS + 1


def test_a_silent_sidecar_is_named_with_its_silence(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.save("a")
    sidecar(volume, "running", time=SystemClock().time() - 500)
    job.hooks[0].clock = FakeTime()
    report = finalize(job)
    assert "silent for 5" in report.not_durable[0].reason


@pytest.mark.parametrize(("age", "patience"), [(59, None), (170, 180.0)])
def test_a_sidecar_in_a_request_that_hangs_is_waited_for(
    folders: Folders, age: float, patience: float | None
) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    save = job.save("a")[0]
    clock = job.hooks[0].clock = FakeTime()
    said = {} if patience is None else {"silent_after": patience}
    sidecar(volume, "running", time=clock.now - age, **said)
    job.hooks[0].began -= 2 * notices.SILENT_SECONDS
    assert finalize(job, timeout=0).not_durable[0].reason.startswith("still discovered")
    sidecar(volume, "running", time=clock.now - age - 15, **said)
    assert "silent" in finalize(job, timeout=0).not_durable[0].reason
    stands(volume, save.save_id, "committed")
    assert finalize(job).durable == ["a"]


def test_a_sidecar_that_refused_to_work_is_quoted_at_once(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.save("a")
    sidecar(volume, "refused", error="another run holds the prefix")
    job.hooks[0].clock = FakeTime()
    report = finalize(job)
    assert report.seconds == 0
    assert "another run holds the prefix" in report.not_durable[0].reason


def test_a_sidecar_that_has_stopped_is_given_time_to_come_back(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.save("a")
    sidecar(volume, "stopped")
    job.hooks[0].clock = FakeTime()
    report = finalize(job)
    assert report.seconds >= feedback.GRACE_SECONDS
    assert "the sidecar has stopped" in report.not_durable[0].reason


def test_a_timeout_names_the_state_that_a_save_is_in(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    save = job.save("a")[0]
    sidecar(volume, "running", error="503 SlowDown")
    stands(volume, save.save_id, "uploading")
    report = finalize(job, timeout=0.1)
    assert "still uploading" in report.not_durable[0].reason
    assert "503 SlowDown" in report.not_durable[0].reason


def test_a_save_that_was_not_published_is_reported_without_waiting(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.save("a")
    from ds_ckpt_hook.saving import after_save

    after_save(job.hooks[0], Engine(0), "never written", save_dir=volume)
    stands(volume, manifests(volume)[0].save_id, "committed")
    report = finalize(job)
    assert report.durable == ["a"]
    assert "is missing" in report.not_durable[0].reason
    with pytest.raises(NotPublishedError, match="never written"):
        feedback.finalize(job.hooks[0], strict=True)


def test_wait_returns_when_the_save_is_durable(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    save = job.save("a")[0]
    stands(volume, save.save_id, "committed")
    assert save.wait(0).durable
    assert save.status().state == "committed"


def test_strict_and_wait_raise_what_became_of_the_save(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    sidecar(volume, "refused", error="no bucket")
    with pytest.raises(NotPublishedError, match="no bucket"):
        job.save("a", wait=True, strict=True)


def test_a_run_without_a_save_tells_the_sidecar_that_it_is_over(folders: Folders) -> None:
    (volume,) = folders(1)
    report = finalize(Job([volume, volume], directory=str(volume)))
    assert (report.durable, report.not_durable) == ([], [])
    status = Volume(str(volume)).trainer_status()
    assert status is not None
    assert status.finished


def test_a_save_that_was_lost_is_told_at_the_next_one_and_once(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    (save,) = job.save("last")
    stands(volume, save.save_id, "superseded", "written again")
    job.save("last")
    job.save("last")
    told = [record for record in caplog.messages if "will not be durable" in record]
    assert len(told) == 1
    assert "a tag of its own" in told[0]


def test_saves_that_wait_for_no_sidecar_are_told_now_and_then(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    job.save("one")
    assert "wait for a sidecar" not in caplog.text
    job.hooks[0].began -= 2 * notices.SILENT_SECONDS
    job.save("two")
    job.save("three")
    told = [record for record in caplog.messages if "wait for a sidecar" in record]
    assert len(told) == 1
    assert f"ds-ckpt agent --volume {volume}" in told[0]
    sidecar(volume, "running")
    job.hooks[0].next_word = 0.0
    job.save("four")
    assert len([record for record in caplog.messages if "wait for a sidecar" in record]) == 1
