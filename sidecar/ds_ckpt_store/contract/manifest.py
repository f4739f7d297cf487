"""Documents on the shared volume: what the hook hands over, and what the sidecar says back.

Version 1. A reader takes its own version and the one before; a newer one raises
:class:`~ds_ckpt_store.errors.UnknownSchemaError` and is kept. Everything here that comes from a
volume is hostile input: sizes and counts are bounded before parsing, paths are checked, and
nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from ds_ckpt_store.contract import digest, names
from ds_ckpt_store.errors import InputError, ManifestError, UnknownSchemaError

SCHEMA = 1
MAX_DOCUMENT_BYTES = 32 << 20
MAX_SHARDS = 100_000
MAX_METRICS = 256
MAX_LIMITS_BYTES = 4096
LEAST_BANDWIDTH = 64 << 10  # bytes per second; with less, stores close connections that stand still
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SEAL = re.compile(rb',"([^"]{8})":"([^"]{8})"}\Z')
_SEAL_BYTES = len(',"checksum":"01234567"}')


def _stated(check: Callable[[str], str]) -> AfterValidator:
    """A rule of :mod:`names` as pydantic takes it."""

    def validate(value: str) -> str:
        try:
            return check(value)
        except InputError as error:
            raise ValueError(str(error)) from None

    return AfterValidator(validate)


def _formed(is_formed: Callable[[str], bool], what: str) -> AfterValidator:
    def validate(value: str) -> str:
        if not is_formed(value):
            raise ValueError(f"{value!r} is not {what}")
        return value

    return AfterValidator(validate)


RelativePath = Annotated[str, _stated(names.check_relative_path)]
Tag = Annotated[str, _stated(names.check_tag)]
SaveId = Annotated[str, _formed(names.is_save_id, "a save id")]
NodeId = Annotated[str, _formed(names.is_node_id, "a node id")]
Crc = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
Natural = Annotated[int, Field(ge=0, lt=1 << 63)]
# To the year 9999, so that a save id has room for it and a calendar can show it.
END_OF_TIME_MS = 253_402_300_800_000
TimeMs = Annotated[int, Field(ge=0, lt=END_OF_TIME_MS)]
Identifier = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
_IDENTIFIER = TypeAdapter(Identifier)
FRESH_SECONDS = 60.0
"""A heartbeat that is older is silence, if it says nothing else: one comes every few seconds."""

Protection = Literal["hardlink", "reflink", "copy", "none"]
SaveState = Literal[
    "discovered",
    "uploading",
    "stored",
    "committed",
    "cleaned",
    "superseded",
    "abandoned",
    "quarantined",
    "failed",
    "held",
]
RECOVERY = "recovery"
"""Kind of a save that was made because the trainer is about to end: it is stored before others."""

RESTING: frozenset[SaveState] = frozenset({"quarantined", "held"})
"""States in which a save stays until a person mends something."""


def is_identifier(text: str) -> bool:
    """Whether ``text`` can be an :data:`Identifier`: a kind, or the name of a metric."""
    try:
        _IDENTIFIER.validate_python(text)
    except ValidationError:
        return False
    return True


class Document(BaseModel):
    """Base of every JSON document of this project; unknown fields are kept out of the way."""

    model_config = ConfigDict(populate_by_name=True, extra="ignore", frozen=True)

    schema_version: int = Field(default=SCHEMA, alias="schema")

    def to_bytes(self) -> bytes:
        """Compact JSON, UTF-8; its last field is the CRC32C of all bytes before that field."""
        body = self.model_dump_json(by_alias=True).encode()[:-1]
        return body + f',"checksum":"{digest.to_hex(digest.crc32c(body))}"}}'.encode()


DocumentT = TypeVar("DocumentT", bound=Document)


def parse(kind: type[DocumentT], data: bytes) -> DocumentT:
    """Read one document.

    One that ends with a checksum must have it; one without (written by hand, or by an older
    version) is taken as it is.

    Raises:
        ManifestError: not JSON, too large, changed since it was written, or a rule of ``kind`` is
            broken; says which.
        UnknownSchemaError: written by a newer version.
    """
    name = kind.__name__
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ManifestError(f"{name} of {len(data)} bytes: {MAX_DOCUMENT_BYTES} is the most")
    seal = _SEAL.search(data[-_SEAL_BYTES:])
    if seal is not None:
        value = digest.to_hex(digest.crc32c(memoryview(data)[:-_SEAL_BYTES]))
        if seal[1] != b"checksum":
            if value.encode() == seal[2]:  # so it is one, and only its name was changed
                raise ManifestError(f"{name} was changed after it was written: its end is damaged")
            seal = None
        elif value.encode() != seal[2]:
            raise ManifestError(
                f"{name} was changed after it was written: its CRC32C is {value}, and it ends with "
                f"{seal[2].decode(errors='replace')}"
            )
    try:
        raw: Any = json.loads(data.decode())
        if _SURROGATE.search(data):  # half of a character: it could not be written again
            json.dumps(raw, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{name} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ManifestError(f"{name} is not a JSON object")
    if seal is not None:
        raw.pop("checksum", None)  # of no kind's fields, some of which take no other
    version = raw.get("schema")
    if type(version) is not int or version < 1:
        raise ManifestError(f"{name} has no schema version")
    if version > SCHEMA:
        raise UnknownSchemaError(
            f"{name} has schema {version}, newer than {SCHEMA}, which this version reads: "
            "upgrade this side; it is kept as it is"
        )
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(item) for item in first["loc"])
        raise ManifestError(f"{name}: {where or 'document'}: {first['msg']}") from None


class Shard(BaseModel):
    """One file of the checkpoint as the hook saw it.

    ``path`` is relative to the tag's folder (for a companion: to save_dir). ``size`` in bytes;
    ``mtime_ns`` in nanoseconds; ``rank`` is the global rank that wrote or hashed it.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    path: RelativePath
    size: Natural
    crc32c: Crc
    device: Natural
    inode: Natural
    mtime_ns: int
    rank: Natural
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None


