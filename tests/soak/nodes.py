"""The pods of the soak: volumes, agents that are started again as the kubelet does, and the ranks.

Nothing here repairs anything. A process that has ended is started again after a moment with the
same arguments on the same volume, and that is all the help there is.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_ckpt_sidecar.demo.processes import Process, clean_environment
from ds_ckpt_sidecar.demo.s3_server import HOST, S3Server, free_ports
from ds_ckpt_store.contract.clock import system_random
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError
from tests.soak import trainer

RESTART_SECONDS = 0.5
AGENT_DRAIN_SECONDS = 5.0  # that an agent is given for what is left
GRACE_SECONDS = 30.0  # from SIGTERM to SIGKILL: twice what it should take, for a busy machine
PATIENCE_SECONDS = 5.0  # with ranks of which one has ended
TMPFS_MIB = 256  # room for a restore, which wants 64 MiB to spare, and for a short backlog


def json_lines(log: Path) -> Iterator[dict[str, Any]]:
    """A log, as far as it is JSON; the line that a killed process was writing is left out."""
    for line in log.read_bytes().split(b"\n")[:-1]:
        if line.startswith(b"{"):
            yield json.loads(line)


class Program(Process):
    """A process of which more is asked than the demo does."""

    def send(self, number: int) -> None:
        """Send a signal; no error if it has ended."""
        self._process.send_signal(number)


class Rank:
    """A process of the training, forked from one that has imported torch, which takes seconds."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["torch.distributed", trainer.__name__])

    def __init__(
        self, name: str, arguments: Sequence[str], environ: Mapping[str, str], logs: Path
    ) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self._process = self._context.Process(
            target=trainer.main,
            args=(list(arguments), clean_environment(environ), str(self.log)),
            daemon=True,
        )
        self._process.start()

    def exit_code(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._process.kill()
        self._process.join()


class Server(S3Server):
    """An S3 server that can be killed, and started again on the same data."""

    answers = False

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.answers = False
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self) -> None:
        """As the base's; the log of the start before is kept."""
        log = self._folder / "weed.log"
        if log.exists():
            log.rename(self._folder / f"weed-{time.monotonic_ns()}.log")
        super().start()
        self.answers = True

    @property
    def address(self) -> tuple[str, int]:
        """Where S3 is spoken; another port after each start."""
        return HOST, int(self.url.rpartition(":")[2])


