"""A loop of one's own with Accelerate, DeepSpeed ZeRO-2 and the hook; its lines say ``# hook``.

::

    torchrun --nproc_per_node 2 accelerate_loop.py --project-dir /checkpoints/run --steps 20

``--zero 0`` trains without DeepSpeed. Runs on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, ProjectConfiguration

import ds_ckpt_hook  # hook
from ds_ckpt_hook.integrations.accelerate import load_state, save_state  # hook

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at first use


class Progress:
    """What Accelerate does not know of: how far the loop is."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stop-after", type=int, help="end abruptly after this step")
    parser.add_argument("--save-steps", type=int, default=5)
    parser.add_argument("--total-limit", type=int, help="let Accelerate remove older checkpoints")
    parser.add_argument("--finalize-timeout", type=float, help="seconds; default: no limit")
    parser.add_argument("--zero", type=int, default=2, help="ZeRO stage; 0: without DeepSpeed")
    options = parser.parse_args()

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": options.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    accelerator = Accelerator(
        cpu=not options.zero,  # with it, Accelerate would leave DeepSpeed out
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config) if options.zero else None,
        project_config=ProjectConfiguration(
            project_dir=options.project_dir,
            automatic_checkpoint_naming=True,
            total_limit=options.total_limit,
        ),
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if options.zero:
        ds_ckpt_hook.attach(model)  # hook, optional: sums the shards while they are written
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    folder = load_state(accelerator)  # hook
    if accelerator.is_main_process:
        print(json.dumps({"resumes_from": folder}), flush=True)
    while progress.step < options.steps:
        seed = 1000 * progress.step + accelerator.process_index
        inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
        loss = (model(inputs) - inputs.sum(-1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        progress.step += 1
        mean = accelerator.reduce(loss.detach(), "mean").item()
        if accelerator.is_main_process:
            print(json.dumps({"step": progress.step, "loss": mean.hex()}), flush=True)
        if progress.step == options.stop_after:
            os._exit(137)  # imitates a pod that is gone from one moment to the next
        if progress.step % options.save_steps == 0:
            save_state(accelerator, step=progress.step, metrics={"loss": mean})  # hook
    ds_ckpt_hook.finalize(options.finalize_timeout)  # hook
    accelerator.wait_for_everyone()
    os._exit(0)  # torch aborts now and then while it tears its process group down at exit


if __name__ == "__main__":
    main()
