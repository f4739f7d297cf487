"""What the chart makes for the Prometheus operator and for Grafana's sidecar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.kubernetes.chart.conftest import Judge
from tests.kubernetes.chart.helm import CHART, Document, only, pods

Rendered = Mapping[str, list[Document]]
ALL = "Job, everything"


def sidecar(found: list[Document]) -> dict[str, Any]:
    """The container, of the first pod."""
    spec = pods(found)[0]["spec"]
    (one,) = [each for each in spec["initContainers"] if each["name"] == "ds-ckpt-sidecar"]
    container: dict[str, Any] = one
    return container


def test_nothing_is_made_unless_asked(rendered: Rendered) -> None:
    kinds = {each["kind"] for each in rendered["Job, least"]}
    assert not kinds & {"PodMonitor", "PrometheusRule", "ConfigMap"}


def test_the_pod_monitor_selects_the_pods_and_a_port_that_they_have(rendered: Rendered) -> None:
    found = rendered[ALL]
    spec = only("PodMonitor", found)["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert (endpoint["path"], endpoint["interval"]) == ("/metrics", "15s")
    assert endpoint["port"] in [port["name"] for port in sidecar(found)["ports"]]
    for pod in pods(found):
        assert spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert set(spec["podTargetLabels"]) <= set(pod["metadata"]["labels"])


def test_the_rules_are_those_of_the_file_with_the_base_of_their_runbooks(
    rendered: Rendered,
) -> None:
    file = (CHART / "files/alerts.yaml").read_text()
    base = "https://wiki.example/ds-ckpt/runbooks"
    expected = yaml.safe_load(file.replace("RUNBOOK_BASE", base))
    assert only("PrometheusRule", rendered[ALL])["spec"] == expected
    least = only("PrometheusRule", rendered["no workload, rules and dashboard"])["spec"]
    assert least == yaml.safe_load(file.replace("RUNBOOK_BASE", "docs/runbooks.md"))


def test_the_dashboard_is_the_file_with_labels_that_can_be_others(rendered: Rendered) -> None:
    file = (CHART / "files/dashboard.json").read_text()
    for case, label, base in (
        (ALL, "yes", "https://wiki.example/ds-ckpt/runbooks"),
        ("no workload, rules and dashboard", "1", "docs/runbooks.md"),
    ):
        made = only("ConfigMap", rendered[case])
        expected = json.loads(file.replace("RUNBOOK_BASE", base))
        assert json.loads(made["data"]["ds-ckpt.json"]) == expected
        assert made["metadata"]["labels"]["grafana_dashboard"] == label
        assert len(json.dumps(made)) < 1_000_000  # what a ConfigMap may hold
    assert only("ConfigMap", rendered[ALL])["metadata"]["annotations"] == {
        "grafana_folder": "Training"
    }


def test_the_network_policy_lets_the_scrape_in(rendered: Rendered) -> None:
    def rules(case: str, port: int) -> list[dict[str, Any]]:
        spec = only("NetworkPolicy", rendered[case])["spec"]
        ports = [{"port": port, "protocol": "TCP"}]
        return [each for each in spec["ingress"] if each.get("ports") == ports]

    (rule,) = rules(ALL, 9484)
    labels = {"kubernetes.io/metadata.name": "monitoring"}
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": labels}}]
    (rule,) = rules("scraped from any namespace", 8484)
    assert "from" not in rule
    assert rules("no network policy for what goes out", 8484) == []


@pytest.mark.parametrize(
    ("case", "expected"),
    [(ALL, ["600Gi"]), ("bytes as numbers", ["600000000000"]), ("Job, least", [])],
)
def test_the_agent_knows_what_its_volume_may_hold(
    rendered: Rendered, case: str, expected: list[str]
) -> None:
    env = sidecar(rendered[case])["env"]
    assert [each["value"] for each in env if each["name"] == "DS_CKPT_VOLUME_LIMIT"] == expected


def test_fields_that_the_operator_does_not_know_are_seen(judge: Judge, rendered: Rendered) -> None:
    for kind, place in (("PodMonitor", "podMetricsEndpoints"), ("PrometheusRule", "groups")):
        made = json.loads(json.dumps(only(kind, rendered[ALL])))
        made["spec"][place][0]["intervall"] = "1m"
        assert judge({kind: [made]}, ["1.37"]) == [
            f"{kind}: {kind}: {kind}.spec.{place}[0].intervall is not known"
        ]