class Disk:
    """The folder of one volume; on a small filesystem of its own if that may be mounted."""

    def __init__(self, path: Path, *, small: bool) -> None:
        self.path = path
        self.small = small
        self._ballast = path / "ballast"

    def make(self) -> None:
        """An empty volume."""
        self.path.mkdir(parents=True)
        if self.small:
            command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_MIB}m", "soak", str(self.path)]
            subprocess.run(command, check=True, capture_output=True)

    def remove(self) -> None:
        """The volume is gone with all that it held."""
        if self.small and os.path.ismount(self.path):
            # Whoever still has a file open there must not keep the name.
            subprocess.run(["umount", "--lazy", str(self.path)], check=True, capture_output=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def fill(self) -> None:
        """Leave no byte free."""
        fd = os.open(self._ballast, os.O_WRONLY | os.O_CREAT)
        for piece in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    os.write(fd, bytes(piece))
        os.close(fd)

    def free(self) -> None:
        """Give back what was filled."""
        self._ballast.unlink(missing_ok=True)


def may_mount(folder: Path) -> str:
    """Why no small filesystem can be mounted, or nothing."""
    disk = Disk(folder / "trial", small=True)
    try:
        disk.make()
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        disk.path.rmdir()
        return said.decode().strip()
    disk.remove()
    return ""


@dataclass(frozen=True)
class End:
    """How one process ended; ``wanted`` if that is how it was told, or made, to end."""

    who: str
    code: int
    wanted: bool
    log: Path


class Agent:
    """The sidecar container of one volume: an agent, and the kubelet that starts it again."""

    def __init__(
        self, name: str, arguments: Sequence[str], environ: Mapping[str, str], logs: Path
    ) -> None:
        self.name = name
        self.ends: list[End] = []
        self.logs: list[Path] = []
        self.program: Program | None = None
        self.frozen = False
        self._arguments = ["-m", "ds_ckpt_sidecar", "agent", *arguments]
        self._environ = clean_environment(environ)
        self._folder = logs
        self._wanted: Collection[int] = ()
        self._retired = False
        self._due: float | None = None
        self._grace: float | None = None

    def start(self) -> None:
        """Start it now, and again whenever it ends."""
        name = f"agent-{self.name}-{len(self.logs) + 1}"
        self.program = Program(name, self._arguments, self._environ, self._folder)
        self.logs.append(self.program.log)
        self._wanted, self._due, self._grace, self.frozen = (), None, None, False

    @property
    def works(self) -> bool:
        """Whether it runs and nobody has told it to end, or holds it up."""
        running = self.program is not None and self.program.exit_code() is None
        return running and not self._wanted and not self.frozen

    @property
    def ended(self) -> bool:
        """Whether there is no process of it."""
        return self.program is None

    def tend(self, now: float) -> None:
        """Start it again a moment after it has ended; kill it when its grace is over."""
        if self._grace is not None and now > self._grace and self.program is not None:
            self.program.kill()
        if self.program is not None and (code := self.program.exit_code()) is not None:
            wanted = code in self._wanted
            self.ends.append(End(self.program.name, code, wanted, self.program.log))
            self.program = None
            self._due = None if self._retired else now + RESTART_SECONDS
        elif self._due is not None and now >= self._due:
            self.start()

    def kill(self) -> None:
        """SIGKILL."""
        if self.program is not None:
            self._wanted = (-signal.SIGKILL,)
            self.program.kill()

    def drain(self, now: float) -> None:
        """SIGTERM; it ends well, or says what it has left, in time; or has not even begun."""
        if self.program is not None:
            self._wanted, self._grace = (0, 1, -signal.SIGTERM), now + GRACE_SECONDS
            self.program.send(signal.SIGTERM)

    def retire(self, now: float) -> None:
        """SIGTERM, and do not start it again."""
        self._retired = True
        self.drain(now)

    def freeze(self) -> None:
        """Let it do nothing, not even end, until :meth:`thaw`."""
        if self.program is not None:
            self.frozen = True
            self.program.send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        if self.program is not None and self.frozen:
            self.frozen = False
            self.program.send(signal.SIGCONT)

    def leave(self) -> None:
        """Its pod is gone: kill it, and do not start it again."""
        if self.program is not None:
            self.kill()
            code = self.program.exit_code() or 0
            self.ends.append(End(self.program.name, code, True, self.program.log))
        self.program, self._due = None, None


@dataclass
class Node:
    """One volume, its agent, and the ranks that save there."""

    name: str
    disk: Disk
    agent: Agent
    ranks: list[int]

    def unfinished(self) -> str:
        """What its agent has still to do, as it says itself; empty if nothing."""
        volume = Volume(str(self.disk.path))
        try:
            status = volume.sidecar_status()
        except (CkptError, OSError) as error:
            return f"its heartbeat cannot be read: {error}"
        if status is None or self.agent.program is None:
            return "its agent has not begun"
        if status.state != "running" or status.backlog_saves or status.last_error:
            return (
                f"its agent is {status.state}, {status.backlog_saves} saves wait, last error "
                f"{status.last_error!r}"
            )
        for name in volume.manifests():
            save = volume.save_status(name.split(".")[0])
            if save is None or save.state not in ("committed", "superseded", "abandoned"):
                return f"{name} is {save.state if save else 'not seen'}: {save and save.reason}"
        return ""


@dataclass
class Job:
    """The training job: all ranks of one attempt after another.

    If a rank ends, the others are ended too and a new attempt begins, as a job's pods do.
    """

    nodes: list[Node]
    environ: Mapping[str, str]
    arguments: Sequence[str]
    folder: Path
    logs: Path
    attempt: int = 0
    ends: list[End] = field(default_factory=list)
    again: int = 0
    paused: bool = False

    def __post_init__(self) -> None:
        self._ranks: list[Rank] = []
        self._struck = False
        self._due: float | None = 0.0
        self._first_end: float | None = None
        self.stop_file = self.folder / "stop"

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def reports(self) -> list[Path]:
        """What ranks have told, the earliest attempt first."""
        return [
            path
            for attempt in range(1, self.attempt + 1)
            for rank in range(self.world)
            if (path := self._report(attempt, rank)).exists()
        ]

    @property
    def runs(self) -> bool:
        """Whether all ranks are there."""
        return bool(self._ranks) and not self._struck and self._first_end is None

    @property
    def finished(self) -> bool:
        """Whether all ranks have ended well, as they do once they are told to stop."""
        return bool(self._ranks) and all(each.exit_code() == 0 for each in self._ranks)

    def _report(self, attempt: int, rank: int) -> Path:
        return self.folder / f"attempt{attempt:03}-rank{rank}.jsonl"

    def _start(self) -> None:
        self.attempt += 1
        self._struck, self._due, self._first_end = False, None, None
        common = {
            **self.environ,
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(free_ports(1, system_random())[0]),
            "WORLD_SIZE": str(self.world),
        }
        for node in self.nodes:
            for rank in node.ranks:
                arguments = [*self.arguments, "--volume", str(node.disk.path)]
                arguments += ["--attempt", str(self.attempt)]
                arguments += ["--out", str(self._report(self.attempt, rank))]
                arguments += ["--stop", str(self.stop_file)]
                arguments += ["--first"] if rank == node.ranks[0] else []
                environ = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank - node.ranks[0])}
                name = f"trainer-attempt{self.attempt}-rank{rank}"
                self._ranks.append(Rank(name, arguments, environ, self.logs))

    def tend(self, now: float) -> None:
        """Start a new attempt a moment after one has ended."""
        if not self._ranks:
            if self._due is not None and now >= self._due and not self.paused:
                self._start()
            return
        codes = [each.exit_code() for each in self._ranks]
        if all(code is None for code in codes) or self.finished:
            return
        self._first_end = now if self._first_end is None else self._first_end
        # The others find out by themselves, or are ended, as a job's controller does.
        if None in codes and now < self._first_end + PATIENCE_SECONDS:
            return
        self._end(now)

    def _end(self, now: float) -> None:
        codes = [each.exit_code() for each in self._ranks]
        for each, code in zip(self._ranks, codes, strict=True):
            each.kill()
            if code is not None:
                wanted = self._struck or code in (0, trainer.AGAIN, trainer.NO_MEETING)
                self.ends.append(End(each.name, code, wanted, each.log))
        self.again += not self._struck
        self._ranks, self._due = [], now + RESTART_SECONDS

    def kill(self, ranks: Sequence[int], now: float) -> None:
        """SIGKILL to these ranks; the others follow as they will."""
        self._struck = True
        for rank in ranks:
            if self._ranks:
                self._ranks[rank].kill()
        self._first_end = now

    def stop(self) -> None:
        """Tell the ranks to finalize and end."""
        self.stop_file.touch()

    def close(self) -> None:
        """Leave none behind."""
        for each in self._ranks:
            each.kill()
        self._ranks = []
