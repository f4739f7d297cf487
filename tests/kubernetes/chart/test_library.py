"""A user's own chart takes the sidecar into its pods, in three lines."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.chart.conftest import Judge
from tests.kubernetes.chart.helm import CHART, Document, Helm, RefusedError, documents, only
from tests.kubernetes.chart.matrix import AGENT, DIGEST, kind, merged
from tests.kubernetes.chart.rules import faults
from tests.kubernetes.tools.machine import ROOT

EXAMPLE = Path(__file__).with_name("example")
NAME = "ds-ckpt-sidecar"

# A pod with lists of its own, so that it takes single ones.
LISTS = """
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .Release.Name }}
spec:
  template:
    metadata:
      labels:
        mine: "true"
        {{- include "ds-ckpt-sidecar.podLabels" . | nindent 8 }}
      annotations:
        mine: "true"
        {{- include "ds-ckpt-sidecar.podAnnotations" . | nindent 8 }}
    spec:
      restartPolicy: OnFailure
      terminationGracePeriodSeconds: 120
      serviceAccountName: {{ .Release.Name }}-ds-ckpt
      securityContext:
        runAsUser: 1000
        {{- include "ds-ckpt-sidecar.podSecurityContext" . | nindent 8 }}
      initContainers:
        - {name: mine, image: "mine:1"}
        {{- include "ds-ckpt-sidecar.initContainers" . | nindent 8 }}
      containers:
        - name: train
          image: train:1
          env:
            - {name: MINE, value: "true"}
            {{- include "ds-ckpt-sidecar.trainerEnv" . | nindent 12 }}
          envFrom:
            - configMapRef: {name: mine}
            {{- include "ds-ckpt-sidecar.trainerEnvFrom" . | nindent 12 }}
          volumeMounts:
            - {name: mine, mountPath: /mine}
            {{- include "ds-ckpt-sidecar.trainerVolumeMounts" . | nindent 12 }}
        {{- include "ds-ckpt-sidecar.containers" . | nindent 8 }}
      volumes:
        - {name: mine, emptyDir: {}}
        {{- include "ds-ckpt-sidecar.volumes" . | nindent 8 }}
"""
SINGLE = """
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .Release.Name }}
spec:
  template:
    metadata:
      labels: {}
    spec:
      {{- $own := index .Subcharts "checkpoints" }}
      restartPolicy: OnFailure
      terminationGracePeriodSeconds: 120
      serviceAccountName: {{ .Release.Name }}-checkpoints
      securityContext:
        {{- include "ds-ckpt-sidecar.podSecurityContext" $own | nindent 8 }}
      initContainers:
        - {{- include "ds-ckpt-sidecar.restoreContainer" $own | nindent 10 }}
        - {{- include "ds-ckpt-sidecar.sidecarContainer" $own | nindent 10 }}
      containers:
        - name: train
          image: train:1
          {{- include "ds-ckpt-sidecar.trainer" $own | nindent 10 }}
      volumes:
        {{- include "ds-ckpt-sidecar.volumes" $own | nindent 8 }}
"""


class Parent:
    """A chart of a user's, that has ours as a dependency.

    Args:
        folder: for the charts, where they lie as in the repository.
        helm: by which it is built.
    """

    def __init__(self, folder: Path, helm: Helm) -> None:
        self.path = folder / EXAMPLE.relative_to(ROOT)
        self._helm = helm
        shutil.copytree(CHART, folder / CHART.relative_to(ROOT))
        shutil.copytree(EXAMPLE, self.path)

    def change(self, template: str = "", **dependency: Any) -> None:
        """Give it another template, or another line to its dependency."""
        if template:
            (self.path / "templates" / "job.yaml").write_text(template)
        chart = yaml.safe_load((self.path / "Chart.yaml").read_text())
        chart["dependencies"][0].update(dependency)
        (self.path / "Chart.yaml").write_text(yaml.safe_dump(chart))

    def add(self, **dependency: Any) -> None:
        """Make it depend on ours once more."""
        chart = yaml.safe_load((self.path / "Chart.yaml").read_text())
        chart["dependencies"].append({**chart["dependencies"][0], **dependency})
        (self.path / "Chart.yaml").write_text(yaml.safe_dump(chart))

    def render_all(self, values: Mapping[str, Any]) -> list[Document]:
        """What it renders."""
        self._helm("dependency", "update", self.path)
        return documents(self._helm.render(values, chart=self.path))

    def render(self, key: str = NAME, **values: Any) -> list[Document]:
        """What it renders, with these values for ours."""
        least = {"workload": {"kind": "none"}, "destination": "s3://bucket/runs/one"}
        return self.render_all({key: merged(least, values)})


@pytest.fixture
def parent(tmp_path: Path, helm: Helm) -> Parent:
    """The example."""
    return Parent(tmp_path, helm)


def names(each: Iterable[dict[str, Any]]) -> list[str]:
    """Of containers, volumes, variables."""
    return [one["name"] for one in each]


def pod(found: list[Document]) -> dict[str, Any]:
    """The template of the user's Job."""
    template: dict[str, Any] = only("Job", found)["spec"]["template"]
    return template


