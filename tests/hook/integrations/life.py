"""The life of a checkpoint under a framework: trained, lost, restored, and gone on from.

The examples run as they are, one process a rank. Each is forked from a server that has imported
the frameworks once, which takes longer than all that these ranks then do.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ds_ckpt_hook
from tests.hook.processes import PYTHONPATH, ROOT

STEPS = 9
SAVED = (3, 6)  # before it is killed in step 9
_KILLED = 137
_SECONDS = 120
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["deepspeed", "lightning.pytorch", "transformers.trainer", "transformers.models.llama"]
)


@dataclass(frozen=True)
class Life:
    """One of the examples, and the store that its checkpoints go to.

    ``option`` is the example's for its save_dir, and ``arguments`` are further ones. Two ranks
    train with ZeRO-2, one alone without DeepSpeed.
    """

    example: str
    option: str
    arguments: Sequence[object]
    folder: Path
    destination: str
    environ: Mapping[str, str] = field(default_factory=dict)
    world: int = 2

    @property
    def volume(self) -> Path:
        """Where the first pod saves."""
        return self.folder / "volume"

    def loses_its_pod(self) -> dict[int, str]:
        """Train, be killed, and have all uploaded that was handed over; returns the losses."""
        lines = self.train(self.volume, "--stop-after", STEPS, expect=_KILLED, knows_store=False)
        assert resumed_from(lines) is None
        self.command("agent", "--once", "--volume", self.volume, "--destination", self.destination)
        return losses(lines)

    def goes_on(self, volume: Path, known: Mapping[int, str]) -> Path:
        """Resume on an empty volume, with the same losses; returns the checkpoint."""
        lines = self.train(volume)
        checkpoint = resumed_from(lines)
        assert checkpoint is not None
        found = losses(lines)
        assert list(found) == [7, 8, 9]
        assert (found[7], found[8]) == (
            known[7],
            known[8],
        )  # the optimizer's state is in the latter
        return Path(checkpoint)

    def train(
        self, volume: Path, *arguments: object, expect: int = 0, knows_store: bool = True
    ) -> list[Any]:
        """Run the example on all ranks; the JSON lines that rank 0 printed."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        environ = {
            **self.environ,
            **({"DS_CKPT_DESTINATION": self.destination} if knows_store else {}),
            "DS_CKPT_TIMEOUT": "30",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": str(self.world),
        }
        command = [
            *(ROOT / "docs/examples" / self.example, self.option, volume),
            *("--steps", STEPS, "--save-steps", SAVED[0], "--finalize-timeout", 0.1),
            *("--zero", 2 if self.world > 1 else 0, *self.arguments, *arguments),
        ]
        outputs = [self.folder / f"output{rank}" for rank in range(self.world)]
        ranks = [
            _context.Process(
                target=_run,
                args=(
                    list(map(str, command)),
                    {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    str(output),
                ),
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(_SECONDS)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        for process, output in zip(ranks, outputs, strict=True):
            assert process.exitcode == expect, output.read_text()[-4000:]
        lines = [line for line in outputs[0].read_text().splitlines() if line.startswith('{"')]
        return [json.loads(line) for line in lines]

    def command(self, *arguments: object) -> str:
        """Run ``ds-ckpt``; what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "ds_ckpt_sidecar", *map(str, arguments)],
            env={**os.environ, **self.environ, "PYTHONPATH": PYTHONPATH},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def record(self, tag: str) -> dict[str, Any]:
        """What the store tells of a committed checkpoint."""
        told: dict[str, Any] = json.loads(self.command("show", self.destination, tag, "--json"))
        assert told["state"] == "committed"
        return told


def _run(arguments: list[str], environ: Mapping[str, str], output: str) -> None:
    import torch

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ.update(environ)
    torch.set_num_threads(1)
    leave = os._exit

    def leave_once_handed_over(status: int) -> None:
        for hook in ds_ckpt_hook._process.values():  # else chance decides which save is the newest
            hook.worker.drain(_SECONDS)
        leave(status)

    os._exit = leave_once_handed_over  # type: ignore[assignment]
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def losses(lines: list[Any]) -> dict[int, str]:
    """Loss by step, to the last bit."""
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def resumed_from(lines: list[Any]) -> str | None:
    """The checkpoint that the example said it goes on from."""
    (found,) = [line["resumes_from"] for line in lines if "resumes_from" in line]
    return found
