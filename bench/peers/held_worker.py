"""One rank of ``held.py``: trains a step, and saves in every way by turns.

    held_worker.py FOLDER STAGE WIDTH ROUNDS

Rank 0 writes one line for each save to FOLDER/rows.jsonl; its times are those of the slowest rank.
``held_s``: until the training thread goes on. ``done_s``: until nothing is left to do on this side:
the manifest is published, or the asynchronous save is written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ds_ckpt_hook
from ds_ckpt_hook.example import import_deepspeed, make_engine, train_step

Way = Callable[[Path], "Callable[[], object]"]


def nothing() -> None:
    """Left to do."""


class Ways:
    """Each takes a folder, holds the training thread, and returns what waits for the rest."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.states = self._capture()

    def _capture(self) -> dict[str, Any]:
        """What DeepSpeed saves on this rank, by file name, for those that save a dict."""
        states: dict[str, Any] = {}
        writer = self.engine.checkpoint_engine

        def keep(state_dict: Any, path: str) -> None:
            states[f"rank{os.environ['RANK']}/{os.path.basename(path)}"] = state_dict

        writer.save = keep
        self.engine.save_checkpoint("captured", "t")
        del writer.save
        return states

    def deepspeed(self, folder: Path) -> Callable[[], object]:
        self.engine.save_checkpoint(str(folder), "t")
        return nothing

    def after_save(self, folder: Path) -> Callable[[], object]:
        self.engine.save_checkpoint(str(folder), "t")
        ds_ckpt_hook.after_save(self.engine, "t", save_dir=folder, strict=True)
        return lambda: ds_ckpt_hook._hook().worker.drain(None)

    def attached(self, folder: Path) -> Callable[[], object]:
        assert ds_ckpt_hook.attach(self.engine)
        try:
            return self.after_save(folder)
        finally:
            del self.engine.checkpoint_engine.save

    def dcp(self, folder: Path) -> Callable[[], object]:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.states, checkpoint_id=folder / "t")
        return nothing

    def dcp_async(self, folder: Path) -> Callable[[], object]:
        import torch.distributed.checkpoint as dcp

        future = dcp.async_save(self.states, checkpoint_id=folder / "t")
        return future.result  # type: ignore[union-attr]


def slowest(seconds: float) -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def main() -> None:
    folder, stage, width, rounds = Path(sys.argv[1]), *(int(each) for each in sys.argv[2:5])
    os.chdir(folder)
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo")
    rank = deepspeed.comm.get_rank()
    args = argparse.Namespace(hidden=width, zero_stage=stage, node_local=False)
    engine = make_engine(deepspeed, args)
    train_step(engine, width)
    ways = Ways(engine)
    turns: list[tuple[str, Way]] = [
        ("deepspeed", ways.deepspeed),
        ("save_checkpoint, after_save", ways.after_save),
        ("attach, save_checkpoint, after_save", ways.attached),
        ("dcp.save", ways.dcp),
        ("dcp.async_save", ways.dcp_async),
    ]
    volume = folder / "volume"
    order = random.Random(stage)  # the same on all ranks
    for number in range(-1, rounds):  # the first is for the caches
        for way, save in turns:
            volume.mkdir(exist_ok=True)
            deepspeed.comm.barrier()
            began = time.perf_counter()
            wait = save(volume)
            held = time.perf_counter() - began
            wait()
            done = time.perf_counter() - began
            row = {"stage": stage, "way": way, "round": number}
            row |= {"held_s": slowest(held), "done_s": slowest(done)}
            deepspeed.comm.barrier()
            if rank == 0:
                size = sum(path.stat().st_size for path in (volume / "t").rglob("*.*"))
                if number >= 0:
                    with (folder / "rows.jsonl").open("a") as out:
                        print(json.dumps(row | {"bytes": size}), file=out)
                for path in (volume / "t", *volume.glob(".ds_ckpt/links/*")):
                    shutil.rmtree(path, ignore_errors=True)
                for path in volume.glob(".ds_ckpt/outbox/*.json"):
                    path.unlink()
                os.sync()
            deepspeed.comm.barrier()
        order.shuffle(turns)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
