"""Sub-checkpoints: what DeepSpeed would write into files, handed to a writer of the user's.

::

    def writer(sub):                       # a context manager that gives a binary stream
        return store.open(f"{sub.tag}/{sub.key}", "wb")

    ds_ckpt_hook.subcheckpoints.save(engine, writer, tag="step1000")      # every rank
    client_state = ds_ckpt_hook.subcheckpoints.load(engine, reader, tag="step1000")

DeepSpeed writes a checkpoint by its checkpoint engine, a public attribute that it reads at each
call. For the length of one ``save_checkpoint`` a stand-in takes its place and streams each state
dict to the user's writer; another loads. Nothing else of DeepSpeed is touched. Global rank 0 writes
the index last, through the same writer, so a set without one is not complete.

A rank that fails must not leave the others in DeepSpeed's own collectives, some of which wait for
half an hour. So all ranks tell each other what they are about to do before DeepSpeed begins; the
stand-in keeps an error of the writer to itself until DeepSpeed is done on all ranks; and a load
reads and checks all bytes, on all ranks, before DeepSpeed sees the first.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from ds_ckpt_hook import engines
from ds_ckpt_hook.core import Hook, reason_of
from ds_ckpt_hook.errors import AgreementError, ExchangeError, SubcheckpointError
from ds_ckpt_hook.subindex import (
    Entry,
    Index,
    Opener,
    Ranks,
    Role,
    Subcheckpoint,
    Topology,
    locate,
)
from ds_ckpt_hook.substreams import fetch, hand_over, read_up_to, send, take_over
from ds_ckpt_store.contract.digest import crc32c, to_hex
from ds_ckpt_store.contract.manifest import MAX_DOCUMENT_BYTES, parse

__all__ = ["Opener", "Ranks", "Role", "Subcheckpoint", "Topology", "load", "save"]

T = TypeVar("T")


def save(
    engine: Any,
    writer: Opener,
    *,
    tag: object = None,
    client_state: Mapping[str, Any] | None = None,
) -> None:
    """Hand all sub-checkpoints of this engine to ``writer``. Every rank calls it.

    Args:
        engine: the DeepSpeed engine.
        writer: called with each :class:`Subcheckpoint` of this rank, and at last, on global rank 0,
            with the index. Its stream gets ``bytes``, in order. It is left with an exception if the
            writing failed. It runs between DeepSpeed's own barriers, which bound it.
        tag: name of the checkpoint; None for DeepSpeed's ``global_step<N>``.
        client_state: anything that can be pickled; :func:`load` returns it.

    Raises:
        SubcheckpointError: it is not complete, for what any rank met; the same on all ranks.
        ExchangeError: not every rank called it, or one is gone, or the ranks talk no longer. It is
            complete if it has an index.
    """
    hook = _hook()
    with contextlib.ExitStack() as stack:
        (about, folder), abouts = _together(
            hook,
            "save",
            lambda: (_about(engine, tag, client_state), _folder(stack)),
            lambda made: replace(made[0], client_state={}),
            otherwise="nothing was saved",
        )
        for what in ("tag", "step", "topology"):
            if clash := _clash([getattr(each, what) for each in abouts]):
                raise SubcheckpointError(f"nothing was saved: the ranks differ in {what}: {clash}")
        otherwise = f"checkpoint {about.tag!r} has no index, and is not complete"
        _, entries = _together(
            hook,
            "written",
            lambda: hand_over(engine, writer, about, folder, hook.exchange.rank),
            lambda written: written,
            otherwise=otherwise,
        )
    index, _ = _together(
        hook,
        "complete",
        lambda: _index_of(about, abouts, entries, hook.exchange.rank),
        otherwise=otherwise,
    )
    _together(
        hook,
        "index",
        lambda: _write_index(writer, about, index, hook.exchange.rank),
        otherwise=otherwise,
        timeout=hook.settings.publish_timeout,
    )


def load(engine: Any, reader: Opener, *, tag: object = None) -> dict[str, Any]:
    """Load what :func:`save` has saved. Every rank calls it, with the topology of the save.

    A rank reads the index and what it needs into a temporary folder (``TMPDIR``), and checks it.
    Only when all ranks have done so is the engine touched.

    Args:
        engine: the DeepSpeed engine; of ZeRO stage 3, one that has not saved yet.
        reader: called with the :class:`Subcheckpoint` of the index, then with each that this rank
            needs, with what its writer was called with.
        tag: name of the checkpoint; None if the reader knows where to find it.

    Returns:
        The client state of the save; of the first of those that share a model, unless ZeRO divides
        it.

    Raises:
        SubcheckpointError: it cannot be loaded, for what any rank met; the same on all ranks. It
            says if the engine was touched.
        AgreementError: the ranks read different checkpoints; nothing was touched.
        ExchangeError: not every rank called it, or the ranks talk no longer.
    """
    hook = _hook()
    rank, patience = hook.exchange.rank, hook.settings.resume_timeout
    untouched = "nothing was loaded, and the engine is as it was"
    with contextlib.ExitStack() as stack:
        (folder, index), sums = _together(
            hook,
            "load",
            lambda: (_folder(stack), _read_index(engine, reader, tag, rank)),
            lambda made: to_hex(crc32c(made[1].to_bytes())),
            otherwise=untouched,
            timeout=patience,
        )
        if clash := _clash(sums):
            raise AgreementError(f"{untouched}: the ranks read different indexes: {clash}")
        _together(
            hook,
            "read",
            lambda: fetch(index, rank, reader, folder),
            otherwise=untouched,
            timeout=patience,
        )
        loaded, _ = _together(
            hook,
            "loaded",
            lambda: take_over(engine, folder),
            otherwise="the engine may be loaded in part: start all ranks anew",
            timeout=patience,
        )
    return loaded


# ---- what both begin with


def _hook() -> Hook:
    import ds_ckpt_hook

    return ds_ckpt_hook._hook()


def _together(
    hook: Hook,
    step: str,
    call: Callable[[], T],
    tell: Callable[[T], Any] = lambda _: None,
    *,
    otherwise: str,
    timeout: float | None = None,
) -> tuple[T, list[Any]]:
    """Do something on every rank, and go on only if it went well on all.

    Returns:
        What came of it on this rank, and what each rank tells of it.

    Raises:
        SubcheckpointError: it failed on a rank; begins with ``otherwise``.
        ExchangeError: not every rank came.
    """
    result, word, problem, cause = None, None, "", None
    try:
        result = call()
        word = tell(result)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's word
        problem, cause = reason_of(error), error
    try:
        answers = hook.exchange.gather(f"subcheckpoints: {step}", (word, problem), timeout=timeout)
    except ExchangeError as error:
        if cause is None:
            raise
        raise SubcheckpointError(f"{otherwise}: {problem}; and {error}") from cause
    problems = [f"rank {rank}: {said}" for rank, (_, said) in enumerate(answers) if said]
    if problems:
        raise SubcheckpointError(f"{otherwise}: {'; '.join(problems[:8])}") from cause
    return cast(T, result), [word for word, _ in answers]


def _clash(values: Sequence[object]) -> str:
    """Who has what, if not all have the same; else empty."""
    if all(value == values[0] for value in values):
        return ""
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    return f"{values[0]!r} on rank 0, {values[other]!r} on rank {other}"


def _folder(stack: contextlib.ExitStack) -> str:
    return stack.enter_context(
        tempfile.TemporaryDirectory(prefix="ds_ckpt_", ignore_cleanup_errors=True)
    )


def _about(
    engine: Any, tag: object, client_state: Mapping[str, Any] | None = None
) -> Subcheckpoint:
    """What is the same for all sub-checkpoints of this rank."""
    if why := _refusal(engine):
        raise SubcheckpointError(why)
    ranks, topology = locate(engine)
    return Subcheckpoint(
        key="",
        role="model",
        tag=f"global_step{engine.global_steps}" if tag is None else str(tag),
        step=engine.global_steps,
        ranks=ranks,
        topology=topology,
        client_state=dict(client_state or {}),
    )


def _about_index(tag: str | None, topology: Topology) -> Subcheckpoint:
    first = Ranks(ep=(0,) * len(topology.ep_sizes))
    return Subcheckpoint("index", "index", tag, None, first, topology)


def _refusal(engine: Any) -> str:
    """Why this engine's state cannot be had by way of its checkpoint engine; empty if it can."""
    if engines.is_decoupled(engine):
        return (
            f"{type(engine.checkpoint_engine).__name__} writes after the save has returned: "
            "sub-checkpoints need DeepSpeed's default checkpoint engine"
        )
    if engine.load_universal_checkpoint():
        return "universal checkpoints are files of their own: convert, and load them with DeepSpeed"
    if engine.zero_nvme_offload_optimizer():
        return (
            "the optimizer's states lie on NVMe, and DeepSpeed copies them as files: use "
            "save_checkpoint and load_checkpoint"
        )
    if engine.zero_elastic_checkpoint():
        return 'turn "elastic_checkpoint" off: with it, each rank reads the states of all'
    return ""


