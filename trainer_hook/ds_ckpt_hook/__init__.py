"""Hands DeepSpeed checkpoints over to the sidecar, and agrees on what to resume from.

::

    ds_ckpt_hook.attach(engine)                    # sums while DeepSpeed writes: saves get faster
    tag = ds_ckpt_hook.agree_on_resume(save_dir)   # every rank; None: start from scratch
    if tag is not None:
        engine.load_checkpoint(save_dir, tag)
    ...
    engine.save_checkpoint(save_dir, tag)
    ds_ckpt_hook.after_save(engine, tag, save_dir=save_dir)   # every rank; returns at once
    ...
    ds_ckpt_hook.finalize()                        # every rank, at the end

A committed checkpoint can be read where it lies, without a restore::

    url = ds_ckpt_hook.history("s3://bucket/run").newest().url   # one rank asks, and tells the rest
    with ds_ckpt_hook.open(f"{url}/mp_rank_00_model_states.pt") as file:
        state = torch.load(file)
    torch.distributed.checkpoint.load(state, storage_reader=ds_ckpt_hook.dcp.Reader(url))

Importing this package imports neither torch nor deepspeed nor a cloud SDK. Messages go to the
logger ``ds_ckpt_hook``.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ds_ckpt_hook import (
    checkpoints,
    feedback,
    methods,
    resume,
    room,
    saving,
    sealing,
    subcheckpoints,
)
from ds_ckpt_hook.checkpoints import Checkpoint, History
from ds_ckpt_hook.core import Hook, Notice
from ds_ckpt_hook.errors import (
    AgreementError,
    ExchangeError,
    HookError,
    NotPublishedError,
    SubcheckpointError,
)
from ds_ckpt_hook.feedback import Committed, FinalReport, Save, Standing, Status
from ds_ckpt_hook.preemption import Preemption
from ds_ckpt_hook.settings import CHECKED, Settings, WhenFull, when_full
from ds_ckpt_store.errors import SettingsError

if TYPE_CHECKING:
    from ds_ckpt_hook import dcp

__all__ = [
    "AgreementError",
    "Checkpoint",
    "Committed",
    "ExchangeError",
    "FinalReport",
    "History",
    "HookError",
    "NotPublishedError",
    "Notice",
    "Preemption",
    "Save",
    "Settings",
    "Standing",
    "Status",
    "SubcheckpointError",
    "after_save",
    "after_save_dir",
    "agree_on_resume",
    "attach",
    "configure",
    "dcp",
    "finalize",
    "history",
    "last_committed",
    "on_notice",
    "on_preemption",
    "open",
    "ready_to_save",
    "status",
    "subcheckpoints",
    "wait",
]

logger = logging.getLogger("ds_ckpt_hook")
_process: dict[str, Hook] = {}


def configure(**overrides: Any) -> None:
    """Override settings that otherwise come from the environment; before any other call.

    Args:
        overrides: fields of :class:`Settings`, such as ``run_id`` or ``exchange_timeout``.

    Raises:
        SettingsError: there is no such setting, or the hook is at work already.
    """
    if _process:
        raise SettingsError("ds_ckpt_hook.configure comes too late: call it before anything else")
    known = {field.name for field in dataclasses.fields(Settings)}
    if unknown := sorted(set(overrides) - known):
        raise SettingsError(f"unknown settings {unknown}; known are {sorted(known)}")
    settings = dataclasses.replace(Settings.from_environ(os.environ), **overrides)
    _process["hook"] = Hook(settings)


def attach(engine: Any, *, keep_zip_sums: bool = False) -> bool:
    """Sum the shards of this engine while they are written. Optional, on each rank for itself.

    The engine's checkpoint engine stays in its place; each ``torch.save`` of it goes through a file
    of ours. ``after_save`` then reads no shard again, and what is damaged after it was written is
    found out before it counts as stored.

    From then on ``engine.save_checkpoint("s3://bucket/run", tag)`` writes below ``DS_CKPT_DIR`` and
    hands over, without ``after_save``, if the sidecar stores there; and
    ``engine.load_checkpoint("s3://bucket/run")`` agrees on what to resume from, brings what this
    node lacks, and loads it: on every rank, for any URL of a store. If a rank cannot, or ranks
    differ, all raise the same NotPublishedError before anything is written.

    Where ``DS_CKPT_WHEN_FULL`` is ``wait`` or ``skip``, each ``save_checkpoint`` first asks
    :func:`ready_to_save`; a save that is left out returns False, and ``after_save`` has nothing to
    do. Then every rank must have called ``attach``.

    Args:
        engine: the DeepSpeed engine.
        keep_zip_sums: let torch compute its own sums over the records of its zip files as well.
            ``torch.load`` does not look at them, ``unzip`` does; without them a save is faster.

    Returns:
        Whether shards are summed as they are written; False for checkpoint engines other than
        DeepSpeed's default, which are served as without ``attach``.
    """
    hook = _hook()
    methods.attach(engine, hook)
    return sealing.attach(engine, hook.seals, hook.fs, keep_zip_sums=keep_zip_sums)


def after_save(
    engine: Any,
    tag: object = None,
    *,
    save_dir: str | os.PathLike[str] | None = None,
    metrics: Mapping[str, float] | None = None,
    kind: str = "checkpoint",
    pin: bool = False,
    wait: bool = False,
    strict: bool = False,
) -> Save:
    """Hand over the checkpoint that ``engine.save_checkpoint`` has just written.

    Every rank calls it. It holds the training thread for a listing, one exchange between the
    ranks and hard links; checksums and publication follow in the background. If a rank failed or
    tags differ, nobody publishes, every rank logs a warning, and training goes on.

    Args:
        engine: the DeepSpeed engine.
        tag: what ``save_checkpoint`` was given; None for DeepSpeed's ``global_step<N>``.
        save_dir: what ``save_checkpoint`` was given; ``DS_CKPT_DIR`` if None.
        metrics: numbers to keep with the checkpoint; what is not finite is kept as null.
        kind: a word for retention rules, such as ``epoch`` or ``recovery``.
        pin: keep it for good.
        wait: return only when it is durable, or cannot become so.
        strict: raise instead of warn. What fails in the background is raised with ``wait`` only.

    Raises:
        CkptError: only with ``strict``; says which ranks failed, and why.
    """
    return saving.after_save(
        _hook(),
        engine,
        tag,
        save_dir=save_dir,
        metrics=metrics,
        kind=kind,
        pin=pin,
        wait=wait,
        strict=strict,
    )


def after_save_dir(
    path: str | os.PathLike[str],
    tag: object = None,
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    kind: str = "checkpoint",
    pin: bool = False,
    wait: bool = False,
    strict: bool = False,
) -> Save:
    """Hand over a folder, whoever wrote it: ``torch.save``, DCP, FSDP, another framework.

    Every rank calls it when it has written its own files; it waits for the others, and then goes
    on like :func:`after_save`. Every file in the folder and below it belongs to the save. On nodes
    with a volume each, that is what lies on any of them; a file that was restored counts only
    where no node has written it anew.

    Args:
        path: the folder; it may be missing on nodes that wrote nothing.
        tag: the end of ``path`` that names the checkpoint, such as ``a/b``; its last component if
            None. What is left of ``path`` is the save_dir that :func:`agree_on_resume` is given.
        step: how far training is.
        metrics: numbers to keep with the checkpoint; what is not finite is kept as null.
        kind: a word for retention rules, such as ``epoch`` or ``recovery``.
        pin: keep it for good.
        wait: return only when it is durable, or cannot become so.
        strict: raise instead of warn. What fails in the background is raised with ``wait`` only.

    Raises:
        CkptError: only with ``strict``; says which ranks failed, and why.
    """
    return saving.after_save_dir(
        _hook(),
        path,
        tag,
        step=step,
        metrics=metrics,
        kind=kind,
        pin=pin,
        wait=wait,
        strict=strict,
    )


def ready_to_save(
    size: int | None = None,
    *,
    save_dir: str | os.PathLike[str] | None = None,
    policy: WhenFull | None = None,
    timeout: float | None = None,
) -> bool:
    """Whether the volume of every node can take another checkpoint; the same answer on all ranks.

    Every rank calls it, before ``save_checkpoint``::

        if ds_ckpt_hook.ready_to_save():
            engine.save_checkpoint(save_dir, tag)
            ds_ckpt_hook.after_save(engine, tag, save_dir=save_dir)

    What counts is the filesystem and, where the sidecar knows it, the ``sizeLimit`` of the
    emptyDir, beyond which the pod would be evicted.

    Args:
        size: bytes that the save takes on this node; None for what the last one took.
        save_dir: where it will lie; ``DS_CKPT_DIR`` if None.
        policy: ``wait`` until the sidecar has made room, and leave the save out if it cannot;
            ``skip`` it at once; ``warn`` and save. ``DS_CKPT_WHEN_FULL`` if None.
        timeout: seconds that ``wait`` waits at most; ``DS_CKPT_ROOM_TIMEOUT`` if None.

    Raises:
        SettingsError: there is no such policy.
    """
    policy = when_full(policy) if policy is not None else None
    return room.ready_to_save(_hook(), size, save_dir=save_dir, policy=policy, timeout=timeout)


def status() -> Status:
    """Where the saves of this process stand. Asks only the volume; any rank, any time."""
    return feedback.status(_hook())


def last_committed() -> Committed | None:
    """The newest checkpoint of the run that is safe in the store, as far as the sidecar knows."""
    return status().last_committed


def wait(tag: object, timeout: float | None = None) -> Standing:
    """Wait until the newest save of a tag is durable, or cannot become so.

    Args:
        tag: of a save of this process.
        timeout: seconds to wait at most; None to wait as long as the sidecar is alive.

    Raises:
        SettingsError: this process has saved no such tag.
    """
    return feedback.wait(_hook(), str(tag), timeout)


def on_notice(listener: Callable[[Notice], None]) -> None:
    """Call ``listener`` with all that the hook warns of.

    A save that is not published or was lost, no sidecar, a lag over ``DS_CKPT_MAX_LAG``, a volume
    without room. Called on the training thread or on one of the hook's, on each node's lowest rank;
    for what only one rank knows, there. What it raises is logged.
    """
    _hook().listeners.append(listener)


def on_preemption(
    engine: Any,
    *,
    save_dir: str | os.PathLike[str] | None = None,
    client_state: Callable[[], Mapping[str, Any]] | None = None,
    grace: float | None = None,
) -> Preemption:
    """Save once more on all ranks when any of them is told to end: SIGTERM, or a cloud's notice.

    Every rank calls it once, on the main thread, after ``deepspeed.initialize``::

        preemption = ds_ckpt_hook.on_preemption(engine, save_dir=save_dir)
        for batch in data:
            engine.backward(engine(batch))
            engine.step()
            if preemption.should_stop():   # every rank, after each step; True at the same one
                break
        ds_ckpt_hook.finalize(timeout=preemption.seconds_left)

    The save has the kind ``recovery`` and the tag ``recovery_step<N>``, and the sidecar stores it
    before all others. It is left out, with a warning, if the time that is left is shorter than what
    the last save took to be written and stored.

    Args:
        engine: the DeepSpeed engine.
        save_dir: where to save; ``DS_CKPT_DIR`` if None.
        client_state: called on each rank for what ``save_checkpoint`` gets as ``client_state``.
        grace: seconds from SIGTERM to SIGKILL; ``DS_CKPT_GRACE`` if None.
    """
    return Preemption(_hook(), engine, save_dir=save_dir, client_state=client_state, grace=grace)


def finalize(timeout: float | None = None, *, strict: bool = False) -> FinalReport:
    """Tell the sidecar that training is over, and wait until all saves are durable.

    Every rank calls it, once, at the end.

    Args:
        timeout: seconds to wait at most; None to wait as long as the sidecar is alive.
        strict: raise if a save is not durable.

    Returns:
        Which saves are durable, and which are not and why.

    Raises:
        NotPublishedError: only with ``strict``.
    """
    return feedback.finalize(_hook(), timeout, strict=strict)


def agree_on_resume(
    save_dir: str | os.PathLike[str] | None = None,
    *,
    destination: str | None = None,
    timeout: float | None = None,
    folders: str | None = None,
) -> str | None:
    """The tag that all ranks resume from, or None for all: start from scratch.

    Every rank calls it, after ``deepspeed.init_distributed`` and before ``load_checkpoint``. All
    take the newest save that every node holds byte for byte, or that is committed in the store;
    nodes that lack it restore it. Checkpoints in save_dir that are newer, torn or unknown are
    moved to ``.ds_ckpt/aside/``, and DeepSpeed's ``latest`` names what was agreed on.

    Args:
        save_dir: where the checkpoints lie; ``DS_CKPT_DIR`` if None.
        destination: URL of the store; ``DS_CKPT_DESTINATION`` if None. Without one, only the
            volumes count.
        timeout: seconds that ranks wait while others verify or restore.
        folders: a pattern, relative to save_dir, of the folders that :func:`after_save_dir` is
            given, such as ``checkpoint-*``: one that was not handed over is moved aside as well.

    Raises:
        AgreementError: no safe agreement; do not start training, restart all ranks.
    """
    return resume.agree_on_resume(
        _hook(), save_dir, destination=destination, timeout=timeout, folders=folders
    )


def history(url: str, run_id: str | None = None, *, every: bool = False) -> History:
    """The checkpoints that a store holds, oldest first: to compare, pin and delete.

    It only reads, needs no other rank and no volume, and may be called anywhere. A store that does
    not answer is asked for up to two minutes.

    Args:
        url: of the store, as the agent's ``--destination``.
        run_id: only those of this run; None for all under the URL.
        every: also saves without a decision yet, and those that were abandoned or deleted.

    Returns:
        A snapshot, with ``newest()``, ``best(metric, mode)``, ``pin``, ``unpin`` and ``delete``.
        What could not be read is in its ``damaged``, and a warning in the log.

    Raises:
        SettingsError: the URL cannot work.
        MissingExtraError: a library is not installed.
        StoreError: the store could not be asked.
    """
    return checkpoints.history(url, run_id, every=every)


def open(url: str) -> io.BufferedReader:
    """Open a file of a committed checkpoint, to read and seek in, straight from its store.

    Bytes are fetched as they are read, through the cache that the node's ranks share
    (``DS_CKPT_CACHE``), and none is handed out that was not compared with the checkpoint's record.

    Args:
        url: ``<url of an entry of history>/<path>``, that is
            ``<destination>/<tag>@<save id>/<path>``.

    Raises:
        NothingCommittedError: there is no such checkpoint, or it is not committed.
        FileNotFoundError: it has no such file.
        SettingsError, MissingExtraError: the URL cannot work, or needs a library.
        StoreError: the store did not answer. Reads raise it, too, and DamagedError where the store
            holds other bytes than were committed.
    """
    from ds_ckpt_hook import opening

    return opening.open_file(url)


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for."""
    if name == "dcp":
        return importlib.import_module("ds_ckpt_hook.dcp")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _hook() -> Hook:
    if "hook" not in _process:
        try:
            settings = Settings.from_environ(os.environ)
        except SettingsError as error:
            # Found at the first save, perhaps hours into training: no reason to end it.
            logger.warning("%s; the usual settings are used instead", error)
            settings = Settings.from_environ(
                {k: v for k, v in os.environ.items() if k not in CHECKED}
            )
        _process["hook"] = Hook(settings)
    return _process["hook"]
