"""Checksums while DeepSpeed writes, so that no byte is read again for them.

DeepSpeed's ``TorchCheckpointEngine`` writes each shard with one ``torch.save``. :func:`attach` lets
that call write to a file of ours, which sums the bytes on their way to the disk; the engine stays
what it is and keeps every other method. torch's own sum over each record of its zip file costs more
than ours and is looked at by nobody on load, so it is switched off for the length of these writes:
a save is then faster than without us. An engine of another kind writes by ways that cannot be seen
from here; its shards are read in the background, as without ``attach``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Iterator
from typing import Any

from ds_ckpt_store.contract.digest import crc32c
from ds_ckpt_store.contract.filesystem import FileStat, Filesystem

logger = logging.getLogger("ds_ckpt_hook")

_PIECE = 4 << 20  # bytes summed and then written, while some are in the cache of the processor
_MOST = 10_000
_MARK = "_ds_ckpt_seals"


class Seals:
    """What this process wrote, with its sums; the newest ten thousand files are remembered."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int, int, int], int] = {}

    def add(self, state: FileStat, value: int) -> None:
        """A file was written whole, and this is the CRC32C of what was written."""
        self._sums[state.identity] = value
        while len(self._sums) > _MOST:
            del self._sums[next(iter(self._sums))]

    def of(self, state: FileStat) -> int | None:
        """The CRC32C of a file in this state; None if it was not seen being written."""
        return self._sums.get(state.identity)


def attach(engine: Any, seals: Seals, fs: Filesystem, *, keep_zip_sums: bool) -> bool:
    """See :func:`ds_ckpt_hook.attach`; whether shards are summed as they are written."""
    writer: Any = getattr(engine, "checkpoint_engine", None)
    name = type(writer).__name__
    if name != "TorchCheckpointEngine":
        logger.info("%s writes out of sight: checksums are taken after each save", name)
        return False
    if getattr(writer.save, _MARK, None) is seals:
        return True
    original = writer.save
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        path = call.arguments.get("path")
        if not isinstance(path, (str, os.PathLike)):
            return original(*args, **kwargs)
        with SummedFile(os.fspath(path)) as file, zip_sums(keep=keep_zip_sums):
            call.arguments["path"] = file
            result = original(*call.args, **call.kwargs)
        if (state := fs.stat(file.path)) is not None and state.size == file.size:
            seals.add(state, file.crc32c)
        return result

    setattr(save, _MARK, seals)
    writer.save = save
    return True


class SummedFile:
    """A new file, or one written anew in place, as ``torch.save`` takes one: write-only, no seeks.

    It tells no descriptor: torch's older format would write to that, past the sum.

    Attributes:
        path: of the file.
        size: bytes written.
        crc32c: of these bytes.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self.crc32c = 0
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> SummedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return self.path

    def write(self, data: Any) -> int:
        """Write it all; torch does not look at how much was written."""
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _PIECE):
            piece = view[begin : begin + _PIECE]
            self.crc32c = crc32c(piece, self.crc32c)
            while piece:
                piece = piece[self._file.write(piece) :]
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """The file is written."""
        self._file.close()

    def tell(self) -> int:
        """Bytes written."""
        return self.size


@contextlib.contextmanager
def zip_sums(*, keep: bool) -> Iterator[None]:
    """torch's switch is one for the whole process, and not in every torch."""
    import torch

    switch = getattr(torch.serialization, "set_crc32_options", None)
    if keep or switch is None:
        yield
        return
    before = torch.serialization.get_crc32_options()
    switch(False)
    try:
        yield
    finally:
        switch(before)
