"""Two ranks on one volume: every ZeRO stage, odd tags, a failing rank, a rank that never calls."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import ds_ckpt_hook
from tests.hook.workers.common import Reporter, engine, leave, start, train_step

folder = Path(sys.argv[1])
deepspeed = start()
rank = deepspeed.comm.get_rank()
report = Reporter(folder)

for stage in range(4):
    made = engine(deepspeed, stage)
    train_step(made, 16)
    save_dir = folder / f"zero{stage}"
    made.save_checkpoint(str(save_dir))
    save = ds_ckpt_hook.after_save(made, save_dir=save_dir)
    report(label=f"zero{stage}", tag=save.tag, save_id=save.save_id)
    if stage == 1:
        one = made

save_dir = folder / "tags"
for label, tag in (("int", 7), ("slash", "run/a/step1"), ("unicode", "ü 1%+"), ("float", 1.5)):
    one.save_checkpoint(str(save_dir), tag)
    save = ds_ckpt_hook.after_save(one, tag, save_dir=save_dir)
    report(label=label, tag=save.tag, save_id=save.save_id)

one.save_checkpoint(str(save_dir), f"rank{rank}")
save = ds_ckpt_hook.after_save(one, f"rank{rank}", save_dir=save_dir)
report(label="per rank", save_id=save.save_id, reason=save.status().reason)

one.save_checkpoint(str(save_dir), "short")
deepspeed.comm.barrier()
if rank == 1:
    (save_dir / "short" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
save = ds_ckpt_hook.after_save(one, "short", save_dir=save_dir)
report(label="short", save_id=save.save_id, reason=save.status().reason)

report(label="loss", value=train_step(one, 16))
one.save_checkpoint(str(save_dir), "after")
save = ds_ckpt_hook.after_save(one, "after", save_dir=save_dir)
report(label="after", save_id=save.save_id, reason=save.status().reason)
ds_ckpt_hook.finalize(timeout=3)

one.save_checkpoint(str(save_dir), "alone")
if rank == 0:
    for label in ("alone", "again"):
        began = time.monotonic()
        save = ds_ckpt_hook.after_save(one, "alone", save_dir=save_dir)
        seconds = time.monotonic() - began
        report(label=label, seconds=seconds, reason=save.status().reason)
deepspeed.comm.barrier()
if rank == 1:
    save = ds_ckpt_hook.after_save(one, "alone", save_dir=save_dir)
    report(label="late", reason=save.status().reason)
report(label="loss", value=train_step(one, 16))
leave(deepspeed)
