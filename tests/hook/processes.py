"""Real ranks: one process each, as a launcher starts them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OLD = os.environ.get("OLD_DEEPSPEED", "")  # of `make test-old`: comes before what is installed
_OURS = [str(ROOT / each) for each in ("", "sidecar", "trainer_hook")]
PYTHONPATH = os.pathsep.join([OLD, *_OURS] if OLD else _OURS)


def run_ranks(
    arguments: Callable[[int], Sequence[str]],
    *,
    world: int = 2,
    environ: Callable[[int], Mapping[str, str]] = lambda _rank: {},
    expect: int = 0,
    timeout: float = 150,
) -> list[str]:
    """Run ``python <arguments>`` on every rank; returns what each printed, stderr included.

    Every rank must end with exit code ``expect``; all are killed when one takes too long.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = []
    for rank in range(world):
        env = {
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": str(world),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            **environ(rank),
        }
        started.append(
            subprocess.Popen(
                [sys.executable, *arguments(rank)],
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == expect, output[-4000:]
    return outputs


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The JSON objects that a rank wrote, one a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]
