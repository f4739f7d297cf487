"""Two ranks on one volume that know no folder: a URL, as ``save_checkpoint`` is given it."""

from __future__ import annotations

import sys
from pathlib import Path

import ds_ckpt_hook
from tests.hook.workers.common import Reporter, engine, leave, start, train_step

folder, what, url = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
deepspeed = start()
rank = deepspeed.comm.get_rank()
made = engine(deepspeed, 2)
ds_ckpt_hook.attach(made)
report = Reporter(folder)
if what == "save":
    train_step(made, 16)
    try:
        made.save_checkpoint("s3://elsewhere/run" if rank else url, "apart")
    except ds_ckpt_hook.NotPublishedError as error:
        report(apart=str(error))
    made.save_checkpoint(url, "step1", client_state={"epoch": 7})
    report(loss=train_step(made, 16))
    ds_ckpt_hook.finalize(timeout=3)
else:
    for tag in (None, "step1"):
        path, state = made.load_checkpoint(url, tag)
        report(found=path is not None, epoch=state["epoch"], loss=train_step(made, 16))
leave(deepspeed)
