"""Every value is described, rendered by a case of the matrix, and does something."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tests.kubernetes.chart import table
from tests.kubernetes.chart.helm import CHART
from tests.kubernetes.chart.matrix import CASES
from tests.kubernetes.chart.table import Row

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
# Only what the schema takes beside values.yaml.
FOR_PARENTS = {"enabled", "global"}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of what is no mapping, or an empty one."""
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from leaves(each, f"{path}.{name}".lstrip("."))
    else:
        yield path, value


def test_the_readme_has_every_value_as_values_yaml_has_it() -> None:
    again = "python -m tests.kubernetes.chart.table"
    assert table.written() == table.table(), f"write it anew: {again}"


def test_every_value_has_a_comment() -> None:
    rows = [row for row in table.rows() if isinstance(row, Row)]
    assert not [row.path for row in rows if row.default is not None and not row.comment]
    in_table = {row.path for row in rows if row.default is not None}
    assert in_table == {
        re.sub(r"^(sidecar\.resources)\..*", r"\1", path) for path, _ in leaves(DEFAULTS)
    }


def test_a_case_of_the_matrix_sets_every_value_to_something_else() -> None:
    unset = dict(leaves(DEFAULTS))
    for values in CASES.values():
        for path, value in leaves(values):
            for name in [name for name in unset if path == name or path.startswith(f"{name}.")]:
                if value != unset[name]:
                    del unset[name]
    assert not unset


def test_the_schema_knows_the_values_and_nothing_else() -> None:
    def compare(values: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Iterator[str]:
        if "properties" not in schema:
            return
        known = set(schema["properties"])
        if schema["additionalProperties"] is not False:
            yield f"{path} takes anything"
        for name in known ^ set(values):
            if path or name not in FOR_PARENTS:
                yield f"{path}.{name} stands in one of values.yaml and the schema"
        for name in known & set(values):
            if isinstance(values[name], dict):
                yield from compare(values[name], schema["properties"][name], f"{path}.{name}")

    assert list(compare(DEFAULTS, SCHEMA, "")) == []


def test_the_schema_requires_every_value_that_may_not_be_null() -> None:
    """helm takes a value out that is null, and a template would read nothing."""

    def nullable(schema: Mapping[str, Any]) -> bool:
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
        return None in schema.get("enum", []) or "null" in schema.get("type", "")

    def compare(schema: Mapping[str, Any], path: str) -> Iterator[str]:
        needed = {name for name, each in schema["properties"].items() if not nullable(each)}
        if not path:
            needed -= FOR_PARENTS
        for name in needed ^ set(schema.get("required", [])):
            yield f"{path}.{name}"
        for name, each in schema["properties"].items():
            if "properties" in each:
                yield from compare(each, f"{path}.{name}")

    assert list(compare(SCHEMA, "")) == []


def test_every_value_that_a_template_reads_is_there() -> None:
    """A misspelt value in a template is empty, and nothing else says so."""
    paths = {path for path, _ in leaves(DEFAULTS)}
    paths |= {part for path in paths for part in _above(path)}
    for file in (CHART / "templates").iterdir():
        for found in re.findall(r"(?:\.Values|\$values)\.([A-Za-z.]+[A-Za-z])", file.read_text()):
            assert found in paths, f"{file.name} reads {found}"


def _above(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
