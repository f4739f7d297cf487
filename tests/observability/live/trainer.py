"""A DeepSpeed trainer at a human pace, led by files: ``python -m ...live.trainer``.

It trains as the hook's example does, a few steps a second. The folder that it is given holds
``interval``, the seconds between two saves, and may hold ``lose``, upon which the next save loses
a file before the hook sees it, and ``end``. Rank 0 reads them; all ranks do the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ds_ckpt_hook
from ds_ckpt_hook import example

STEP_SECONDS = 0.2


def main() -> None:
    args = parser().parse_args()
    deepspeed = example.import_deepspeed()
    deepspeed.init_distributed("gloo")
    engine = example.make_engine(deepspeed, args)
    tag = ds_ckpt_hook.agree_on_resume(args.save_dir)
    if tag is not None:
        engine.load_checkpoint(args.save_dir, tag)
    say(resumed=tag, step=engine.global_steps)
    saved = time.monotonic()
    while (told := agree(lead(args.gate, saved))) != "end":
        example.train_step(engine, args.hidden)
        if told == "train":
            time.sleep(STEP_SECONDS)
            continue
        saved = time.monotonic()
        save(engine, args.save_dir, lose=told == "lose")
    final = ds_ckpt_hook.finalize(args.finalize_timeout)
    say(durable=final.durable, not_durable=[each.tag for each in final.not_durable])
    deepspeed.comm.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch aborts now and then while it tears its process group down at exit


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--gate", type=Path, required=True)
    made.add_argument("--save-dir", required=True)
    made.add_argument("--hidden", type=int, default=768)
    made.add_argument("--finalize-timeout", type=float, default=60)
    made.set_defaults(zero_stage=2, node_local=True)
    return made


def lead(gate: Path, saved: float) -> str:
    """What rank 0 wants to be done now; the others' wish counts for nothing."""
    if int(os.environ["RANK"]):
        return ""
    if (gate / "end").exists():
        return "end"
    if time.monotonic() - saved < float((gate / "interval").read_text()):
        return "train"
    if (gate / "lose").exists():
        (gate / "lose").unlink()
        return "lose"
    return "save"


def agree(wish: str) -> str:
    """What rank 0 wants."""
    import torch.distributed as dist

    told = [wish]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def save(engine: Any, save_dir: str, *, lose: bool) -> None:
    """Save and hand over; ``lose`` a file of rank 0's in between, as a careless clean-up does."""
    tag = f"global_step{engine.global_steps}"
    engine.save_checkpoint(save_dir, tag)
    if lose and int(os.environ["RANK"]) == 0:
        for path in Path(save_dir, tag).glob("*optim_states.pt"):
            path.unlink()
    made = ds_ckpt_hook.after_save(engine, tag, save_dir=save_dir)
    say(saved=tag, save_id=made.save_id, reason=made.status().reason)


def say(**fields: object) -> None:
    print(json.dumps({"time": time.time(), **fields}), flush=True)


if __name__ == "__main__":
    main()
