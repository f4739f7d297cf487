"""A DeepSpeed trainer that a test leads step by step: ``python -m tests.kubernetes.pods.trainer``.

It trains as the hook's example does. The folder that it is given holds ``steps``, the step up to
which it may go now, and ``end`` when it may end; into ``saved`` each rank writes the checksums of
what it has saved, before the hook or the sidecar has seen any of it: the truth to judge by.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ds_ckpt_hook
from ds_ckpt_hook import example
from ds_ckpt_store.contract.filesystem import Filesystem

POLL = 0.02


def main() -> None:
    args = parser().parse_args()
    os.umask(int(args.umask, 8))
    told = Told()
    if args.on_term != "nothing":
        signal.signal(signal.SIGTERM, told)
    if args.no_widening:
        Filesystem.let_group_in = lambda *_: None  # type: ignore[method-assign,assignment,misc]
    deepspeed = example.import_deepspeed()
    deepspeed.init_distributed("gloo")
    engine = example.make_engine(deepspeed, args)
    rank = int(os.environ["RANK"])
    tag = ds_ckpt_hook.agree_on_resume(args.save_dir)
    if tag is not None:
        engine.load_checkpoint(args.save_dir, tag)
    say(resumed=tag, step=engine.global_steps, rank=rank)
    save_at = {int(step) for step in args.save_at.split(",")}
    while engine.global_steps < args.steps:
        while allowed(args.gate) <= engine.global_steps:
            time.sleep(POLL)
            if told.now:
                heed(engine, args, rank)
                told.now = False
        loss = example.train_step(engine, args.hidden)
        say(step=engine.global_steps, loss=loss.hex(), rank=rank)
        if engine.global_steps in save_at:
            save(engine, args, f"step{engine.global_steps}", rank)
    while not (args.gate / "end").exists():
        time.sleep(POLL)
        if told.now:
            heed(engine, args, rank)
            told.now = False
    final = ds_ckpt_hook.finalize(args.finalize_timeout)
    say(
        durable=final.durable,
        not_durable={standing.tag: standing.reason for standing in final.not_durable},
    )
    deepspeed.comm.barrier()
    leave(0)


class Told:
    """Notes that SIGTERM came."""

    now = False

    def __call__(self, *_: object) -> None:
        self.now = True


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--gate", type=Path, required=True)
    made.add_argument("--save-dir", default=os.environ.get("DS_CKPT_DIR"))
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--save-at", default="2,4", help="steps after which it saves")
    made.add_argument("--hidden", type=int, default=512)
    made.add_argument("--umask", default="022")
    made.add_argument("--no-widening", action="store_true", help="as an earlier hook, or none")
    made.add_argument("--on-term", choices=("exit", "save", "nothing"), default="exit")
    made.add_argument("--finalize-timeout", type=float, default=60)
    made.set_defaults(zero_stage=2, node_local=True)
    return made


def heed(engine: Any, args: argparse.Namespace, rank: int) -> None:
    """What it does when it is told to end."""
    if args.on_term == "save":
        save(engine, args, "last-words", rank)
    else:
        say(ends="told to")
        leave(143)


def allowed(gate: Path) -> int:
    """The step up to which it may go."""
    try:
        return int((gate / "steps").read_text() or 0)
    except FileNotFoundError:
        return 0


def save(engine: Any, args: argparse.Namespace, tag: str, rank: int) -> None:
    engine.save_checkpoint(args.save_dir, tag)
    folder = Path(args.save_dir) / tag
    files = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
    modes = sorted({oct(path.stat().st_mode & 0o777) for path in folder.rglob("*")})
    made = ds_ckpt_hook.after_save(engine, tag, save_dir=args.save_dir)
    truth = {"tag": tag, "files": files, "modes": modes}
    part = args.gate / "saved" / f".{made.save_id}.{rank}"
    part.write_text(json.dumps(truth))
    part.rename(part.with_name(f"{made.save_id}.{rank}.json"))
    say(saved=tag, save_id=made.save_id, rank=rank)


def say(**fields: object) -> None:
    print(json.dumps({"time": time.time(), **fields}), flush=True)


def leave(code: int) -> None:
    """torch aborts now and then while it tears its process group down at exit."""
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
