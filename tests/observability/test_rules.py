"""The chart's rules: Prometheus takes them, they fire and stay silent, and each has its runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_ckpt_sidecar.observe.metrics import METRICS
from tests.observability.expressions import RULES, of_rules
from tests.observability.tools.install import BIN, ROOT

CASES = sorted(Path(__file__).with_name("rules").glob("*.yaml"))
RUNBOOKS = (ROOT / "docs/runbooks.md").read_text()
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]


def promtool(*arguments: str | Path) -> None:
    """Run it; it must find nothing wrong."""
    command = [str(BIN / "promtool"), *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_prometheus_takes_the_rules() -> None:
    promtool("check", "rules", RULES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_alerts_fire_and_stay_silent_when_they_should(case: Path, tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path / RULES.name)
    shutil.copy(case, tmp_path / case.name)
    promtool("test", "rules", tmp_path / case.name)


def test_each_alert_is_tested_for_firing_and_for_staying_silent() -> None:
    asked = [
        each
        for case in CASES
        for test in yaml.safe_load(case.read_text())["tests"]
        for each in test.get("alert_rule_test", [])
    ]
    names = {alert["alert"] for alert in ALERTS}
    assert {each["alertname"] for each in asked if each.get("exp_alerts")} == names
    assert {each["alertname"] for each in asked if not each.get("exp_alerts")} == names


def test_each_alert_has_what_whoever_is_called_needs() -> None:
    for alert in ALERTS:
        assert alert["labels"] in ({"severity": "page"}, {"severity": "ticket"}), alert["alert"]
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        anchor = f"RUNBOOK_BASE#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook_url"] == anchor


def test_each_alert_has_its_section_of_the_runbooks_and_each_section_its_alert() -> None:
    sections = re.split(r"^## ", RUNBOOKS, flags=re.MULTILINE)[1:]
    titled = {text.splitlines()[0]: text for text in sections}
    assert {title for title in titled if title.startswith("DsCkpt")} == {
        alert["alert"] for alert in ALERTS
    }
    for alert in ALERTS:
        text = titled[alert["alert"]]
        for part in ("**Means**", "**Look**", "**Do**"):
            assert part in text, (alert["alert"], part)


def test_rules_and_runbooks_name_metrics_that_there_are() -> None:
    known = {each.full_name for each in METRICS}
    known |= {
        f"{each.full_name}_{suffix}"
        for each in METRICS
        if each.kind == "histogram"
        for suffix in ("bucket", "sum", "count")
    }
    known |= {"ds_ckpt_process_start_time_seconds"}
    used = {name for each in of_rules() for name in each.selectors}
    assert used
    assert used <= known
    assert set(re.findall(r"\bds_ckpt_\w+", RUNBOOKS)) - {"ds_ckpt_sidecar"} <= known
