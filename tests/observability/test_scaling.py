"""The rules of the live run are the chart's, faster and otherwise the same."""

from __future__ import annotations

import pytest
import yaml

from tests.observability.expressions import RULES
from tests.observability.live.scaling import at_pace, faster


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("lag_seconds > 600", "lag_seconds > 10"),
        ("lag > clamp_min(3 * interval, 900)", "lag > clamp_min(3 * interval, 15)"),
        ("rate(errors_total[5m]) > 0.2", "rate(errors_total[5s]) > 0.2"),
        ("increase(errors_total[2h:1m]) > 3", "increase(errors_total[120s:5s]) > 3"),
        ("lag unless lag offset 6h", "lag unless lag offset 360s"),
        ("predict_linear(free[30m], 3600) < 0", "predict_linear(free[30s], 60) < 0"),
        ("free < 100 * size / 1000", "free < 100 * size / 1000"),
        ('up{job="a 600", le="120"} == 0', 'up{job="a 600", le="120"} == 0'),
        ("quantile_600 > 0.95", "quantile_600 > 0.95"),
    ],
)
def test_times_become_shorter_and_nothing_else(expression: str, expected: str) -> None:
    assert faster(expression) == expected


def test_rules_stay_the_same_but_for_their_times() -> None:
    changed = {"for", "keep_firing_for", "expr"}

    def rest(text: str) -> list[dict[str, object]]:
        return [
            {name: value for name, value in rule.items() if name not in changed}
            for group in yaml.safe_load(text)["groups"]
            for rule in group["rules"]
        ]

    text = RULES.read_text()
    assert rest(at_pace(text)) == rest(text)
    assert at_pace(text) != text
