"""Importing stays light, and what is lacking is named."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [ROOT / "trainer_hook", ROOT / "sidecar"]
BARE = {"pydantic", "psutil", "awscrt"}
HEAVY = (
    "torch",
    "deepspeed",
    "boto3",
    "botocore",
    "fsspec",
    "kubernetes",
    "google",
    "azure",
    "numpy",
)
FROM_EXTRAS = (
    *HEAVY,
    "pydantic_settings",
    "rich",
    "structlog",
    "tenacity",
    "typer",
    "watchdog",
)
BLOCKER = """
    import sys

    class NotInstalled:
        names = {names!r}

        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in self.names:
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

    sys.meta_path.insert(0, NotInstalled())
"""


def run(code: str, *, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter in which some distributions are not installed."""
    blocker = textwrap.dedent(BLOCKER).format(names=without) if without else ""
    return subprocess.run(
        [sys.executable, "-c", blocker + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "module",
    [
        "ds_ckpt_hook",
        "ds_ckpt_store",
        "ds_ckpt_store.contract.manifest",
        "ds_ckpt_store.contract.volume",
        "ds_ckpt_store.stores",
        "ds_ckpt_store.catalog",
        "ds_ckpt_store.restore",
        "ds_ckpt_sidecar",
        "ds_ckpt_sidecar.cli",
    ],
)
def test_an_import_brings_nothing_heavy(module: str) -> None:
    ran = run(
        f"""
        import sys
        import {module}
        print(*sorted({{name.split(".")[0] for name in sys.modules}} & set({HEAVY!r})))
        """
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


def test_the_library_and_the_hook_work_without_any_extra() -> None:
    """All but the stores of clouds and the retries around a store, which belong to extras."""
    modules = [
        ".".join(path.relative_to(ROOT / "sidecar").with_suffix("").parts)
        for path in sorted((ROOT / "sidecar" / "ds_ckpt_store").rglob("*.py"))
        if path.name not in ("__init__.py", "retry.py", "fsspec.py")
        and path.parent.name not in ("s3", "gcs", "azure", "fsspec")
    ]
    ran = run(
        f"""
        import importlib
        import ds_ckpt_hook
        for module in {modules!r}:
            importlib.import_module(module)
        """,
        without=FROM_EXTRAS,
    )
    assert ran.returncode == 0, ran.stderr


def test_a_store_without_its_sdk_names_the_extra() -> None:
    ran = run(
        """
        from ds_ckpt_store.errors import MissingExtraError
        from ds_ckpt_store.stores import open_store
        try:
            open_store("s3://bucket/prefix")
        except MissingExtraError as error:
            print(error)
        """,
        without=("boto3", "botocore"),
    )
    assert ran.returncode == 0, ran.stderr
    assert "ds-ckpt-sidecar[s3]" in ran.stdout


@pytest.mark.parametrize("lacking", [("typer",), ("rich",), FROM_EXTRAS])
def test_the_command_without_its_extra_names_it(lacking: tuple[str, ...]) -> None:
    ran = run(
        """
        from ds_ckpt_sidecar.cli import main
        sys.argv = ["ds-ckpt", "ls", "file:///nowhere"]
        sys.exit(main())
        """,
        without=lacking,
    )
    assert ran.returncode in (1, 2)
    assert "ds-ckpt-sidecar[cli]" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("lacking", ["torch", "deepspeed"])
def test_the_demo_without_its_extra_names_it(lacking: str) -> None:
    ran = run(
        f"""
        import importlib.util
        import sys
        from ds_ckpt_sidecar.cli import main
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *more: (
            None if name == {lacking!r} else real(name, *more)
        )
        sys.argv = ["ds-ckpt", "demo"]
        sys.exit(main())
        """
    )
    assert ran.returncode in (1, 2)
    assert "ds-ckpt-sidecar[demo]" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_bare_distribution_depends_on_nothing_heavy() -> None:
    requirements = importlib.metadata.requires("ds-ckpt-sidecar") or []
    bare = {
        re.split(r"[<>=!~ \[;]", requirement, maxsplit=1)[0]
        for requirement in requirements
        if "extra ==" not in requirement
    }
    assert bare == BARE


def test_the_walls_between_the_packages_hold() -> None:
    ran = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout


def test_only_the_clock_knows_the_time() -> None:
    """The example stands for a user's training script, and is none of ours."""
    offenders = []
    for source in SOURCES:
        for path in source.rglob("*.py"):
            if path.match("contract/clock.py") or path.match("ds_ckpt_hook/example.py"):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                imported = (
                    [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
                if "time" in imported:
                    offenders.append(str(path.relative_to(ROOT)))
    assert offenders == []
