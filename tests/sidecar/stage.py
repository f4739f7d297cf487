"""An agent on a stage: real volume, real agent, simulated time, and a network of a chosen speed.

Time goes on only in :meth:`Stage.play`, so a drain of 25 s takes milliseconds and always goes the
same way. The sizes are of a few hundred bytes, and the network moves about a hundred a second.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import ds_ckpt_sidecar.agent
from ds_ckpt_sidecar.agent import Agent
from ds_ckpt_sidecar.observe.termination import TerminationMessage
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.manifest import NodeManifest, TrainerStatus
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import TransientError
from ds_ckpt_store.stores.forwarding import Forwarding
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import (
    Capabilities,
    Condition,
    ObjectInfo,
    Part,
    Source,
    Store,
    Upload,
)
from ds_ckpt_store.stores.probe import Findings
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import Lines
from tests.simulation import seams
from tests.simulation.chance import Chance
from tests.simulation.cloud import LIMITS, URL
from tests.simulation.kernel import Kernel, Process, SimClock, Task
from tests.simulation.pods import Settings

RATE = 100.0  # bytes per second
CALL_SECONDS = 0.01


class Network(Forwarding):
    """A store that is reached over a slow line, or not at all."""

    def __init__(self, store: MemoryStore, stage: Stage, process: Process) -> None:
        super().__init__(store)
        self._stage = stage
        self._process = process

    def _pass(self, operation: str, key: str, size: int = 0) -> None:
        self._process.wait(self._stage.call_seconds + size / self._stage.rate)
        self._stage.sent += size
        if self._stage.away or (self._stage.takes_no_data and size):
            raise self._stage.answer(operation, key, "the store is away")

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        self._pass("put", key, source.size if names.is_data(key) else 0)
        return self.store.put(key, source, condition=condition)

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        self._pass("put_part", upload.key, source.size)
        return self.store.put_part(upload, number, source)

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        self._pass("get", key)
        return self.store.get(key)

    def head(self, key: str) -> ObjectInfo:
        self._pass("head", key)
        return self.store.head(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._pass("list", prefix)
        yield from list(self.store.list(prefix))


@dataclass
class Reports:
    """What a cluster was told."""

    told: list[tuple[str, Any]] = field(default_factory=list)

    def committed(self, tag: str, folder: str, time_ms: int) -> None:
        self.told.append(("committed", tag))

    def failing(self, sentence: str) -> None:
        self.told.append(("failing", sentence))

    def not_durable_at_exit(self, sentences: Sequence[str]) -> None:
        self.told.append(("not durable", tuple(sentences)))

    def of(self, kind: str) -> list[Any]:
        return [what for each, what in self.told if each == kind]


class Player:
    """One agent process on the stage."""

    def __init__(self, stage: Stage, agent: Agent, process: Process) -> None:
        self._stage = stage
        self.agent = agent
        self.process = process
        self.ended_at: float | None = None

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return None if self.ended_at is None else self.process.result

    def why(self, path: str) -> str:
        """What its page says; empty: all is well."""
        return self.agent.answers()[path]()


class Stage:
    """One volume, one bucket, and whoever works there.

    Attributes:
        rate: bytes per second to the store.
        call_seconds: that each call takes besides.
        away: the store does not answer.
        answer: what its caller hears then.
        takes_no_data: it refuses the bytes of checkpoints alone.
        sent: bytes of checkpoints on their way so far.
        now: seconds since the beginning.
    """

    def __init__(self, folder: Path) -> None:
        self.kernel = Kernel(Chance("stage", frozenset()))
        Kernel.current = self.kernel
        self.rate = RATE
        self.call_seconds = CALL_SECONDS
        self.away = False
        self.answer: type[TransientError] = TransientError
        self.takes_no_data = False
        self.sent = 0
        self.log = Lines()
        self.reports = Reports()
        self.message = folder / "termination-log"
        self._numbers = itertools.count()
        self._world = self.process("world")
        self.bucket = MemoryBucket(SimClock(self._world))
        self.path = folder / "volume"
        with self._on_stage():
            self.trainer = Trainer(self.path, seed=1)
        self._beats = itertools.count()

    def process(self, name: str) -> Process:
        stream = self.kernel.chance.stream(f"{name}{next(self._numbers)}", lambda _: 0.0)
        return Process(self.kernel, name, stream, mortal=False)

    @contextlib.contextmanager
    def _on_stage(self) -> Iterator[None]:
        """What makes ids by the system's chance takes that of a process."""
        task = self.kernel.running
        self.kernel.running = Task(self._world, None)
        try:
            yield
        finally:
            self.kernel.running = task

    # ---- who works there

    def agent(self, **settings: Any) -> Player:
        """Start an agent."""
        process = self.process("agent")
        chosen = {"rescan_seconds": 5.0, "streams": 1, "drain_seconds": 25.0, **settings}
        capabilities = Capabilities(
            proofs=MemoryStore(self.bucket).capabilities.proofs, limits=LIMITS
        )
        store = MemoryStore(self.bucket, capabilities, url=URL)
        agent = Agent(
            Settings(volume=str(self.path), destination=URL, page_cache="keep", **chosen),
            store=Network(store, self, process),
            volume=Volume(str(self.path)),
            log=self.log,
            clock=SimClock(process),
            rng=random.Random(3),
            executor=seams.Inline(),
            message=TerminationMessage(str(self.message), self.log),
            reports=self.reports,
        )
        player = Player(self, agent, process)

        def main() -> int:
            try:
                return agent.run()
            finally:
                player.ended_at = self.now

        process.start(main)
        return player

    def save(self, tag: str, size: int, shards: int = 1, kind: str = "checkpoint") -> NodeManifest:
        """The trainer hands a save over, of equal shards; the agent sees it at its next look."""
        with self._on_stage():
            files = {f"x{number}": size for number in range(shards)}
            return self.trainer.save(tag, files, kind=kind)

    def beat(self, *, finished: bool = False) -> None:
        """The trainer shows that it lives, or says that it has finished."""
        self.trainer.volume.write_trainer_status(
            TrainerStatus(
                run_id=self.trainer.run_id,
                attempt=self.trainer.attempt,
                time=SimClock(self._world).time() + next(self._beats) / 1000,
                finished=finished,
                nodes=[self.trainer.node],
            )
        )

    def beating(self, until: float) -> None:
        """The trainer beats every 5 s until then."""
        at = self.now
        while at < until:
            self.at(at, self.beat)
            at += 5.0

    # ---- time

    @property
    def now(self) -> float:
        return self.kernel.now

    def at(self, when: float, act: Callable[[], object]) -> None:
        """Do something at a time."""

        def do() -> None:
            act()

        self.kernel.at(when, do)

    def play(self, until: float) -> None:
        """Let time go on."""
        self.kernel.run(until)
        failures, self.kernel.failures = self.kernel.failures, []
        for _, error in failures:
            raise error

    # ---- what came of it

    def committed(self) -> list[str]:
        """Tags of the bucket's checkpoints, in the order of their saves."""
        catalog = Catalog(MemoryStore(self.bucket), random.Random(4))
        return [record.tag for record in catalog.committed()]

    def order(self) -> list[str]:
        """Tags in the order in which they became durable."""
        return [line["tag"] for line in self.log.of("save.committed")]

    def said(self) -> str:
        """The termination message."""
        return self.message.read_text()


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    """A stage with the real modules in simulated time; its processes are gone afterwards."""

    def no_store(url: str) -> Any:
        raise AssertionError(f"nobody opens {url} here")

    def probe(store: Store, *_: object) -> Findings:
        list(store.list(""))
        return Findings(store.proof, conditional_create=True, swap=True)

    with (
        seams.swapped(no_store, lambda *_: lambda: None),
        mock.patch.object(ds_ckpt_sidecar.agent, "probe", probe),
    ):
        stage = Stage(folder)
        try:
            yield stage
        finally:
            for process in stage.kernel.processes:
                process.kill()
