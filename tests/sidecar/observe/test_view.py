"""Lag, exposure and progress, worked out from what agent and trainer last said."""

from __future__ import annotations

import random

import pytest

from ds_ckpt_sidecar.observe.view import FRESH_SECONDS, View, look, without_secrets
from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.manifest import Restored, SaveStatus, SidecarStatus, TrainerStatus

NOW = 10_000.0


def sidecar(**values: object) -> SidecarStatus:
    return SidecarStatus.model_validate(
        {"time": NOW - 1, "pid": 7, "version": "1", "state": "running", "run_id": "run", **values}
    )


def trainer(**values: object) -> TrainerStatus:
    return TrainerStatus.model_validate(
        {"run_id": "run", "attempt": "a1", "time": NOW - 2, "step": 500, "started": 4_000.0}
        | values
    )


def save(number: int, state: str, saved: float, **values: object) -> SaveStatus:
    return SaveStatus.model_validate(
        {
            "save_id": f"save-{number:04}",
            "tag": f"step{number}",
            "state": state,
            "time": NOW - 3,
            "saved_ms": int(saved * 1000),
            "step": number,
            "bytes_total": 100,
        }
        | values
    )


COMMITTED = {
    "newest_committed_ms": 9_000_000,
    "newest_committed_tag": "step400",
    "newest_committed_save": "save-0400",
    "newest_committed_step": 400,
}


def test_nothing_was_ever_seen() -> None:
    view = look(None, None, [], NOW)
    assert (view.state, view.alive, view.newest) == ("never seen", False, None)
    assert (view.lag_seconds, view.exposure_seconds, view.exposure_steps) == (0.0, 0.0, None)


def test_lag_is_the_age_of_the_oldest_save_that_can_become_durable() -> None:
    saves = [
        save(1, "committed", 1_000),
        save(2, "superseded", 2_000),
        save(3, "quarantined", 2_500),
        save(4, "stored", 9_400, bytes_done=100, waiting_for=["n2"], waiting_since=9_500.0),
        save(5, "discovered", 9_900),
    ]
    view = look(sidecar(), trainer(), saves, NOW)
    assert view.lag_seconds == pytest.approx(600)
    assert (view.backlog_saves, view.backlog_bytes) == (2, 100)
    assert view.waiting_seconds == pytest.approx(500)
    assert [one.tag for one in view.saves] == ["step5", "step4", "step3", "step2", "step1"]


def test_no_lag_once_all_is_durable() -> None:
    saves = [save(1, "committed", 1_000), save(2, "cleaned", 2_000)]
    view = look(sidecar(), trainer(), saves, NOW)
    assert (view.lag_seconds, view.backlog_saves, view.waiting_seconds) == (0.0, 0, 0.0)


def test_exposure_reaches_from_the_newest_durable_save_to_now() -> None:
    view = look(sidecar(**COMMITTED), trainer(), [], NOW)
    assert view.exposure_seconds == pytest.approx(1_000)
    assert view.exposure_steps == 100


def test_a_silent_trainer_has_stopped_training() -> None:
    silent = trainer(time=NOW - FRESH_SECONDS - 100)
    view = look(sidecar(**COMMITTED), silent, [], NOW)
    assert view.exposure_seconds == pytest.approx(1_000 - FRESH_SECONDS - 100)


def test_a_finished_trainer_exposes_only_saves_that_are_not_durable() -> None:
    done = trainer(finished=True)
    durable = [save(400, "committed", 9_000)]
    view = look(sidecar(**COMMITTED), done, durable, NOW)
    assert (view.exposure_seconds, view.exposure_steps) == (0.0, 0)
    late = [*durable, save(450, "uploading", 9_500)]
    view = look(sidecar(**COMMITTED), done, late, NOW)
    assert (view.exposure_seconds, view.exposure_steps) == (500.0, 50)


def test_with_nothing_durable_all_since_the_attempt_began_is_exposed() -> None:
    view = look(sidecar(), trainer(), [], NOW)
    assert (view.exposure_seconds, view.exposure_steps) == (6_000.0, 500)


