"""Hugging Face's Trainer with DeepSpeed ZeRO-2 and the hook; the lines it needs say ``# hook``.

::

    torchrun --nproc_per_node 2 huggingface.py --output-dir /checkpoints/run --steps 20

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
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from ds_ckpt_hook.integrations.huggingface import (  # hook
    CheckpointCallback,
    checkpoint_to_resume,
)

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at first use


def deepspeed_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }


class Sentences(torch.utils.data.Dataset):
    """The same ones whenever and wherever they are made."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Losses(TrainerCallback):
    """Prints each step's loss, to the last bit."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(json.dumps({"step": state.global_step, "loss": logs["loss"].hex()}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stop-after", type=int, help="end abruptly after this step")
    parser.add_argument("--save-steps", type=int, default=5)
    parser.add_argument("--save-total-limit", type=int)
    parser.add_argument("--finalize-timeout", type=float, help="seconds; default: no limit")
    parser.add_argument("--zero", type=int, default=2, help="ZeRO stage; 0: without DeepSpeed")
    options = parser.parse_args()

    args = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=options.save_steps,
        eval_strategy="steps",
        eval_steps=options.save_steps,
        save_total_limit=options.save_total_limit,
        deepspeed=deepspeed_config(options.zero) if options.zero else None,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == options.stop_after:
                os._exit(137)  # imitates a pod that is gone from one moment to the next

    trainer = Trainer(
        model,
        args,
        train_dataset=Sentences(),
        eval_dataset=torch.utils.data.Subset(Sentences(), range(8)),
        callbacks=[
            Losses(),
            CheckpointCallback(finalize_timeout=options.finalize_timeout),  # hook
            Stop(),
        ],
    )
    checkpoint = checkpoint_to_resume(args.output_dir)  # hook
    if args.process_index == 0:
        print(json.dumps({"resumes_from": checkpoint}), flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)  # torch aborts now and then while it tears its process group down at exit


if __name__ == "__main__":
    main()
