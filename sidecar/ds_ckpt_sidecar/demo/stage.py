"""The programs of the demo, with the arguments and the environment that each needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ds_ckpt_sidecar.demo.processes import Group, Process, clean_environment
from ds_ckpt_sidecar.demo.s3_server import HOST, free_ports
from ds_ckpt_store.contract.clock import Clock, system_random

RANKS = 2
RUN_ID = "demo"
SAVE_EVERY = 10
HIDDEN = 1024
"""Width of the model: large enough that a checkpoint has some megabytes."""
PATIENCE_SECONDS = 120.0
"""How long a program may take to import torch, train its few steps and end, on a slow machine."""


class Stage:
    """Where the demo plays: starts its programs with the arguments that they need.

    Args:
        folder: for volumes, outputs and logs.
        url: the destination.
        environ: what the environment must say to reach it.
        zero_stage: DeepSpeed's ZeRO stage.
        hidden: width of the model.
        clock: for waiting.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        environ: Mapping[str, str],
        zero_stage: int,
        hidden: int,
        clock: Clock,
    ) -> None:
        self.folder = folder
        self.url = url
        self.clock = clock
        self._environ = environ
        self.zero_stage = zero_stage
        self._hidden = hidden

    def volume(self, name: str) -> Path:
        """A new, empty volume."""
        path = self.folder / name
        path.mkdir()
        return path

    def trainer(
        self,
        group: Group,
        name: str,
        volume: Path,
        *,
        steps: int,
        resume: bool = False,
        hook: bool = True,
    ) -> tuple[list[Process], Path]:
        """Start the ranks of one training run; ``(processes, output of rank 0)``."""
        output = self.folder / f"{name}.jsonl"
        arguments = ["-m", "ds_ckpt_hook.example", "--save-dir", str(volume), "--out", str(output)]
        arguments += ["--steps", str(steps), "--save-every", str(SAVE_EVERY)]
        arguments += ["--zero-stage", str(self.zero_stage), "--hidden", str(self._hidden)]
        arguments += ["--finalize-timeout", str(PATIENCE_SECONDS / 2)]
        arguments += ["--resume"] if resume else []
        arguments += [] if hook else ["--no-hook"]
        common = {
            "DS_ACCELERATOR": "cpu",
            "DS_CKPT_RUN_ID": RUN_ID,
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(free_ports(1, system_random())[0]),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(RANKS),
        }
        ranks = [
            group.add(
                Process(
                    f"{name}-rank{rank}",
                    arguments,
                    clean_environment({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
                    self.folder,
                )
            )
            for rank in range(RANKS)
        ]
        return ranks, output

    def agent(self, group: Group, name: str, volume: Path) -> Process:
        """Start the sidecar of one volume."""
        arguments = ["agent", "--volume", str(volume), "--destination", self.url]
        return group.add(self._ds_ckpt(name, [*arguments, "--run-id", RUN_ID]))

    def restore(self, volume: Path, *, tag: str | None = None) -> float:
        """Run ``ds-ckpt restore`` into a volume; seconds that it took from start to end."""
        start = self.clock.monotonic()
        arguments = ["restore", "--from", self.url, "--to", str(volume)]
        arguments += [] if tag is None else ["--tag", tag]
        with Group(self.clock) as group:
            group.wait(
                [group.add(self._ds_ckpt(f"restore-{volume.name}", arguments))], PATIENCE_SECONDS
            )
        return self.clock.monotonic() - start

    def _ds_ckpt(self, name: str, arguments: list[str]) -> Process:
        environ = clean_environment(self._environ)
        return Process(name, ["-m", "ds_ckpt_sidecar", *arguments], environ, self.folder)
