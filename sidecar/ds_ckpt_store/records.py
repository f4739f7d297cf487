"""Documents of one prefix: lease, intent, receipt, record and hold, as JSON objects in the store.

Whoever can write to the prefix can write these, so they are read with the same care as a manifest:
bounded, by schema, with paths that stay inside. Where they lie is the catalog's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    model_validator,
)

from ds_ckpt_store.contract import digest, names
from ds_ckpt_store.contract.manifest import (
    MAX_SHARDS,
    Crc,
    Document,
    Identifier,
    Natural,
    RelativePath,
    SaveId,
    SaveInfo,
)

LONGEST_HOLD = 86_400  # seconds; who may only hold must not keep a checkpoint for ever by one write
RecordState = Literal["committed", "abandoned", "deleted"]


@dataclass(frozen=True)
class Piece:
    """Bytes of an object that have a checksum of their own: where they begin, how many they are."""

    offset: int
    size: int
    crc32c: int

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.offset + self.size


class PartSums(BaseModel):
    """The checksums of an object's parts, so that a range of it can be verified alone.

    A help for readers, and nothing that a checkpoint rests on: it may be absent, and counts only
    where it combines to the checksum of the whole.

    Attributes:
        size: bytes of each part but the last, which may be shorter.
        crc32c: of each in order, eight hexadecimal digits, without anything between them.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    size: Natural
    crc32c: str

    def of(self, size: int, crc32c: int) -> list[Piece]:
        """The pieces of an object; one that is all of it if these sums are not the object's."""
        count = -(-size // self.size) if self.size else 0
        if 0 < count == len(self.crc32c) / 8 and re.fullmatch("[0-9a-f]+", self.crc32c):
            pieces = [
                Piece(
                    number * self.size,
                    min(self.size, size - number * self.size),
                    digest.from_hex(self.crc32c[8 * number : 8 * number + 8]),
                )
                for number in range(count)
            ]
            if digest.combine_all((piece.crc32c, piece.size) for piece in pieces) == crc32c:
                return pieces
        return [Piece(0, size, crc32c)]


class StoredFile(BaseModel):
    """One object of a checkpoint.

    Attributes:
        path: relative to the folder; for a companion its bare name.
        node: id of the node that uploaded it.
        rank: global rank that wrote it.
        parts: checksums of its parts, if it was sent in parts by this very start of its sidecar.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    path: RelativePath
    size: Natural
    crc32c: Crc
    node: str
    rank: Natural = 0
    sha256: str | None = None
    parts: PartSums | None = None

    @property
    def pieces(self) -> list[Piece]:
        """What of it can be verified alone, in order: its parts, or else all of it."""
        crc32c = digest.from_hex(self.crc32c)
        if self.parts is None:
            return [Piece(0, self.size, crc32c)]
        return self.parts.of(self.size, crc32c)


def _beside(files: list[StoredFile]) -> list[StoredFile]:
    """Companions get their names beside the tag's folder: bare names, and not the pointer's."""
    for entry in files:
        if "/" in entry.path or entry.path == names.LATEST:
            raise ValueError(f"{entry.path!r} is no name of a companion")
    return files


Files = Annotated[list[StoredFile], Field(max_length=10 * MAX_SHARDS)]
Companions = Annotated[Files, AfterValidator(_beside)]


class Owner(Document):
    """The lease on a prefix.

    Attributes:
        epoch: of the newest attempt; grows with every attempt and every takeover.
        attempts: epoch of each attempt of this run that was seen.
        began: when each of them began, in seconds since the epoch by the store's clock, as far as
            its sidecars could tell. Clocks of machines, of which attempt ids are made, order
            nothing where this is known.
        unfinished: nodes of the newest attempt that have not said that they are finished.
        stale_seconds: after how long a silence its sidecars count a lease as dead.
    """

    run_id: Identifier
    attempt: Identifier
    epoch: int
    attempts: dict[str, int]
    began: dict[str, FiniteFloat] = {}
    unfinished: list[str]
    stale_seconds: float = 0.0
    nonce: str


class Intent(SaveInfo):
    """``saves/<save_id>.json``: what is going to be stored, before the first byte is."""

    epoch: int


class Receipt(Document):
    """What one node's sidecar has stored and verified for one save."""

    save_id: str
    node: str
    files: Files
    companions: Companions = []
    proof: str


class Record(SaveInfo):
    """The decision on one save, and all that is needed to verify and restore it."""

    state: RecordState
    epoch: int
    files: Files = []
    companions: Companions = []
    reason: str = ""
    purged: bool = False
    nonce: str = ""

    @model_validator(mode="after")
    def _is_placeable(self) -> Record:
        if self.tag.split("/", 1)[0] in {entry.path for entry in self.companions}:
            raise ValueError("a companion has the name of the tag's folder")
        return self

    @property
    def order(self) -> tuple[int, int, str]:
        """Newest last: (epoch, save time, save id); never the text of a tag."""
        return (self.epoch, self.time_ms, self.save_id)

    @property
    def size(self) -> int:
        """Bytes of all shards and companions."""
        return sum(entry.size for entry in (*self.files, *self.companions))

    def objects(self) -> list[tuple[str, StoredFile]]:
        """Every object of the checkpoint as (key, file)."""
        folder = self.folder
        return [(f"{folder}/{entry.path}", entry) for entry in self.files] + [
            (f"{folder}/{names.COMPANIONS_DIR}/{entry.path}", entry) for entry in self.companions
        ]


class Hold(Document):
    """A restore in progress; keeps one record from retention, ``seconds`` after each write."""

    save_id: SaveId
    seconds: Annotated[int, Field(ge=0, le=LONGEST_HOLD)]
    nonce: str
