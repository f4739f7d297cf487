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
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import IO, Any, TypeAlias, TypeVar, cast

from ds_ckpt_hook import engines
from ds_ckpt_hook.core import Hook, reason_of
from ds_ckpt_hook.errors import AgreementError, ExchangeError, SubcheckpointError
from ds_ckpt_hook.sealing import zip_sums
from ds_ckpt_hook.subindex import Entry, Index, Ranks, Role, Topology, identify, locate
from ds_ckpt_store.contract.digest import crc32c, to_hex
from ds_ckpt_store.contract.manifest import MAX_DOCUMENT_BYTES, parse

__all__ = ["Opener", "Ranks", "Role", "Subcheckpoint", "Topology", "load", "save"]

T = TypeVar("T")

_FOLDER = "subcheckpoints"  # DeepSpeed's tag: the same on all ranks, and seen by nobody
_CLIENT_STATE = "ds_ckpt_client_state"
_PIECE = 4 << 20  # bytes handed to a writer, or asked of a reader, at once


@dataclass(frozen=True)
class Subcheckpoint:
    """One piece of a checkpoint, as a writer or a reader is asked for it.

    A reader sees what the writer saw, but for ``client_state``.

    Attributes:
        key: names it within its checkpoint, in letters, digits and ``-``.
        role: ``model``, ``optimizer``, ``layer`` (of a pipeline), ``expert``, or ``index``.
        tag: of the checkpoint; None for an index that is loaded without a tag.
        step: global step; None for the index.
        ranks: where the rank that writes it stands; all 0 for the index.
        topology: world sizes, ZeRO stage and precision of the engine.
        client_state: what the user gave to :func:`save`; empty on load.
    """

    key: str
    role: Role
    tag: str | None
    step: int | None
    ranks: Ranks
    topology: Topology
    client_state: Mapping[str, Any] = field(default_factory=dict)


