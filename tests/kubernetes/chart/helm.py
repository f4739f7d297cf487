"""Both helms that the chart supports, as a user calls them; no cluster is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.tools.machine import ROOT, tool

CHART = ROOT / "helm" / "ds-ckpt-sidecar"
HELMS = ("helm3", "helm4")
Document = dict[str, Any]


class RefusedError(Exception):
    """What helm said when it refused."""


class Helm:
    """One of the two.

    Args:
        name: ``helm3`` or ``helm4``.
        folder: for values, and for helm's own files.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._folder = name, folder
        self._environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith("HELM_")},
            **{f"HELM_{kind}_HOME": str(folder / kind) for kind in ("CACHE", "CONFIG", "DATA")},
            "KUBECONFIG": str(folder / "none"),
        }

    def __call__(self, *arguments: str | Path) -> str:
        """Run it; what it wrote.

        Raises:
            RefusedError: it failed.
        """
        command = [str(tool(self.name)), *map(str, arguments)]
        ran = subprocess.run(
            command, env=self._environ, capture_output=True, text=True, timeout=60, check=False
        )
        if ran.returncode:
            raise RefusedError(ran.stdout + ran.stderr)
        return ran.stdout

    def render(
        self,
        values: Mapping[str, Any],
        *arguments: str,
        chart: Path = CHART,
        release: str = "train",
        version: str = "1.37",
    ) -> str:
        """``helm template`` in namespace ``training``, as text."""
        file = self._folder / "values.json"
        file.write_text(json.dumps(values))
        where = ["--namespace", "training", "--kube-version", version]
        return self("template", release, chart, *where, "--values", file, *arguments)

    def notes(self, values: Mapping[str, Any]) -> str:
        """What it tells whoever installs release ``train``.

        Only ``helm install`` shows it, which asks a cluster. So the notes of a copy are rendered as
        part of a document.
        """
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            chart = Path(folder) / CHART.name
            shutil.copytree(CHART, chart)
            (chart / "templates" / "NOTES.txt").rename(chart / "notes.txt")
            (chart / "templates" / "notes.yaml").write_text(
                'kind: Notes\ntext: {{ tpl (.Files.Get "notes.txt") . | toJson }}\n'
            )
            text: str = only("Notes", documents(self.render(values, chart=chart)))["text"]
            return text


def documents(text: str) -> list[Document]:
    """What was rendered, each item of a List by itself."""
    found: list[Document] = []
    for each in yaml.load_all(text, UniqueKeys):
        if each and each["kind"] == "List":
            found += each["items"]
        elif each:
            found.append(each)
    return found


def only(kind: str, found: Sequence[Document]) -> Document:
    """The one document of a kind."""
    (one,) = [each for each in found if each["kind"] == kind]
    return one


def pods(found: Sequence[Document]) -> list[Document]:
    """The pod templates in workloads of any kind."""
    templates = []

    def look(value: Any) -> None:
        if isinstance(value, list):
            for each in value:
                look(each)
        elif isinstance(value, dict):
            if "containers" in value.get("spec", {}):
                templates.append(value)
            else:
                for each in value.values():
                    look(each)

    look(list(found))
    return templates


class UniqueKeys(yaml.CSafeLoader):
    """YAML in which a key that stands twice in one mapping is an error, as it is for helm 4."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        twice = {name for name in names if names.count(name) > 1}
        assert not twice, f"{sorted(twice)} stand twice{node.start_mark}"
        return super().construct_mapping(node, deep)
