"""Lightning's Trainer with its DeepSpeed strategy (ZeRO-2) and the hook; its lines say ``# hook``.

::

    torchrun --nproc_per_node 2 lightning_fit.py --dirpath /checkpoints/run --steps 20

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
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from ds_ckpt_hook.integrations.lightning import CheckpointCallback, checkpoint_to_resume  # hook

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at first use


class OnCpu(DeepSpeedStrategy):
    """Lightning refuses DeepSpeed without a GPU; this is what it does otherwise."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Model(LightningModule):
    def __init__(self, stop_after: int | None) -> None:
        super().__init__()
        self.stop_after = stop_after
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )

    def training_step(self, _batch: torch.Tensor, _index: int) -> torch.Tensor:
        step = self.global_step + 1
        # Lightning reads an epoch from its begin when it resumes: here a batch is the step's own
        seed = 1000 * step + self.global_rank
        batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
        loss = (self.layers(batch) - batch.sum(-1, keepdim=True)).square().mean()
        self.log("train_loss", loss, sync_dist=True)
        mean = self.all_gather(loss.detach()).mean().item()
        if self.global_rank == 0:
            print(json.dumps({"step": step, "loss": mean.hex()}), flush=True)
        if step == self.stop_after:
            os._exit(137)  # imitates a pod that is gone from one moment to the next
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dirpath", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stop-after", type=int, help="end abruptly in this step")
    parser.add_argument("--save-steps", type=int, default=5)
    parser.add_argument("--save-top-k", type=int, default=-1, help="let Lightning remove others")
    parser.add_argument("--finalize-timeout", type=float, help="seconds; default: no limit")
    parser.add_argument("--zero", type=int, default=2, help="ZeRO stage; 0: without DeepSpeed")
    options = parser.parse_args()

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": options.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    checkpoints = ModelCheckpoint(
        options.dirpath,
        # DeepSpeed makes a folder of it, others a file, which needs a folder of its own
        filename="{epoch}-{step}" if options.zero else "{epoch}-{step}.ckpt/model",
        every_n_train_steps=options.save_steps,
        save_top_k=options.save_top_k,
        monitor="step",
        mode="max",
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1),
        strategy=OnCpu(config=config, process_group_backend="gloo") if options.zero else "auto",
        max_steps=options.steps,
        callbacks=[
            checkpoints,
            CheckpointCallback(  # hook
                options.dirpath, finalize_timeout=options.finalize_timeout
            ),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    seed_everything(0, verbose=False)
    data = torch.utils.data.DataLoader(range(options.steps * 2))
    checkpoint = checkpoint_to_resume(trainer, options.dirpath)  # hook
    if trainer.global_rank == 0:
        print(json.dumps({"resumes_from": checkpoint}), flush=True)
    trainer.fit(Model(options.stop_after), data, ckpt_path=checkpoint)
    trainer.strategy.barrier()
    os._exit(0)  # torch aborts now and then while it tears its process group down at exit


if __name__ == "__main__":
    main()
