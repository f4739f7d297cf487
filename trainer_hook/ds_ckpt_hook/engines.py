"""Checkpoint engines that are not done when ``save_checkpoint`` returns.

With a decoupled engine the files, and DeepSpeed's ``latest``, come at the next optimizer step,
where all ranks commit together. Such a save is remembered and taken at the first call of the hook
after that: ``after_save``, ``finalize``, or the model's next forward pass, where a hook of ours
looks once and goes away when there is nothing left to wait for. All ranks pass these points
in the same order, so they take the save in the same exchange.

An engine that never says when it is done (DataStates up to DeepSpeed 0.19, whose ``step`` sees no
commit) or that leaves stubs in place of shards (Nebula) is refused with a warning. Guessing would
upload half a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REMEDY = (
    'use DeepSpeed\'s default checkpoint engine, or "checkpoint": {"writer": {"decoupled": '
    "true}} of DeepSpeed 0.18 or newer"
)


def refusal(engine: Any) -> str:
    """Why saves of this engine cannot be taken; empty if they can."""
    writer = getattr(engine, "checkpoint_engine", None)
    if writer is None:
        return ""
    name = type(writer).__name__
    if "Nebula" in name:
        return f"{name} leaves stubs where the shards should be: {REMEDY}"
    if not is_decoupled(engine):
        return ""
    inherited = getattr(_base_of(writer), "get_commit_info", None)
    if getattr(type(writer), "get_commit_info", None) in (None, inherited):
        return f"{name} does not say when its files are finished: {REMEDY}"
    return ""


def is_decoupled(engine: Any) -> bool:
    """Whether files are still written when ``save_checkpoint`` has returned."""
    asked = getattr(getattr(engine, "checkpoint_engine", None), "is_decoupled", None)
    return bool(asked()) if callable(asked) else False


def is_finished(engine: Any) -> bool:
    """Whether all files of the last save are in place; for engines that are not refused."""
    writer = getattr(engine, "checkpoint_engine", None)
    return writer is None or not is_decoupled(engine) or writer.get_commit_info() is None


def call_before_forward(engine: Any, look: Callable[[], bool]) -> None:
    """Call ``look`` before each forward pass of the model, until it says True."""
    handle: Any = None

    def before(_module: Any, _inputs: Any) -> None:
        if look() and handle is not None:
            handle.remove()

    module = getattr(engine, "module", None)
    if module is not None and hasattr(module, "register_forward_pre_hook"):
        handle = module.register_forward_pre_hook(before)


def _base_of(writer: Any) -> type | None:
    return next((k for k in type(writer).__mro__ if k.__name__ == "CheckpointEngine"), None)
