"""Two nodes of one rank each, with node-local storage: ZeRO 1 and 3."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ds_ckpt_hook
from tests.hook.workers.common import Reporter, engine, leave, start, train_step

folder = Path(sys.argv[1])
deepspeed = start()
rank = int(os.environ["RANK"])
report = Reporter(folder)
for stage in (1, 3):
    save_dir = folder / f"zero{stage}" / f"node{rank}"
    report(label=f"resume{stage}", tag=ds_ckpt_hook.agree_on_resume(save_dir))
    made = engine(deepspeed, stage, node_local=True)
    train_step(made, 16)
    made.save_checkpoint(str(save_dir))
    save = ds_ckpt_hook.after_save(made, save_dir=save_dir)
    report(label=f"zero{stage}", save_id=save.save_id)
final = ds_ckpt_hook.finalize(timeout=3)
report(label="final", not_durable=[standing.reason for standing in final.not_durable])
leave(deepspeed)
