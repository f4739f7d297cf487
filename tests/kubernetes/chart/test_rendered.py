"""What the matrix renders to: the same by both helms, and what Kubernetes takes."""

from __future__ import annotations

from collections.abc import Mapping

from tests.kubernetes.chart.conftest import Judge
from tests.kubernetes.chart.helm import Document, Helm, documents, pods
from tests.kubernetes.chart.matrix import CASES
from tests.kubernetes.chart.rules import faults

NATIVE = [f"1.{minor}" for minor in range(29, 38)]
BEFORE = [f"1.{minor}" for minor in range(25, 29)]
PLAIN = [name for name, values in CASES.items() if "plain container" in name]


def test_both_helms_render_the_same_bytes(texts: Mapping[str, Mapping[str, str]]) -> None:
    different = [name for name in CASES if texts["helm3"][name] != texts["helm4"][name]]
    assert not different


def test_every_version_from_1_29_on_gets_the_same(
    helms: Mapping[str, Helm], texts: Mapping[str, Mapping[str, str]]
) -> None:
    vendors = ("1.29", "v1.29.3-eks-1234567", "v1.30.1-gke.1329000", "v1.31.0+k3s1")
    for version in vendors:
        assert (
            helms["helm3"].render(CASES["Job, everything"], version=version)
            == (texts["helm3"]["Job, everything"])
        )
    for name in (name for name in CASES if name.endswith(("least", "everything"))):
        if name not in PLAIN:
            assert helms["helm4"].render(CASES[name], version="1.29") == texts["helm4"][name], name


def test_the_strict_schemas_from_1_29_to_1_37_take_all(
    rendered: Mapping[str, list[Document]], judge: Judge
) -> None:
    assert judge(rendered, NATIVE) == []


def test_the_strict_schemas_before_1_29_take_the_plain_container(
    helms: Mapping[str, Helm], judge: Judge
) -> None:
    found = {name: documents(helms["helm4"].render(CASES[name], version="1.25")) for name in PLAIN}
    assert found
    assert judge(found, BEFORE) == []
    assert not [each for name in found for each in faults(found[name])]


def test_our_own_rules_find_nothing(rendered: Mapping[str, list[Document]]) -> None:
    assert [f"{name}: {each}" for name, found in rendered.items() for each in faults(found)] == []


def test_every_case_but_those_without_a_workload_has_its_pods(
    rendered: Mapping[str, list[Document]],
) -> None:
    for name, found in rendered.items():
        assert bool(pods(found)) == (not name.startswith("no workload")), name
