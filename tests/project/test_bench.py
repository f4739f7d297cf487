"""The benchmarks run and write the rows that they promise. Only with our own client."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASE = "16x256MiB"
TINY = ("--size-scale", "0.001")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"bench/{script}.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (["--store", "file"], [("file", "file", "command")]),
        (
            ["--store", "sink", "--store", "seaweed", "--scheme", "https"],
            [("sink", "https", "transfer"), ("seaweed", "https", "command")],
        ),
    ],
    ids=["folder", "servers"],
)
@pytest.mark.parametrize("script", ["upload", "download"])
def test_a_benchmark_writes_a_row_for_each_run(
    script: str, chosen: list[str], expected: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    rows_file = tmp_path / "rows.json"
    arguments = [*chosen, "--case", CASE, "--client", "ds-ckpt", "--repeats", "1", *TINY]
    result = run(script, *arguments, "--json", str(rows_file))
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(rows_file.read_text())
    for row in rows:
        assert row.pop("wall_s") > 0
        assert row.pop("cpu_s") > 0
        assert 10 < row.pop("peak_mib") < 1000
    same = {"case": CASE, "client": "ds-ckpt", "repeat": 0}
    assert rows == [
        {"store": store, "scheme": scheme, "scope": scope, **same}
        for store, scheme, scope in expected
    ]


def test_a_client_that_is_missing_is_named_and_no_success(tmp_path: Path) -> None:
    chosen = ["--case", CASE, "--store", "sink", "--scheme", "http", "--client", "aws-v2"]
    arguments = [*chosen, "--aws2", str(tmp_path / "nothing"), *TINY]
    result = run("upload", *arguments)
    assert result.returncode == 1
    assert "MISSING aws-v2" in result.stdout
    assert run("upload", *arguments, "--allow-missing").returncode == 0
