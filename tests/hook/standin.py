"""Several ranks in one process: real hooks and volumes, an exchange between threads.

An engine here writes files under DeepSpeed's names without DeepSpeed, so that the many ways in
which ranks can disagree are tested in milliseconds. Real DeepSpeed and real processes are in
``test_with_deepspeed.py``.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ds_ckpt_hook.core import Hook
from ds_ckpt_hook.errors import ExchangeError
from ds_ckpt_hook.exchange import values_of
from ds_ckpt_hook.settings import Settings
from ds_ckpt_store.contract.manifest import NodeManifest
from ds_ckpt_store.contract.volume import Volume

T = TypeVar("T")


class Meeting:
    """Where the threads of one job exchange what they say."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.said: list[Any] = [None] * parties
        self.barrier = threading.Barrier(parties)
        self.asked: list[list[bool]] = [[] for _ in range(parties)]


class ThreadExchange:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.world_size = meeting.parties

    def gather(self, step: str, value: Any, *, timeout: float | None = None) -> list[Any]:
        meeting = self._meeting
        try:
            meeting.said[self.rank] = (step, value)
            meeting.barrier.wait(timeout or 20)
            answers = list(meeting.said)
            meeting.barrier.wait(20)
        except threading.BrokenBarrierError:
            raise ExchangeError(f"{step}: not every rank came") from None
        return values_of(answers)

    def ask_any(self, yes: bool) -> Callable[[], bool]:
        meeting = self._meeting
        meeting.asked[self.rank].append(yes)
        number = len(meeting.asked[self.rank])

        def answer() -> bool:
            deadline = time.monotonic() + 5
            while any(len(each) < number for each in meeting.asked):
                if time.monotonic() > deadline:
                    raise ExchangeError("not every rank asked")
                time.sleep(0.001)
            return any(each[number - 1] for each in meeting.asked)

        return answer


class Engine:
    """Writes what ZeRO-1 writes with node-local storage: model and own optimizer shard."""

    def __init__(self, rank: int, *, writes_model: bool = True) -> None:
        self.rank = rank
        self.global_steps = 0
        self.save_non_zero_checkpoint = writes_model
        self.save_zero_checkpoint = True

    def _get_ckpt_name(self, save_dir: str, tag: str) -> str:
        return os.path.join(save_dir, tag, "mp_rank_00_model_states.pt")

    def _get_zero_ckpt_name(self, save_dir: str, tag: str) -> str:
        name = f"zero_pp_rank_{self.rank}_mp_rank_00_optim_states.pt"
        return os.path.join(save_dir, tag, name)

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str, content: str = "", **_: Any
    ) -> None:
        save_dir = Path(save_dir)
        (save_dir / tag).mkdir(parents=True, exist_ok=True)
        body = content or f"{tag} at step {self.global_steps}"
        if self.save_non_zero_checkpoint:
            model = Path(self._get_ckpt_name(str(save_dir), tag))
            model.write_text(f"model {body}" + (" shared" if self.rank == 0 else ""))
        shard = Path(self._get_zero_ckpt_name(str(save_dir), tag))
        shard.write_text(f"optimizer {body} of rank {self.rank}")
        (save_dir / "latest").write_text(tag)


_living: list[Hook] = []


def end_earlier_attempts() -> None:
    """Silence the heartbeats of attempts that are over: their process would be gone."""
    while _living:
        for session in _living.pop().sessions.values():
            session.stop_heartbeat()


class Job:
    """One attempt of a training job: a hook for each rank, on the volumes that they see."""

    def __init__(self, volumes: Sequence[Path], run: str = "run", **settings: Any) -> None:
        end_earlier_attempts()
        meeting = Meeting(len(volumes))
        self.volumes = list(volumes)
        self.hooks = [
            Hook(
                Settings(run_id=run, **settings),
                rng=random.Random(os.urandom(8)),
                connect=lambda _timeout, rank=rank: ThreadExchange(meeting, rank),
            )
            for rank in range(len(volumes))
        ]
        _living.extend(self.hooks)
        first = {volume: volumes.index(volume) for volume in volumes}
        self.engines = [
            Engine(rank, writes_model=first[volume] == rank) for rank, volume in enumerate(volumes)
        ]

    def all_ranks(self, call: Callable[[int, Hook], T]) -> list[T]:
        """Call on every rank at once; an exception on any is raised here."""
        results: list[Any] = [None] * len(self.hooks)
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = call(rank, self.hooks[rank])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(r,)) for r in range(len(self.hooks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return results

    def save(self, tag: str, content: str = "", **options: Any) -> list[Any]:
        """``save_checkpoint`` and ``after_save`` on every rank; until all is handed over."""
        from ds_ckpt_hook.saving import after_save

        for engine in self.engines:
            engine.global_steps += 1
            engine.save_checkpoint(self.volumes[engine.rank], tag, content)
        saves = self.all_ranks(
            lambda rank, hook: after_save(
                hook, self.engines[rank], tag, save_dir=self.volumes[rank], **options
            )
        )
        self.drain()
        return saves

    def drain(self) -> None:
        for hook in self.hooks:
            assert hook.worker.drain(30)

    def resume(self, **options: Any) -> list[str | None]:
        from ds_ckpt_hook.resume import agree_on_resume

        return self.all_ranks(
            lambda rank, hook: agree_on_resume(hook, self.volumes[rank], **options)
        )


def manifests(folder: Path) -> list[NodeManifest]:
    """What stands in the outbox of a volume, oldest first."""
    volume = Volume(str(folder))
    return [volume.manifest(name) for name in volume.manifests()]
