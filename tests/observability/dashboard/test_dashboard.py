"""The dashboard: is the file what the program makes, is it whole, and do its queries parse?"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt_sidecar.observe.metrics import METRICS
from observability.dashboard import FILE, text
from tests.observability.draw import Scope, expressions, panels
from tests.observability.tools.install import BIN, ROOT, TOOLS

DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = panels(DASHBOARD)
SHOWN = [panel for panel in PANELS if panel["type"] != "row"]
PROCESS = {"ds_ckpt_process_resident_memory_bytes", "ds_ckpt_process_cpu_seconds_total"}
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}


NODE = ROOT / ".servers/venv/bin/node"
CHECK = Path(__file__).parent / "schema/check.mjs"
STRICT = "--strict --noEmit --module esnext --moduleResolution bundler --skipLibCheck"


def typed(dashboard: dict[str, Any], folder: Path) -> str:
    """What TypeScript finds wrong, by the types of Grafana and of its panels."""
    source, made = folder / "dashboard.json", folder / "dashboard.ts"
    source.write_text(json.dumps(dashboard))
    subprocess.run([NODE, CHECK, source, made], check=True)
    modules = folder / "node_modules"
    if not modules.exists():
        modules.symlink_to(TOOLS / "node_modules")
    compiler = modules / "typescript/bin/tsc"
    command = [NODE, "--preserve-symlinks", compiler, *STRICT.split(), "--preserveSymlinks", made]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def titled(panel: dict[str, Any]) -> str:
    return panel["title"]


def known() -> set[str]:
    names = {
        f"{each.full_name}{suffix}" for each in METRICS for suffix in SUFFIXES.get(each.kind, ("",))
    }
    return names | PROCESS


def test_the_file_is_what_the_program_makes() -> None:
    assert FILE.read_text() == text(), "run `make dashboard`"


@pytest.mark.parametrize("panel", SHOWN, ids=titled)
def test_a_panel_says_what_it_tells_and_what_to_do_in_which_unit(panel: dict[str, Any]) -> None:
    assert "What to do:" in panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["targets"]


@pytest.mark.parametrize("panel", SHOWN, ids=titled)
def test_a_panel_asks_for_metrics_that_there_are(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        asked = set(re.findall(r"ds_ckpt_\w+", target["expr"]))
        assert asked
        assert asked <= known()


def test_grafana_knows_every_field(tmp_path) -> None:
    assert not typed(DASHBOARD, tmp_path)


def test_a_field_that_grafana_does_not_know_is_found(tmp_path) -> None:
    changed = json.loads(FILE.read_text())
    changed["panels"][1]["options"]["graphMode"] = "curve"
    changed["titel"] = "Checkpoints"
    found = typed(changed, tmp_path)
    assert "curve" in found
    assert "titel" in found


def test_no_metric_is_left_out() -> None:
    asked = {
        name for expression in expressions(DASHBOARD) for name in re.findall(r"ds_\w+", expression)
    }
    missing = {
        each.full_name
        for each in METRICS
        if not any(name.startswith(each.full_name) for name in asked)
    }
    assert not missing


def test_runbooks_are_those_of_alerts_that_there_are() -> None:
    alerts = re.findall(r"alert: (\w+)", FILE.with_name("alerts.yaml").read_text())
    anchors = {f"${{runbooks}}#{alert.lower()}" for alert in alerts}
    links = {link["url"] for panel in SHOWN for link in panel.get("links", [])}
    assert links
    assert links <= anchors


def test_ids_and_titles_are_given_once() -> None:
    for field in ("id", "title"):
        values = [panel[field] for panel in PANELS]
        assert len(values) == len(set(values))


def test_panels_lie_beside_each_other() -> None:
    for panel in PANELS:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
    for one, other in itertools.combinations([panel["gridPos"] for panel in PANELS], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above


def test_no_more_of_the_network_is_in_use_than_there_is(tmp_path) -> None:
    """In a run that has just begun, one that grows faster, and one that is restarted."""
    (panel,) = [each for each in SHOWN if each["title"] == "Network in use"]
    (target,) = panel["targets"]
    share = Scope(DASHBOARD, seconds=300, scrape=1).substitute(target["expr"])
    series = "0x10 1+1x40 50+9x40 600+100x40 0+900x40"
    asked = [
        {
            "expr": f"({share}) > bool 1",
            "eval_time": f"{second}s",
            "exp_samples": [{"labels": "{}", "value": 0}],
        }
        for second in range(80, 840, 7)
    ]
    test = {
        "interval": "5s",
        "input_series": [{"series": 'ds_ckpt_sent_bytes_total{run="r"}', "values": series}],
        "promql_expr_test": asked,
    }
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"evaluation_interval": "5s", "tests": [test]}))
    ran = subprocess.run([BIN / "promtool", "test", "rules", file], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_prometheus_understands_every_expression(tmp_path) -> None:
    scope = Scope(DASHBOARD, seconds=3600, scrape=15)
    rules = [
        {"record": f"dashboard:{number}", "expr": scope.substitute(expression)}
        for number, expression in enumerate(expressions(DASHBOARD))
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(
        [BIN / "promtool", "check", "rules", file], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
