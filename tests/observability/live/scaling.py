"""The chart's rules at the pace of a test: shorter, and otherwise the same.

A run of minutes cannot wait as long as a person at night should be let sleep. So of each rule

* ``for`` and ``keep_firing_for`` become shorter by :data:`FASTER`,
* so do the windows of ``rate`` and its like, offsets, and the times that stand in its expression as
  plain numbers: floors that a wait must exceed whatever the save interval is, and how far ahead a
  prediction looks. A plain number of :data:`LEAST_TIME` or more is such a time.

* Groups are judged as often as Prometheus itself is told to.

Factors (numbers beside ``*`` or ``/``), small numbers, names, labels and annotations stay.
"""

from __future__ import annotations

import re

import yaml

FASTER = 60
LEAST_WINDOW = 5
"""Seconds; a window must hold several scrapes, of which there is one a second."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LEAST_TIME = 60
_STRING = r'"[^"]*"|\'[^\']*\''
_NUMBER = re.compile(rf"({_STRING})|(?<![\w.$\[:])(\d+)(?![\w.])")
_WINDOW = re.compile(r"(?:(?<=[\[:])|(?<=\boffset ))(\d+)([smhd])(?![\w.])")


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
    shrunk = _WINDOW.sub(lambda match: shorter(match.group(), LEAST_WINDOW), expression)

    def lower(match: re.Match[str]) -> str:
        beside = shrunk[: match.start()].rstrip()[-1:], shrunk[match.end() :].lstrip()[:1]
        number = match.group(2)
        if number is None or int(number) < LEAST_TIME or {"*", "/"} & set(beside):
            return match.group()
        return f"{int(number) / FASTER:g}"

    return _NUMBER.sub(lower, shrunk)


def shorter(duration: str, least: int) -> str:
    """A duration of one unit, in whole seconds."""
    return f"{max(least, round(seconds(duration) / FASTER))}s"


def seconds(duration: str) -> int:
    """Seconds of a duration like ``5m``."""
    return int(duration[:-1]) * _UNITS[duration[-1]]
