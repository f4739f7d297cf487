"""torch's distributed checkpoints: written to the volume, and read straight from the store.

torch plans what each rank reads: items, which are ranges of files. :class:`Reader` fetches the
pieces that these lie in, many at a time and once a node, and they are then read from the node's
cache, each block compared with the record. A folder without torch's ``.metadata`` is read as one
of safetensors, such as Hugging Face's libraries write. What ``torch.save`` wrote is unpickled as
torch does it: ``.metadata`` without restriction, so load only what you trust.

:class:`Writer` writes into a folder of its own for each tag, and sums the files on their way. torch
calls a writer at the end on one rank only, and every rank takes part in handing over: so that is a
call of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import ds_ckpt_hook
from ds_ckpt_hook import safetensors_files
from ds_ckpt_hook.opening import StoredCheckpoint, split
from ds_ckpt_hook.sealing import SummedFile
from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.errors import SettingsError

if TYPE_CHECKING:
    from ds_ckpt_hook.feedback import Save

METADATA = ".metadata"


class Reader(FileSystemReader):  # type: ignore[misc]  # torch is not looked into
    """Reads a committed checkpoint for ``torch.distributed.checkpoint.load``.

    Every rank makes one, with the same URL.

    Args:
        url: ``<destination>/<tag>@<save id>``, as :func:`ds_ckpt_hook.history` tells it; the path
            of a folder in the checkpoint may follow.

    Raises:
        SettingsError: the URL names no checkpoint, or no store that can work.
        NothingCommittedError: it is not committed.
        StoreError: the store did not answer.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fs = _Files(url)
        self.path = url
        self._is_safetensors = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by torch before a load; another id is another checkpoint's URL."""
        super().reset()
        if checkpoint_id is not None and os.fspath(checkpoint_id) != self.path:
            self.fs.close()
            self.path = os.fspath(checkpoint_id)
            self.fs = _Files(self.path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds, and where.

        Raises:
            FileNotFoundError: the folder holds neither a ``.metadata`` nor safetensors.
            DamagedError: the store holds other bytes than were committed, or these are no tensors.
            StoreError: the store did not answer.
        """
        found = self.fs.names()
        files = [name for name in found if name.endswith(safetensors_files.ENDING)]
        self._is_safetensors = bool(files) and not any(name.endswith(METADATA) for name in found)
        if not self._is_safetensors:
            return super().read_metadata(*args, **kwargs)
        return _metadata(self.fs, files)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch what the plan needs, many pieces at a time, then read it.

        Raises:
            DamagedError: the store holds other bytes than were committed.
            NothingCommittedError: the checkpoint was deleted meanwhile.
            StoreError: the store did not answer.
        """
        places = [(item, self.storage_data[item.storage_index]) for item in plan.items]
        if not self._is_safetensors:
            self.fs.prefetch([(each.relative_path, each.offset, each.length) for _, each in places])
            return super().read_data(plan, planner)
        self.fs.prefetch([(path, *_rows(item, tensor)) for item, (path, tensor) in places])
        with contextlib.ExitStack() as stack:
            files: dict[str, io.BufferedReader] = {}
            for item, (path, tensor) in places:
                if path not in files:
                    files[path] = stack.enter_context(self.fs.create_stream(path, "rb"))
                target = planner.resolve_tensor(item).detach()
                target.copy_(_read(files[path], item, tensor))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Close the connections to the store."""
        self.fs.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a checkpoint's URL."""
        try:
            split(os.fspath(checkpoint_id))
        except SettingsError:
            return False
        return True


class Writer(FileSystemWriter):  # type: ignore[misc]  # torch is not looked into
    """Writes for ``torch.distributed.checkpoint.save`` into a new folder of the volume.

    Every rank makes one for each save, and hands over when the save has returned, or the future of
    ``async_save`` is done::

        writer = ds_ckpt_hook.dcp.Writer("/checkpoints", "step-1000")
        torch.distributed.checkpoint.save(state, storage_writer=writer)
        writer.hand_over(step=1000)

    Args:
        save_dir: on the volume that is shared with the sidecar.
        tag: the folder's name; a new one for each save.
        options: what torch's ``FileSystemWriter`` takes. Files are not synced to the volume's disk
            unless ``sync_files`` is set: what is stored is read from its cache.

    Raises:
        TagError: the tag cannot become a folder in the store.
    """

    def __init__(self, save_dir: str | os.PathLike[str], tag: str, **options: Any) -> None:
        # A save that is written over may still be on its way to the store.
        path = os.path.join(save_dir, names.check_tag(tag))
        super().__init__(path, **{"overwrite": False, "sync_files": False, **options})
        self._tag = tag
        self.fs = _SummedFiles()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by torch before a save.

        Raises:
            SettingsError: the save is to go elsewhere.
        """
        if checkpoint_id is not None and os.fspath(checkpoint_id) != os.fspath(self.path):
            raise SettingsError(
                f"this writer writes to {self.path}, not to {os.fspath(checkpoint_id)}: leave "
                "checkpoint_id out, and make a writer for each save"
            )
        super().reset()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; what fails in one of torch's further threads is raised, too.

        torch itself forgets it, and goes on to call the checkpoint complete.
        """
        written = super().write_data(plan, planner)
        if self.fs.failure is not None:
            raise self.fs.failure
        return written

    def hand_over(
        self,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        kind: str = "checkpoint",
        pin: bool = False,
        wait: bool = False,
        strict: bool = False,
    ) -> Save:
        """Hand over what was written; every rank calls it. See :func:`ds_ckpt_hook.after_save_dir`.

        Raises:
            CkptError: only with ``strict``; says which ranks failed, and why.
        """
        return ds_ckpt_hook.after_save_dir(
            self.path,
            self._tag,
            step=step,
            metrics=metrics,
            kind=kind,
            pin=pin,
            wait=wait,
            strict=strict,
        )


class _SummedFiles(FileSystem):  # type: ignore[misc]  # torch is not looked into
    """The volume's files, summed while they are written, so that they are not read for it."""

    def __init__(self) -> None:
        self.failure: Exception | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A file, to write it whole."""
        if mode != "wb":
            with super().create_stream(path, mode) as other:
                yield other
            return
        try:
            with SummedFile(os.fspath(path)) as file:
                yield file
        except Exception as error:
            self.failure = error
            raise
        state = Filesystem().stat(file.path)
        if state is not None and state.size == file.size:
            ds_ckpt_hook._hook().seals.add(state, file.crc32c)


class _Files(FileSystem):  # type: ignore[misc]  # torch is not looked into
    """The files of one checkpoint, as torch asks for them."""

    def __init__(self, url: str) -> None:
        run, folder, below = split(url)
        self._below = f"{below}/" if below else ""
        self._url = url
        self._checkpoint = StoredCheckpoint(f"{run}/{folder}")

    def names(self) -> list[str]:
        """Files that lie in the folder itself."""
        below = [
            path.removeprefix(self._below)
            for path in self._checkpoint.files
            if path.startswith(self._below)
        ]
        return [path for path in below if "/" not in path]

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.BufferedReader]:
        """A file, to read."""
        if mode != "rb":
            raise io.UnsupportedOperation(f"{self._url} is committed: it can only be read")
        with self._checkpoint.open(self._below + os.fspath(path)) as file:
            yield file

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:  # noqa: ARG002
        """The path in the folder; a file's URL is never needed."""
        return suffix

    def prefetch(self, ranges: list[tuple[str, int, int]]) -> None:
        """Fetch what these ranges of files lie in."""
        self._checkpoint.prefetch(
            (self._below + path, offset, length) for path, offset, length in ranges
        )

    def close(self) -> None:
        """Close the connections."""
        self._checkpoint.close()


# ---- safetensors


def _metadata(files: _Files, paths: list[str]) -> Metadata:
    """What the files of a folder hold, as torch plans a load by it."""
    found: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, tuple[str, safetensors_files.Tensor]] = {}
    for path in paths:
        with files.create_stream(path, "rb") as file:
            tensors = safetensors_files.tensors_of(file, path)
        for each in tensors:
            offsets, shape = torch.Size(each.offsets), torch.Size(each.shape)
            ends = [offset + size for offset, size in zip(offsets, shape, strict=True)]
            whole = found.setdefault(
                each.name,
                TensorStorageMetadata(
                    properties=TensorProperties(dtype=each.dtype),
                    size=torch.Size(ends),
                    chunks=[],
                ),
            )
            whole.chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=shape))
            whole.size = torch.Size(map(max, whole.size, ends))
            places[MetadataIndex(each.name, offsets)] = (path, each)
    return Metadata(state_dict_metadata=found, storage_data=places)


def _rows(item: Any, tensor: safetensors_files.Tensor) -> tuple[int, int]:
    """The range of a file that an item of a plan needs."""
    if not tensor.shape:
        return tensor.begin, tensor.length
    return tensor.rows(item.storage_offsets[0], item.lengths[0])


def _read(file: io.BufferedReader, item: Any, tensor: safetensors_files.Tensor) -> torch.Tensor:
    offset, length = _rows(item, tensor)
    if not length:
        return torch.empty(tuple(item.lengths), dtype=tensor.dtype)
    data = bytearray(length)
    file.seek(offset)
    file.readinto(data)
    found = torch.frombuffer(data, dtype=tensor.dtype)
    if not tensor.shape:
        return found.reshape(())
    found = found.reshape((item.lengths[0], *tensor.shape[1:]))
    for dim in range(1, len(tensor.shape)):
        found = found.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
    return found
