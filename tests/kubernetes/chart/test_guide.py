"""What the README and the guide tell a user to type is what helm takes."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.kubernetes.chart.helm import Helm, documents
from tests.kubernetes.tools.machine import ROOT

PAGES = ("README.md", "docs/kubernetes.md")


def commands(page: str) -> list[list[str]]:
    """Each ``helm install`` of a page."""
    text = (ROOT / page).read_text()
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("helm install")]


def options(page: str) -> list[str]:
    """Each ``--set`` that the page's text names beside its commands."""
    text = (ROOT / page).read_text()
    return re.findall(r"`--set ([a-zA-Z.]+=[^`\s]+)`", text)


@pytest.mark.parametrize("page", PAGES)
def test_each_command_of_a_page_renders_a_job_with_restore_and_sidecar(
    helm: Helm, page: str
) -> None:
    assert commands(page)
    for command in commands(page):
        name, *arguments = command[2:]
        (job,) = [
            each for each in documents(helm("template", name, *arguments)) if each["kind"] == "Job"
        ]
        pod = job["spec"]["template"]["spec"]
        names = [each["name"] for each in pod["initContainers"]]
        assert names == ["ds-ckpt-restore", "ds-ckpt-sidecar"]
        (trainer,) = pod["containers"]
        assert trainer["command"] == ["torchrun", "train.py"]


def test_each_further_option_of_the_guide_is_taken_with_its_command(helm: Helm) -> None:
    (command,) = commands("docs/kubernetes.md")
    further = options("docs/kubernetes.md")
    assert len(further) >= 3
    for option in further:
        assert helm("template", *command[2:], "--set", option)
    spot = "sidecar.drainSeconds=5,pod.terminationGracePeriodSeconds=15"
    assert helm("template", *command[2:], "--set", spot)
    assert helm("template", *command[2:], "--set", "sidecar.native=false")