def test_steps_that_nobody_knows_are_not_made_up() -> None:
    known_later = {**COMMITTED, "newest_committed_step": None}
    view = look(sidecar(**known_later), trainer(), [], NOW)
    assert (view.exposure_seconds, view.exposure_steps) == (1_000.0, None)
    view = look(sidecar(**known_later), trainer(), [save(400, "committed", 9_000)], NOW)
    assert view.exposure_steps == 100, "the save's own status names its step"


def test_a_clock_behind_exposes_nothing_negative() -> None:
    ahead = {**COMMITTED, "newest_committed_ms": int((NOW + 50) * 1000)}
    view = look(sidecar(**ahead), None, [save(9, "uploading", NOW + 60)], NOW)
    assert (view.exposure_seconds, view.lag_seconds) == (0.0, 0.0)
    assert look(sidecar(**ahead), trainer(step=1), [], NOW).exposure_steps == 0


@pytest.mark.parametrize("ahead", [0.0, 100.0, 1_000.0, 5_000.0, 1e6])
def test_a_save_counts_from_its_hand_over_here_however_far_the_others_clock_is_ahead(
    ahead: float,
) -> None:
    """The first rank's node names the time of a save, and any node may commit it."""
    durable = save(400, "committed", 9_000 + ahead, handed_over=9_010.0)
    waits = save(401, "uploading", 9_500 + ahead, handed_over=9_505.0)
    said = sidecar(**COMMITTED | {"newest_committed_ms": int((9_000 + ahead) * 1000)})
    view = look(said, trainer(), [durable, waits], NOW)
    assert view.exposure_seconds == pytest.approx(1_000, abs=10)
    assert view.lag_seconds == pytest.approx(500, abs=5)
    assert view.newest is not None
    assert view.newest.age_seconds == view.exposure_seconds
    over = look(said, trainer(finished=True), [durable, waits], NOW)
    assert over.exposure_seconds == pytest.approx(500, abs=10)


def test_a_clock_ahead_and_a_save_that_was_never_here() -> None:
    said = sidecar(**COMMITTED | {"newest_committed_ms": int((NOW + 500) * 1000)})
    before = save(399, "cleaned", 8_000 + 5_000, handed_over=8_000.0)
    after = save(401, "uploading", 9_900 + 5_000, handed_over=9_900.0)
    assert look(said, trainer(), [before, after], NOW).exposure_seconds == 2_000
    assert look(said, trainer(started=9_000.0), [before, after], NOW).exposure_seconds == 1_000
    assert look(said, trainer(), [], NOW).exposure_seconds == 6_000


def test_the_interval_is_the_median_of_the_last_saves() -> None:
    times = [0.001, 1_000, 2_000, 2_100, 3_100, 9_999]
    saves = [save(number, "cleaned", at) for number, at in enumerate(times)]
    assert look(sidecar(), None, saves, NOW).save_interval_seconds == pytest.approx(1_000, abs=1)
    assert look(sidecar(), None, saves[:1], NOW).save_interval_seconds == 0.0


def test_progress_and_time_left_of_the_save_under_way() -> None:
    under_way = save(1, "uploading", 9_000, bytes_done=40, shards_total=4, shards_done=1)
    waits = save(2, "discovered", 9_100, shards_total=4)
    view = look(sidecar(rate=20.0), None, [under_way, waits], NOW)
    second, first = view.saves
    assert (first.share, first.rate, first.left_seconds) == (0.4, 20.0, 3.0)
    assert (second.rate, second.left_seconds) == (0.0, None)
    assert view.backlog_shards == 7
    assert look(sidecar(), None, [under_way], NOW).saves[0].left_seconds is None


def test_files_that_are_no_manifest_have_no_age_that_counts() -> None:
    bad = SaveStatus(save_id="unnamed", state="held", reason="newer", time=NOW - 5_000)
    view = look(sidecar(refused_manifests=1), None, [bad], NOW)
    assert (view.lag_seconds, view.backlog_saves, view.refused_manifests) == (0.0, 0, 1)


