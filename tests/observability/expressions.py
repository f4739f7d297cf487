"""Every expression that dashboard and rules ask Prometheus for, as it can be asked in a test."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.observability.draw import panels

FILES = Path(__file__).resolve().parents[2] / "helm/ds-ckpt-sidecar/files"
RULES = FILES / "alerts.yaml"
DASHBOARD = FILES / "dashboard.json"


@dataclass(frozen=True)
class Expression:
    """One.

    Attributes:
        where: the alert, or panel and legend, that it belongs to.
        text: PromQL, with Grafana's variables.
    """

    where: str
    text: str

    def __str__(self) -> str:
        return self.where

    @property
    def selectors(self) -> set[str]:
        """The names of our metrics in it."""
        return set(re.findall(r"\bds_ckpt_\w+", self.text))


def without_stand_in(text: str) -> str:
    """Without what gives a number where there is no series."""
    return re.sub(r"\s+or\s+(?:on\s*\([^)]*\)\s*)?vector\s*\([^)]*\)", "", text)


def of_rules(text: str | None = None) -> list[Expression]:
    """Those of the rules, or of the chart's file of them."""
    groups = yaml.safe_load(text or RULES.read_text())["groups"]
    return [
        Expression(rule.get("alert") or rule["record"], str(rule["expr"]))
        for group in groups
        for rule in group["rules"]
    ]


def of_dashboard() -> list[Expression]:
    """Those of panels and annotations."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [
        Expression(f"annotation {each['name']}", each["expr"])
        for each in dashboard["annotations"]["list"]
        if "expr" in each
    ]
    for panel in panels(dashboard):
        for target in panel.get("targets", []):
            legend = target.get("legendFormat") or target["refId"]
            found.append(Expression(f"{panel['title']}: {legend}", target["expr"]))
    return found


def of_variables() -> list[Expression]:
    """What the values of the dashboard's variables are looked for in."""
    found = []
    for each in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if each["type"] == "query":
            query = each["query"]["query"]
            match = re.fullmatch(r"label_values\((.*), \w+\)", query)
            assert match, f"a variable's query is not what is known here: {query}"
            found.append(Expression(f"variable {each['name']}", match.group(1)))
    return found
