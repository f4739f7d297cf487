"""Two ranks that save with torch's distributed checkpoints, or load such, or safetensors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ds_ckpt_hook
from ds_ckpt_store.contract.filesystem import Filesystem
from tests.hook.workers.common import Reporter

ROWS = 4096
phase, folder = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
report = Reporter(folder)


def state(fill: int) -> dict[str, Any]:
    """What ``tests/hook/reading/test_distributed.py`` expects, or nothing of it."""
    weights = (torch.arange(ROWS * 1024, dtype=torch.float32) * fill).reshape(ROWS, 1024)
    return {
        "rows": distribute_tensor(weights, mesh, [Shard(0)]),
        "columns": distribute_tensor(weights[:64].clone(), mesh, [Shard(1)]),
        "same": torch.arange(1_500_000, dtype=torch.int32) * fill,
        "step": 7 * fill,
    }


def is_same(found: dict[str, Any]) -> bool:
    expected = state(1)
    for name in ("rows", "columns"):
        if not torch.equal(found[name].to_local(), expected[name].to_local()):
            return False
    return torch.equal(found["same"], expected["same"])


if phase == "save":
    volume = folder / "volume"
    for tag in ("step-7", "step-8"):
        writer = ds_ckpt_hook.dcp.Writer(volume, tag)
        if tag == "step-7":
            dcp.save(state(1), storage_writer=writer)
        else:
            dcp.async_save(state(1), storage_writer=writer).result()
        save = writer.hand_over(step=int(tag[-1]), strict=True)
        assert ds_ckpt_hook._hook().worker.drain(60)
        seals, fs = ds_ckpt_hook._hook().seals, Filesystem()
        mine = [f"__{rank}_0.distcp", *([".metadata"] if rank == 0 else [])]
        states = [fs.stat(f"{volume}/{tag}/{name}") for name in mine]
        summed = [each is not None and seals.of(each) is not None for each in states]
        report(tag=tag, save_id=save.save_id, summed=summed)
else:
    for label, url in zip(("dcp", "safetensors"), sys.argv[3:], strict=True):
        found = state(0)
        if label == "safetensors":
            del found["step"]
        reader = ds_ckpt_hook.dcp.Reader(url)
        dcp.load(found, storage_reader=reader)
        reader.close()
        report(label=label, same=is_same(found), step=found.get("step"))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
