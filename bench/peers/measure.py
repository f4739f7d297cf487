"""One run of one command: wall, CPU and peak memory, each of that command alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.05
SAMPLES_A_TREE = 10  # children are looked for this rarely: it costs CPU that the client should have
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
    mark that the kernel keeps for each process since its exec (VmHWM), read 20 times a second; the
    largest process of the tree counts. ``ru_maxrss`` would not do: a child inherits it from this
    process.

    Raises:
        FailedError: it ended with an error, or not within ten minutes.
    """
    os.sync()  # what an earlier run left unwritten is not this one's
    with log.open("wb") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ
        )
        watcher = _Watcher(process)
        watcher.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
            wall = time.perf_counter() - started
        except BaseException:
            process.kill()
            raise
        finally:
            watcher.end()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        words = log.read_text(errors="replace")[-2000:]
        raise FailedError(f"{command[0]} ended with {process.returncode}:\n{words}")
    return Usage(wall, used.ru_utime + used.ru_stime, watcher.peak_kib / 1024)


class _Watcher(threading.Thread):
    """Reads how much memory a process and its children hold at most."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._ended = threading.Event()
        self.peak_kib = 0

    def run(self) -> None:
        pids: list[int] = []
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for sample in itertools.count():
            if sample % SAMPLES_A_TREE == 0:
                pids = list(tree(self._process.pid))
            self.peak_kib = max([self.peak_kib, *map(high_water, pids)])
            if time.monotonic() > deadline:
                self._process.kill()
            if self._ended.wait(SAMPLE_SECONDS):
                return

    def end(self) -> None:
        self._ended.set()
        self.join()


def high_water(pid: int) -> int:
    """KiB that a process has held at most; 0 if it is gone."""
    with suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0


def tree(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children = file.read().split()
            for child in children:
                yield from tree(int(child))
