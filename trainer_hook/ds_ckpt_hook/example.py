"""A small DeepSpeed training run with the hook: ``python -m ds_ckpt_hook.example``.

Runs on CPUs, with one process or under ``torchrun``. Everything is deterministic, so a run that
was interrupted and resumed can be compared with one that was not, loss by loss. The lines that a
training script needs are marked with ``# hook``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any, TextIO

import ds_ckpt_hook  # hook


def main(argv: list[str] | None = None) -> None:
    """Train; exit code 0 when all steps are done."""
    args = parser().parse_args(argv)
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo")
    engine = make_engine(deepspeed, args)
    if not args.no_hook:
        ds_ckpt_hook.attach(engine)  # hook
    report = Report(args.out)

    if args.resume:
        tag = ds_ckpt_hook.agree_on_resume(args.save_dir)  # hook
        loaded = engine.load_checkpoint(args.save_dir, tag)[0] if tag is not None else None
        report(loaded=loaded, tag=tag, global_steps=engine.global_steps)

    while engine.global_steps < args.steps:
        loss = train_step(engine, args.hidden)
        step = engine.global_steps
        report(step=step, loss=loss, loss_hex=loss.hex())
        if args.kill_after is not None and step >= args.kill_after:
            os._exit(137)  # imitates a pod that is gone from one moment to the next
        if args.save_every and step % args.save_every == 0:
            tag = args.tag_format.format(step=step)
            began = time.perf_counter()
            engine.save_checkpoint(args.save_dir, tag)
            seconds = time.perf_counter() - began
            if not args.no_hook:
                save = ds_ckpt_hook.after_save(engine, tag, save_dir=args.save_dir)  # hook
                report(
                    saved=tag,
                    save_seconds=seconds,
                    held_seconds=save.held_seconds,
                    save_id=save.save_id,
                )

    if not args.no_hook:
        final = ds_ckpt_hook.finalize(args.finalize_timeout)  # hook
        report(
            durable=final.durable,
            not_durable={standing.tag: standing.reason for standing in final.not_durable},
            finalize_seconds=final.seconds,
        )
    deepspeed.comm.barrier()
    # torch aborts now and then while it tears its process group down at exit.
    sys.stdout.flush()
    os._exit(0)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="ds_ckpt_hook.example", description=__doc__)
    made.add_argument("--save-dir", required=True, help="DeepSpeed's save_dir")
    made.add_argument("--steps", type=int, default=10, help="train until this global step")
    made.add_argument("--save-every", type=int, default=2, help="0: never")
    made.add_argument("--zero-stage", type=int, choices=range(4), default=2)
    made.add_argument("--hidden", type=int, default=64, help="width of the model")
    made.add_argument("--tag-format", default="global_step{step}")
    made.add_argument("--resume", action="store_true", help="resume from what all ranks agree on")
    made.add_argument("--no-hook", action="store_true", help="save with DeepSpeed alone")
    made.add_argument("--out", help="file for one JSON object per line, by rank 0; else stdout")
    made.add_argument("--kill-after", type=int, help="die abruptly after this step")
    made.add_argument("--finalize-timeout", type=float, help="seconds; default: no limit")
    made.add_argument("--node-local", action="store_true", help="each node has its own save_dir")
    return made


def import_deepspeed() -> Any:
    """DeepSpeed for CPUs, without the operators that it would compile at first use."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def make_engine(deepspeed: Any, args: argparse.Namespace) -> Any:
    """A small regression model with AdamW, the same on all ranks."""
    import torch

    torch.manual_seed(0)
    width = args.hidden
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 1),
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 1_000_000,
        "zero_optimization": {"stage": args.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"use_node_local_storage": args.node_local},
    }
    return deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config=config,
    )[0]


def train_step(engine: Any, width: int) -> float:
    """One step on data made of (step, rank) alone; the loss, averaged over the ranks."""
    import torch
    import torch.distributed as dist

    seed = 1000 * engine.global_steps + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4, width, generator=generator)
    loss = torch.nn.functional.mse_loss(engine(inputs), inputs.sum(-1, keepdim=True))
    engine.backward(loss)
    engine.step()
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return float(total.item() / dist.get_world_size())


class Report:
    """Writes one JSON object per line, from global rank 0 only."""

    def __init__(self, path: str | None) -> None:
        self._stream: TextIO | None = None
        if int(os.environ["RANK"]) == 0:
            self._stream = open(path, "a", encoding="utf-8") if path else sys.stdout  # noqa: SIM115

    def __call__(self, **fields: object) -> None:
        """Write one line, at once."""
        if self._stream is not None:
            print(json.dumps(fields), file=self._stream, flush=True)


if __name__ == "__main__":
    main()
