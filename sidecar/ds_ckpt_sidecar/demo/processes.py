"""The processes of the demo: started, watched, and never left behind.

Each runs in a session of its own, so that killing it takes its children too, and writes what it
says to a log. What the user's environment says of stores and of this project is kept from them:
the demo must do the same on every machine, and must not touch a real bucket.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.errors import DemoError

POLL_SECONDS = 0.02
_FOREIGN = ("AWS_", "DS_CKPT_", "MASTER_", "TORCHELASTIC_")


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without settings of stores, launchers and this project."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    return {**kept, **extra}


class Process:
    """One program of this project, run by this interpreter.

    Args:
        name: for messages and for the name of the log.
        arguments: what follows ``python``.
        environ: the whole environment.
        logs: folder for ``<name>.log``.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], environ: Mapping[str, str], logs: Path
    ) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    def check(self) -> None:
        """Raise if it has failed.

        Raises:
            DemoError: with the end of its log.
        """
        if self.exit_code():
            raise DemoError(f"{self.name} ended with exit code {self.exit_code()}:\n{self.tail()}")

    def kill(self) -> None:
        """SIGKILL to it and its children; returns when it is gone. No error if it was already."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """SIGTERM to it alone: the polite way to end an agent."""
        self._process.terminate()

    def tail(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:]) or "(it said nothing)"


class Group:
    """Processes that stand and fall together; as a context, it leaves none behind."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._processes: list[Process] = []

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def add(self, process: Process) -> Process:
        """Take charge of a process."""
        self._processes.append(process)
        return process

    def kill(self) -> None:
        """SIGKILL to all of them."""
        for process in self._processes:
            process.kill()
        self._processes.clear()

    def wait(self, processes: Sequence[Process], seconds: float) -> None:
        """Return when these have ended well.

        Raises:
            DemoError: one of the group failed, or the time is up.
        """
        self.wait_until(
            lambda: all(process.exit_code() is not None for process in processes),
            seconds,
            "the end of " + ", ".join(process.name for process in processes),
        )

    def wait_until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Return when ``done`` says so.

        Raises:
            DemoError: one of the group failed, or the time is up.
        """
        deadline = self._clock.monotonic() + seconds
        while not done():
            for process in self._processes:
                process.check()
            if self._clock.monotonic() > deadline:
                told = "\n".join(f"{each.name}:\n{each.tail()}" for each in self._processes)
                raise DemoError(f"waited {seconds:.0f} s in vain for {what}\n{told}")
            self._clock.sleep(POLL_SECONDS)
        for process in self._processes:
            process.check()
