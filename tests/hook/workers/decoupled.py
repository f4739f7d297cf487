"""DeepSpeed's decoupled engine: files come at the next optimizer step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ds_ckpt_hook
from ds_ckpt_hook.example import train_step
from tests.hook.workers.common import Reporter, start


def main() -> None:
    folder = Path(sys.argv[1])
    deepspeed = start()
    import torch

    report = Reporter(folder)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"writer": {"type": "python", "decoupled": True, "data_parallel": "replica"}},
    }
    engine = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config
    )[0]
    save_dir = folder / "volume"
    train_step(engine, 16)
    for wanted in (1, 2):
        engine.save_checkpoint(str(save_dir))
        save = ds_ckpt_hook.after_save(engine, save_dir=save_dir)
        report(label="saved", step=wanted, save_id=save.save_id, reason=save.status().reason)
        train_step(engine, 16)
    train_step(engine, 16)
    engine.save_checkpoint(str(save_dir))
    ds_ckpt_hook.after_save(engine, save_dir=save_dir)
    final = ds_ckpt_hook.finalize(timeout=3)
    report(label="final", not_durable={s.tag: s.reason for s in final.not_durable})
    deepspeed.comm.barrier()
    engine.destroy()
    deepspeed.comm.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
