"""A training process: the real hook, under an engine that writes what DeepSpeed writes.

Every file carries marks, so that whoever reads it later can tell of which save of which attempt it
is, which rank wrote it and whether it is whole.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from ds_ckpt_hook.core import Hook
from ds_ckpt_hook.errors import ExchangeError
from ds_ckpt_hook.exchange import values_of
from ds_ckpt_hook.feedback import finalize
from ds_ckpt_hook.resume import agree_on_resume
from ds_ckpt_hook.saving import after_save
from ds_ckpt_hook.settings import Settings
from ds_ckpt_store.contract.digest import crc32c
from ds_ckpt_store.errors import CkptError
from tests.simulation.cloud import URL
from tests.simulation.disk import Disk, SimFilesystem, tree
from tests.simulation.kernel import Kernel, Process, SimClock, Task

MODEL = "mp_rank_00_model_states.pt"
EXCHANGE_SECONDS = 30.0


def marked(marks: dict[str, Any], filler: bytes) -> bytes:
    """A file that says what it is, and whether it is whole."""
    head = json.dumps(marks, sort_keys=True).encode() + b"\n"
    return f"{crc32c(head + filler):08x}{len(head) + len(filler):06d}".encode() + head + filler


def marks_of(data: bytes) -> dict[str, Any] | None:
    """What a file says of itself; None if it is not whole."""
    try:
        value, size, rest = int(data[:8], 16), int(data[8:14]), data[14:]
        if len(rest) != size or crc32c(rest) != value:
            return None
        found: dict[str, Any] = json.loads(rest.partition(b"\n")[0])
        return found
    except ValueError:
        return None


class Meeting:
    """Where the ranks of one attempt exchange what they say."""

    def __init__(self, kernel: Kernel, parties: int) -> None:
        self.kernel = kernel
        self.parties = parties
        self.said: dict[int, Any] = {}
        self.answers: list[Any] = []
        self.round = 0
        self.broken = ""
        self.waiting: list[Task] = []

    def gather(self, process: Process, rank: int, value: Any, timeout: float) -> list[Any]:
        process.step("exchange")
        if self.broken:
            raise ExchangeError(self.broken)
        number = self.round
        self.said[rank] = value
        if len(self.said) == self.parties:
            self.answers = [self.said[each] for each in range(self.parties)]
            self.said = {}
            self.round += 1
            waiting, self.waiting = self.waiting, []
            for task in waiting:
                self.kernel.wake(task)
            return self.answers
        task = self.kernel.running
        if task is None:
            raise AssertionError("only a thread can talk")
        self.waiting.append(task)
        if not self.kernel.park(timeout) and self.round == number:
            self.broken = f"rank {rank} waited {timeout:.0f} s for the others"
            waiting, self.waiting = self.waiting, []
            for each in waiting:
                self.kernel.wake(each)
        process.step("exchanged")
        if self.round == number:
            raise ExchangeError(self.broken or "the others gave up")
        return self.answers


class SimExchange:
    def __init__(self, meeting: Meeting, process: Process, rank: int, timeout: float) -> None:
        self._meeting = meeting
        self._process = process
        self._timeout = timeout
        self.rank = rank
        self.world_size = meeting.parties

    def gather(self, step: str, value: Any, *, timeout: float | None = None) -> list[Any]:
        patience = self._timeout if timeout is None else timeout
        return values_of(self._meeting.gather(self._process, self.rank, (step, value), patience))


class Engine:
    """Writes what ZeRO-1 writes with node-local storage: model and own optimizer shard."""

    def __init__(self, fs: SimFilesystem, rank: int, *, writes_model: bool) -> None:
        self.fs = fs
        self.rank = rank
        self.global_steps = 0
        self.save_non_zero_checkpoint = writes_model
        self.save_zero_checkpoint = True

    def _get_ckpt_name(self, save_dir: str, tag: str) -> str:
        return f"{save_dir}/{tag}/{MODEL}"

    def _get_zero_ckpt_name(self, save_dir: str, tag: str) -> str:
        return f"{save_dir}/{tag}/zero_pp_rank_{self.rank}_mp_rank_00_optim_states.pt"

    def save_checkpoint(
        self, save_dir: str, tag: str, marks: dict[str, Any], rng: random.Random
    ) -> None:
        self.fs.make_folder(f"{save_dir}/{tag}")
        shard = self._get_zero_ckpt_name(save_dir, tag)
        own = {**marks, "rank": self.rank}
        self.fs.write_in_place(shard, marked(own, rng.randbytes(rng.choice((0, 30, 60, 300)))))
        if self.save_non_zero_checkpoint:
            path = self._get_ckpt_name(save_dir, tag)
            self.fs.write_in_place(path, marked(own, rng.randbytes(rng.choice((10, 60, 200)))))


@dataclass
class Attempt:
    """One start of the training, over all its ranks.

    Attributes:
        number: counted from 1 over all runs of the world.
        run_id: of the training run.
        resumed: by rank, the tag that the hook named and the marks of what was then loaded.
        saves: how many were agreed on by all ranks.
        failed: why a rank gave up before training began.
    """

    number: int
    run_id: str
    meeting: Meeting
    saves_wanted: int
    pause: float
    with_destination: bool
    with_script: bool
    resumed: dict[int, tuple[str | None, str]] = field(default_factory=dict)
    save_ids: dict[str, int] = field(default_factory=dict)
    failed: str = ""
    problems: list[str] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    first_step: int = 0


def train(attempt: Attempt, process: Process, disk: Disk, rank: int, *, leader: bool) -> None:
    """The main program of one rank."""
    fs = SimFilesystem(disk, process)
    rng = process.stream.rng
    clock = SimClock(process)
    settings = Settings(
        directory=disk.path,
        run_id=attempt.run_id,
        destination=URL if attempt.with_destination else None,
        exchange_timeout=EXCHANGE_SECONDS,
        publish_timeout=120.0,
        resume_timeout=600.0,
    )
    hook = Hook(
        settings,
        clock=clock,
        rng=rng,
        fs=fs,
        connect=lambda timeout: SimExchange(attempt.meeting, process, rank, timeout),
    )
    engine = Engine(fs, rank, writes_model=leader)
    try:
        tag = agree_on_resume(hook, disk.path)
    except CkptError as error:
        attempt.failed = attempt.failed or str(error)
        process.kernel.say(f"cannot resume: {error}")
        return
    if rng.random() < 0.5:  # torch and DeepSpeed take their time before they load
        process.wait(rng.random() * 15)
    loaded = _load(attempt, disk, rank, tag)
    attempt.resumed[rank] = (tag, loaded)
    engine.global_steps = _step_of(loaded)
    process.kernel.say(f"resumes from {tag} at step {engine.global_steps}")
    tags: list[str] = []
    wait_for_all = SimExchange(attempt.meeting, process, rank, 300.0)
    shared = process.kernel.chance.rng(f"attempt {attempt.number}")  # the same on every rank
    for number in range(attempt.saves_wanted):
        process.step("train")
        process.wait(attempt.pause * (0.5 + shared.random()))
        engine.global_steps += 10
        again = bool(tags) and shared.random() < 0.2
        tag = tags[-1] if again else f"global_step{engine.global_steps}"
        marks = {
            "run": attempt.run_id,
            "attempt": attempt.number,
            "save": number,
            "tag": tag,
            "step": engine.global_steps,
            "world": attempt.meeting.parties,
        }
        try:
            engine.save_checkpoint(disk.path, tag, marks, rng)
            wait_for_all.gather("saved", None)
            if rank == 0:
                fs.write_in_place(f"{disk.path}/latest", tag.encode())
                if attempt.with_script:
                    fs.write_in_place(f"{disk.path}/zero_to_fp32.py", b"# how to merge")
        except OSError as error:  # DeepSpeed's own failure ends the training
            attempt.failed = attempt.failed or f"rank {rank}: the engine cannot save: {error}"
            return
        except ExchangeError:
            return
        _publish(attempt, hook, engine, disk, tag)
        if again:
            if rank == 0:
                process.kernel.chance.count("tags saved again")
        else:
            tags.append(tag)
        if shared.random() < 0.3 and len(tags) > 1:
            old = tags.pop(0)
            if disk.folder_at(f"{disk.path}/{old}") is not None:
                fs.remove_quickly(f"{disk.path}/{old}")
    finalize(hook, timeout=5.0)
    attempt.done.add(rank)


def _publish(attempt: Attempt, hook: Hook, engine: Engine, disk: Disk, tag: str) -> None:
    """``after_save``; whatever happens, it must not raise and not hold training for long."""
    began = hook.clock.monotonic()
    try:
        save = after_save(hook, engine, tag, save_dir=disk.path)
    except Exception as error:
        attempt.problems.append(f"I7: after_save raised {type(error).__name__}: {error}")
        return
    held = hook.clock.monotonic() - began
    frozen = 60.0  # a process may be stopped meanwhile
    if held > 4 * EXCHANGE_SECONDS + frozen:
        attempt.problems.append(f"I7: after_save held the trainer for {held:.0f} s")
    if save.save_id is not None:
        attempt.save_ids[save.save_id] = attempt.save_ids.get(save.save_id, 0) + 1


def _load(attempt: Attempt, disk: Disk, rank: int, tag: str | None) -> str:
    """What ``load_checkpoint`` would find for this rank, as one line; empty for a fresh start."""
    if tag is None:
        return ""
    files = tree(disk, f"{disk.path}/{tag}")
    own = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    found = []
    for name in (MODEL, own):
        marks = marks_of(files.get(name, b""))
        if marks is None and any(_is_of_another(each, attempt) for each in files.values()):
            return "another run's 0"
        if marks is None:
            attempt.problems.append(f"I8: rank {rank} finds no whole {name} under {tag!r}")
            return "torn 0"
        if marks["world"] != attempt.meeting.parties:
            return f"another run's {marks['step']}"  # DeepSpeed has its own say on that
        found.append(marks)
    model, shard = found
    same = all(model[key] == shard[key] for key in ("run", "attempt", "save", "tag", "world"))
    if not same or shard["rank"] != rank or model["tag"] != tag:
        attempt.problems.append(f"I8: rank {rank} finds files of two saves under {tag!r}: {found}")
    return f"{shard['attempt']}.{shard['save']} {shard['step']}"


def _is_of_another(data: bytes, attempt: Attempt) -> bool:
    marks = marks_of(data)
    return marks is not None and marks["run"] != attempt.run_id


def _step_of(loaded: str) -> int:
    return int(loaded.rpartition(" ")[2]) if loaded else 0
