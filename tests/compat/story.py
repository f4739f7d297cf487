"""What trainers and sidecars of a version do, one step a process: ``story STEP ARGUMENTS``.

The code of the version is first on the path (see ``versions.py``). So this keeps to names that
neighbouring versions have in common, and to engines and files that are a few bytes long. A step
says what came of it in one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ds_ckpt_hook.core import Hook
from ds_ckpt_hook.exchange import values_of
from ds_ckpt_hook.resume import agree_on_resume
from ds_ckpt_hook.saving import after_save
from ds_ckpt_hook.settings import Settings
from ds_ckpt_sidecar import cli
from ds_ckpt_sidecar.agent import Agent
from ds_ckpt_sidecar.settings import AgentSettings
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.manifest import TransferLimits
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import TransientError
from ds_ckpt_store.restore import Restore
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.faulty import FaultyStore, Rule
from ds_ckpt_store.transfer.budget import Budget

RUN = "run"
HALF = "half"  # the save that was being uploaded
PART = 64  # bytes


class Small(AgentSettings):
    """Settings with parts of a few bytes, so that a small file has some."""

    @property
    def part_bytes(self) -> int:
        return PART


class Hasty(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return min(b, 0.01)


class Between:
    """The exchange of ranks that are threads."""

    def __init__(self, rank: int, said: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = barrier.parties
        self._said = said
        self._barrier = barrier

    def gather(self, step: str, value: Any, *, timeout: float | None = None) -> list[Any]:
        self._said[self.rank] = (step, value)
        self._barrier.wait(60)
        answers = list(self._said)
        self._barrier.wait(60)
        return values_of(answers)


class Engine:
    """Names its files as DeepSpeed does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.global_steps = 0
        self.save_non_zero_checkpoint = rank == 0
        self.save_zero_checkpoint = True

    def _get_ckpt_name(self, save_dir: str, tag: str) -> str:
        return f"{save_dir}/{tag}/mp_rank_00_model_states.pt"

    def _get_zero_ckpt_name(self, save_dir: str, tag: str) -> str:
        return f"{save_dir}/{tag}/zero_pp_rank_{self.rank}_mp_rank_00_optim_states.pt"