# ---- the way out


def _index_of(
    about: Subcheckpoint,
    abouts: Sequence[Subcheckpoint],
    entries: Sequence[Sequence[Entry]],
    rank: int,
) -> bytes:
    """The index of what was written, if this rank can be loaded from it.

    Raises:
        ManifestError: what was written does not make a checkpoint.
        ValueError: not for this rank.
    """
    data = Index.model_construct(
        tag=about.tag,
        step=about.step,
        topology=about.topology,
        ranks=tuple(each.ranks for each in abouts),
        entries=tuple(entry for written in entries for entry in written),
    ).to_bytes()
    parse(Index, data).needed_by(rank)
    return data


def _write_index(writer: Opener, about: Subcheckpoint, index: bytes, rank: int) -> None:
    if rank == 0:
        send(writer(_about_index(about.tag, about.topology)), lambda file: file.write(index))


# ---- the way back


def _read_index(engine: Any, reader: Opener, tag: object, rank: int) -> Index:
    """The index, if it is that of a checkpoint which this engine can load.

    Raises:
        SubcheckpointError: there is none, or of another tag or topology.
        CkptError: it is damaged, or written by a newer version.
    """
    about = _about(engine, tag)
    asked = _about_index(None if tag is None else str(tag), about.topology)
    try:
        data = read_up_to(MAX_DOCUMENT_BYTES, reader(asked))
    except Exception as error:
        raise SubcheckpointError(
            f"the index, without which a save is not complete, cannot be read: {reason_of(error)}"
        ) from error
    index = parse(Index, data)
    if asked.tag not in (None, index.tag):
        raise SubcheckpointError(f"the index is that of checkpoint {index.tag!r}")
    if other := about.topology.differences(index.topology):
        raise SubcheckpointError(
            f"checkpoint {index.tag!r} was saved with another topology: {', '.join(other)}"
        )
    if index.ranks[rank] != about.ranks:
        raise SubcheckpointError(
            f"this rank is {about.ranks}, and was {index.ranks[rank]} when checkpoint "
            f"{index.tag!r} was saved"
        )
    return index