class SaveInfo(Document):
    """What is known of a save as a whole; the same on every node."""

    run_id: Identifier
    attempt: Identifier
    save_id: SaveId
    tag: Tag
    time_ms: TimeMs
    step: Natural | None = None
    kind: Identifier = "checkpoint"
    metrics: dict[Identifier, float | None] = Field(default_factory=dict, max_length=MAX_METRICS)
    pin: bool = False
    parent: SaveId | None = None
    world_size: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    nodes: Annotated[list[NodeId], Field(min_length=1, max_length=MAX_SHARDS)]

    @field_validator("nodes")
    @classmethod
    def _are_distinct(cls, value: list[str]) -> list[str]:
        if len(set(value)) != len(value):
            raise ValueError("a node is listed twice")
        return sorted(value)

    @field_validator("metrics")
    @classmethod
    def _finite(cls, value: dict[str, float | None]) -> dict[str, float | None]:
        return {k: v if v is not None and math.isfinite(v) else None for k, v in value.items()}

    @functools.cached_property
    def folder(self) -> str:
        """The store's folder for this save."""
        return names.folder_of(self.tag, self.save_id)


class NodeManifest(SaveInfo):
    """What one node's hook wrote for one save: the hand-off to its sidecar.

    Attributes:
        node: id of this node; it may be missing in ``nodes`` when it uploads nothing itself.
        root: save_dir relative to the volume, ``"."`` for the volume itself.
        ranks: global ranks on this node, ascending.
        protection: how the bytes under ``links/<save_id>/`` are kept from the trainer.
        shards: files that this node uploads.
        replicas: files that this node holds too, but another node uploads.
        elsewhere: paths that only other nodes hold.
        companions: small files beside the tag folder (global rank 0's node only).
        destination: where the trainer asked to upload to, or None for the sidecar's own setting.
        started: when the attempt began on this node, by its clock, in seconds since the epoch; None
            from a hook before this.
    """

    node: NodeId
    root: str = "."
    ranks: Annotated[list[Natural], Field(max_length=MAX_SHARDS)] = []
    protection: Protection = "hardlink"
    shards: Annotated[list[Shard], Field(max_length=MAX_SHARDS)]
    replicas: Annotated[list[Shard], Field(max_length=MAX_SHARDS)] = []
    elsewhere: Annotated[list[str], Field(max_length=10 * MAX_SHARDS)] = []
    companions: Annotated[list[Shard], Field(max_length=256)] = []
    destination: str | None = None
    started: Annotated[float, Field(allow_inf_nan=False)] | None = None
    hook_version: str = "unknown"

    @model_validator(mode="after")
    def _is_consistent(self) -> NodeManifest:
        if self.root != ".":
            names.check_relative_path(self.root)
        for what, entries in (("shard", [*self.shards, *self.replicas]), ("file", self.companions)):
            seen: set[str] = set()
            for entry in entries:
                if entry.path in seen:
                    raise ValueError(f"{what} {entry.path!r} is listed twice")
                seen.add(entry.path)
            for path in seen:
                if not seen.isdisjoint(names.parents(path)):
                    raise ValueError(f"{what} {path!r} lies below another file")
        beside = {entry.path for entry in self.companions}
        if any("/" in path for path in beside):
            raise ValueError("a companion lies beside the tag folder, not deeper")
        if beside & {names.LATEST, self.tag.split("/", 1)[0]}:
            raise ValueError("a companion has the name of the pointer or of the tag folder")
        if (self.node in self.nodes) != bool(self.shards):
            raise ValueError("the list of nodes must name exactly those that upload a shard")
        return self

    @property
    def file_name(self) -> str:
        """Its name in ``outbox/``."""
        return f"{self.save_id}.{self.node}.json"


class NodeIdentity(Document):
    """``node.json``: the id of one shared volume, made once."""

    node: NodeId


