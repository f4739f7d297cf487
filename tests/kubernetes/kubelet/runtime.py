"""The container runtime: one run of one container, by podman."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 60.0


class PodmanError(Exception):
    """podman refused; with its own words."""


class Podman:
    """The command.

    Args:
        command: with which it starts.
        environ: its whole environment; this process's own if None.
    """

    def __init__(
        self, command: Sequence[str] = ("podman",), environ: Mapping[str, str] | None = None
    ) -> None:
        self.command = tuple(command)
        self.environ = dict(os.environ if environ is None else environ)
        self._images: dict[str, Image] = {}

    def __call__(self, *arguments: str, check: bool = True, timeout: float = 120) -> str:
        """Run it to its end; what it wrote to stdout."""
        ran = self.run(*arguments, timeout=timeout)
        if check and ran.returncode:
            raise PodmanError(f"podman {' '.join(arguments)}: {ran.stderr or ran.stdout}")
        return ran.stdout

    def run(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """The same, with its exit code."""
        return subprocess.run(
            [*self.command, *arguments],
            capture_output=True,
            text=True,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )

    def image(self, name: str) -> Image:
        """What a local image says of itself.

        Raises:
            PodmanError: there is none of that name.
        """
        if name not in self._images:
            config: dict[str, Any] = json.loads(self("image", "inspect", name))[0]["Config"]
            number = str(config.get("StopSignal") or signal.SIGTERM.value)
            stop = int(number) if number.isdigit() else signal.Signals[number].value
            self._images[name] = Image(str(config.get("User") or "").split(":")[0], stop)
        return self._images[name]


@dataclass(frozen=True)
class Image:
    """What counts of an image.

    Attributes:
        user: a number, a name, or empty for root.
        stop_signal: number of the signal that asks it to end.
    """

    user: str
    stop_signal: int


class Run:
    """One run of a container, from its start to its end.

    Args:
        podman: the command.
        name: of it; podman knows it by that and a number, since others may run pods beside.
        arguments: of ``podman run``, the image and the command included.
        folder: for what the container writes to stdout and stderr, and for its number.

    Attributes:
        log: the file of what it wrote.
        pid: of its first process, on this machine; 0 if it ended before it was seen.
    """

    def __init__(self, podman: Podman, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = f"{name}.{uuid.uuid4().hex[:8]}"
        self.log = folder / f"{name}.log"
        self._podman = podman
        pidfile = folder / f"{name}.pid"
        mine = [
            "--name",
            self.name,
            "--pidfile",
            str(pidfile),
            "--pull",
            "never",
            "--log-driver",
            "none",
        ]
        mine += ["--sig-proxy=false", "--http-proxy=false"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*podman.command, "run", *mine, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=podman.environ,
                start_new_session=True,
                cwd=folder,  # conmon leaves a file "oom" there
            )
        deadline = time.monotonic() + START_SECONDS
        self._pidfd: int | None = None
        self.pid = 0
        while self._process.poll() is None:
            text = pidfile.read_text() if pidfile.exists() else ""
            if text:
                with contextlib.suppress(ProcessLookupError):
                    self._pidfd = os.pidfd_open(int(text))
                    self.pid = int(text)
                break
            if time.monotonic() > deadline:
                self.remove()
                raise PodmanError(f"{name} did not start: {self.output()}")
            time.sleep(0.01)
        if self._process.poll() == 125 and self._pidfd is None:
            raise PodmanError(f"{name} did not start: {self.output()}")

    @property
    def running(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    def output(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """A signal to its first process, from outside, as a runtime sends it."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def heeds(self, number: int) -> bool:
        """Whether its first process runs its own command, and has a handler for a signal."""
        try:
            command = Path(f"/proc/{self.pid}/cmdline").read_text()
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False
        (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", status, re.MULTILINE)
        name = signal.Signals(number).name.removeprefix("SIG")
        return name in command and bool(int(caught, 16) >> (number - 1) & 1)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of its first process; whether it came in time."""
        if self._pidfd is None:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def reap(self) -> int:
        """Wait until the runtime has put it away, after its end; its exit code."""
        return self._process.wait(START_SECONDS)

    def execute(
        self, command: Sequence[str], seconds: float
    ) -> subprocess.CompletedProcess[str] | None:
        """Run a command in it; None if the time was not enough."""
        try:
            return self._podman.run("exec", self.name, *command, timeout=seconds)
        except subprocess.TimeoutExpired:
            return None

    def remove(self) -> None:
        """Kill it if it runs, and forget it."""
        self.signal(signal.SIGKILL)
        self._podman("rm", "--force", "--time", "0", "--ignore", self.name, check=False)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