def test_a_silent_or_stopped_agent_is_not_alive() -> None:
    assert look(sidecar(), None, [], NOW).alive
    assert not look(sidecar(time=NOW - 1_000), None, [], NOW).alive
    assert not look(sidecar(state="stopped"), None, [], NOW).alive


def test_an_error_comes_with_what_to_do() -> None:
    view = look(sidecar(last_error="no", last_error_kind="AccessError"), None, [], NOW)
    assert "docs/policies" in view.remedy
    assert look(sidecar(last_error_kind="AccessError"), None, [], NOW).remedy == ""
    assert look(sidecar(last_error="no", last_error_kind="Strange"), None, [], NOW).remedy == ""
    refused = look(sidecar(last_error="no", last_error_kind="PermissionError"), None, [], NOW)
    assert "disk" in refused.remedy


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("az://c/p?sv=1&sig=abc", "az://c/p?..."),
        ("sftp://me:secret@host:22/dir", "sftp://host:22/dir"),
        ("file:///ckpt", "file:///ckpt"),
        ("http://me:secret@[bad/x", "..."),
        ("", ""),
    ],
)
def test_a_destination_is_shown_without_credentials(url: str, safe: str) -> None:
    assert without_secrets(url) == safe


def test_a_thousand_saves_are_summed_once() -> None:
    saves = [save(number, "uploading", 1.0 + number) for number in range(1_000)]
    view: View = look(sidecar(), trainer(), saves, NOW)
    assert (view.backlog_saves, view.backlog_bytes) == (1_000, 100_000)


def test_time_before_the_attempt_began_was_lost_already_or_is_durable() -> None:
    began = trainer(started=NOW - 20, step=401)
    view = look(sidecar(**COMMITTED), began, [], NOW)
    assert (view.exposure_seconds, view.exposure_steps) == (20.0, 1)


@pytest.mark.parametrize("state", ["starting", "refused", "standby"])
def test_an_agent_that_has_not_reached_the_store_goes_by_what_was_durable_here(state: str) -> None:
    saves = [save(400, "committed", 9_000), save(300, "cleaned", 8_000), save(1, "stored", 9_500)]
    view = look(sidecar(state=state, unready="away"), trainer(), saves, NOW)
    assert view.newest is not None
    assert (view.newest.tag, view.newest.step, view.exposure_seconds) == ("step400", 400, 1_000.0)


def test_a_restored_volume_tells_what_is_durable_too() -> None:
    restored = Restored(
        source="s3://b",
        run_id="run",
        save_id=names.new_save_id(9_000_000, random.Random(1)),
        tag="step400",
        time_ms=9_000_000,
        epoch=1,
        step=400,
    )
    view = look(sidecar(state="starting"), trainer(), [], NOW, restored)
    assert view.newest is not None
    assert view.newest.tag == "step400"
    assert view.exposure_seconds == pytest.approx(1_000)


def test_an_agent_that_has_looked_and_found_nothing_is_believed() -> None:
    view = look(sidecar(), trainer(), [save(400, "committed", 9_000)], NOW)
    assert view.newest is None


def test_an_agent_that_says_nothing_is_not_ready_and_says_why() -> None:
    assert look(sidecar(), None, [], NOW).unready == ""
    assert "last heard of 100 s ago" in look(sidecar(time=NOW - 100), None, [], NOW).unready
    assert look(sidecar(state="stopped"), None, [], NOW).unready == "the agent is stopped"
    assert "no agent" in look(None, None, [], NOW).unready


def test_a_trainer_is_running_silent_or_finished() -> None:
    states = [trainer(), trainer(time=NOW - 100), trainer(finished=True), None]
    seen = [look(sidecar(), each, [], NOW).trainer_state for each in states]
    assert seen == ["running", "silent", "finished", "unknown"]


def test_the_first_gap_alone_is_no_interval() -> None:
    saves = [save(1, "cleaned", 1_000), save(2, "cleaned", 1_060)]
    assert look(sidecar(), None, saves, NOW).save_interval_seconds == 0.0
