"""What a file in Hugging Face's safetensors format holds, told by its first bytes.

Eight bytes say how long the header is, the header (JSON) says where each tensor lies behind it. So
of a large file only what is asked for need be read. The header is read as if it were hostile: it
is bounded, and no tensor reaches out of the file or has another size than its shape says.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from ds_ckpt_store.errors import DamagedError

ENDING = ".safetensors"
MAX_HEADER = 100 << 20  # as the format's own library has it
_SHARDING = "DCP_SHARDING_INFO"  # torch's writer: where in the whole tensor this one belongs
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class Tensor:
    """One tensor, or one piece of it.

    Attributes:
        name: its key in the state dict.
        dtype: of its numbers.
        shape: of what lies here.
        offsets: of what lies here in the whole tensor; zeros where it is all of it.
        begin: where its bytes begin in the file.
        length: bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    begin: int
    length: int

    def rows(self, first: int, count: int) -> tuple[int, int]:
        """``(offset, length)`` in the file of some of its rows; all of it if it has none."""
        if not self.shape or not self.shape[0]:
            return self.begin, self.length
        row = self.length // self.shape[0]
        return self.begin + first * row, count * row


def tensors_of(file: io.BufferedReader, path: str) -> list[Tensor]:
    """The tensors of a file.

    Args:
        file: open for reading.
        path: for messages.

    Raises:
        DamagedError: it is no such file, or has types that are not known here.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise DamagedError(f"{path} is no safetensors file: a header of {length} bytes", (path,))
    try:
        header = json.loads(file.read(length))
        notes = header.pop("__metadata__", None) or {}
        sharding = json.loads(notes[_SHARDING]) if _SHARDING in notes else {}
        return [
            _tensor(name, entry, sharding.get(name), 8 + length, size)
            for name, entry in header.items()
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(
            f"{path} is no safetensors file that can be read: {error}", (path,)
        ) from None


def _tensor(name: str, entry: Any, sharded: Any, base: int, size: int) -> Tensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(each) for each in entry["shape"])
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"tensor {name!r} is of type {entry['dtype']!r}, which is not known")
    offsets = tuple(sharded["saved_offsets"]) if sharded else (0,) * len(shape)
    fits = 0 <= begin <= end <= size - base and len(offsets) == len(shape) and min((*shape, 0)) == 0
    if not fits or end - begin != dtype.itemsize * math.prod(shape):
        raise ValueError(f"tensor {name!r} has bytes {begin} to {end} for the shape {shape}")
    return Tensor(name, dtype, shape, offsets, base + begin, end - begin)
