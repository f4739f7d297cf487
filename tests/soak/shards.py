"""What the soak's trainers write: files that say of which save they are, no two of them alike.

The first line of each is a JSON object, its mark. All files of one save have one ``save`` in it, so
a checkpoint that is put together from two saves shows, whatever its checksums say.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

_LONGEST_MARK = 1000


@dataclass(frozen=True)
class Mark:
    """What the first line of a file says.

    Attributes:
        save: ``<attempt>.<number>``, the same on all ranks.
        path: of the file, relative to its tag's folder.
        rank: that wrote it.
        step: of the training then.
    """

    save: str
    path: str
    rank: int
    step: int


def content(mark: Mark, size: int) -> bytes:
    """A file of about ``size`` bytes that no other mark gives."""
    line = json.dumps(mark.__dict__).encode() + b"\n"
    rng = random.Random(f"{mark.save}/{mark.rank}/{mark.path}")
    return line + rng.randbytes(max(0, size - len(line)))


def mark_of(file: Path) -> Mark | None:
    """The mark of a file, or None if it has none that can be read."""
    with file.open("rb") as reader:
        line = reader.readline(_LONGEST_MARK)
    try:
        return Mark(**json.loads(line))
    except (ValueError, TypeError):
        return None


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as reader:
        while piece := reader.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
