"""What the chart's README shows is what the chart takes."""

from __future__ import annotations

import re

import yaml

from tests.kubernetes.chart.conftest import Judge
from tests.kubernetes.chart.helm import CHART, Helm, documents, only
from tests.kubernetes.chart.matrix import LEAST, merged
from tests.kubernetes.chart.rules import faults

PROSE = (CHART / "README.md").read_text().split("## Every value")[0]


def test_the_values_of_the_readme_make_a_job(helm: Helm, judge: Judge) -> None:
    (shown,) = re.findall(r"```yaml\n# run-7\.yaml\n(.*?)```", PROSE, re.DOTALL)
    found = documents(helm.render(yaml.safe_load(shown), release="run-7"))
    assert faults(found) == []
    assert judge({"run-7": found}, ["1.29", "1.37"]) == []
    assert only("Job", found)


def test_the_rules_of_the_readme_are_rules_of_a_network_policy(helm: Helm, judge: Judge) -> None:
    rules = [yaml.safe_load(each) for each in re.findall(r"\| `(\{.*\})` \|", PROSE)]
    assert len(rules) == 4
    policy = {"enabled": True, "egress": {"restrict": True, "rules": rules}}
    found = documents(helm.render(merged(LEAST, {"networkPolicy": policy})))
    assert judge({"rules": found}, ["1.29", "1.37"]) == []
    assert only("NetworkPolicy", found)["spec"]["egress"][-4:] == rules


def test_every_setting_that_the_readme_names_is_a_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in set(re.findall(r"`([a-z]+[A-Za-z]*(?:\.[A-Za-z]+)+)(?:=[^`]*)?`", PROSE)):
        if name.split(".")[0] in values:
            value = values
            for part in name.split("."):
                assert isinstance(value, dict), name
                assert part in value or value == {}, name
                value = value.get(part, {})