Opener: TypeAlias = Callable[[Subcheckpoint], AbstractContextManager[IO[bytes]]]
"""A writer or a reader: a context manager that gives a binary stream."""


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
            lambda: _hand_over(engine, writer, about, folder, hook.exchange.rank),
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
            lambda: _fetch(index, rank, reader, f"{folder}/{_FOLDER}"),
            otherwise=untouched,
            timeout=patience,
        )
        loaded, _ = _together(
            hook,
            "loaded",
            lambda: _take_over(engine, folder),
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


class _StandIn:
    """In place of a checkpoint engine for the length of one call; what it lacks is the engine's."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    @contextlib.contextmanager
    def instead_in(self, engine: Any) -> Iterator[None]:
        """Stand in; the checkpoint engine is back when this is left."""
        engine.checkpoint_engine = self
        try:
            yield
        finally:
            engine.checkpoint_engine = self._own


# ---- the way out


def _hand_over(
    engine: Any, writer: Opener, about: Subcheckpoint, folder: str, rank: int
) -> list[Entry]:
    """Have DeepSpeed save, by way of a stand-in; returns what this rank wrote."""
    stand_in = _Saving(engine.checkpoint_engine, writer, about, folder, rank)
    with stand_in.instead_in(engine):
        engine.save_checkpoint(
            folder, _FOLDER, {_CLIENT_STATE: about.client_state}, save_latest=False
        )
    if stand_in.error is not None:
        raise stand_in.error
    return stand_in.entries


class _Saving(_StandIn):
    """Streams to the writer what DeepSpeed would have written."""

    def __init__(
        self, own: Any, writer: Opener, about: Subcheckpoint, folder: str, rank: int
    ) -> None:
        super().__init__(own)
        self._writer = writer
        self._about = about
        self._folder = folder
        self._rank = rank
        self.entries: list[Entry] = []
        self.error: SubcheckpointError | None = None

    def create(self, _info: object) -> None:
        """Nothing is to be prepared."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """No file is written."""

    def commit(self, _info: object) -> bool:
        """The index is what makes it complete."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """One rank writes what several have."""
        return dp_rank == 0

    def preserves_storage_sharing(self) -> bool:
        """torch.save would write all that a view is a part of; DeepSpeed then clones it."""
        return True

    def save(self, state_dict: Any, path: str) -> None:
        """Stream to the writer; an error waits until DeepSpeed is done on all ranks."""
        if self.error is not None:
            return
        about, file = self._about, os.path.relpath(path, f"{self._folder}/{_FOLDER}")
        key = file
        try:
            role, key = identify(file, about.ranks, about.topology)
            if role == "model" and about.topology.zero_stage < 3 and about.ranks.dp > 0:
                return  # with node-local storage, each node's first rank is asked for it
            opened = self._writer(replace(about, key=key, role=role))
            summed = _send(opened, functools.partial(_torch_save, state_dict))
        except Exception as error:  # noqa: BLE001 - raised when DeepSpeed is done
            self.error = SubcheckpointError(f"{key} could not be written: {reason_of(error)}")
            self.error.__cause__ = error
            return
        self.entries.append(
            Entry(
                key=key,
                role=role,
                file=file,
                rank=self._rank,
                size=summed.size,
                crc32c=to_hex(summed.crc32c),
            )
        )


class _Summed:
    """A user's stream as ``torch.save`` takes one: write-only, no seeks."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.size = 0
        self.crc32c = 0

    def write(self, data: Any) -> int:
        """Write it all, in bytes of our own: what torch lends is gone when this returns.

        Raises:
            OSError: the stream takes no more.
        """
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _PIECE):
            piece = bytes(view[begin : begin + _PIECE])
            self.crc32c = crc32c(piece, self.crc32c)
            while piece:
                count = self._stream.write(piece)
                if count == 0:
                    raise OSError("the writer's stream takes no more bytes")
                piece = piece[count:] if count is not None else b""
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is kept back."""


def _send(opened: AbstractContextManager[IO[bytes]], write: Callable[[_Summed], Any]) -> _Summed:
    with opened as stream:
        summed = _Summed(stream)
        write(summed)
        return summed
    raise SubcheckpointError("the writer kept an error to itself")


def _torch_save(state: Any, file: _Summed) -> None:
    import torch

    with zip_sums(keep=False):
        torch.save(state, file)


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
        _send(writer(_about_index(about.tag, about.topology)), lambda file: file.write(index))


# ---- the way back


def _read_index(engine: Any, reader: Opener, tag: object, rank: int) -> Index:
    """The index, if it is that of a checkpoint which this engine can load.

    Raises:
        SubcheckpointError: there is none, or of another tag or topology.
        CkptError: it is damaged, or written by a newer version.
    """
    about = _about(engine, tag)
    asked = _about_index(None if tag is None else str(tag), about.topology)
    data = b""
    try:
        with reader(asked) as stream:
            while len(data) <= MAX_DOCUMENT_BYTES and (more := stream.read(_PIECE)):
                data += more
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


def _fetch(index: Index, rank: int, reader: Opener, folder: str) -> None:
    """Read what this rank needs; empty files stand for the rest, whose names DeepSpeed counts."""
    needed = {entry.key for entry in index.needed_by(rank)}
    os.mkdir(folder)
    for entry in index.entries:
        path = f"{folder}/{entry.file}"
        if entry.key in needed:
            sub = Subcheckpoint(
                key=entry.key,
                role=entry.role,
                tag=index.tag,
                step=index.step,
                ranks=index.ranks[entry.rank],
                topology=index.topology,
            )
            try:
                _fetch_one(entry, reader(sub), path)
            except Exception as error:
                raise SubcheckpointError(
                    f"{entry.key} could not be read: {reason_of(error)} (it goes to {folder})"
                ) from error
        else:
            open(path, "xb").close()


def _fetch_one(entry: Entry, opened: AbstractContextManager[IO[bytes]], path: str) -> None:
    size = value = 0
    with opened as source, open(path, "xb") as target:
        while size <= entry.size and (piece := source.read(_PIECE)):
            size += len(piece)
            value = crc32c(piece, value)
            target.write(piece)
    if size != entry.size:
        raise SubcheckpointError(f"{entry.size} bytes were written, and {_read(size, entry)} read")
    if to_hex(value) != entry.crc32c:
        raise SubcheckpointError(
            f"it is damaged: its CRC32C is {to_hex(value)}, and {entry.crc32c} was written"
        )


def _read(size: int, entry: Entry) -> str:
    return "more were" if size > entry.size else f"{size} were"


def _take_over(engine: Any, folder: str) -> dict[str, Any]:
    """Have DeepSpeed load what was read; returns the client state."""
    with _Loading(engine.checkpoint_engine).instead_in(engine):
        _, state = engine.load_checkpoint(folder, _FOLDER)
    return dict(state[_CLIENT_STATE])


class _Loading(_StandIn):
    """Reads as it was written, whatever the checkpoint engine that is configured can read."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """One sub-checkpoint; some states of an optimizer are objects, so it is unpickled."""
        import torch

        return torch.load(path, map_location=map_location, weights_only=False)
