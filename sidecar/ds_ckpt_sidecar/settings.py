"""Settings of the agent: command line over environment (``DS_CKPT_*``) over defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from ds_ckpt_store.errors import SettingsError
from ds_ckpt_store.retention import DEFAULT_PAUSE

Seconds = Annotated[float, Field(ge=0)]


class AgentSettings(BaseSettings):
    """What one agent is told. Seconds, bytes and MiB as the names say."""

    model_config = SettingsConfigDict(env_prefix="DS_CKPT_", extra="ignore", frozen=True)

    volume: Annotated[str, Field(description="the folder that trainer and sidecar share")]
    destination: Annotated[str, Field(description="s3://bucket/prefix or file:///folder")]
    run_id: Annotated[
        str, Field(description="the run; default: what the trainer on this volume says")
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
    streams: Annotated[int, Field(ge=1, le=256, description="parts in flight at most")] = 8
    part_mib: Annotated[int, Field(ge=5, le=5120, description="preferred size of a part")] = 16
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

    @field_validator("destination")
    @classmethod
    def _without_slash(cls, value: str) -> str:
        return value.rstrip("/") if not value.endswith("://") else value

    @property
    def lease_renew_seconds(self) -> float:
        """The lease is renewed this often, well before it could be taken for dead."""
        return self.lease_stale_seconds / 5


def load(**given: Any) -> AgentSettings:
    """Settings from what the command line gave (None: not given) and the environment.

    Raises:
        SettingsError: a setting is missing or cannot work; says which, and where it can be set.
    """
    try:
        return AgentSettings(**{key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        sentences = []
        for item in error.errors(include_url=False):
            name = ".".join(str(part) for part in item["loc"])
            option = "--" + name.replace("_", "-")
            sentences.append(f"{option} (or DS_CKPT_{name.upper()}): {item['msg']}")
        raise SettingsError("; ".join(sentences)) from None
