"""An agent in this process, or in one of its own, on a real volume, and what it said and stored."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_ckpt_sidecar.agent import Agent
from ds_ckpt_sidecar.settings import AgentSettings
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import Clock, SystemClock
from ds_ckpt_store.contract.digest import crc32c, to_hex
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.manifest import SaveStatus
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.records import Record
from ds_ckpt_store.restore import Restore
from ds_ckpt_store.stores.faulty import FaultyStore, Rule
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.transfer.budget import Budget

PATIENCE = 60.0


class Lines:
    """A log that a story can be told from."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def info(self, event: str, **values: Any) -> None:
        self.lines.append(("info", event, values))

    def warning(self, event: str, **values: Any) -> None:
        self.lines.append(("warning", event, values))

    def error(self, event: str, **values: Any) -> None:
        self.lines.append(("error", event, values))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [values for _, name, values in list(self.lines) if name == event]

    def text(self) -> str:
        return "\n".join(f"{level} {name} {values}" for level, name, values in list(self.lines))


class Hasty(random.Random):
    """Chance that always says: try again soon."""

    def uniform(self, a: float, b: float) -> float:
        return min(b, 0.01)


class World:
    """One bucket, and agents that work for it in this process."""

    def __init__(self) -> None:
        self.bucket = MemoryBucket(SystemClock())
        self.store = FaultyStore(MemoryStore(self.bucket))
        self.log = Lines()
        self.catalog = Catalog(MemoryStore(self.bucket), random.Random(1))

    def fault(self, *arguments: Any, **options: Any) -> Rule:
        rule = Rule(*arguments, **options)
        self.store.script.append(rule)
        return rule

    def agent(
        self,
        volume: str | os.PathLike[str],
        *,
        store: Store | None = None,
        fs: Filesystem | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> Agent:
        chosen = {
            "rescan_seconds": 0.05,
            "streams": 4,
            "part_mib": 5,
            "drain_seconds": 2,
            **settings,
        }
        return Agent(
            AgentSettings(volume=os.fspath(volume), destination="memory://bucket/run", **chosen),
            store=store or self.store,
            volume=Volume(os.fspath(volume), fs),
            log=self.log,
            clock=clock,
            rng=Hasty(),
        )

    def once(self, volume: str | os.PathLike[str], **settings: Any) -> int:
        """A pass over a volume, as ``--once`` makes it; its exit code."""
        return self.agent(volume, **settings).run(once=True)

    @contextlib.contextmanager
    def running(self, volume: str | os.PathLike[str], **settings: Any) -> Iterator[Agent]:
        """An agent at work in a thread."""
        agent = self.agent(volume, **settings)
        thread = threading.Thread(target=agent.run, daemon=True)
        thread.start()
        try:
            yield agent
        finally:
            agent.stop()
            thread.join(PATIENCE)
            assert not thread.is_alive(), "the agent does not stop"

    # ---- what came of it

    def states(self) -> dict[str, str]:
        """Tag to state of its record, tombstones too; of several, the newest."""
        return {record.tag: record.state for record in self.catalog.records()}

    def keys(self, under: str = "") -> list[str]:
        return sorted(key for key in self.bucket.objects if key.startswith(under))

    def latest(self) -> str | None:
        record = self.catalog.latest()
        return record.tag if record else None

    def restored(self, folder: Path, **options: Any) -> dict[str, bytes]:
        """Files of a checkpoint, brought back into a new folder."""
        folder.mkdir(parents=True)
        with ThreadPoolExecutor(4) as pool:
            result = Restore(
                MemoryStore(self.bucket),
                pool,
                budget=Budget(SystemClock(), streams=4),
                clock=SystemClock(),
                rng=random.Random(2),
            ).run(Volume(str(folder)), **options)
        return contents(Path(result.folder))

    def check_whole(self) -> None:
        """I1 and I2: whatever is committed is whole, and ``latest`` names the newest of it."""
        committed = self.catalog.committed()
        for record in committed:
            check_whole(self.catalog.store, record)
        if committed:
            assert self.catalog.latest() == committed[-1]


def check_whole(store: Store, record: Record) -> None:
    for key, entry in record.objects():
        data, _ = store.get(key)
        assert (len(data), to_hex(crc32c(data))) == (entry.size, entry.crc32c), key


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but our own."""
    return {
        path: (folder / path).read_bytes()
        for path, _ in Filesystem().walk(str(folder))
        if not path.startswith(".ds_ckpt/")
    }


def status(volume: str | os.PathLike[str], save_id: str) -> SaveStatus:
    found = Volume(os.fspath(volume)).save_status(save_id)
    assert found is not None, f"no status of {save_id}"
    return found


def left_of_saves(volume: str | os.PathLike[str]) -> list[str]:
    """What our own folder still holds of saves: manifests, links, trash."""
    own = Path(os.fspath(volume)) / ".ds_ckpt"
    return [
        str(path.relative_to(own))
        for name in ("outbox", "links", "trash")
        for path in sorted((own / name).glob("*"))
    ]


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for what must come; fails if it does not come in a time that is far too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


# ---- a process of its own


@dataclass
class Process:
    """``ds-ckpt agent`` in a process of its own, with its log lines."""

    process: subprocess.Popen[bytes]
    path: Path
    ended: bool = field(default=False)

    def lines(self) -> list[dict[str, Any]]:
        whole = self.path.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in whole if line.startswith(b"{")]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["event"] == event]

    def output(self) -> str:
        return self.path.read_text()

    def wait_for(self, event: str, count: int = 1) -> dict[str, Any]:
        def come() -> bool:
            if len(self.of(event)) >= count:
                return True
            assert self.process.poll() is None, f"it ended:\n{self.output()}"
            return False

        until(come)
        return self.of(event)[count - 1]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


@contextlib.contextmanager
def agent_process(
    log: Path,
    volume: str | os.PathLike[str],
    destination: str,
    *options: str,
    environ: Mapping[str, str] | None = None,
    program: str = "",
) -> Iterator[Process]:
    """An agent process; killed at the end if it still runs.

    Args:
        log: where its standard error goes.
        volume: its volume.
        destination: its destination.
        options: further options of ``ds-ckpt agent``.
        environ: added to the environment.
        program: Python code to run first, in that process.
    """
    code = f"{program}\nfrom ds_ckpt_sidecar.cli import main\nmain()"
    command = [sys.executable, "-c", code, "agent", "--volume", os.fspath(volume)]
    command += ["--destination", destination, "--log-format", "json"]
    command += ["--rescan-seconds", "0.2", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environ or {})},
        )
    try:
        yield Process(process, log)
    finally:
        process.kill()
        process.wait()
