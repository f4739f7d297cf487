"""The hook in Lightning's Trainer: a companion of its ``ModelCheckpoint``.

With the DeepSpeed strategy a checkpoint is a folder ``epoch=0-step=10.ckpt`` with DeepSpeed's own
folder ``checkpoint`` in it, and is handed over whole. So is what FSDP saves in shards. Other
strategies write one file, which needs a folder of its own that ends in ``.ckpt``:
``ModelCheckpoint(filename="{epoch}-{step}.ckpt/model")``.

::

    folder = "/checkpoints/run"
    callbacks = [ModelCheckpoint(folder, every_n_train_steps=500), CheckpointCallback(folder)]
    trainer = Trainer(callbacks=callbacks, ...)
    trainer.fit(model, ckpt_path=checkpoint_to_resume(trainer, folder))

Lightning has no hook that all ranks come to once a checkpoint is written. So for the length of a
fit ``trainer.save_checkpoint``, which ``ModelCheckpoint`` calls on every rank, goes through here.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import ds_ckpt_hook
from ds_ckpt_hook import engines
from ds_ckpt_hook.feedback import FinalReport
from ds_ckpt_store.errors import SettingsError

logger = logging.getLogger("ds_ckpt_hook")

_SUFFIX = ".ckpt"


class CheckpointCallback(Callback):  # type: ignore[misc]  # untyped where not installed
    """Hands over each checkpoint of a fit, and waits at its end until all are durable.

    Every ``trainer.save_checkpoint`` into ``dirpath`` counts, whoever calls it, but for weights
    alone, which training cannot go on from. An exception ends the fit without the wait: what was
    handed over is uploaded all the same.

    Args:
        dirpath: that of the ``ModelCheckpoint``.
        kind: a word for retention rules, such as ``epoch`` or ``recovery``.
        finalize_timeout: seconds to wait at the end; None to wait as long as the sidecar is alive.

    Attributes:
        report: what :func:`ds_ckpt_hook.finalize` found; None before the end.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        *,
        kind: str = "checkpoint",
        finalize_timeout: float | None = None,
    ) -> None:
        self.report: FinalReport | None = None
        self._dirpath = os.path.realpath(dirpath)
        self._kind = kind
        self._timeout = finalize_timeout

    def setup(self, trainer: Trainer, _module: LightningModule, stage: str) -> None:
        """Called by Lightning on every rank; saves are handed over from now on."""
        if stage != "fit" or "save_checkpoint" in vars(trainer):
            return
        original = trainer.save_checkpoint

        @functools.wraps(original)
        def save_checkpoint(
            filepath: str | os.PathLike[str],
            weights_only: bool | None = None,
            *rest: Any,
            **more: Any,
        ) -> None:
            original(filepath, weights_only, *rest, **more)
            if not weights_only:
                self._hand_over(trainer, os.path.realpath(filepath))

        trainer.save_checkpoint = save_checkpoint

    def on_fit_end(self, _trainer: Trainer, _module: LightningModule) -> None:
        """Called by Lightning on every rank when the fit has come to its end."""
        self.report = ds_ckpt_hook.finalize(self._timeout)

    def teardown(self, trainer: Trainer, _module: LightningModule, stage: str) -> None:
        """Called by Lightning on every rank, after all else."""
        if stage == "fit":
            vars(trainer).pop("save_checkpoint", None)

    def _hand_over(self, trainer: Trainer, path: str) -> None:
        """Hand one checkpoint over. What is decided here must come out the same on all ranks."""
        inside = os.path.relpath(path, self._dirpath)
        why = _unfinished(trainer)
        if inside.split(os.sep, 1)[0] in (os.curdir, os.pardir):
            why = f"it lies outside of {self._dirpath}, the dirpath of the CheckpointCallback"
        if why:
            logger.warning("%s is not published: %s", path, why)
            return
        # Where a strategy writes a file, it lies on one node, and the others see nothing.
        if not os.path.isdir(path) and os.path.dirname(inside).endswith(_SUFFIX):
            path, inside = os.path.dirname(path), os.path.dirname(inside)
        elif os.path.isfile(path):
            logger.warning(
                "this strategy writes a checkpoint into one file: give each a folder, as by "
                'ModelCheckpoint(filename="{epoch}-{step}.ckpt/model")'
            )
        ds_ckpt_hook.after_save_dir(
            path,
            inside,
            step=trainer.global_step,
            metrics=dict(trainer.callback_metrics),
            kind=self._kind,
        )


def checkpoint_to_resume(
    trainer: Trainer,
    dirpath: str | os.PathLike[str],
    *,
    destination: str | None = None,
    timeout: float | None = None,
) -> str | None:
    """What to pass to ``trainer.fit(ckpt_path=...)``; None: start from scratch.

    Every rank calls it before ``fit``. It connects the ranks, as ``fit`` would, so they must have
    been started by ``torchrun`` or alike: those that Lightning starts itself are not there yet.
    Nodes that lack the checkpoint restore it; see :func:`ds_ckpt_hook.agree_on_resume`.

    Args:
        trainer: the one that will fit.
        dirpath: that of the ``ModelCheckpoint``.
        destination: URL of the store; ``DS_CKPT_DESTINATION`` if None.
        timeout: seconds that ranks wait while others verify or restore.

    Raises:
        SettingsError: Lightning would start the other ranks itself.
        AgreementError: no safe agreement; do not start training, restart all ranks.
    """
    if trainer.world_size > 1:
        if not trainer.strategy.cluster_environment.creates_processes_externally:
            raise SettingsError(
                f"the other {trainer.world_size - 1} ranks are not there before fit: start the "
                "script by torchrun, srun or alike instead of letting Lightning start them"
            )
        trainer.strategy.setup_environment()
    tag = ds_ckpt_hook.agree_on_resume(
        dirpath, destination=destination, timeout=timeout, folders=f"*{_SUFFIX}"
    )
    if tag is None:
        return None
    folder = os.path.join(dirpath, tag)
    files = [name for name in os.listdir(folder) if name.endswith(_SUFFIX)]
    return os.path.join(folder, files[0]) if len(files) == 1 else folder


def _unfinished(trainer: Trainer) -> str:
    """Why the files of a save are not there when ``save_checkpoint`` returns; empty if they are."""
    if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
        return "AsyncCheckpointIO has not written it when save_checkpoint returns; leave it out"
    engine = getattr(trainer.strategy, "deepspeed_engine", None)
    if engine is None or (not engines.refusal(engine) and engines.is_finished(engine)):
        return ""
    return (
        f"DeepSpeed's {type(engine.checkpoint_engine).__name__} has not finished it when "
        "save_checkpoint returns; leave checkpoint.writer out of its configuration"
    )
