"""``helm upgrade`` of a chart that renders Jobs, whose pod templates cannot be changed.

The workload's name ends with a hash of what cannot be changed. So an upgrade either changes what
may be changed in place, or makes a new workload and removes the old one; it never asks the API
server for what that refuses.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.chart.helm import CHART, Document, Helm, documents, only
from tests.kubernetes.chart.matrix import DIGEST, KINDS, kind, merged

WORKLOADS = {name: name for name in KINDS} | {"IndexedJob": "Job"}
# What the API server lets change in place.
IN_PLACE = {
    "Job": ["backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "suspend"],
    "JobSet": ["ttlSecondsAfterFinished", "suspend"],
    "PyTorchJob": ["runPolicy"],
    "TrainJob": ["suspend"],
}

CHANGES: dict[str, dict[str, Any]] = {
    "another image": {"trainer": {"image": "train:2"}},
    "another sidecar": {"image": {"digest": DIGEST}},
    "another setting": {"agent": {"keepLast": 3}},
    "more grace": {"pod": {"terminationGracePeriodSeconds": 300}},
    "another node": {"pod": {"nodeSelector": {"gpu": "h100"}}},
    "reports": {"kubernetesReports": {"enabled": True}},
}
SAME: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a queue": {"workload": {"suspend": True, "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}},
    "who owns it": {"workload": {"annotations": {"example.com/owner": "me"}}},
    "when it goes": {"workload": {"ttlSecondsAfterFinished": 3600}},
    "a policy for the network": {"networkPolicy": {"enabled": True}},
    "the account": {"serviceAccount": {"annotations": {"a": "b"}}},
}


def workload(helm: Helm, values: dict[str, Any], name: str, **options: Any) -> Document:
    """What trains."""
    return only(WORKLOADS[name], documents(helm.render(values, **options)))


@pytest.mark.parametrize("name", KINDS)
def test_a_changed_pod_is_a_new_workload(helms: dict[str, Helm], name: str) -> None:
    helm = helms["helm4"]
    before = workload(helm, kind(name), name)
    seen = {before["metadata"]["name"]}
    for change in CHANGES.values():
        after = workload(helm, merged(kind(name), change), name)
        seen.add(after["metadata"]["name"])
    if name != "Job":
        seen.add(workload(helm, kind(name, 2), name)["metadata"]["name"])
    assert len(seen) == 1 + len(CHANGES) + (name != "Job")
    assert all(each.startswith("train-") for each in seen)


@pytest.mark.parametrize("name", KINDS)
def test_what_leaves_the_pods_alone_changes_the_workload_in_place(
    helms: dict[str, Helm], name: str
) -> None:
    helm = helms["helm4"]
    before = workload(helm, kind(name), name)
    for said, change in SAME.items():
        if name == "TrainJob" and said == "when it goes":
            continue
        after = workload(helm, merged(kind(name), change), name)
        assert after["metadata"]["name"] == before["metadata"]["name"], said
        allowed = IN_PLACE[WORKLOADS[name]]
        fixed = [
            {key: value for key, value in each["spec"].items() if key not in allowed}
            for each in (before, after)
        ]
        assert fixed[0] == fixed[1], said


def test_limits_of_a_job_change_in_place_and_those_of_others_do_not(
    helms: dict[str, Helm],
) -> None:
    limits = {
        "backoffLimit": 3,
        "activeDeadlineSeconds": 60,
        "podReplacementPolicy": "TerminatingOrFailed",
    }
    for name in KINDS:
        before = workload(helms["helm4"], kind(name), name)["metadata"]["name"]
        for limit, value in limits.items():
            after = workload(helms["helm4"], kind(name, **{limit: value}), name)["metadata"]["name"]
            assert (before == after) == (WORKLOADS[name] == "Job"), (name, limit)


def test_a_port_that_a_workload_does_not_use_leaves_it_alone(helms: dict[str, Helm]) -> None:
    for name in KINDS:
        before = workload(helms["helm4"], kind(name), name)["metadata"]["name"]
        after = workload(helms["helm4"], kind(name, masterPort=23456), name)["metadata"]["name"]
        assert (before != after) == (name in ("IndexedJob", "JobSet")), name


def test_a_new_version_of_the_chart_with_the_same_image_leaves_what_trains_alone(
    helms: dict[str, Helm], tmp_path: Path
) -> None:
    newer = tmp_path / "newer"
    shutil.copytree(CHART, newer)
    chart = yaml.safe_load((newer / "Chart.yaml").read_text())
    (newer / "Chart.yaml").write_text(yaml.safe_dump({**chart, "version": "9.9.9"}))
    values = kind("IndexedJob", 2)
    before = workload(helms["helm4"], values, "IndexedJob")
    after = workload(helms["helm4"], values, "IndexedJob", chart=newer)
    assert json.dumps(before["spec"]) == json.dumps(after["spec"])
    assert before["metadata"]["name"] == after["metadata"]["name"]
    assert after["metadata"]["labels"]["helm.sh/chart"] == "ds-ckpt-sidecar-9.9.9"
