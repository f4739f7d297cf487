"""The hand that disturbs: faults drawn from one seed, and put right again after a while.

It deals a shuffled deck in which each kind of fault lies, then another one, until the time is over.
A kind counts as often as it *happened*: a fault on the wire only when a request met it. What is
disturbed is put right by the hand as it would be in life: a server comes back, a disk gets room
again, the network heals. It never touches what an agent has to put right itself.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_ckpt_store.contract.volume import Volume
from tests.faultproxy import SLOW_DOWN, Fault, FaultProxy
from tests.soak.checks import check_restored
from tests.soak.commands import Answer, Command, Commands
from tests.soak.ledger import Ledger
from tests.soak.nodes import Disk, Job, Node, Server

MIB = 1 << 20
INTERNAL_ERROR = "<Error><Code>InternalError</Code><Message>injected</Message></Error>"
DATA = r"(@|%40)[0-9a-f]{12}-"  # a key of a shard: its folder ends in a save id
DOCUMENT = r"/(latest$|\.ds_ckpt/(saves|receipts|checkpoints|owner|holds|probe))"
# Trainers that resume give a silent connection a minute, and a short soak has no more.
AGENT_APP = "agent"
OF_AGENTS = rf"^user-agent: .*app/{AGENT_APP}"
SLOWEST_PACE = 4.0  # seconds between two faults, on average

Fix = Callable[[], None]


@dataclass(frozen=True)
class Kind:
    """One kind of fault; ``early`` if what follows from it takes long."""

    name: str
    do: Callable[[], None]
    early: bool = False


class Hand:
    """Draws faults, does them, and counts those that happened.

    Args:
        seed: of all that it draws.
        seconds: that it is at work; its pace is such that a deck is dealt by then.
        nodes: the pods.
        job: the trainers.
        server: the S3 server.
        proxy: in front of it.
        commands: ``ds-ckpt`` as a person or an init container calls it.
        ledger: what trainers and sidecars have said.
        gc_options: with which garbage is collected while all are at work.
        work: a folder for what is restored meanwhile.
        say: told of each fault.
    """

    def __init__(
        self,
        seed: str,
        *,
        seconds: float,
        nodes: list[Node],
        job: Job,
        server: Server,
        proxy: FaultProxy,
        commands: Commands,
        ledger: Ledger,
        gc_options: Sequence[str],
        work: Path,
        say: Callable[[str], None],
    ) -> None:
        self._rng = random.Random(f"hand {seed}")
        self._nodes = nodes
        self._job = job
        self._server = server
        self._proxy = proxy
        self._commands = commands
        self._ledger = ledger
        self._gc_options = gc_options
        self._work = work
        self._say = say
        self._done: Counter[str] = Counter()
        self._wire: dict[str, list[Fault]] = {}
        self._later: list[tuple[float, Fix]] = []
        self._running: list[tuple[Command, Callable[[Answer], None]]] = []
        self._threads: list[threading.Thread] = []
        self._deck: list[Kind] = []
        self._due = 0.0
        self._now = 0.0
        self._rests = False
        self._decks = 0
        self._restores = 0
        self.problems: list[str] = []
        self.kinds = self._all()
        self._pace = min(SLOWEST_PACE, 0.8 * seconds / len(self.kinds))

    def _all(self) -> list[Kind]:
        kinds = [
            Kind("agent killed", self._kill_agent),
            Kind("agent told to drain", self._drain_agent),
            Kind("agent frozen for a while", self._freeze_agent),
            Kind("trainers killed", self._kill_trainers, early=True),
            Kind("volume lost and replaced", self._lose_volume, early=True),
            Kind("server killed and started again", self._kill_server),
            Kind("connection cut", self._cut),
            Kind("connection silent", self._stall),
            Kind("answer 503 or 500", self._throttle),
            Kind("put refused and applied later", self._late),
            Kind("byte flipped going up", self._flip_up),
            Kind("byte flipped in a shard coming down", self._flip_down),
            Kind("byte flipped in a document coming down", self._flip_document),
            Kind("byte rotten on a volume", self._rot),
            Kind("gc at work meanwhile", self._collect),
            Kind("restore meanwhile", self._restore),
        ]
        if self._small():
            kinds.append(Kind("disk full", self._fill_disk))
        return kinds

    def _small(self) -> list[Disk]:
        return [node.disk for node in self._nodes if node.disk.small]

    # ---- time

    def tend(self, now: float) -> None:
        """Do what is due."""
        self._now = now
        due = [fix for when, fix in self._later if when <= now]
        self._later = [each for each in self._later if each[0] > now]
        for fix in due:
            fix()
        ended = [each for each in self._running if each[0].ended]
        self._running = [each for each in self._running if each not in ended]
        for command, then in ended:
            then(command.wait())
        if not self._rests and now >= self._due:
            kind = self._draw()
            self._due = now + self._rng.uniform(0.5, 1.5) * self._pace
            self._say(kind.name)
            kind.do()

    def _draw(self) -> Kind:
        """The next card; in the first deck those with long consequences come early, and apart."""
        if not self._deck:
            deck = list(self.kinds)
            self._rng.shuffle(deck)
            if not self._decks:
                early = [kind for kind in deck if kind.early]
                late = [kind for kind in deck if not kind.early]
                for place, kind in zip((1, 9), early, strict=True):
                    late.insert(place, kind)
                deck = late
            self._decks += 1
            self._deck = deck[::-1]
        return self._deck.pop()

    def rest(self) -> None:
        """No further fault; what is disturbed is put right now."""
        self._rests = True
        self._proxy.clear()
        while self._later:
            fixes, self._later = self._later, []
            for _, fix in fixes:
                fix()
            for thread in self._threads:
                thread.join()

    @property
    def idle(self) -> bool:
        """Whether nothing that the hand began is still going on."""
        return not self._later and not self._running

    def counts(self) -> dict[str, int]:
        """Kind of fault to how often it happened."""
        wire = {
            name: sum(self._proxy.hits(fault) for fault in faults)
            for name, faults in self._wire.items()
        }
        return {kind.name: self._done[kind.name] + wire.get(kind.name, 0) for kind in self.kinds}

    def _after(self, seconds: float, fix: Fix) -> None:
        self._later.append((self._now + seconds, fix))

    def _when(self, condition: Callable[[], bool], do: Fix) -> None:
        """Do something as soon as it can be done."""

        def look() -> None:
            if self._rests:
                return
            if condition():
                do()
            else:
                self._after(0, look)

        look()

    # ---- agents

    def _to_agent(self, kind: str, do: Callable[[Node], None]) -> None:
        """Befall an agent, as soon as it is at work."""
        node = self._rng.choice(self._nodes)

        def befall() -> None:
            do(node)
            self._done[kind] += 1

        self._when(lambda: node.agent.works, befall)

    def _kill_agent(self) -> None:
        self._to_agent("agent killed", lambda node: node.agent.kill())

    def _drain_agent(self) -> None:
        self._to_agent("agent told to drain", lambda node: node.agent.drain(self._now))

    def _freeze_agent(self) -> None:
        seconds = self._rng.uniform(1, 4)

        def freeze(node: Node) -> None:
            node.agent.freeze()
            self._after(seconds, node.agent.thaw)

        self._to_agent("agent frozen for a while", freeze)

    # ---- trainers and volumes

    def _kill_trainers(self) -> None:
        ranks = list(range(self._job.world))
        chosen = self._rng.choice([ranks, [self._rng.choice(ranks)]])

        def kill() -> None:
            self._job.kill(chosen, self._now)
            self._done["trainers killed"] += 1

        self._when(lambda: self._job.runs, kill)

    def _lose_volume(self) -> None:
        """A pod is evicted; its successor is empty, and an init container restores."""
        node = self._rng.choice(self._nodes)
        seconds = self._rng.uniform(0.5, 2)

        def lose() -> None:
            self._job.paused = True
            self._job.kill(node.ranks, self._now)
            node.agent.leave()
            self._done["volume lost and replaced"] += 1
            self._after(seconds, replace)

        def replace() -> None:
            node.disk.remove()
            node.disk.make()
            init()

        def init() -> None:
            self._call(self._commands.restore(node.disk.path), restored)

        def restored(answer: Answer) -> None:
            if answer.code and "no committed checkpoint" not in answer.errors:
                self._after(1, init)  # as the kubelet does with an init container
                return
            node.agent.start()
            self._job.paused = False

        self._when(lambda: self._job.runs and node.agent.works, lose)

    def _fill_disk(self) -> None:
        disk = self._rng.choice(self._small())
        seconds = self._rng.uniform(2, 6)

        def fill() -> None:
            disk.fill()
            self._done["disk full"] += 1
            self._after(seconds, disk.free)

        self._when(lambda: not self._job.paused, fill)

    def _rot(self) -> None:
        """Change one bit of a shard that was handed over, and leave its times as they were."""
        where, which = self._rng.random(), self._rng.random()
        found: list[Path] = []

        def look() -> bool:
            found[:] = sorted(self._links())
            return bool(found)

        def rot() -> None:
            self._done["byte rotten on a volume"] += _flip(found[int(which * len(found))], where)

        self._when(look, rot)

    def _links(self) -> Iterator[Path]:
        """Shards of saves that nobody has called committed yet."""
        for node in self._nodes:
            volume = Volume(str(node.disk.path))
            for name in volume.manifests():
                save_id = name.split(".")[0]
                if save_id not in self._ledger.claims:
                    yield from Path(volume.link_folder(save_id)).glob("*.pt")

    # ---- server and network

    def _kill_server(self) -> None:
        seconds = self._rng.uniform(0.2, 3)

        def kill() -> None:
            self._server.kill()
            self._done["server killed and started again"] += 1
            self._after(seconds, start)

        def start() -> None:
            thread = threading.Thread(target=self._start_server)
            thread.start()
            self._threads.append(thread)

        self._when(lambda: self._server.answers, kill)

    def _start_server(self) -> None:
        try:
            self._server.start()
        except Exception as error:
            self.problems.append(f"the server did not start again: {error}")
        else:
            self._proxy.lead_to(*self._server.address)

    def _on_the_wire(self, kind: str, *faults: Fault) -> None:
        for fault in faults:
            self._wire.setdefault(kind, []).append(self._proxy.add(fault))

    def _some(self, *choices: tuple[str, str, int], header: str = "") -> list[Fault]:
        """Three faults of (pattern, kind, most bytes until it happens)."""
        return [
            Fault(
                match,
                do,
                after=self._rng.randrange(most + 1),
                times=self._rng.randint(1, 2),
                header=header,
            )
            for match, do, most in self._rng.choices(choices, k=3)
        ]

    def _cut(self) -> None:
        faults = self._some(
            (r"^PUT .*partNumber=", "reset", 5 * MIB),
            (r"^PUT .*partNumber=", "drop_response", 0),
            (rf"^PUT .*{DATA}", "reset", 60_000),
            (rf"^PUT .*{DATA}", "drop_response", 0),
            (rf"^PUT .*{DOCUMENT}", "drop_response", 0),
            (r"^PUT .*/\.ds_ckpt/checkpoints/", "drop_response", 0),
            (r"^PUT .*/latest", "drop_response", 0),
            (r"^POST .*uploadId=", "drop_response", 0),
            (r"^GET ", "cut_response", 300),
            (r"^DELETE ", "drop_response", 0),
        )
        self._on_the_wire("connection cut", *faults)

    def _stall(self) -> None:
        faults = self._some(
            (r"^PUT .*partNumber=", "stall", 5 * MIB),
            (rf"^PUT .*{DATA}", "stall_response", 0),
            (rf"^PUT .*{DOCUMENT}", "stall_response", 0),
            (r"^POST .*uploadId=", "stall_response", 0),
            (r"^GET ", "stall_response", 200),
            header=OF_AGENTS,
        )
        self._on_the_wire("connection silent", *faults)

    def _throttle(self) -> None:
        match = self._rng.choice((r"^PUT ", r"^GET ", r"^"))
        status, body = self._rng.choice(((503, SLOW_DOWN), (500, INTERNAL_ERROR)))
        seconds = self._rng.uniform(1, 4)
        fault = Fault(match, "status", times=None, status=status, body=body)
        self._on_the_wire("answer 503 or 500", fault)
        self._after(seconds, lambda: self._proxy.drop(fault))

    def _late(self) -> None:
        seconds = self._rng.uniform(0.5, 5)
        faults = self._some(
            (rf"^PUT .*{DOCUMENT}", "late", 0),
            (r"^PUT .*/\.ds_ckpt/checkpoints/", "late", 0),
            (r"^PUT .*/latest", "late", 0),
            (rf"^PUT [^?]*{DATA}", "late", 0),
        )
        self._on_the_wire("put refused and applied later", *faults)
        self._after(seconds, self._apply_late)

    def _apply_late(self) -> None:
        """Whatever was kept back comes to the server now, if it is there."""
        if self._server.answers:
            with contextlib.suppress(Exception):  # the server may be killed under it
                self._proxy.apply_late()
        else:
            self._after(1, self._apply_late)

    def _flip_up(self) -> None:
        faults = self._some(
            (r"^PUT .*partNumber=", "flip", 4 * MIB),
            (rf"^PUT [^?]*{DATA}", "flip", 200),
            (rf"^PUT .*{DOCUMENT}", "flip", 200),
        )
        self._on_the_wire("byte flipped going up", *faults)

    def _flip_down(self) -> None:
        after = self._rng.randrange(200)
        fault = Fault(rf"^GET .*{DATA}", "flip_response", after=after, times=2)
        self._on_the_wire("byte flipped in a shard coming down", fault)
        self._fetch("restore past a flipped byte")

    def _flip_document(self) -> None:
        # Apart from each other: what looks damaged is read twice.
        faults = [
            Fault(
                rf"^GET [^?]*{DOCUMENT}[^?]*$",
                "flip_response",
                after=self._rng.randrange(150),
                skip=4 * number,
            )
            for number in range(5)
        ]
        self._on_the_wire("byte flipped in a document coming down", *faults)

    # ---- commands

    def _call(self, command: Command, then: Callable[[Answer], None]) -> None:
        self._running.append((command, then))

    def _collect(self) -> None:
        def collect() -> None:
            self._call(self._commands.collect(*self._gc_options), collected)

        def collected(answer: Answer) -> None:
            if answer.code == 0:
                self._done["gc at work meanwhile"] += 1
            else:
                self._again("gc", answer, collect)

        collect()

    def _restore(self) -> None:
        self._fetch("restore meanwhile")

    def _fetch(self, kind: str) -> None:
        """Restore the newest into an empty folder; it is right, or it says that it could not."""

        def fetch() -> None:
            self._restores += 1
            folder = self._work / f"meanwhile-{self._restores}"
            self._call(self._commands.restore(folder), lambda answer: fetched(answer, folder))

        def fetched(answer: Answer, folder: Path) -> None:
            if answer.code == 0:
                self.problems += check_restored(self._ledger, folder, None, kind)
                self._done[kind] += 1
            else:
                self._again("restore", answer, fetch)
            shutil.rmtree(folder, ignore_errors=True)

        fetch()

    def _again(self, what: str, answer: Answer, call: Fix) -> None:
        """A command that failed under the hand says why, and is called again."""
        if answer.code != 1 or "Traceback" in answer.errors:
            self.problems.append(f"{what} ended with code {answer.code}: {answer.errors[-2000:]}")
        if not self._rests:
            self._after(1, call)


def _flip(path: Path, where: float) -> bool:
    """Change one bit of a file behind everybody's back; False if it is gone."""
    try:
        state = path.stat()
        with path.open("r+b") as file:
            file.seek(int(state.st_size * where))
            byte = file.read(1)
            file.seek(-len(byte), os.SEEK_CUR)
            file.write(bytes(value ^ 1 for value in byte))
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    except OSError:
        return False
    return bool(byte)
