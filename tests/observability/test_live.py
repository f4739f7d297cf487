"""A live run: what metrics, rules and dashboard show of it was caused by what happened in it.

The run is told in ``live/story.py``. Nothing here is a number that a test has put in.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ds_ckpt_sidecar.observe.metrics import METRICS
from tests.observability.draw import Scope, draw
from tests.observability.expressions import (
    DASHBOARD,
    Expression,
    of_dashboard,
    of_rules,
    of_variables,
    without_stand_in,
)
from tests.observability.live.lab import NAMESPACE, RUN
from tests.observability.live.monitoring import SCRAPE_SECONDS, Series, program
from tests.observability.live.scaling import faster
from tests.observability.live.story import ALERTS, OPENMETRICS, Story
from tests.observability.tools.install import TOOLS

# The first test to ask for the run makes it.
pytestmark = pytest.mark.timeout(420)

# Metric to the event in the midst of which it must change, and the labels of the series that must.
CAUSES = {
    "upload_lag_seconds": ("store_stops", ""),
    "exposure_seconds": ("store_stops", ""),
    "exposure_steps": ("store_stops", ""),
    "save_interval_seconds": ("training_begins", ""),
    "backlog_saves": ("store_stops", ""),
    "backlog_shards": ("store_stops", ""),
    "backlog_bytes": ("store_stops", ""),
    "waiting_for_nodes_seconds": ("node_is_missing", 'pod="live-0"'),
    "saves": ("file_is_no_manifest", 'state="quarantined"'),
    "newest_committed_timestamp_seconds": ("training_begins", ""),
    "newest_committed_step": ("training_begins", ""),
    "manifests_refused": ("file_is_no_manifest", ""),
    "consecutive_failures": ("store_stops", ""),
    "upload_bytes_per_second": ("agent_is_killed", 'pod="live-0"'),
    "transfer_streams_limit": ("limit_is_set", 'pod="live-0"'),
    "transfer_bandwidth_limit_bytes_per_second": ("limit_is_set", 'pod="live-0"'),
    "volume_free_bytes": ("disk_fills", 'pod="live-0"'),
    "volume_used_bytes": ("disk_fills", 'pod="live-0"'),
    "volume_high_water_bytes": ("disk_fills", 'pod="live-0"'),
    "volume_unfreed_bytes": ("file_is_held", 'pod="live-0"'),
    "agent_ready": ("training_begins", ""),
    "agent_state": ("training_begins", 'state="starting"'),
    "agent_heartbeat_timestamp_seconds": ("training_begins", ""),
    "trainer_heartbeat_timestamp_seconds": ("training_begins", ""),
    "trainer_step": ("training_begins", ""),
    "trainer_finished": ("training_ends", ""),
    "trainer_held_seconds": ("training_begins", ""),
    "trainer_skipped_saves": ("save_is_skipped", ""),
    "restore_seconds": ("volume_is_replaced", 'pod="live-1"'),
    "restore_bytes": ("volume_is_replaced", 'pod="live-1"'),
    "credentials_expiry_timestamp_seconds": ("agent_is_killed", 'pod="live-0"'),
    "uploaded_bytes": ("training_begins", ""),
    "sent_bytes": ("byte_flips", ""),
    "parts": ("agent_is_killed", 'outcome="resumed"'),
    "errors": ("store_throttles", 'kind="ThrottledError"'),
    "verify_failures": ("byte_flips", ""),
    "saves_decided": ("volume_is_replaced", 'state="abandoned"'),
    "retention_checkpoints": ("training_begins", ""),
    "retention_objects": ("training_begins", ""),
    "save_commit_seconds": ("training_begins", ""),
    "save_phase_seconds": ("training_begins", 'phase="uploading"'),
}

# What is the same from the beginning to the end of a run, and why.
CONSTANT = {
    "build_info": "it says which version runs",
    "run_info": "it says which node that is, and where its checkpoints go",
    "volume_size_bytes": "a volume does not grow",
}

# Grafana's variables, as a person who looks at this run chooses them.
CHOSEN = {"namespace": [NAMESPACE], "run": [RUN]}
PICTURE = TOOLS / "dashboard.png"


def changes(series: Series, start: float, end: float) -> bool:
    """Whether one of the series has two values in that time, or is there in a part of it only."""
    steps = int(end - start) + 1
    for points in series.values():
        seen = {value for when, value in points if start <= when <= end}
        if len(seen) > 1 or 0 < sum(start <= when <= end for when, _ in points) < steps - 1:
            return True
    return False


def varies(series: Series) -> bool:
    """Whether one of the series has two values that are numbers."""
    return any(
        len({value for _, value in points if value == value}) > 1 for points in series.values()
    )


def appears(series: Series, story: Story) -> bool:
    """Whether one of the series begins with a later event than the first."""
    return any(points[0][0] > story.events["training_begins"][1] for points in series.values())


def over_all(story: Story, expression: str) -> Series:
    return story.lab.prometheus.over(expression, *story.span)


def shown(story: Story, expression: Expression) -> Series:
    """As the dashboard shows it."""
    start, end = story.span
    scope = Scope(json.loads(DASHBOARD.read_text()), end - start, SCRAPE_SECONDS, CHOSEN)
    return over_all(story, scope.substitute(without_stand_in(expression.text)))


def test_each_metric_has_a_cause_in_the_run_or_a_reason_to_be_constant() -> None:
    names = {described.name for described in METRICS}
    assert names == CAUSES.keys() | CONSTANT.keys()
    assert not CAUSES.keys() & CONSTANT.keys()


@pytest.mark.parametrize("described", METRICS, ids=lambda described: described.name)
def test_a_metric_moves_with_what_it_tells_of(story: Story, described) -> None:
    name = described.full_name + ("_count" if described.kind == "histogram" else "")
    if described.name in CONSTANT:
        series = over_all(story, name)
        assert series
        assert not varies(series)
        return
    event, labels = CAUSES[described.name]
    began, ended = story.events[event]
    selector = f"{name}{{{labels}}}"
    start, end = began - 1, ended + 2
    series = story.lab.prometheus.over(selector, start, end)
    assert series, f"{selector} is not there"
    assert changes(series, start, end), f"{selector} stays the same while {event}: {series}"


@pytest.mark.parametrize("expression", of_rules(), ids=str)
def test_a_rule_holds_and_does_not_hold(story: Story, expression: Expression) -> None:
    """Each condition comes true in the run by what happens there, and is not true all the time."""
    series = over_all(story, without_stand_in(faster(expression.text)))
    assert series, "no series"
    assert changes(series, *story.span), f"the same all the time: {list(series)}"


@pytest.mark.parametrize("expression", of_dashboard(), ids=str)
def test_an_expression_of_the_dashboard_moves(story: Story, expression: Expression) -> None:
    series = shown(story, expression)
    assert series, "no series"
    constant = [name for name in CONSTANT if f"ds_ckpt_{name}" in expression.selectors]
    assert varies(series) or appears(series, story) or constant, f"always the same: {series}"


@pytest.mark.parametrize("expression", of_variables(), ids=str)
def test_a_variable_of_the_dashboard_finds_values(story: Story, expression: Expression) -> None:
    assert shown(story, expression)


def test_each_alert_has_an_event_that_makes_it_fire() -> None:
    assert sorted(name for names in ALERTS.values() for name in names) == sorted(
        each.where for each in of_rules()
    )


@pytest.mark.parametrize(
    ("event", "alert"), [(event, alert) for event in ALERTS for alert in ALERTS[event]]
)
def test_an_alert_says_of_which_run_and_what_to_do(story: Story, event: str, alert: str) -> None:
    """Through agent, Prometheus and Alertmanager to whoever is to be woken."""
    told = story.lab.receiver.heard(alert, "firing", story.events[event][0])[0]
    assert told.labels["namespace"] == NAMESPACE
    assert alert in ("DsCkptAgentDown", "DsCkptAgentRestarting") or told.labels["run"] == RUN
    assert "{{" not in str(told.annotations)
    assert told.annotations["summary"]
    assert told.annotations["runbook_url"].endswith(f"#{alert.lower()}")


def test_a_stopped_store_is_told_of_and_so_is_its_return(story: Story) -> None:
    stopped, back = story.events["store_stops"][0], story.events["store_is_back"][0]
    firing = story.lab.receiver.heard("DsCkptUploadLag", "firing", stopped)
    resolved = story.lab.receiver.heard("DsCkptUploadLag", "resolved", back)
    assert firing[0].when < back
    assert resolved


def test_the_dashboard_can_be_drawn(story: Story) -> None:
    """No query is refused, and no panel is empty. Look at the picture."""
    seconds = time.time() - story.span[0]
    problems = draw(DASHBOARD, story.lab.prometheus.url, PICTURE, seconds, CHOSEN)
    print(f"the dashboard: {PICTURE}", file=sys.stderr)
    assert [each for each in problems if each.kind != "constant"] == []


def test_the_exposition_passes_promtool(story: Story) -> None:
    """Syntax and, with its linter, the conventions for names, units and help."""
    checked = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=story.expositions["text/plain"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_the_exposition_is_openmetrics(story: Story) -> None:
    text = story.expositions[OPENMETRICS]
    families = {family.name for family in text_string_to_metric_families(text)}
    assert families >= {f"ds_ckpt_{described.name}" for described in METRICS} - ABSENT


ABSENT = {"ds_ckpt_restore_seconds", "ds_ckpt_restore_bytes"}
"""Of a volume that began empty."""
