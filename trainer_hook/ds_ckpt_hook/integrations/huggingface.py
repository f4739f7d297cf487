"""The hook in Hugging Face's Trainer, with DeepSpeed and without.

The Trainer saves into ``output_dir/checkpoint-<N>``: DeepSpeed's ``global_step<N>`` inside it, and
beside that the state of the trainer, of each rank's random numbers and of the scheduler. All of it
is what ``resume_from_checkpoint`` needs, so the folder is handed over whole. The Trainer's own
rotation (``save_total_limit``) may remove it before it is uploaded: hard links keep its bytes.

::

    args = TrainingArguments(output_dir="/checkpoints/run", save_steps=500, ...)
    trainer = Trainer(model, args, callbacks=[CheckpointCallback()], ...)
    trainer.train(resume_from_checkpoint=checkpoint_to_resume(args.output_dir))
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import ds_ckpt_hook
from ds_ckpt_hook.feedback import FinalReport

logger = logging.getLogger("ds_ckpt_hook")


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # untyped where not installed
    """Hands over each checkpoint of the Trainer, and waits at the end until all are durable.

    An exception in training ends it without that: what was handed over is uploaded all the same.

    Args:
        kind: a word for retention rules, such as ``epoch`` or ``recovery``.
        finalize_timeout: seconds to wait at the end; None to wait as long as the sidecar is alive.

    Attributes:
        report: what :func:`ds_ckpt_hook.finalize` found; None before the end.
    """

    def __init__(self, *, kind: str = "checkpoint", finalize_timeout: float | None = None) -> None:
        self.report: FinalReport | None = None
        self._kind = kind
        self._timeout = finalize_timeout

    def on_save(
        self, args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        """Called by the Trainer on every rank after it has saved."""
        if _is_decoupled(args):
            logger.warning(
                "checkpoint-%d is not published: DeepSpeed's decoupled writer has not finished it "
                "when the Trainer has saved; leave checkpoint.writer.decoupled out of its "
                "configuration",
                state.global_step,
            )
            return
        ds_ckpt_hook.after_save_dir(
            os.path.join(args.output_dir, f"checkpoint-{state.global_step}"),
            step=state.global_step,
            metrics=newest_evaluation(state.log_history),
            kind=self._kind,
        )

    def on_train_end(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        """Called by the Trainer on every rank when training has come to its end."""
        self.report = ds_ckpt_hook.finalize(self._timeout)


def checkpoint_to_resume(
    output_dir: str | os.PathLike[str],
    *,
    destination: str | None = None,
    timeout: float | None = None,
) -> str | None:
    """What to pass to ``trainer.train(resume_from_checkpoint=...)``; None: start from scratch.

    Every rank calls it, once its ``TrainingArguments`` are made: they connect the ranks. Nodes
    that lack the checkpoint restore it; see :func:`ds_ckpt_hook.agree_on_resume`.

    Args:
        output_dir: that of the ``TrainingArguments``.
        destination: URL of the store; ``DS_CKPT_DESTINATION`` if None.
        timeout: seconds that ranks wait while others verify or restore.

    Raises:
        AgreementError: no safe agreement; do not start training, restart all ranks.
    """
    tag = ds_ckpt_hook.agree_on_resume(
        output_dir, destination=destination, timeout=timeout, folders="checkpoint-*"
    )
    return None if tag is None else os.path.join(output_dir, tag)


def newest_evaluation(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of the newest evaluation in a Trainer's ``log_history``; empty without one."""
    for entry in reversed(history):
        if found := {name: entry[name] for name in entry if name.startswith("eval_")}:
            return found
    return {}


def _is_decoupled(args: TrainingArguments) -> bool:
    config = getattr(args, "hf_deepspeed_config", None)
    return config is not None and bool(config.get_value("checkpoint.writer.decoupled"))
