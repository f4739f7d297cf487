"""``ds-ckpt`` as people and init containers call it: a process for each call."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_ckpt_sidecar.demo.processes import clean_environment

LONGEST_SECONDS = 300.0


@dataclass(frozen=True)
class Answer:
    """What a call came to."""

    code: int
    output: str
    errors: str


class Command:
    """A call that may still run."""

    def __init__(self, name: str, arguments: list[str], environ: Mapping[str, str], logs: Path):
        self.name = name
        self._out, self._err = logs / f"{name}.out", logs / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ds_ckpt_sidecar", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(environ),
            )

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def wait(self) -> Answer:
        """What it came to, once it has ended; killed if that takes far too long."""
        try:
            self._process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        return Answer(
            self._process.returncode,
            self._out.read_text(errors="replace"),
            self._err.read_text(errors="replace"),
        )

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


class Commands:
    """Makes calls on one prefix; from any thread.

    Args:
        url: of the prefix.
        environ: with which the store is found.
        logs: folder for what calls print.
    """

    def __init__(self, url: str, environ: Mapping[str, str], logs: Path) -> None:
        self._url = url
        self._environ = clean_environment(environ)
        self._logs = logs
        self._numbers = itertools.count(1)
        self._calls: list[Command] = []

    def start(self, *arguments: str) -> Command:
        """Begin a call."""
        name = f"{arguments[0]}-{next(self._numbers)}"
        call = Command(name, list(arguments), self._environ, self._logs)
        self._calls.append(call)
        return call

    def run(self, *arguments: str) -> Answer:
        """Make a call and wait for its end."""
        return self.start(*arguments).wait()

    def restore(self, to: str | os.PathLike[str], *options: str) -> Command:
        """Begin a restore."""
        return self.start("restore", "--from", self._url, "--to", os.fspath(to), *options)

    def collect(self, *options: str) -> Command:
        """Begin a collection of garbage."""
        return self.start("gc", self._url, *options)

    def close(self) -> None:
        """Leave none behind."""
        for call in self._calls:
            if not call.ended:
                call.kill()
