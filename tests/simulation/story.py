"""A training job, and the hand that disturbs it.

The job is what a Kubernetes job is: pods with a volume each, whose containers are started again
when they die; if one rank dies, all are started again as a new attempt, on the same volumes or on
new, empty ones. What the hand does, and when, is drawn before the run begins.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ds_ckpt_sidecar.agent import Agent
from ds_ckpt_store.stores.port import Proof
from tests.simulation.chance import Chance
from tests.simulation.checker import Checker, not_one_save
from tests.simulation.cloud import Cloud
from tests.simulation.disk import Disk, tree
from tests.simulation.kernel import Kernel, Process
from tests.simulation.pods import (
    STALE_SECONDS,
    AgentOptions,
    run_agent,
    run_curator,
    run_gc,
    run_restore,
)
from tests.simulation.trainer import Attempt, Meeting, marks_of, train

LEAST_SAVES = 5
LEAST_NODES = 4
MOST_SAVES = 4
MOST_ATTEMPTS = 5


@dataclass
class Pod:
    """One pod: a volume, an agent, and the ranks of its node.

    Attributes:
        leaving: it was replaced, and its agent runs a while longer.
    """

    name: str
    disk: Disk
    ranks: list[int]
    skew: float
    agent: Process | None = None
    program: Agent | None = None
    trainers: list[Process] = field(default_factory=list)
    starts: int = 0
    leaving: bool = False
    gone: bool = False
    restoring: Process | None = None

    @property
    def busy(self) -> bool:
        """Whether its agent has something to do that it can do.

        One that has ended with the training may leave saves of which it has stored its part: the
        node that stores its own last commits them.
        """
        if self.is_done:
            return False
        syncer = self.program._syncer if self.program is not None else None
        return syncer is None or bool(syncer.unfinished())

    @property
    def is_done(self) -> bool:
        """Whether its agent has ended by itself, and said that all is done."""
        if self.agent is None or self.program is None or self.program.stopping:
            return False
        return self.agent.ended and self.agent.result == 0


@dataclass(frozen=True)
class Odds:
    """How often accidents happen in one run; probability at each call."""

    values: dict[str, float]

    def of(self, kind: str) -> float:
        return self.values.get(kind, 0.0)


def draw_odds(rng: random.Random) -> Odds:
    """Some runs are calm, some are rough, and each in its own way."""
    rough = rng.choice((0.3, 1.0, 1.0, 3.0))

    def draw(usual: float, share: float = 0.7) -> float:
        return usual * rough * rng.uniform(0.3, 2.0) if rng.random() < share else 0.0

    return Odds(
        {
            "death": draw(0.0004),
            "disk waits": 0.03,
            "lost request": draw(0.008),
            "lost answer": draw(0.012),
            "late": draw(0.008),
            "doubled": draw(0.008),
            "refused": draw(0.01),
            "conflict": draw(0.03),
            "cut": draw(0.05),
            "slow listing": draw(0.02),
            "changed on its way up": draw(0.02),
            "changed on its way down": draw(0.03),
            "outlives its sender": 0.5,
            "lock does not hold": draw(0.5, 0.5),
        }
    )


class Job:
    """One training run over all its attempts.

    Args:
        world: where it runs.
        run_id: its name.
        nodes: how many.
        options: of its agents.
    """

    def __init__(self, world: World, run_id: str, nodes: int, options: AgentOptions) -> None:
        self.world = world
        self.run_id = run_id
        self.nodes = nodes
        self.options = options
        self.pods: list[Pod] = []
        self.left: list[Pod] = []
        self.attempt: Attempt | None = None
        self.attempts: list[Attempt] = []
        self.suspended = False
        self.finished = False
        self.with_destination = True
        self._rng = world.chance.rng(f"job {run_id}")
        self._due: float | None = 0.0
        two = self._rng.random() < 0.1
        self._ranks = [2 if two and node == 0 else 1 for node in range(nodes)]
        for slot in range(nodes):
            self.pods.append(self._new_pod(slot))

    def _new_pod(self, slot: int) -> Pod:
        world = self.world
        number = world.next_number()
        name = f"{self.run_id}-{slot}.{number}"
        disk = Disk(f"/volumes/{name}", number)
        disk.on_removed = world.checker.removed
        first = sum(self._ranks[:slot])
        ranks = list(range(first, first + self._ranks[slot]))
        skew = self._rng.uniform(-300, 300)
        pod = Pod(name, disk, ranks, skew)
        outbox = f"{disk.path}/.ds_ckpt/outbox"
        disk.on_new_name[outbox] = [lambda: world.checker.appeared(disk)]
        return pod

    # ---- the job's controller, every second

    def look(self) -> None:
        """Start again what has ended, as the cluster would."""
        now = self.world.kernel.now
        for pod in [*self.pods, *self.left]:
            if pod.gone or (pod.agent is not None and pod.agent.alive):
                continue
            if pod.leaving:
                self._remove(pod)
            elif pod.is_done and self.attempt is None:
                continue  # a container that has succeeded is not started again
            elif not self.suspended and (pod.restoring is None or not pod.restoring.alive):
                self.start_agent(pod)
        if self.suspended or self.finished:
            return
        if self.attempt is not None and self._due is None:
            self._watch(self.attempt)
        ready = all(p.restoring is None or not p.restoring.alive for p in self.pods)
        due = self._due is not None and now >= self._due and not self.finished
        if due and ready and (self.world.resting or not self.full):
            self._due = None
            self.start_attempt()

    def _watch(self, attempt: Attempt) -> None:
        """Whether an attempt has come to its end, or one of its ranks."""
        trainers = [process for pod in self.pods for process in pod.trainers]
        if all(process.alive for process in trainers):
            return
        done = self._done(attempt)
        if len(done) == len(trainers):
            self.attempt = None
            self.finished = self.world.resting and self.enough()
            self._due = self.world.kernel.now + self._rng.uniform(1, 10)
        elif any(not process.alive and process.name not in done for process in trainers):
            self.end_attempt()

    def _done(self, attempt: Attempt) -> set[str]:
        return {
            process.name
            for pod in self.pods
            for rank, process in zip(pod.ranks, pod.trainers, strict=True)
            if rank in attempt.done
        }

    @property
    def full(self) -> bool:
        """Whether more would only cost time."""
        return (
            len(self.attempts) >= MOST_ATTEMPTS
            or self.world.chance.counts.get("saves", 0) >= MOST_SAVES
        )

    def _still_to_save(self) -> int:
        """In the last attempt: one save at least, and as many as the run lacks."""
        return max(1, LEAST_SAVES - self.world.chance.counts.get("saves", 0))

    def enough(self) -> bool:
        return self.world.chance.counts.get("saves", 0) >= LEAST_SAVES

    def start_attempt(self) -> None:
        """All ranks begin, as one attempt."""
        world = self.world
        number = world.next_number()
        self.attempt = Attempt(
            number=number,
            run_id=self.run_id,
            meeting=Meeting(world.kernel, sum(self._ranks)),
            saves_wanted=self._still_to_save() if world.resting else self._rng.randint(1, 3),
            pause=4.0 if world.resting else self._rng.choice((4.0, 10.0, 20.0)),
            with_destination=self.with_destination,
            with_script=self._rng.random() < 0.3,
        )
        self.with_destination = True
        self.attempts.append(self.attempt)
        world.chance.count("attempts")
        for pod in self.pods:
            pod.trainers = []
            for rank in pod.ranks:
                process = world.process(f"trainer-{pod.name}r{rank}a{number}", skew=pod.skew)
                pod.trainers.append(process)
                attempt, disk = self.attempt, pod.disk
                leader = rank == pod.ranks[0]
                process.start(
                    lambda a=attempt, p=process, d=disk, r=rank, lead=leader: train(
                        a, p, d, r, leader=lead
                    )
                )

    def end_attempt(self) -> None:
        """One rank is gone: all are killed, and started again a while later."""
        for pod in self.pods:
            for process in pod.trainers:
                process.kill()
        self.attempt = None
        self._due = self.world.kernel.now + self._rng.uniform(1, 15)

    def start_agent(self, pod: Pod) -> None:
        """The container of the sidecar is started, or started again."""
        world = self.world
        pod.starts += 1
        process = world.process(f"agent-{pod.name}s{pod.starts}", skew=pod.skew)
        pod.agent = process
        pod.program = None

        def started(agent: Agent) -> None:
            pod.program = agent
            process.attempt = lambda: agent._syncer._attempt if agent._syncer is not None else ""
            outbox = f"{pod.disk.path}/.ds_ckpt/outbox"
            wake = agent._wake

            def notify() -> None:
                if process.alive:
                    world.kernel.at(world.kernel.now + 0.05, wake.set)

            pod.disk.on_new_name[outbox] = [
                lambda: world.checker.appeared(pod.disk),
                notify,
            ]

        process.start(lambda: run_agent(process, pod.disk, world.cloud, self.options, started))

    def replace(self, slots: list[int], *, stay: float, drain: bool) -> list[Pod]:
        """Pods are lost and replaced by empty ones; all ranks begin again.

        Args:
            slots: which.
            stay: seconds that the old pods' agents run on; 0: they are gone at once.
            drain: the old agents are told to stop (SIGTERM), else not even that.
        """
        self.end_attempt()
        new = []
        for slot in slots:
            old = self.pods[slot]
            old.leaving = True
            self.left.append(old)
            self.pods[slot] = self._new_pod(slot)
            new.append(self.pods[slot])
            if stay <= 0:
                self._remove(old)
                continue
            if drain:
                self._end_with_notice(old)
            self.world.kernel.at(self.world.kernel.now + stay, lambda pod=old: self._remove(pod))
        return new

    def _end_with_notice(self, pod: Pod) -> None:
        """What its agent is told: at once that the pod will end, and a moment later to end."""
        program, process, kernel = pod.program, pod.agent, self.world.kernel
        if program is None or process is None or not process.alive:
            return
        program.notice()
        kernel.at(kernel.now + 2.0, lambda: program.stop() if process.alive else None)

    def _remove(self, pod: Pod) -> None:
        if pod.gone:
            return
        pod.gone = True
        for process in (pod.agent, pod.restoring, *pod.trainers):
            if process is not None:
                process.kill()

    def suspend(self) -> None:
        """Everything of this job is gone for a while."""
        self.suspended = True
        self.end_attempt()
        for pod in [*self.pods, *self.left]:
            for process in (pod.agent, pod.restoring):
                if process is not None:
                    process.kill()

    def go_on(self) -> None:
        """It is back, on the same volumes."""
        self.suspended = False
        if self.attempt is None:
            self._due = self.world.kernel.now

    def volumes(self) -> list[Disk]:
        return [pod.disk for pod in self.pods if not pod.gone]


class World:
    """All of one run."""

    def __init__(self, kernel: Kernel, chance: Chance) -> None:
        self.kernel = kernel
        self.chance = chance
        self.resting = False
        self.errands: set[str] = set()  # what somebody repeats until it is done
        self._numbers = 0
        rng = chance.rng("world")
        self.odds = draw_odds(rng)
        self.checker = Checker(kernel, STALE_SECONDS)
        proof = rng.choice(
            (Proof.STORED_CHECKSUM, Proof.STORED_CHECKSUM, Proof.CONTENT_MD5, Proof.READ_BACK)
        )
        self.cloud = Cloud(
            kernel, ahead=rng.uniform(-300, 300), proof=proof, changed=self.checker.changed
        )
        self.checker.cloud = self.cloud
        keep = rng.choice((None, None, 1, 2, 3))
        options = AgentOptions(
            run_id=rng.choice(("", "run")),
            keep_last=keep,
            keep_local=rng.choice((0, 1, 1, 1, 2)),
            retention_pause=rng.choice((5.0, 20.0, 60.0)),
            abandon_seconds=rng.choice((20.0, 60.0)),
            order=rng.choice(("oldest", "newest")),
            exit_when_finished=chance.rng("containers").random() < 0.3,
        )
        self.options = options
        self.job = Job(self, "run", 5 if rng.random() < 0.1 else 4, options)
        self.foreign: Job | None = None
        self.horizon = rng.uniform(50, 130)
        self.hand = Hand(self, chance.rng("hand"))

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def process(self, name: str, *, skew: float = 0.0, mortal: bool = True) -> Process:
        stream = self.chance.stream(name, self.odds.of)
        return Process(self.kernel, name, stream, skew=skew, mortal=mortal)

    @property
    def jobs(self) -> list[Job]:
        return [self.job] if self.foreign is None else [self.job, self.foreign]

    def disks(self) -> list[Disk]:
        return [pod.disk for job in self.jobs for pod in (*job.pods, *job.left)]

    # ---- a run

    def run(self) -> None:
        """The disturbed time, the rest after it, and the last look."""
        self._tick()
        self.hand.begin()
        self.kernel.run(self.horizon)
        self._rest()
        for _ in range(360):
            self.kernel.run(self.kernel.now + 5.0)
            if self.checker.broken or self._is_quiet():
                break
        else:
            self.checker.fails(f"I5: not everything came to rest: {self._what_is_left()}")
        if not self.checker.broken:
            self._come_by()
            self._last_look()

    def _come_by(self) -> None:
        """A save whose last node died before it decided is for whoever of the run starts next."""
        if not self.checker.undecided(self.job.run_id):
            return
        self.chance.count("saves left to whoever comes by")
        pod = self.job.pods[0]
        if pod.agent is not None:
            pod.agent.kill()
        self.job.start_agent(pod)
        for _ in range(60):
            self.kernel.run(self.kernel.now + 1.0)
            if not self.checker.undecided(self.job.run_id):
                break

    def _tick(self) -> None:
        for job in self.jobs:
            job.look()
        self.kernel.at(self.kernel.now + 1.0, self._tick)

    def _rest(self) -> None:
        """No accident happens any more; whatever was taken away comes back."""
        self.resting = True
        self.chance.resting = True
        self.cloud.down_until = self.cloud.throttled_until = 0.0
        for process in self.kernel.processes:
            process.frozen_until = 0.0
        for disk in self.disks():
            disk.full = False
        for job in self.jobs:
            for pod in job.left:
                job._remove(pod)
        self.cloud.land_all()
        if self.foreign is not None:
            self.foreign.suspend()
        self.job.go_on()

    def _is_quiet(self) -> bool:
        if self.cloud.pending or self.errands or not self.job.finished:
            return False
        return not any(pod.busy or self._has_news(pod) for pod in self.job.pods)

    def _has_news(self, pod: Pod) -> bool:
        """Whether a save was published that the agent, which is at work, has not looked at yet."""
        syncer = pod.program._syncer if pod.program is not None else None
        known = syncer._saves if syncer is not None else {}
        return any(m.save_id not in known for m in self.checker.named(pod.disk))

    def _what_is_left(self) -> str:
        parts = [f"finished {self.job.finished}"]
        if self.job.attempts:
            parts.append(f"last attempt {self.job.attempts[-1].failed or 'well'}")
        for pod in self.job.pods:
            syncer = pod.program._syncer if pod.program is not None else None
            saves = syncer.unfinished() if syncer is not None else []
            parts += [f"{pod.name}: {s.manifest.tag} {s.state} {s.reason}" for s in saves]
            if syncer is None:
                parts.append(f"{pod.name}: its agent has not begun")
        return "; ".join(parts[:8])

    def _last_look(self) -> None:
        self.checker.rest(self.job.volumes(), self.job.run_id)
        for attempt in [a for job in self.jobs for a in job.attempts]:
            for problem in attempt.problems:
                self.checker.fails(problem)
            if len(set(attempt.resumed.values())) > 1:
                self.checker.fails(f"I8: ranks of one attempt resumed apart: {attempt.resumed}")
        for process, error in self.kernel.failures:
            self.checker.fails(f"{process.name} ended by {type(error).__name__}: {error}")
        self._restore_newest()

    def _restore_newest(self) -> None:
        """The way back, into an empty pod."""
        for pod in self.job.pods:
            if pod.agent is not None:
                pod.agent.kill()
        self.job.suspended = True
        process = self.process("restore-last", mortal=False)
        disk = Disk("/volumes/last", self.next_number())
        process.start(lambda: run_restore(process, disk, self.cloud))
        for _ in range(600):
            self.kernel.run(self.kernel.now + 1.0)
            if not process.alive:
                break
        committed = [record for record, _ in self.checker.committed.values()]
        if committed:
            newest = max(committed, key=lambda record: record.order)
            self.judge_restored(disk, str(process.result), wanted=newest.save_id)
        disk.close()

    def judge_restored(self, disk: Disk, save_id: str, *, wanted: str = "") -> None:
        """What a restore that said it succeeded has left."""
        if wanted and save_id != wanted:
            self.checker.fails(f"the newest is {wanted}, and {save_id or 'nothing'} was restored")
        if not save_id:
            return
        latest = tree(disk, disk.path).get("latest", b"").decode()
        files = tree(disk, f"{disk.path}/{latest}")
        found = {path: marks_of(data) for path, data in files.items()}
        whole = {path: marks for path, marks in found.items() if marks is not None}
        why = "a file is not whole" if len(whole) < len(found) else not_one_save(whole, latest)
        if why:
            self.checker.fails(f"the restored checkpoint {latest} is torn: {why}")

    def close(self) -> None:
        for process in self.kernel.processes:
            process.kill()
        for disk in self.disks():
            disk.close()


class Hand:
    """What disturbs the job from outside. Drawn before the run, so that each act can be left out.

    Args:
        world: what it disturbs.
        rng: its chance.
    """

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self._acts: list[tuple[float, str, float, float]] = []
        kinds = {
            "kill agent": 3,
            "kill trainers": 2,
            "replace pods": 3,
            "freeze agent": 2,
            "freeze trainer": 1,
            "outage": 1,
            "throttle": 1,
            "full disk": 1,
            "restore": 3,
            "gc": 2,
            "curate": 2,
            "second agent": 1,
            "lose journal": 1,
            "stop agent": 1,
            "notice agent": 1,
            "roll back": 1,
            "foreign run": 0.5,
            "suspend": 0.3,
        }
        names = list(kinds)
        count = rng.randint(3, 7)
        chosen = rng.choices(names, weights=list(kinds.values()), k=count)
        if not {"kill agent", "kill trainers", "replace pods"} & set(chosen):
            chosen.append("kill agent")
        if "suspend" in chosen:  # long enough to see it come back
            world.horizon += STALE_SECONDS + 150
        for kind in chosen:
            when = rng.uniform(4, world.horizon)
            self._acts.append((when, kind, rng.random(), rng.random()))

    def begin(self) -> None:
        for number, (when, kind, a, b) in enumerate(self._acts, 1):
            act: Callable[[float, float], None] = getattr(self, "_" + kind.replace(" ", "_"))
            name = f"hand {kind} {number}"

            def do(
                act: Callable[[float, float], None] = act,
                name: str = name,
                kind: str = kind,
                a: float = a,
                b: float = b,
            ) -> None:
                if self._world.chance.allows(name):
                    self._world.kernel.say(name)
                    self._world.chance.count(kind)
                    act(a, b)

            self._world.kernel.at(when, do)

    # ---- acts; a and b are drawn between 0 and 1

    def _pod(self, a: float) -> Pod:
        pods = self._world.job.pods
        return pods[int(a * len(pods))]

    def _kill_agent(self, a: float, b: float) -> None:
        agent = self._pod(a).agent
        if agent is not None:
            agent.kill()

    def _kill_trainers(self, a: float, b: float) -> None:
        if not self._world.job.suspended:
            self._world.job.end_attempt()

    def _replace_pods(self, a: float, b: float) -> None:
        job = self._world.job
        if job.suspended:
            return
        count = job.nodes if b < 0.3 else 1 + int(a * (job.nodes - 1))
        slots = self._rng.sample(range(job.nodes), count)
        stay = 0.0 if b < 0.4 else self._rng.uniform(5, 150)
        new = job.replace(slots, stay=stay, drain=b > 0.7)
        if a < 0.3:  # an init container brings the newest back before anything else starts
            for pod in new:
                self._restore_into(pod, 0)

    def _restore_into(self, pod: Pod, choose: int) -> None:
        world = self._world
        process = world.process(f"restore-{pod.name}", skew=pod.skew)
        pod.restoring = process
        process.start(lambda: run_restore(process, pod.disk, world.cloud, choose=choose))

    def _roll_back(self, a: float, b: float) -> None:
        """All pods are replaced, and an older checkpoint is brought back by hand."""
        job = self._world.job
        if job.suspended:
            return
        job.replace(list(range(job.nodes)), stay=0.0, drain=False)
        job.with_destination = False
        for pod in job.pods:
            self._restore_into(pod, 1)

    def _freeze_agent(self, a: float, b: float) -> None:
        agent = self._pod(a).agent
        if agent is not None:
            agent.frozen_until = self._world.kernel.now + 5 + b * 70

    def _freeze_trainer(self, a: float, b: float) -> None:
        for trainer in self._pod(a).trainers:
            trainer.frozen_until = self._world.kernel.now + 5 + b * 50

    def _outage(self, a: float, b: float) -> None:
        self._world.cloud.down_until = self._world.kernel.now + 5 + a * 60

    def _throttle(self, a: float, b: float) -> None:
        self._world.cloud.throttled_until = self._world.kernel.now + 5 + a * 60

    def _full_disk(self, a: float, b: float) -> None:
        disk = self._pod(a).disk
        disk.full = True
        kernel = self._world.kernel
        kernel.at(kernel.now + 5 + b * 90, lambda: setattr(disk, "full", False))

    def _restore(self, a: float, b: float) -> None:
        """Somebody restores into a folder of his own while everything goes on."""
        world = self._world
        number = world.next_number()
        process = world.process(f"restore-aside.{number}")
        disk = Disk(f"/volumes/aside.{number}", number)
        choose = 0 if a < 0.7 else 1

        def main() -> None:
            save_id = run_restore(process, disk, world.cloud, choose=choose)
            world.judge_restored(disk, save_id)

        process.on_death.append(disk.close)
        process.start(main)

    def _gc(self, a: float, b: float) -> None:
        world = self._world
        process = world.process(f"gc-{world.next_number()}")
        older_than = 20.0 + a * 60
        process.start(
            lambda: run_gc(process, world.cloud, "run", older_than=older_than, dry_run=b < 0.3)
        )

    def _curate(self, a: float, b: float) -> None:
        """Somebody keeps or throws away by name, and does it again if that dies half way."""
        world = self._world
        errand = f"curator-{world.next_number()}"
        wanted: list[str] = []
        world.errands.add(errand)

        def go(tries: int = 0) -> None:
            process = world.process(f"{errand}.{tries}")

            def main() -> None:
                run_curator(process, world.cloud, wanted, a, b)
                world.errands.discard(errand)

            def again() -> None:
                if errand in world.errands:
                    world.kernel.at(world.kernel.now + 5, lambda: go(tries + 1))

            process.on_death.append(again)
            process.start(main)

        go()

    def _second_agent(self, a: float, b: float) -> None:
        """One more agent on a volume that has one: it stands by, or the lock does not hold."""
        world = self._world
        pod = self._pod(a)
        process = world.process(f"agent-{pod.name}second{world.next_number()}", skew=pod.skew)
        process.start(
            lambda: run_agent(process, pod.disk, world.cloud, world.options, lambda _: None)
        )
        world.kernel.at(world.kernel.now + 20 + b * 100, process.kill)

    def _lose_journal(self, a: float, b: float) -> None:
        pod = self._pod(a)
        if pod.agent is not None:
            pod.agent.kill()
        pod.disk.lose_journal()

    def _stop_agent(self, a: float, b: float) -> None:
        """SIGTERM, and the container is started again."""
        program = self._pod(a).program
        if program is not None:
            program.stop()

    def _notice_agent(self, a: float, b: float) -> None:
        """The notice of a preStop hook; SIGTERM comes later, or does not come at all."""
        pod = self._pod(a)
        program, process, kernel = pod.program, pod.agent, self._world.kernel
        if program is None or process is None or not process.alive:
            return
        program.notice()
        if b < 0.7:
            kernel.at(kernel.now + b * 40, lambda: program.stop() if process.alive else None)

    def _foreign_run(self, a: float, b: float) -> None:
        """Another run is started with the same prefix."""
        world = self._world
        if world.foreign is None:
            options = AgentOptions("other", 1, 1, 0.0, 40.0, "oldest")
            world.foreign = Job(world, "other", 1, options)

    def _suspend(self, a: float, b: float) -> None:
        """The whole job is away for so long that its lease goes stale, and comes back."""
        world = self._world
        world.job.suspend()
        away = STALE_SECONDS + 10 + a * 80
        if world.foreign is None and b < 0.7:
            self._foreign_run(a, b)
        kernel = world.kernel
        kernel.at(kernel.now + away, world.job.go_on)
