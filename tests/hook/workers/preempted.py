"""Two ranks train; rank 1 is sent SIGTERM in its third step."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import ds_ckpt_hook
from tests.hook.workers.common import Reporter, engine, leave, start, train_step

folder = Path(sys.argv[1])
deepspeed = start()
rank = deepspeed.comm.get_rank()
made = engine(deepspeed, 1)
save_dir = folder / "volume"
steps = 0
preemption = ds_ckpt_hook.on_preemption(
    made, save_dir=save_dir, client_state=lambda: {"batch": steps}
)
for steps in range(1, 20):
    train_step(made, 16)
    if steps == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if preemption.should_stop():
        break
ds_ckpt_hook.finalize(timeout=3)
_, state = made.load_checkpoint(str(save_dir), f"recovery_step{steps}")
Reporter(folder)(step=steps, client_state={"batch": state["batch"]})
leave(deepspeed)
