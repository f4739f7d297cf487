"""What the workers share: a small real DeepSpeed engine, and one line per fact."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import ds_ckpt_hook
from ds_ckpt_hook.example import import_deepspeed, make_engine, train_step

__all__ = ["Reporter", "engine", "leave", "start", "train_step"]


def start() -> Any:
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo")
    return deepspeed


def engine(deepspeed: Any, stage: int, *, node_local: bool = False) -> Any:
    args = argparse.Namespace(hidden=16, zero_stage=stage, node_local=node_local)
    made = make_engine(deepspeed, args)
    if os.environ.get("ATTACHED"):
        assert ds_ckpt_hook.attach(made)
    return made


class Reporter:
    def __init__(self, folder: Path) -> None:
        self._file = open(folder / f"rank{os.environ['RANK']}.jsonl", "w")  # noqa: SIM115

    def __call__(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self._file, flush=True)


def leave(deepspeed: Any) -> NoReturn:
    deepspeed.comm.barrier()
    sys.stdout.flush()
    os._exit(0)
