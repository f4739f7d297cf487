"""Settings of the agent: command line over environment (``DS_CKPT_*``) over defaults."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from ds_ckpt_sidecar.observe.address import split
from ds_ckpt_store.contract.manifest import Bandwidth
from ds_ckpt_store.errors import SettingsError
from ds_ckpt_store.retention import DEFAULT_PAUSE
from ds_ckpt_store.stores import STALL_SECONDS
from ds_ckpt_store.transfer.budget import STREAMS
from ds_ckpt_store.transfer.plan import MIB

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
StallSeconds = Annotated[
    float,
    Field(ge=1, le=3600, description="a request on which nothing moves for so long is given up"),
]
DEFAULT_MEMORY_MIB = 32
_ALIKE = 0.9  # of two names: one or two letters
_NUMBER = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?")
_WITH_UNIT = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(?P<unit>[a-zA-Z]+)")


def _rate(value: object) -> object:
    """``500MiB``, ``2GB``, ``1048576``, each also with ``/s``; ``none`` is 0, no limit."""
    if not isinstance(value, str):
        return value
    try:
        return _bytes(value.strip().removesuffix("/s").strip())
    except ValueError:
        raise ValueError(
            f"{value!r} is no bandwidth: write bytes per second like 500MiB, 2GB or 1048576, or "
            "none"
        ) from None


def _limit(value: object) -> object:
    """A quantity as Kubernetes writes it: ``200Gi``, ``500G``, ``1e9``; ``none`` is 0, no limit."""
    if not isinstance(value, str):
        return value
    try:
        # What ends in m is millions to ByteSize, and thousandths to Kubernetes.
        return _bytes("" if value.strip().endswith("m") else value.strip())
    except ValueError:
        raise ValueError(
            f"{value!r} is no size of a volume: write what its sizeLimit says, like 200Gi, 500G or "
            "1073741824, or none"
        ) from None


def _bytes(text: str) -> int:
    """A number of bytes, with a unit or an exponent; ``none`` is 0.

    Raises:
        ValueError: it is none, or not a whole number; no more is said.
    """
    if text.lower() == "none":
        return 0
    if _NUMBER.fullmatch(text):
        number = Decimal(text)
        if number != int(number):
            raise ValueError(text)
        return int(number)
    if not (found := _WITH_UNIT.fullmatch(text)):
        raise ValueError(text)
    # ByteSize alone is no judge: it takes what it knows from the beginning of a text.
    unit = re.sub("(?i)^([kmgtpe]i)$", r"\1B", found["unit"])
    try:
        size = int(TypeAdapter(ByteSize).validate_python(found["number"] + unit))
    except (ValidationError, OverflowError):
        raise ValueError(text) from None
    if not size and Decimal(found["number"]):
        raise ValueError(text)
    return size


def _is_no_typo(value: int) -> int:
    if 0 < value < MIB:
        raise ValueError(f"{value} bytes is too little for a volume: is a unit like Gi missing?")
    return value


def _in_one_line(value: str) -> str:
    if not value.isprintable():
        raise ValueError(f"{value!r} has a line break, or what else cannot be printed")
    return value


Rate = Annotated[Bandwidth, BeforeValidator(_rate)]
VolumeLimit = Annotated[
    int, Field(ge=0, lt=1 << 63), AfterValidator(_is_no_typo), BeforeValidator(_limit)
]


class AgentSettings(BaseSettings):
    """What one agent is told. Seconds, bytes and MiB as the names say."""

    model_config = SettingsConfigDict(env_prefix="DS_CKPT_", extra="ignore", frozen=True)

    volume: Annotated[str, Field(description="the folder that trainer and sidecar share")]
    destination: Annotated[str, Field(description="s3://, gs://, az://, file:///folder, ...")]
    run_id: Annotated[
        str,
        Field(description="the run; default: what the trainer on this volume says", max_length=256),
        AfterValidator(_in_one_line),
    ] = ""
    keep_last: Annotated[
        int | None, Field(ge=1, description="keep the last N in the store; default: keep all")
    ] = None
    keep_local: Annotated[
        int, Field(ge=0, description="committed saves that stay on the volume")
    ] = 1
    retention_pause: Annotated[
        Seconds, Field(description="between giving up a checkpoint and deleting its objects")
    ] = DEFAULT_PAUSE
    order: Annotated[
        Literal["oldest", "newest"], Field(description="which save to upload first")
    ] = "oldest"
    streams: Annotated[int, Field(ge=1, le=256, description="requests at a time at most")] = STREAMS
    part_mib: Annotated[int, Field(ge=5, le=5120, description="preferred size of a part")] = 64
    memory_mib: Annotated[
        int, Field(ge=1, description="what all requests together may hold; bounds their number")
    ] = DEFAULT_MEMORY_MIB
    bandwidth: Annotated[
        Rate, Field(description="bytes per second at most; 0 or none: no limit")
    ] = 0
    volume_limit: Annotated[
        VolumeLimit,
        Field(description="bytes that the volume may hold before the pod is evicted; 0: no limit"),
    ] = 0
    stall_seconds: StallSeconds = STALL_SECONDS
    page_cache: Annotated[
        Literal["drop", "keep"],
        Field(description="what becomes of the pages of shards that were uploaded"),
    ] = "drop"
    priority: Annotated[
        Literal["normal", "low"], Field(description="low: behind training for CPU and disk")
    ] = "normal"
    rescan_seconds: Annotated[
        Seconds, Field(gt=0, description="the outbox is looked through at least this often")
    ] = 5.0
    drain_seconds: Annotated[Seconds, Field(description="time for what is left after SIGTERM")] = (
        25.0
    )
    lease_stale_seconds: Annotated[
        Seconds, Field(gt=0, description="silence after which another run's lease is dead")
    ] = 600.0
    abandon_seconds: Annotated[
        Seconds,
        Field(description="wait for a node whose attempt is over, before a save is given up"),
    ] = 6 * 3600.0
    allow_weak_store: Annotated[
        bool, Field(description="accept a store without conditional create, for one node alone")
    ] = False
    journal: Annotated[str, Field(description="the agent's memory; default: on the volume")] = ""
    log_format: Literal["text", "json"] = "text"
    listen: Annotated[
        str, Field(description=":8484 or 127.0.0.1:8484, for probes and preStop; default: nowhere")
    ] = ""
    exit_when_finished: Annotated[
        bool, Field(description="end by itself once the trainer is over and all is decided")
    ] = False
    trainer_gone_seconds: Annotated[
        Seconds, Field(gt=0, description="silence after which a trainer is over, for that")
    ] = 300.0
    termination_log: Annotated[
        str, Field(description="the termination message; default: /dev/termination-log if there")
    ] = ""
    kubernetes: Annotated[
        bool, Field(description="report by events and annotations of the own pod")
    ] = False

    @field_validator("listen")
    @classmethod
    def _can_be_listened_on(cls, value: str) -> str:
        if value:
            split(value)
        return value

    @field_validator("destination")
    @classmethod
    def _without_slash(cls, value: str) -> str:
        return value.rstrip("/") if not value.endswith("://") else value

    @property
    def part_bytes(self) -> int:
        """Preferred size of a part."""
        return self.part_mib * MIB

    @property
    def lease_renew_seconds(self) -> float:
        """The lease is renewed this often, well before it could be taken for dead."""
        return self.lease_stale_seconds / 5


class ReadSettings(BaseSettings):
    """What commands that only read take from the environment."""

    model_config = SettingsConfigDict(env_prefix="DS_CKPT_", extra="ignore", frozen=True)

    stall_seconds: StallSeconds = STALL_SECONDS


class LimitSettings(BaseModel):
    """A bandwidth that is no setting of the agent: of ``ds-ckpt limit``, a restore, a check."""

    bandwidth: Rate | None = None


SettingsT = TypeVar("SettingsT", bound=BaseModel)


def load(**given: Any) -> AgentSettings:
    """Settings from what the command line gave (None: not given) and the environment.

    Raises:
        SettingsError: a setting is missing or cannot work; says which, and where it can be set.
    """
    return check(AgentSettings, **given)


def check(kind: type[SettingsT], **given: Any) -> SettingsT:
    """As :func:`load`, for settings of any kind.

    Raises:
        SettingsError: a setting is missing or cannot work; says which, and where it can be set.
    """
    try:
        return kind(**{key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        sentences = []
        for item in error.errors(include_url=False):
            name = ".".join(str(part) for part in item["loc"])
            option = "--" + name.replace("_", "-")
            if item["type"] == "missing":
                what = "is missing: set it"
            elif item["type"] == "value_error":
                what = str(item["ctx"]["error"])
            else:
                what = f"{item['input']!r} cannot be: {item['msg'][0].lower()}{item['msg'][1:]}"
            sentences.append(f"{option} (or DS_CKPT_{name.upper()}): {what}")
        raise SettingsError("; ".join(sentences)) from None


def misspelt(variables: Iterable[str]) -> dict[str, str]:
    """Variables that look like a setting of the agent's and are none, each with that setting.

    What begins like one and resembles none may be the trainer's, or of a newer version.

    Args:
        variables: names of the environment.
    """
    known = [f"DS_CKPT_{name.upper()}" for name in AgentSettings.model_fields]
    found = {}
    for variable in sorted(variables):
        if not variable.startswith("DS_CKPT_") or variable in known:
            continue
        near = difflib.get_close_matches(variable, known, n=1, cutoff=_ALIKE)
        if near:
            found[variable] = near[0]
    return found
