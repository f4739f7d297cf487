"""The hook with Accelerate: ``save_state`` and ``load_state`` of an Accelerator, with and without
DeepSpeed.

::

    accelerator = Accelerator(...)
    ...
    accelerator.register_for_checkpointing(progress)
    folder = load_state(accelerator, "/checkpoints/run")  # None: from scratch
    ...
    save_state(accelerator, f"/checkpoints/run/step{step}", step=step)
    ...
    ds_ckpt_hook.finalize()

With ``automatic_checkpoint_naming`` both go without a folder: Accelerate numbers its saves in
``project_dir/checkpoints``, and goes on counting after the one that was loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator

import ds_ckpt_hook
from ds_ckpt_hook.feedback import Save
from ds_ckpt_store.errors import SettingsError

_AUTOMATIC = "checkpoints"  # Accelerate's folder in project_dir; it lists nothing but saves there


def save_state(
    accelerator: Accelerator,
    output_dir: str | os.PathLike[str] | None = None,
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    kind: str = "checkpoint",
    pin: bool = False,
    wait: bool = False,
    strict: bool = False,
    **options: Any,
) -> Save:
    """``accelerator.save_state``, and the hand-over of what it has written. Every rank calls it.

    Args:
        accelerator: the Accelerator.
        output_dir: the folder of this checkpoint; None with ``automatic_checkpoint_naming`` only.
        step: how far training is.
        metrics: numbers to keep with the checkpoint; what is not finite is kept as null.
        kind: a word for retention rules, such as ``epoch`` or ``recovery``.
        pin: keep it for good.
        wait: return only when it is durable, or cannot become so.
        strict: raise instead of warn.
        options: for ``accelerator.save_state``.

    Raises:
        SettingsError: DeepSpeed is set to write after ``save_state`` has returned.
        CkptError: only with ``strict``; see :func:`ds_ckpt_hook.after_save_dir`.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None and plugin.hf_ds_config.get_value("checkpoint.writer.decoupled"):
        raise SettingsError(
            "DeepSpeed's decoupled writer has not finished when save_state returns: leave "
            "checkpoint.writer.decoupled out of its configuration"
        )
    folder = os.fspath(accelerator.save_state(output_dir, **options))
    return ds_ckpt_hook.after_save_dir(
        folder,
        f"{_AUTOMATIC}/{os.path.basename(folder)}" if _is_automatic(accelerator) else None,
        step=step,
        metrics=metrics,
        kind=kind,
        pin=pin,
        wait=wait,
        strict=strict,
    )


def load_state(
    accelerator: Accelerator,
    save_dir: str | os.PathLike[str] | None = None,
    *,
    destination: str | None = None,
    timeout: float | None = None,
    folders: str | None = None,
    **options: Any,
) -> str | None:
    """``accelerator.load_state`` of what all ranks agree on. Every rank calls it.

    Call it once all is prepared and registered. Nodes that lack the checkpoint restore it; see
    :func:`ds_ckpt_hook.agree_on_resume`.

    Args:
        accelerator: the Accelerator.
        save_dir: the folder above those that :func:`save_state` was given; with
            ``automatic_checkpoint_naming`` None, for the Accelerator's ``project_dir``.
        destination: URL of the store; ``DS_CKPT_DESTINATION`` if None.
        timeout: seconds that ranks wait while others verify or restore.
        folders: a pattern of the names of checkpoints in ``save_dir``, such as ``step*``.
        options: for ``accelerator.load_state``.

    Returns:
        The folder that was loaded; None if training starts from scratch.

    Raises:
        SettingsError: there is no ``save_dir``.
        AgreementError: no safe agreement; do not start training, restart all ranks.
    """
    automatic = _is_automatic(accelerator)
    if automatic:
        save_dir, folders = accelerator.project_dir, f"{_AUTOMATIC}/checkpoint_*"
    if save_dir is None:
        raise SettingsError("load_state needs save_dir: the folder above those of save_state")
    tag = ds_ckpt_hook.agree_on_resume(
        save_dir, destination=destination, timeout=timeout, folders=folders
    )
    if tag is None:
        return None
    folder = os.path.join(save_dir, tag)
    accelerator.load_state(folder, **options)
    if automatic:
        accelerator.project_configuration.iteration = int(folder.rsplit("_", 1)[1]) + 1
    return folder


def _is_automatic(accelerator: Accelerator) -> bool:
    return bool(accelerator.project_configuration.automatic_checkpoint_naming)
