"""One thing that was looked at, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: ``ok``; ``note``: good to know, or could not be found out; ``warning``: something
            costs money, or will not work later; ``error``: saves are not stored, or get lost.
        what: the path, bucket, prefix or setting.
        sentence: what was found there.
        remedy: what to do, exactly; empty where nothing is to be done.
    """

    severity: Severity
    what: str
    sentence: str
    remedy: str = ""

    def __str__(self) -> str:
        """In one line."""
        return f"{self.what}: {self.sentence}" + (f"; {self.remedy}" if self.remedy else "")


def that_matter(findings: Iterable[Finding]) -> list[Finding]:
    """The warnings and errors alone, errors first."""
    found = list(findings)
    return [each for level in ("error", "warning") for each in found if each.severity == level]
