"""What others' linters say of the chart, and what the chart says when it is installed."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.kubernetes.chart.helm import CHART, Helm
from tests.kubernetes.chart.matrix import CASES, DIGEST, KINDS, LEAST, NONE, Values, kind, merged
from tests.kubernetes.tools.machine import ROOT, tool

CHECKOV = ROOT / "helm" / ".checkov.yaml"

# A trainer without faults of its own, so that what is found is the chart's.
FAULTLESS: Values = {
    "trainer": {
        "image": f"registry.example/train@{DIGEST}",
        "imagePullPolicy": "Always",
        "resources": {
            "requests": {"cpu": 8, "memory": "64Gi"},
            "limits": {"cpu": 8, "memory": "64Gi"},
        },
        "securityContext": {
            "runAsUser": 65532,
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    },
    "image": {"repository": "registry.example/ds-ckpt-sidecar", "digest": DIGEST},
    "kubernetesReports": {"enabled": True},
    "networkPolicy": {"enabled": True},
}
SECRETS: Values = {
    "credentials": {
        "secret": "minio",
        "env": [{"name": "AWS_ACCESS_KEY_ID", "secret": "more", "key": "user"}],
    }
}
PLAIN: Values = {"sidecar": {"native": False}}


def test_helms_own_linter_has_nothing_to_say(helm: Helm, tmp_path: Path) -> None:
    for name in (f"{each}, {much}" for each in KINDS for much in ("least", "everything")):
        file = tmp_path / "values.json"
        file.write_text(json.dumps(CASES[name]))
        said = helm("lint", "--strict", CHART, "--values", file)
        assert "0 chart(s) failed" in said
        assert not re.search(r"\[(WARNING|ERROR)\]", said), said


def test_checkov_finds_what_has_its_reason_beside_it_and_nothing_else(
    helms: Mapping[str, Helm], tmp_path: Path
) -> None:
    releases = {
        "job": kind("Job"),
        "indexed": kind("IndexedJob", 2),
        "plain": merged(kind("Job"), PLAIN),
        "secrets": merged(kind("Job"), PLAIN, SECRETS),
    }
    for name, values in releases.items():
        text = helms["helm4"].render(merged(values, FAULTLESS), release=name)
        (tmp_path / f"{name}.yaml").write_text(text)
    ran = subprocess.run(
        [
            *(tool("checkov"), "--framework", "kubernetes", "--skip-download"),
            *("--quiet", "--compact", "--output", "json", "--directory", tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    report = json.loads(ran.stdout)
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["passed"] > 300
    found = {each["check_id"] for each in report["results"]["failed_checks"]}
    assert found == set(yaml.safe_load(CHECKOV.read_text())["skip-check"])
    for line in CHECKOV.read_text().splitlines():
        assert "CKV_" not in line or re.search(r"CKV_\w+ # .{20,}", line), f"no reason: {line}"


@pytest.mark.parametrize("name", [*KINDS, "none"])
def test_it_says_what_was_made_what_to_look_at_and_what_to_type(helm: Helm, name: str) -> None:
    values = NONE if name == "none" else kind(name)
    notes = helm.notes(values)
    assert "s3://bucket/runs/one\nas run train." in notes
    assert "ServiceAccount/train" in notes
    assert "volume.emptyDir.sizeLimit" in notes
    if name == "none":
        assert 'include "ds-ckpt-sidecar.podSpec" . | nindent' in notes
        return
    shown = "Job" if name == "IndexedJob" else name
    assert re.search(rf"^  {shown}/train-[0-9a-f]{{8}}: 1 pod of train:1", notes, re.MULTILINE)
    assert re.findall(r"^  (\d)\. ", notes, re.MULTILINE) == ["1", "2", "3"]
    commands = re.findall(r"^ {7}(\S.*)", notes, re.MULTILINE)
    assert [re.sub(r".*-- ", "", each) for each in commands[2:]] == [
        "ds-ckpt doctor",
        "ds-ckpt ls s3://bucket/runs/one",
    ]
    assert all("--namespace training" in each for each in commands)


def test_it_warns_of_credentials_that_nobody_has_named(helm: Helm) -> None:
    assert "No credentials are named" in helm.notes(LEAST)
    assert "No credentials are named" not in helm.notes(merged(LEAST, SECRETS))
    assert "No credentials are named" not in helm.notes(CASES["IRSA"])


def test_the_notes_say_that_a_tag_stays_in_force(helm: Helm) -> None:
    said = "Every new pod begins at tag global_step400 again, and throws away what was stored after"
    tagged = merged(LEAST, {"restore": {"tag": "global_step400"}})
    assert said in helm.notes(tagged)
    assert 'upgrade with restore.tag=""' in helm.notes(tagged)
    assert "restore.tag" not in helm.notes(LEAST)
    assert said not in helm.notes(merged(tagged, {"restore": {"enabled": False}}))
