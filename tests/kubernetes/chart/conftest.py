"""Both helms, the matrix of values rendered by both, and the schemas of Kubernetes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.kubernetes.chart.helm import HELMS, Document, Helm, documents
from tests.kubernetes.chart.matrix import CASES
from tests.kubernetes.tools.machine import TOOLS

Judge = Callable[[Mapping[str, Sequence[Document]], Sequence[str]], list[str]]
JUDGE = Path(__file__).with_name("judge.py")


@pytest.fixture(scope="session")
def helms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Helm]:
    """helm3 and helm4."""
    return {name: Helm(name, tmp_path_factory.mktemp(name)) for name in HELMS}


@pytest.fixture(params=HELMS)
def helm(request: pytest.FixtureRequest, helms: Mapping[str, Helm]) -> Helm:
    """Each of them."""
    return helms[request.param]


@pytest.fixture(scope="session")
def texts(helms: Mapping[str, Helm]) -> dict[str, dict[str, str]]:
    """Helm to case of the matrix to what it renders."""
    return {
        name: {case: helm.render(values) for case, values in CASES.items()}
        for name, helm in helms.items()
    }


@pytest.fixture(scope="session")
def rendered(texts: Mapping[str, Mapping[str, str]]) -> dict[str, list[Document]]:
    """Case of the matrix to its documents."""
    return {case: documents(text) for case, text in texts["helm4"].items()}


@pytest.fixture(scope="session")
def judge() -> Judge:
    """What is wrong with documents, by the strict schemas of these versions of Kubernetes."""

    def run(cases: Mapping[str, Sequence[Document]], versions: Sequence[str]) -> list[str]:
        asked = {
            name: {"documents": list(found), "versions": list(versions)}
            for name, found in cases.items()
        }
        ran = subprocess.run(
            [TOOLS / "venv/bin/python", JUDGE],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-4000:]
        wrong: list[str] = json.loads(ran.stdout)
        return wrong

    return run
