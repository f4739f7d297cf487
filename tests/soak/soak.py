"""The soak: several pods train and save against a real S3 server while a hand disturbs everything.

One loop in one thread: it starts what has ended, notes what is said, and lets the hand do what is
due. At the end the hand rests, the trainers are told to finish, and the agents must come to the
end of their work by themselves; then the store is held to all that was said.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.faultproxy import FaultProxy
from tests.servers import S3
from tests.soak.checks import Checker, check_counts, check_ends, check_log
from tests.soak.commands import Commands
from tests.soak.hand import AGENT_APP, Hand
from tests.soak.ledger import Ledger
from tests.soak.nodes import (
    AGENT_DRAIN_SECONDS,
    GRACE_SECONDS,
    Agent,
    Disk,
    Job,
    Node,
    Server,
    json_lines,
    may_mount,
)

BUCKET = "soak"
PREFIX = "run"
RUN_ID = "soak"
STALE = ("--lease-stale-seconds", "20")
TICK_SECONDS = 0.1
LISTEN_SECONDS = 0.3
START_SECONDS = 120.0  # that trainers may take to begin, on a busy machine
DRAIN_SECONDS = 180.0  # that agents may take to come to an end once nothing disturbs them
OVERTIME_SECONDS = 30.0  # that the hand may go on until each kind of fault has happened
SECONDS_OF_A_KIND = 3.0  # a kind of fault is demanded if there is so much time for each
BEYOND_FAULTS = (
    "tag saved again",
    "attempt resumed from a checkpoint",
    "save given up by retention",
)


@dataclass(frozen=True)
class Plan:
    """What a soak is told.

    Attributes:
        seconds: that the hand is at work.
        seed: of all that is drawn.
        ranks: how many ranks save on each volume.
        interval: seconds between two saves, on average.
    """

    seconds: float
    seed: str
    ranks: tuple[int, ...] = (2, 1, 1)
    interval: float = 1.3

    @property
    def keep_last(self) -> int:
        """Such that retention has much to give up, and much is left to be restored."""
        return int(min(20, max(5, self.seconds / 12)))

    def is_long(self, kinds: int) -> bool:
        """Whether there is time for each of so many kinds of fault to happen."""
        return self.seconds >= kinds * SECONDS_OF_A_KIND


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        problems: what does not hold; none if all is well.
        left_out: what could not be tried here, and why.
        figures: in the order in which they are shown.
        faults: kind to how often it happened.
        others: the same, of what trainers and sidecars did.
        seconds: part of the soak to how long it took.
    """

    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Soak:
    """One soak in one folder.

    Args:
        plan: what to do.
        folder: an existing, empty one.
        say: told what happens.
    """

    def __init__(self, plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._began = time.monotonic()
        self.outcome = Outcome()
        self.logs = folder / "logs"
        self._volumes = folder / "volumes"
        self._reports = folder / "logs" / "reports"
        self._work = folder / "work"
        self._data = folder / "server"
        for path in (self.logs, self._volumes, self._reports, self._work, self._data):
            path.mkdir()
        (self.logs / "checks").mkdir()
        self.ledger = Ledger()
        self._listened = 0.0

    def run(self) -> Outcome:
        """All of it."""
        with ExitStack() as stack:
            with self._timed("to the first committed save"):
                self._set_up(stack)
                self._start()
            with self._timed("with the hand at work"):
                self._disturb()
            with self._timed("until all was drained"):
                self._drain()
            with self._timed("for the checks"):
                self._check()
        return self.outcome

    # ---- set up

    def _set_up(self, stack: ExitStack) -> None:
        server = Server(self._data)
        stack.enter_context(server)
        server.create_bucket(BUCKET)
        os.environ.update(server.environ)  # where our own store finds its credentials
        os.environ["OMP_NUM_THREADS"] = "1"  # and torch, which is imported once for all ranks
        self._server = server
        proxy = stack.enter_context(FaultProxy(*server.address))
        environ = {
            **server.environ,
            "DS_CKPT_S3_ENDPOINT": proxy.url,
            "DS_CKPT_STALL_SECONDS": "3",
        }
        url = f"s3://{BUCKET}/{PREFIX}"
        small = may_mount(self._volumes)
        if small:
            self.outcome.left_out.append(f"disk full: no small filesystem can be mounted: {small}")
        self._nodes = self._make_nodes(url, environ, small=not small)
        for node in self._nodes:
            node.disk.make()
            stack.callback(node.disk.remove)
        self._job = Job(
            self._nodes,
            {
                **environ,
                "DS_CKPT_RUN_ID": RUN_ID,
                "DS_CKPT_DESTINATION": url,
                "DS_CKPT_TIMEOUT": "60",
                "DS_CKPT_PUBLISH_TIMEOUT": "60",
                "DS_CKPT_RESUME_TIMEOUT": "180",
            },
            [
                *("--seed", self._plan.seed, "--interval", str(self._plan.interval)),
                *("--finalize-seconds", str(DRAIN_SECONDS)),
            ],
            self._reports,
            self.logs,
        )
        for node in self._nodes:
            stack.callback(node.agent.leave)
        stack.callback(self._job.close)
        self._commands = Commands(url, environ, self.logs)
        stack.callback(self._commands.close)
        self._proxy = proxy
        self._hand = self._make_hand()

    def _make_nodes(self, url: str, environ: dict[str, str], *, small: bool) -> list[Node]:
        nodes = []
        first = 0
        for number, count in enumerate(self._plan.ranks):
            name = f"node{number}"
            # The last volume is a small one; the others lie where this folder lies.
            disk = Disk(self._volumes / name, small=small and number == len(self._plan.ranks) - 1)
            arguments = ["--volume", str(disk.path), "--destination", url, "--run-id", RUN_ID]
            arguments += ["--rescan-seconds", "0.5", "--part-mib", "5", "--streams", "4"]
            arguments += ["--keep-last", str(self._plan.keep_last), "--retention-pause", "3"]
            arguments += ["--abandon-seconds", "8", "--drain-seconds", str(AGENT_DRAIN_SECONDS)]
            arguments += [*STALE, "--log-format", "json"]
            agent = Agent(name, arguments, {**environ, "AWS_SDK_UA_APP_ID": AGENT_APP}, self.logs)
            nodes.append(Node(name, disk, agent, list(range(first, first + count))))
            first += count
        return nodes

    def _make_hand(self) -> Hand:
        return Hand(
            self._plan.seed,
            seconds=self._plan.seconds,
            nodes=self._nodes,
            job=self._job,
            server=self._server,
            proxy=self._proxy,
            commands=self._commands,
            ledger=self.ledger,
            gc_options=("--older-than", "5", *STALE),
            work=self._work,
            say=self._say_when,
        )

    def _say_when(self, what: str) -> None:
        self._say(f"{time.monotonic() - self._began:6.1f} s  {what}")

    # ---- the loop

    def _until(
        self, done: Callable[[], bool], seconds: float, missing: Callable[[], str], *, hand: bool
    ) -> bool:
        """Go round until something is so; says what is missing if it takes longer."""
        deadline = time.monotonic() + seconds
        while not done():
            now = time.monotonic()
            if now > deadline:
                self.outcome.problems.append(f"after {seconds:.0f} s {missing()}")
                return False
            for node in self._nodes:
                node.agent.tend(now)
            self._job.tend(now)
            if hand:
                self._hand.tend(now)
            if now - self._listened >= LISTEN_SECONDS:
                self._listened = now
                self._listen()
            time.sleep(TICK_SECONDS)
        return True

    def _listen(self) -> None:
        self.ledger.read(self._job.reports)
        self.ledger.watch(node.disk.path for node in self._nodes)
        self._proxy.seen.clear()  # nobody looks, and they would fill the memory

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.outcome.seconds[what] = time.monotonic() - began

    # ---- its parts

    def _start(self) -> None:
        """Begin, and come to a first committed save while nothing disturbs."""
        for node in self._nodes:
            node.agent.start()
        self._until(
            lambda: bool(self.ledger.claims),
            START_SECONDS,
            lambda: "nothing is committed yet",
            hand=False,
        )

    def _disturb(self) -> None:
        end = time.monotonic() + self._plan.seconds
        last = end + OVERTIME_SECONDS if self._demanded() else end

        def over() -> bool:
            counts = self._hand.counts()
            now = time.monotonic()
            return now >= end and (now >= last or all(counts[name] for name in counts))

        self._until(over, self._plan.seconds + 2 * OVERTIME_SECONDS, lambda: "", hand=True)

    def _demanded(self) -> list[str]:
        """Kinds that must happen."""
        kinds = [kind.name for kind in self._hand.kinds]
        return [*kinds, *BEYOND_FAULTS] if self._plan.is_long(len(kinds)) else []

    def _drain(self) -> None:
        """The hand rests, the trainers finish, and the agents come to an end by themselves."""
        self._say_when("the hand rests")
        self._hand.rest()
        self._until(
            lambda: self._hand.idle, DRAIN_SECONDS, lambda: "a pod is not back yet", hand=True
        )
        self._job.stop()
        self._until(
            lambda: self._job.finished,
            DRAIN_SECONDS,
            lambda: "the trainers have not finished",
            hand=False,
        )
        self._say_when("the trainers have finished")
        self._until(
            lambda: not any(node.unfinished() for node in self._nodes),
            DRAIN_SECONDS,
            lambda: "; ".join(f"{n.name}: {n.unfinished()}" for n in self._nodes if n.unfinished()),
            hand=False,
        )
        self._say_when("the agents have nothing left to do")
        for node in self._nodes:
            node.agent.retire(time.monotonic())
        self._until(
            lambda: all(node.agent.ended for node in self._nodes),
            GRACE_SECONDS + 5,
            lambda: "agents that have nothing to do do not end",
            hand=False,
        )
        self._listen()

    def _check(self) -> None:
        """Hold the store to what was said."""
        server, outcome = self._server, self.outcome
        for node in self._nodes:
            for log in node.agent.logs:
                self.ledger.hear(log.stem, json_lines(log))
        url = f"s3://{BUCKET}/{PREFIX}"
        direct = Commands(url, server.environ, self.logs / "checks")
        store = S3(server.url, server.access_key, server.secret_key).store(BUCKET, PREFIX)
        checker = Checker(
            self.ledger,
            url,
            store=store,
            run=direct.run,
            work=self._work,
            keep_last=self._plan.keep_last,
        )
        outcome.problems += self.ledger.problems + self._hand.problems
        outcome.problems += checker.everything()
        ends = [end for node in self._nodes for end in node.agent.ends] + self._job.ends
        outcome.problems += check_ends(ends)
        for node in self._nodes:
            for log in node.agent.logs:
                last = log == node.agent.logs[-1]
                outcome.problems += check_log(log.stem, json_lines(log), last=last)
        outcome.faults = self._hand.counts()
        self._count(checker)
        happened = {**outcome.faults, **outcome.others}
        outcome.problems += check_counts(happened, self._demanded())
        store.close()

    def _count(self, checker: Checker) -> None:
        records = checker.records()
        states = Counter(record.state for record in records)
        counts, found = self.ledger.counts, checker.found
        self.outcome.figures = {
            "attempts of the training": self._job.attempt,
            "attempts that the ranks began again by themselves": self._job.again,
            "saves written": len(self.ledger.written),
            "saves handed over": len(self.ledger.names),
            "saves said to be committed": len(self.ledger.claims),
            "records: committed": states["committed"],
            "records: given up by retention": states["deleted"],
            "records: abandoned": states["abandoned"],
            "agents started": sum(len(node.agent.logs) for node in self._nodes),
            "restored bit for bit": found.restored,
            "restored bytes": found.restored_bytes,
            "objects verified": found.verified,
            "found by gc at the end": found.collected,
        }
        self.outcome.others = {
            "tag saved again": counts["tag saved again"],
            "attempt resumed from a checkpoint": self.ledger.resumes(),
            "save given up by retention": states["deleted"],
            "save not written, for want of room": counts["unwritten"] // self._job.world,
        }
