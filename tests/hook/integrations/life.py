"""The life of a checkpoint under a framework: trained, lost, restored, and gone on from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hook.processes import PYTHONPATH, ROOT, run_ranks

KILLED = 137


@dataclass(frozen=True)
class Life:
    """One of the examples, and the store that its checkpoints go to."""

    example: str
    destination: str
    environ: Mapping[str, str] = field(default_factory=dict)
    world: int = 2

    def train(self, *arguments: object, expect: int = 0, knows_store: bool = True) -> list[Any]:
        """Run the example on all ranks; the JSON lines that rank 0 printed."""
        store = {"DS_CKPT_DESTINATION": self.destination} if knows_store else {}
        outputs = run_ranks(
            lambda _rank: [str(ROOT / "docs/examples" / self.example), *map(str, arguments)],
            world=self.world,
            environ=lambda _rank: {**self.environ, **store, "DS_CKPT_TIMEOUT": "30"},
            expect=expect,
        )
        lines = [line for line in outputs[0].splitlines() if line.startswith('{"')]
        assert lines, outputs[0][-4000:]
        return [json.loads(line) for line in lines]

    def command(self, *arguments: object) -> str:
        """Run ``ds-ckpt``; what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "ds_ckpt_sidecar", *map(str, arguments)],
            env={**os.environ, **self.environ, "PYTHONPATH": PYTHONPATH},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def upload(self, volume: Path) -> None:
        """What a sidecar does with all that was handed over."""
        self.command("agent", "--once", "--volume", volume, "--destination", self.destination)

    def committed(self) -> dict[str, Any]:
        """What the store tells of each committed checkpoint, by tag."""
        listed = json.loads(self.command("ls", self.destination, "--json"))
        return {each["tag"]: each for each in listed["checkpoints"]}


def losses(lines: list[Any]) -> dict[int, str]:
    """Loss by step, to the last bit."""
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def resumed_from(lines: list[Any]) -> str | None:
    """The checkpoint that the example said it goes on from."""
    (found,) = [line["resumes_from"] for line in lines if "resumes_from" in line]
    return found