class TrainerStatus(Document):
    """``status/trainer.json``: trainer to sidecar.

    ``time`` is seconds since the epoch by the trainer's clock, and ``started`` when the attempt
    began on this node, by the same clock; ``nodes`` are the ids of all nodes of the attempt.
    ``finished``: it makes no further save; ``by_itself``: because its process ended, by an
    exception for instance, and nobody said that training is over.
    """

    run_id: Identifier
    attempt: Identifier
    time: float
    started: Annotated[float, Field(allow_inf_nan=False)] | None = None
    step: int | None = None
    finished: bool = False
    by_itself: bool = False
    nodes: list[str] = []
    resumed_from: str | None = None
    error: str | None = None
    skipped_saves: int = 0
    held_seconds: float = 0.0


class SaveStatus(Document):
    """``status/<save_id>.json``: sidecar to trainer, where one save stands.

    ``saved_ms`` is when it was saved, by the clock of the first rank's node, and 0 for what is no
    manifest; ``handed_over`` when this node's manifest was written, by this node's, and 0 if that
    is not known;
    ``time``, ``waiting_since`` and ``durable_since`` are seconds since the epoch by the sidecar's,
    the last two 0 while it is neither; ``shards`` count files that this node uploads.
    """

    save_id: str
    tag: str = ""
    state: SaveState
    reason: str = ""
    time: float
    saved_ms: TimeMs = 0
    handed_over: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    step: int | None = None
    kind: str = ""
    bytes_total: int = 0
    bytes_done: int = 0
    shards_total: int = 0
    shards_done: int = 0
    folder: str = ""
    waiting_for: list[str] = []
    waiting_since: float = 0.0
    durable_since: float = 0.0


class SidecarStatus(Document):
    """``status/sidecar.json``: sidecar to trainer; heartbeat, backlog, space, error, limits.

    ``unready`` says why it cannot store now; ``failures`` is how often in a row a pass, or a try of
    the save that fares worst, has failed. Of the volume, ``limit_bytes`` is what it may hold before
    the pod is evicted (0: no bound but its disk), ``high_water_bytes`` the most that was seen in
    use, and ``unfreed_bytes`` what was removed and is kept by others. ``rate`` is bytes per second
    of late, 0 while nothing moves. ``silent_after`` is how old, in seconds, this may get while the
    sidecar lives.
    """

    time: float
    silent_after: Annotated[float, Field(ge=0, allow_inf_nan=False)] = FRESH_SECONDS
    pid: int
    version: str
    run_id: str = ""
    node: str = ""
    destination: str = ""
    state: Literal["starting", "standby", "running", "draining", "stopped", "refused"]
    backlog_saves: int = 0
    backlog_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0
    newest_committed_ms: TimeMs = 0
    newest_committed_tag: str = ""
    newest_committed_save: str = ""
    newest_committed_step: int | None = None
    epoch: int = 0
    last_error: str = ""
    last_error_time: float = 0.0
    last_error_kind: str = ""
    unready: str = ""
    failures: int = 0
    refused_manifests: int = 0
    streams: int = 0
    bandwidth: int = 0
    rate: float = 0.0
    used_bytes: int = 0
    high_water_bytes: int = 0
    limit_bytes: int = 0
    unfreed_bytes: int = 0
    credentials_expiry: float | None = None

    def is_silent(self, now: float) -> bool:
        """Whether it has said nothing for so long that it has ended, or hangs.

        Args:
            now: seconds since the epoch, by the clock of the sidecar's pod.
        """
        return abs(now - self.time) > self.silent_after


def _bandwidth(value: int) -> int:
    if 0 < value < LEAST_BANDWIDTH:
        raise ValueError(f"{value} bytes per second: {LEAST_BANDWIDTH} is the least, 0 is no limit")
    return value


Bandwidth = Annotated[Natural, AfterValidator(_bandwidth)]
Streams = Annotated[int, Field(ge=1, le=256)]


class TransferLimits(Document):
    """``limits.json``: what transfers may use while it lies there; None is as the settings say.

    ``bandwidth`` in bytes per second, 0 for no limit; ``streams`` are requests at a time. A name
    that is not known is refused: people write this file, and a misspelt limit is none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    bandwidth: Bandwidth | None = None
    streams: Streams | None = None


class RestoredFile(BaseModel):
    """One restored file: ``path`` relative to the volume, and what it was when it was verified."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    path: str
    size: Natural
    crc32c: Crc
    device: Natural
    inode: Natural
    mtime_ns: int


class Restored(Document):
    """``restored.json``: which record this volume was restored from.

    ``bytes`` is what was fetched for it, and ``seconds`` what the restore took; None: written by a
    version that did not say.
    """

    source: str
    run_id: str
    save_id: SaveId
    tag: Tag
    time_ms: TimeMs
    epoch: int
    step: int | None = None
    world_size: int = 1
    files: list[RestoredFile] = []
    bytes: Natural | None = None
    seconds: Annotated[float, Field(ge=0)] | None = None
