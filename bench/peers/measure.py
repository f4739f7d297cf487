"""One run of one command: wall, CPU and peak memory, each of that command alone."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
SAMPLE_SECONDS = 0.02
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Usage:
    """Seconds from start to exit, seconds of CPU in it, and MiB of its largest process."""

    wall_s: float
    cpu_s: float
    peak_mib: float


class FailedError(Exception):
    """The command failed; the message ends with its last words."""


def run(command: list[str], environ: dict[str, str], log: Path) -> Usage:
    """Run a command to its end.

    CPU is user and system time of the process and of all its children. Memory is the high-water
    mark that the kernel keeps for each process since its exec (VmHWM), read every 20 ms; the
    largest process of the tree counts. ``ru_maxrss`` would not do: a child inherits it from this
    process.

    Raises:
        FailedError: it ended with an error, or not within ten minutes.
    """
    os.sync()  # what an earlier run left unwritten is not this one's
    ended = threading.Event()
    peak = 0
    with log.open("wb") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ
        )

        def watch() -> None:
            nonlocal peak
            deadline = started + TIMEOUT_SECONDS
            while not ended.is_set():
                peak = max([peak, *map(high_water, tree(process.pid))])
                ended.wait(SAMPLE_SECONDS)
                if time.perf_counter() > deadline:
                    process.kill()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
    ended.set()
    watcher.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        words = log.read_text(errors="replace")[-2000:]
        raise FailedError(f"{command[0]} ended with {process.returncode}:\n{words}")
    return Usage(wall, used.ru_utime + used.ru_stime, peak / 1024)


def high_water(pid: int) -> int:
    """KiB that a process has held at most; 0 if it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0


def tree(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from tree(int(child))
