"""The table of every value in the chart's README, made of ``values.yaml`` and its comments.

``python -m tests.kubernetes.chart.table`` writes it anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from tests.kubernetes.chart.helm import CHART

README = CHART / "README.md"
BEGIN, END = "<!-- values -->", "<!-- end of values -->"
SECTION = re.compile(r"^# -- (.*?) -+$")
KEY = re.compile(r"^( *)([A-Za-z]+):(.*)$")


@dataclass(frozen=True)
class Row:
    """One value.

    Attributes:
        path: ``workload.kind``.
        comment: what ``values.yaml`` says of it.
        default: as YAML; None of a mapping that has rows of its own.
    """

    path: str
    comment: str
    default: str | None


def rows() -> Iterator[str | Row]:
    """Headings and values, in the order of ``values.yaml``."""
    comment: list[str] = []
    above: list[str] = []
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for line in (CHART / "values.yaml").read_text().splitlines():
        if section := SECTION.match(line):
            yield section[1]
            comment = []
        elif line.strip().startswith("#"):
            comment.append(line.strip().removeprefix("#").strip())
        elif not line.strip():
            comment = []
        elif key := KEY.match(line):
            above = [*above[: len(key[1]) // 2], key[2]]
            path = ".".join(above)
            if path.startswith("sidecar.resources."):
                continue
            value = values
            for name in above:
                value = value[name]
            inner = isinstance(value, dict) and value and path != "sidecar.resources"
            default = None if inner else yaml.safe_dump(value, default_flow_style=True, width=999)
            default = default and default.removesuffix("\n").removesuffix("\n...")
            yield Row(path, " ".join(comment), default)
            comment = []


def table() -> str:
    """The tables as Markdown."""
    lines: list[str] = []
    for row in rows():
        if isinstance(row, str):
            lines += ["", f"### {row}", "", "| value | default | for |", "| --- | --- | --- |"]
        elif row.default is not None or row.comment:
            default = f"`{row.default}`" if row.default is not None else ""
            lines.append(f"| `{row.path}` | {default} | {row.comment} |")
    return "\n".join(lines).strip()


def written() -> str:
    """What stands in the README."""
    return README.read_text().split(BEGIN)[1].split(END)[0].strip()


if __name__ == "__main__":
    before, rest = README.read_text().split(BEGIN)
    README.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}")