def test_three_lines_bring_restore_sidecar_and_volume(parent: Parent, judge: Judge) -> None:
    lines = (parent.path / "templates" / "job.yaml").read_text()
    assert len(re.findall("include", lines)) == 3
    found = parent.render()
    assert judge({"example": found}, ["1.29", "1.37"]) == []
    assert faults(found) == []
    spec = pod(found)["spec"]
    assert names(spec["initContainers"]) == ["ds-ckpt-restore", "ds-ckpt-sidecar"]
    assert names(spec["containers"]) == ["train"]
    assert names(spec["containers"][0]["env"]) == [
        "DS_CKPT_DIR",
        "DS_CKPT_RUN_ID",
        "DS_CKPT_GRACE",
    ]
    assert spec["serviceAccountName"] == only("ServiceAccount", found)["metadata"]["name"]


def test_the_readme_shows_the_same_three_lines() -> None:
    shown = (CHART / "README.md").read_text()
    for name in re.findall(r'include "(ds-ckpt-sidecar\.\w+)" \.', _job()):
        assert f'include "{name}" . | nindent' in shown
    for name in re.findall(r'define "ds-ckpt-sidecar\.(\w+)"', _library()):
        if name != "resolve":
            assert f".{name}`" in shown or f'sidecar.{name}"' in shown, name


def test_its_values_stand_under_its_name(parent: Parent, judge: Judge) -> None:
    found = parent.render(
        agent=AGENT,
        kubernetesReports={"enabled": True},
        credentials={"secret": "minio", "files": {"secret": "files"}},
        identity={"azureClientId": "00000000-1111-2222-3333-444444444444"},
        trainer={"readsStore": True},
        image={"digest": DIGEST},
        imagePullSecrets=[{"name": "registry"}],
        pod={
            "extraVolumes": [{"name": "authorities", "configMap": {"name": "authorities"}}],
            "terminationGracePeriodSeconds": 300,
        },
        sidecar={"extraVolumeMounts": [{"name": "authorities", "mountPath": "/etc/authorities"}]},
    )
    assert judge({"example": found}, ["1.29", "1.37"]) == []
    assert faults(found) == []
    spec = pod(found)["spec"]
    assert spec["terminationGracePeriodSeconds"] == 300
    assert spec["initContainers"][1]["image"] == f"ds-ckpt-sidecar@{DIGEST}"
    assert spec["containers"][0]["envFrom"] == [{"secretRef": {"name": "minio"}}]
    assert pod(found)["metadata"]["labels"]["azure.workload.identity/use"] == "true"


@pytest.mark.parametrize("native", [True, False])
def test_a_pod_with_lists_of_its_own_takes_single_ones(
    parent: Parent, judge: Judge, native: bool
) -> None:
    parent.change(LISTS)
    found = parent.render(sidecar={"native": native}, trainer={"readsStore": True})
    assert judge({"lists": found}, ["1.29", "1.37"]) == []
    assert faults(found) == []
    spec = pod(found)["spec"]
    assert "ds-ckpt-sidecar" in names(spec["initContainers" if native else "containers"])
    assert names(spec["initContainers"])[:2] == ["mine", "ds-ckpt-restore"]


