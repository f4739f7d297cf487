"""The chart's rules at the pace of a test: shorter, and otherwise the same.

A run of minutes cannot wait as long as a person at night should be let sleep. So of each rule

* ``for`` and ``keep_firing_for`` become shorter by :data:`FASTER`,
* and so do the floors in its expression: the numbers of seconds, written in full, which a wait must
  exceed whatever the save interval is, and the windows of ``rate`` and its like.

Factors, and all numbers that are no times, stay; so do names, labels and annotations.
"""

from __future__ import annotations

import re

import yaml

FASTER = 60
LEAST_WINDOW = 5
"""Seconds; a window must hold several scrapes, of which there is one a second."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WINDOW = re.compile(r"(?<=\[)(\d+)([smhd])(?=[]:])")


def at_pace(text: str) -> str:
    """The file of rules for a test."""
    rules = yaml.safe_load(text)
    for group in rules["groups"]:
        group.pop("interval", None)
        for rule in group["rules"]:
            for name in ("for", "keep_firing_for"):
                if name in rule:
                    rule[name] = shorter(rule[name], 1)
            rule["expr"] = faster(str(rule["expr"]))
    return yaml.safe_dump(rules, sort_keys=False)


def faster(expression: str) -> str:
    """An expression with shorter windows and lower floors."""
    return _WINDOW.sub(lambda match: shorter(match.group(), LEAST_WINDOW), expression)


def shorter(duration: str, least: int) -> str:
    """A duration of one unit, in whole seconds."""
    return f"{max(least, round(seconds(duration) / FASTER))}s"


def seconds(duration: str) -> int:
    """Seconds of a duration like ``5m``."""
    return int(duration[:-1]) * _UNITS[duration[-1]]
