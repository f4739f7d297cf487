"""How the bytes of sub-checkpoints leave DeepSpeed, and how they come back to it.

A save streams: ``torch.save`` writes to the user's stream, and what goes by is summed. A load goes
by way of a folder, because all bytes are checked before DeepSpeed sees any, because ``torch.load``
must seek, and because DeepSpeed reads models and layers twice and looks at the names of the rest.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import IO, Any

from ds_ckpt_hook.core import reason_of
from ds_ckpt_hook.errors import SubcheckpointError
from ds_ckpt_hook.sealing import zip_sums
from ds_ckpt_hook.subindex import Entry, Index, Opener, Subcheckpoint, identify
from ds_ckpt_store.contract.digest import crc32c, to_hex

_TAG = "subcheckpoints"  # for DeepSpeed: the same on all ranks, and seen by nobody
_CLIENT_STATE = "ds_ckpt_client_state"
_PIECE = 4 << 20  # bytes handed to a writer, or asked of a reader, at once


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


def hand_over(
    engine: Any, writer: Opener, about: Subcheckpoint, folder: str, rank: int
) -> list[Entry]:
    """Have DeepSpeed save, by way of a stand-in; returns what this rank wrote."""
    stand_in = _Saving(engine.checkpoint_engine, writer, about, folder, rank)
    with stand_in.instead_in(engine):
        engine.save_checkpoint(folder, _TAG, {_CLIENT_STATE: about.client_state}, save_latest=False)
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
        about, file = self._about, os.path.relpath(path, f"{self._folder}/{_TAG}")
        key = file
        try:
            role, key = identify(file, about.ranks, about.topology)
            if role == "model" and about.topology.zero_stage < 3 and about.ranks.dp > 0:
                return  # with node-local storage, each node's first rank is asked for it
            opened = self._writer(replace(about, key=key, role=role))
            summed = send(opened, functools.partial(_torch_save, state_dict))
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


def send(opened: AbstractContextManager[IO[bytes]], write: Callable[[_Summed], Any]) -> _Summed:
    """Write to a stream of the user's.

    Raises:
        SubcheckpointError: its context took an error for its own, so not all may be there.
    """
    with opened as stream:
        summed = _Summed(stream)
        write(summed)
        return summed
    raise SubcheckpointError("the writer kept an error to itself")


def _torch_save(state: Any, file: _Summed) -> None:
    import torch

    with zip_sums(keep=False):
        torch.save(state, file)


# ---- the way back


def read_up_to(most: int, opened: AbstractContextManager[IO[bytes]]) -> bytes:
    """All that a stream gives, or a little more than ``most`` bytes."""
    data = b""
    with opened as stream:
        while len(data) <= most and (more := stream.read(_PIECE)):
            data += more
    return data


def fetch(index: Index, rank: int, reader: Opener, folder: str) -> None:
    """Read what this rank needs; empty files stand for the rest, whose names DeepSpeed counts.

    Raises:
        SubcheckpointError: it cannot be read, or is not what was written.
    """
    needed = {entry.key for entry in index.needed_by(rank)}
    folder = f"{folder}/{_TAG}"
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


def take_over(engine: Any, folder: str) -> dict[str, Any]:
    """Have DeepSpeed load what was read; returns the client state."""
    with _Loading(engine.checkpoint_engine).instead_in(engine):
        _, state = engine.load_checkpoint(folder, _TAG)
    return dict(state[_CLIENT_STATE])


class _Loading(_StandIn):
    """Reads as it was written, whatever the checkpoint engine that is configured can read."""

    def load(self, path: str, map_location: Any = None) -> Any:
        """One sub-checkpoint; some states of an optimizer are objects, so it is unpickled."""
        import torch

        return torch.load(path, map_location=map_location, weights_only=False)
