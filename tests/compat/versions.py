"""Neighbouring versions: this one, and the one before, whose sources lie in ``versions/``.

A version runs in processes of its own, with its packages first on the path: out of the zip file
as out of an installation, by the libraries that are installed here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = "ours"
OTHERS = sorted(path.stem for path in (ROOT / "tests/compat/versions").glob("*.zip"))
PAIRS = [pair for other in OTHERS for pair in ((other, OURS), (OURS, other))]


def start(version: str, step: str, *arguments: object) -> subprocess.Popen[str]:
    """Begin a step of ``story.py``."""
    packages = ROOT if version == OURS else ROOT / f"tests/compat/versions/{version}.zip"
    paths = [f"{packages}/sidecar", f"{packages}/trainer_hook", str(ROOT)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.compat.story", step, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> Any:
    """What came of it."""
    said, complained = process.communicate(timeout=120)
    assert process.returncode == 0, complained
    return json.loads(said.splitlines()[-1])


def run(version: str, step: str, *arguments: object) -> Any:
    """A step of ``story.py``, done."""
    return end(start(version, step, *arguments))