class Training:
    """One start of a training job, one rank on each volume."""

    def __init__(self, volumes: list[Path]) -> None:
        said: list[Any] = [None] * len(volumes)
        barrier = threading.Barrier(len(volumes))
        self.volumes = volumes
        self.engines = [Engine(rank) for rank in range(len(volumes))]
        self.hooks = [
            Hook(
                Settings(run_id=RUN, directory=str(volume)),
                connect=lambda _timeout, rank=rank: Between(rank, said, barrier),  # type: ignore[misc]
            )
            for rank, volume in enumerate(volumes)
        ]

    def save(self, tag: str, *, size: int = 40, **about: Any) -> Any:
        """Write it as DeepSpeed would, and hand it over; its save id.

        With ``wait``, what each rank was told when it was durable or could not become so.
        """

        def one(rank: int) -> Any:
            engine, volume = self.engines[rank], self.volumes[rank]
            engine.global_steps += 1
            (volume / tag).mkdir(parents=True, exist_ok=True)
            text = f"{tag} of rank {rank} ".encode()
            body = (text * (size // len(text) + 1))[:size]
            if rank == 0:
                Path(engine._get_ckpt_name(str(volume), tag)).write_bytes(b"model " + body)
                (volume / "latest").write_text(tag)
                (volume / "zero_to_fp32.py").write_text("# a script\n")
            Path(engine._get_zero_ckpt_name(str(volume), tag)).write_bytes(body)
            hook = self.hooks[rank]
            save = after_save(hook, engine, tag, save_dir=volume, **about)
            assert hook.worker.drain(60)
            assert save.save_id is not None, save.status()
            return save

        saves = self.each(one)
        return saves if about.get("wait") else saves[0].save_id

    def each(self, call: Any) -> list[Any]:
        with ThreadPoolExecutor(len(self.hooks)) as pool:
            return list(pool.map(call, range(len(self.hooks))))

    def end(self, *, finished: bool = False) -> None:
        for hook in self.hooks:
            for session in hook.sessions.values():
                if finished:
                    session.finish()
                session.stop_heartbeat()


class Log:
    """What an agent says, as lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, event: str, **values: Any) -> None:
        pass

    def warning(self, event: str, **values: Any) -> None:
        self.lines.append(f"{event} {values}")

    error = warning


def agent(volume: str | Path, store: Any, url: str, log: Any = None, **settings: Any) -> int:
    """One pass of a sidecar; its exit code."""
    return Agent(
        Small(volume=str(volume), destination=url, run_id=RUN, **settings),
        store=store,
        volume=Volume(str(volume)),
        log=log or Log(),
        rng=Hasty(),
    ).run(once=True)


def leave(out: str) -> None:
    """Leave volumes ``node0``, ``node1`` and ``restored``, and the prefix ``store``.

    Of one run: saves that are abandoned, deleted, purged, committed and held, half committed (one
    node has stored its shards) and half uploaded (two parts of a file are stored).
    """
    root = Path(out)
    url = (root / "store").as_uri()
    volumes = [root / "node0", root / "node1"]
    for volume in volumes:
        volume.mkdir(parents=True)
    training = Training(volumes)

    given_up = training.save("given-up")
    agent(volumes[0], open_store(url), url)  # and node 1 never comes
    store = open_store(url)
    catalog = Catalog(store, random.Random(3))
    intent = catalog.intent(given_up)
    assert intent is not None
    catalog.abandon(intent, "node never stored its shards")

    for tag in ("old1", "old2", "old3"):
        training.save(tag, kind="epoch", metrics={"loss": 0.5})
        for volume in (*volumes, *volumes):
            agent(volume, open_store(url), url)
    kept, *goes = catalog.committed()[::-1]
    for record, purged in zip(goes, (False, True), strict=True):
        deleted = catalog.replace(record, state="deleted", reason="retention")
        assert deleted is not None
        if purged:
            catalog.delete_objects([key for key, _ in deleted.objects()])
            assert catalog.replace(deleted, purged=True)
    catalog.hold(kept.save_id, f"{kept.save_id}-{'1' * 16}", seconds=86_400)
    restore(url, str(root / "restored"))

    training.save("waits", pin=True)
    assert agent(volumes[0], open_store(url), url) == 0
    training.save(HALF, size=4 * PART)
    broken = FaultyStore(open_store(url))
    lost = Rule("put_part", "fail-before", f"{HALF}@", error=TransientError, skip=2, count=None)
    broken.script.append(lost)
    Volume(str(volumes[0])).write_limits(TransferLimits(bandwidth=200 << 20, streams=4))
    agent(volumes[0], broken, url, streams=1)
    training.end()
    store.close()


def sync(url: str, *volumes: str) -> dict[str, Any]:
    """A pass of a sidecar on each volume, one after the other."""
    log, codes, parts = Log(), [], 0
    for volume in volumes:
        store = FaultyStore(open_store(url))  # here for its list of calls
        codes.append(agent(volume, store, url, log))
        parts += len(store.asked("put_part"))
    return {"codes": codes, "parts": parts, "said": log.lines}


def train(tag: str, *volumes: str) -> list[list[str]]:
    """Save once, and wait until all ranks were told where it ended: state and reason of each."""
    training = Training([Path(volume) for volume in volumes])
    saves = training.save(tag, wait=True)
    training.end(finished=True)
    return [[save.status().state, save.status().reason] for save in saves]


def resume(url: str, *volumes: str) -> list[Any]:
    """The tag that the ranks agree on, and the files that they would load."""
    training = Training([Path(volume) for volume in volumes])

    def one(rank: int) -> Any:
        hook, volume = training.hooks[rank], training.volumes[rank]
        return agree_on_resume(hook, volume, destination=url)

    agreed = training.each(one)
    training.end()
    assert len(set(agreed)) == 1, agreed
    return [agreed[0], content([f"{volume}/{agreed[0]}" for volume in volumes])]


def restore(url: str, volume: str) -> list[Any]:
    """The newest committed one: its tag, and its files."""
    os.mkdir(volume)
    with ThreadPoolExecutor(2) as pool:
        Restore(
            open_store(url),
            pool,
            budget=Budget(SystemClock(), streams=2),
            clock=SystemClock(),
            rng=random.Random(4),
        ).run(Volume(volume))
    tag = Path(volume, "latest").read_text()
    return [tag, content([f"{volume}/{tag}"])]


def content(folders: list[str]) -> dict[str, str]:
    """Files of some folders, by path."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for folder in folders
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def look(url: str) -> dict[str, str]:
    """What the prefix holds: each tag, and where it stands."""
    store = open_store(url)
    catalog = Catalog(store, random.Random(5))
    found = {record.tag: record.state for record in catalog.records()}
    store.close()
    return found


def command(*arguments: str) -> list[Any]:
    """What ``ds-ckpt`` ends with; what it says goes to where this process's output goes."""
    sys.argv = ["ds-ckpt", *arguments]
    try:
        cli.main()
    except SystemExit as error:
        return [error.code or 0]
    return [0]


STEPS = {step.__name__: step for step in (leave, sync, train, resume, restore, look, command)}

if __name__ == "__main__":
    print(f"\n{json.dumps(STEPS[sys.argv[1]](*sys.argv[2:]))}", flush=True)
    os._exit(0)