def test_a_dependency_with_an_alias_is_given_its_own_context(parent: Parent, judge: Judge) -> None:
    parent.change(SINGLE, alias="checkpoints")
    found = parent.render("checkpoints", destination="gs://bucket/runs/one")
    assert judge({"alias": found}, ["1.29", "1.37"]) == []
    assert faults(found) == []
    assert pod(found)["spec"]["initContainers"][0]["args"][2] == "gs://bucket/runs/one"


@pytest.mark.parametrize("given", [".", '(index .Subcharts "checkpoint")'])
def test_a_context_that_is_not_the_dependencys_is_refused(parent: Parent, given: str) -> None:
    parent.change(SINGLE.replace('index .Subcharts "checkpoints"', given), alias="checkpoints")
    sentence = (
        "the context that a template of this chart was given is not this chart's. If the "
        'dependency has an alias, give (index .Subcharts "alias") in place of the dot; if its '
        "condition may switch it off, put the includes into an if on the same value"
    )
    with pytest.raises(RefusedError, match=re.escape(sentence)):
        parent.render("checkpoints")


def test_two_of_them_in_one_chart_share_no_name_and_no_run(parent: Parent, judge: Judge) -> None:
    (parent.path / "templates" / "job.yaml").unlink()
    parent.change(alias="actor")
    parent.add(alias="Critic_2")
    values = {
        name: kind("IndexedJob", 2, backoffLimit=limit)
        for name, limit in (("actor", 1), ("Critic_2", 2))
    }
    found = parent.render_all(values)
    assert judge({"two": found}, ["1.29", "1.37"]) == []
    names_of = {
        each: sorted(one["metadata"]["name"] for one in found if one["kind"] == each)
        for each in ("ServiceAccount", "Service")
    }
    assert list(names_of.values()) == [["train-actor", "train-critic-2"]] * 2
    jobs = [each for each in found if each["kind"] == "Job"]
    assert {each["metadata"]["name"].rpartition("-")[0] for each in jobs} == {
        "train-actor",
        "train-critic-2",
    }
    marks = [each["spec"]["template"]["metadata"] for each in jobs]
    runs = {each["annotations"]["ds-ckpt.io/run-id"] for each in marks}
    assert runs == {"train-actor", "train-Critic_2"}
    for service in (each for each in found if each["kind"] == "Service"):
        wanted = service["spec"]["selector"].items()
        assert [wanted <= each["labels"].items() for each in marks].count(True) == 1


def test_users_and_groups_are_left_out_by_the_values_of_the_chart_itself(parent: Parent) -> None:
    """Of null in there helm 4 says nothing, and takes the dependency's default."""
    none = {"sidecar": {"runAsUser": "", "runAsGroup": ""}, "volume": {"fsGroup": ""}}
    (parent.path / "values.yaml").write_text(yaml.safe_dump({NAME: none}))
    spec = pod(parent.render())["spec"]
    assert "fsGroup" not in spec["securityContext"]
    for container in spec["initContainers"]:
        assert not {"runAsUser", "runAsGroup"} & set(container["securityContext"])


def test_a_condition_switches_the_dependency_off(parent: Parent) -> None:
    template = (parent.path / "templates" / "job.yaml").read_text()
    one = '{{- include "ds-ckpt-sidecar.podMetadata" . | nindent 6 }}'
    assert one in template
    parent.change(
        '{{- if index .Values "ds-ckpt-sidecar" "enabled" }}\n' + template + "{{- end }}\n",
        condition=f"{NAME}.enabled",
    )
    assert parent.render(enabled=False) == []
    assert only("Job", parent.render(enabled=True))


def test_what_cannot_work_is_refused_also_below_another_chart(parent: Parent) -> None:
    refused = {
        "destination is missing": {"destination": ""},
        "trainer.image is missing": {"workload": {"kind": "Job"}},
        "keeplast": {"agent": {"keeplast": 3}},
        "podSpec holds no containers, and sidecar.native=false": {"sidecar": {"native": False}},
    }
    for sentence, values in refused.items():
        with pytest.raises(RefusedError, match=re.escape(sentence)):
            parent.render(**values)


def _job() -> str:
    return (EXAMPLE / "templates" / "job.yaml").read_text()


def _library() -> str:
    return (CHART / "templates" / "_library.tpl").read_text()
