"""What ``attach`` changes of an engine's own methods: URLs for folders, and room before a save.

``engine.save_checkpoint("s3://bucket/run", tag)``: DeepSpeed writes to the volume as ever, and the
sidecar stores it where the URL says; ``engine.load_checkpoint("s3://...")`` brings what this node
lacks back onto the volume first. Before anything is written all ranks tell each other tag and URL,
and a sidecar that stores elsewhere: what one rank cannot do, none begins.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from typing import Any

from ds_ckpt_hook import resume, room, saving
from ds_ckpt_hook.core import Hook, reason_of
from ds_ckpt_hook.errors import NotPublishedError
from ds_ckpt_hook.feedback import sidecar_of
from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.", re.IGNORECASE)
_MARK = "_ds_ckpt_attached"


def attach(engine: Any, hook: Hook) -> None:
    """Change both methods of this engine; what we have nothing to say to goes on as before."""
    for name, method in (("save_checkpoint", _save), ("load_checkpoint", _load)):
        original = getattr(engine, name, None)
        if original is not None and getattr(original, _MARK, None) is not hook:
            setattr(engine, name, _changed(engine, hook, original, method))


def _changed(engine: Any, hook: Hook, original: Any, method: Any) -> Any:
    signature = inspect.signature(original)
    folder = next(iter(signature.parameters))

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments[folder]
        url = given.rstrip("/") if isinstance(given, str) and _URL.match(given) else None
        if url is not None:
            bound.arguments[folder] = hook.settings.directory
        return method(engine, hook, original, bound, folder, url)

    setattr(call, _MARK, hook)
    return call


def _save(
    engine: Any,
    hook: Hook,
    original: Any,
    call: inspect.BoundArguments,
    folder: str,
    url: str | None,
) -> Any:
    tag = call.arguments.get("tag")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    if url is not None:
        _agree(hook, "save", tag, url)
    save_dir = call.arguments[folder]
    if hook.settings.when_full != "warn" and not room.ready_to_save(hook, save_dir=save_dir):
        hook.left_out.add(tag)
        return False
    hook.left_out.discard(tag)
    result = original(*call.args, **call.kwargs)
    if url is not None:
        saving.after_save(hook, engine, tag, save_dir=save_dir, destination=url)
    return result


def _load(
    _engine: Any,
    hook: Hook,
    original: Any,
    call: inspect.BoundArguments,
    folder: str,
    url: str | None,
) -> Any:
    if url is None:
        return original(*call.args, **call.kwargs)
    tag = call.arguments.get("tag")
    tag = None if tag is None else str(tag)
    _agree(hook, "load", tag, url)
    agreed = resume.agree_on_resume(hook, call.arguments[folder], destination=url, tag=tag)
    if agreed is None:
        return None, None  # as DeepSpeed says that there is nothing
    call.arguments["tag"] = agreed
    return original(*call.args, **call.kwargs)


def _agree(hook: Hook, what: str, tag: str | None, url: str) -> None:
    """All ranks mean the same, and can do it.

    Raises:
        NotPublishedError: one does not, or cannot; the same on all ranks, and nothing was begun.
        ExchangeError: not every rank has called.
    """
    problem = ""
    try:
        problem = _refusal(hook, what, tag, url)
    except (CkptError, OSError) as error:
        problem = reason_of(error)
    told: list[tuple[str | None, str, str]] = hook.exchange.gather(
        f"{what}_checkpoint", (tag, url, problem)
    )
    problems = [f"rank {rank}: {said}" for rank, (_, _, said) in enumerate(told) if said]
    if problems:
        raise NotPublishedError(f"{what}_checkpoint({url!r}): {'; '.join(problems[:8])}")
    for index, kind in ((0, "tags"), (1, "URLs")):
        meant = [each[index] for each in told]
        if any(each != meant[0] for each in meant):
            listed = ", ".join(f"rank {rank}: {each!r}" for rank, each in enumerate(meant[:8]))
            raise NotPublishedError(f"{what}_checkpoint: the ranks gave different {kind}: {listed}")


def _refusal(hook: Hook, what: str, tag: str | None, url: str) -> str:
    """Why this rank cannot; empty if it can."""
    directory = hook.settings.directory
    if directory is None:
        return (
            "set DS_CKPT_DIR to where the volume is mounted that trainer and sidecar share: the "
            "checkpoint lies there on its way"
        )
    if tag is not None:
        names.check_tag(tag)
    if what == "load":
        return ""
    if not os.path.isdir(directory):
        return f"DS_CKPT_DIR is {directory}, and no such folder is mounted"
    sidecar = sidecar_of(Volume(directory, hook.fs))
    to = sidecar.destination if sidecar is not None else hook.settings.destination or ""
    if to and to.rstrip("/") != url:
        return (
            f"the sidecar stores what lies on {directory} at {to}: save there, or set the agent's "
            f"--destination (DS_CKPT_DESTINATION) to {url}"
        )
    return ""
