"""One rank is told to end: all save once more at the same step, or say that they do not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt_hook.errors import ExchangeError
from ds_ckpt_hook.preemption import Preemption
from ds_ckpt_store.contract.manifest import SaveStatus
from ds_ckpt_store.contract.volume import Volume
from tests.hook.processes import lines_of, run_ranks
from tests.hook.standin import Job, manifests

Folders = Callable[[int], list[Path]]


def stands(volume: Path, save_id: str, **values: Any) -> None:
    status = {"save_id": save_id, "state": "committed", "time": 1.0, **values}
    Volume(str(volume)).write_save_status(SaveStatus.model_validate(status))


def watched(job: Job, **options: Any) -> list[Preemption]:
    return [
        Preemption(
            job.hooks[rank],
            engine,
            save_dir=job.volumes[rank],
            client_state=None,
            grace=options.get("grace", 30.0),
        )
        for rank, engine in enumerate(job.engines)
    ]


def boundary(job: Job, watches: list[Preemption]) -> list[bool]:
    """All ranks come to the end of a step."""
    for engine in job.engines:
        engine.global_steps += 1
    return job.all_ranks(lambda rank, _hook: watches[rank].should_stop())


def test_a_notice_on_one_rank_is_one_save_of_all_at_the_same_step(folders: Folders) -> None:
    one, two = folders(2)
    job = Job([one, one, two])
    watches = watched(job)
    assert boundary(job, watches) == [False] * 3
    watches[2].notify("spot")
    assert boundary(job, watches) == [False] * 3, "the others hear of it at the next step"
    assert boundary(job, watches) == [True] * 3
    job.drain()
    for volume in (one, two):
        (manifest,) = manifests(volume)
        assert (manifest.tag, manifest.kind, manifest.step) == ("recovery_step3", "recovery", 3)
    assert boundary(job, watches) == [True] * 3
    assert len(manifests(one)) == 1, "once"
    assert all(watch.save is not None for watch in watches)
    left = [watch.seconds_left for watch in watches]
    assert all(each is not None and 20 < each <= 30 for each in left), "the shortest counts for all"


def test_without_a_notice_there_is_no_end(folders: Folders) -> None:
    job = Job(folders(2))
    watches = watched(job)
    for _ in range(5):
        assert boundary(job, watches) == [False, False]
    assert [watch.seconds_left for watch in watches] == [None, None]


def test_a_save_that_would_not_be_stored_in_time_is_left_out_loudly(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = folders(2)
    job = Job([one, two])
    heard: list[Any] = []
    job.hooks[0].listeners.append(heard.append)
    watches = watched(job)
    first, _ = job.save("a")
    took_a_minute = {"handed_over": 100.0, "durable_since": 160.0, "bytes_total": 1}
    stands(one, first.save_id, **took_a_minute)
    watches[1].notify("maintenance", seconds_left=50)
    boundary(job, watches)
    assert boundary(job, watches) == [True, True]
    assert len(manifests(one)) == 1
    assert [each.kind for each in heard] == ["preempted"]
    assert "no recovery save: " in heard[0].sentence
    assert " s are left, and to write and store it takes " in heard[0].sentence
    assert "rank 1: maintenance" in caplog.text


def test_a_step_that_is_saved_already_is_not_saved_again(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    watches = watched(job)
    watches[0].notify("spot")
    boundary(job, watches)
    job.save("a")
    job.engines[0].global_steps -= 1  # no step since
    assert boundary(job, watches) == [True]
    assert [m.tag for m in manifests(volume)] == ["a"]


def test_ranks_that_do_not_hear_each_other_train_on(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(folders(2))
    watches = watched(job)
    assert boundary(job, watches) == [False, False]

    def broken(_yes: bool) -> Callable[[], bool]:
        raise ExchangeError("rank 1 is gone")

    monkeypatch.setattr(job.hooks[0].exchange, "ask_any", broken)
    for _ in range(3):
        assert watches[0].should_stop() is False
    assert caplog.text.count("no longer hear of each other's notices") == 1


def test_a_save_that_fails_ends_the_loop_all_the_same(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (volume,) = folders(1)
    job = Job([volume])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job.engines[0], "save_checkpoint", full)
    watches = watched(job)
    watches[0].notify("spot")
    boundary(job, watches)
    assert boundary(job, watches) == [True]
    assert "no recovery save: OSError" in caplog.text
    assert manifests(volume) == []


def test_a_second_signal_does_what_it_did_before(folders: Folders) -> None:
    (volume,) = folders(1)
    job = Job([volume])
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
    try:
        watches = watched(job)
        signal.raise_signal(signal.SIGTERM)
        assert told == []
        watches[0].should_stop()
        assert watches[0].should_stop() is True
        signal.raise_signal(signal.SIGTERM)
        assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_away_from_the_main_thread_the_signal_is_left_alone(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(folders(1))
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: watched(job))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert "call preemption.notify() instead" in caplog.text


@pytest.mark.slow
def test_real_ranks_of_which_one_gets_sigterm_end_at_one_step(tmp_path: Path) -> None:
    run_ranks(lambda _rank: ["-m", "tests.hook.workers.preempted", str(tmp_path)])
    ends = [lines_of(tmp_path / f"rank{rank}.jsonl") for rank in range(2)]
    assert ends[0] == ends[1]
    assert ends[0][0]["step"] == 4, "told in step 3, and read at the end of the next"
    (manifest,) = manifests(tmp_path / "volume")
    assert (manifest.tag, manifest.kind) == ("recovery_step4", "recovery")
    assert ends[0][0]["client_state"] == {"batch": 4}
