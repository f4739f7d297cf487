"""Settings of the hook, all from the environment that the pod's manifest gives the trainer.

A training script then needs no setting at all; :func:`ds_ckpt_hook.configure` overrides single
ones where a script knows better.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import SettingsError

logger = logging.getLogger("ds_ckpt_hook")


CHECKED = (
    "DS_CKPT_TIMEOUT",
    "DS_CKPT_PUBLISH_TIMEOUT",
    "DS_CKPT_RESUME_TIMEOUT",
    "DS_CKPT_ROOM_TIMEOUT",
    "DS_CKPT_MAX_LAG",
    "DS_CKPT_GRACE",
    "DS_CKPT_WHEN_FULL",
)
WhenFull = Literal["wait", "skip", "warn"]


@dataclass(frozen=True)
class Settings:
    """All settings of the hook; times in seconds.

    Attributes:
        directory: ``DS_CKPT_DIR``, where the shared volume is mounted; save_dir if None.
        run_id: ``DS_CKPT_RUN_ID``, the name of the training run over all its restarts; the name
            of the save_dir if None. Global rank 0's value counts for all.
        destination: ``DS_CKPT_DESTINATION``, the store's URL. Only ``agree_on_resume`` reads it.
        start_fresh: ``DS_CKPT_START_FRESH``, start from scratch though checkpoints are known
            of that cannot be had. Global rank 0's value counts for all.
        widen_modes: ``DS_CKPT_WIDEN_MODES``, let the volume's group read the files of a checkpoint
            and change its folders, so that a sidecar of another user can store and remove it.
            ``0`` leaves them as the trainer made them: the sidecar must be the trainer's user.
        exchange_timeout: ``DS_CKPT_TIMEOUT``, how long a rank waits for the others in one exchange.
        publish_timeout: ``DS_CKPT_PUBLISH_TIMEOUT``, how long a node waits in the background for
            the checksums of its ranks, and ranks for the index of sub-checkpoints.
        max_lag: ``DS_CKPT_MAX_LAG``, warn when a save is not durable after so many seconds; None:
            never.
        when_full: ``DS_CKPT_WHEN_FULL``, what :func:`ds_ckpt_hook.ready_to_save` does where the
            volume cannot take another checkpoint: ``wait`` for room, ``skip`` the save, ``warn``.
        room_timeout: ``DS_CKPT_ROOM_TIMEOUT``, how long ``wait`` waits.
        grace: ``DS_CKPT_GRACE``, from SIGTERM to the end of this process: what the pod's
            terminationGracePeriodSeconds says. Only :func:`ds_ckpt_hook.on_preemption` reads it.
        resume_timeout: ``DS_CKPT_RESUME_TIMEOUT``, how long ranks wait while others verify or
            restore a checkpoint.
    """

    directory: str | None = None
    run_id: str | None = None
    destination: str | None = None
    start_fresh: bool = False
    widen_modes: bool = True
    exchange_timeout: float = 120.0
    publish_timeout: float = 1800.0
    max_lag: float | None = None
    when_full: WhenFull = "warn"
    room_timeout: float = 1800.0
    grace: float = 30.0
    resume_timeout: float = 7200.0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read ``DS_CKPT_*``.

        Raises:
            SettingsError: a time is not a positive number; names the variable.
        """
        return cls(
            directory=environ.get("DS_CKPT_DIR") or None,
            run_id=_run_id(environ.get("DS_CKPT_RUN_ID", "")),
            destination=environ.get("DS_CKPT_DESTINATION") or None,
            start_fresh=environ.get("DS_CKPT_START_FRESH", "").lower() in ("1", "true", "yes"),
            widen_modes=environ.get("DS_CKPT_WIDEN_MODES", "").lower() not in ("0", "false", "no"),
            exchange_timeout=_seconds(environ, "DS_CKPT_TIMEOUT", cls.exchange_timeout),
            publish_timeout=_seconds(environ, "DS_CKPT_PUBLISH_TIMEOUT", cls.publish_timeout),
            max_lag=_seconds(environ, "DS_CKPT_MAX_LAG", 0.0) or None,
            when_full=when_full(environ.get("DS_CKPT_WHEN_FULL") or cls.when_full),
            room_timeout=_seconds(environ, "DS_CKPT_ROOM_TIMEOUT", cls.room_timeout),
            grace=_seconds(environ, "DS_CKPT_GRACE", cls.grace),
            resume_timeout=_seconds(environ, "DS_CKPT_RESUME_TIMEOUT", cls.resume_timeout),
        )


def when_full(word: str) -> WhenFull:
    """A policy by its name.

    Raises:
        SettingsError: there is none of that name.
    """
    for known in get_args(WhenFull):
        if word == known:
            return known  # type: ignore[no-any-return]
    raise SettingsError(f"{word!r} is no policy for a full volume: {get_args(WhenFull)} are")


def _run_id(text: str) -> str | None:
    printable = "".join(c for c in text if c.isprintable()).strip()[:256]
    if printable != text:
        logger.warning("DS_CKPT_RUN_ID=%r is used as %r", text, printable)
    return printable or None


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise SettingsError(f"{name}={text!r}: a number of seconds greater than 0 is needed")
    return value


@dataclass(frozen=True)
class Place:
    """Where a save lies: a volume, and save_dir relative to it (``"."`` for the volume itself)."""

    volume: Volume
    root: str

    @property
    def save_dir(self) -> str:
        """Absolute path of save_dir."""
        return self.volume.path if self.root == "." else f"{self.volume.path}/{self.root}"


def locate(save_dir: str | os.PathLike[str] | None, settings: Settings, fs: Filesystem) -> Place:
    """The volume of a save_dir: ``DS_CKPT_DIR`` if it lies in there, else save_dir itself.

    Raises:
        SettingsError: neither is given, or save_dir lies in a folder that is reserved.
    """
    chosen = save_dir if save_dir is not None else settings.directory
    if chosen is None or not os.fspath(chosen):
        raise SettingsError(
            "no folder is known: pass save_dir, or set DS_CKPT_DIR to the shared volume"
        )
    path = os.path.realpath(chosen)
    if settings.directory is not None:
        volume = os.path.realpath(settings.directory)
        if path == volume:
            return Place(Volume(volume, fs), ".")
        if path.startswith(f"{volume.rstrip('/')}/"):
            root = os.path.relpath(path, volume)
            try:
                return Place(Volume(volume, fs), names.check_relative_path(root))
            except Exception as error:
                raise SettingsError(f"save_dir {path} cannot be used: {error}") from error
    return Place(Volume(path, fs), ".")
