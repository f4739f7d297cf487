"""The hook of one process: its settings, its sessions, its background worker, its saves.

Everything that a test or a simulation swaps (clock, randomness, filesystem, the ranks' exchange)
is handed in here. A training process has one, made by :func:`ds_ckpt_hook.configure` or by the
first call.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ds_ckpt_hook import session as sessions
from ds_ckpt_hook.errors import HookError
from ds_ckpt_hook.exchange import Exchange, connect
from ds_ckpt_hook.publishing import Worker
from ds_ckpt_hook.sealing import Seals
from ds_ckpt_hook.session import Session
from ds_ckpt_hook.settings import Place, Settings, locate
from ds_ckpt_store.contract import access
from ds_ckpt_store.contract.clock import Clock, SystemClock, system_random
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.manifest import SaveStatus
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError, SettingsError

logger = logging.getLogger("ds_ckpt_hook")

NoticeKind = Literal["not published", "lost", "lag", "no sidecar", "no room", "preempted"]
DURABLE = frozenset({"committed", "cleaned"})
LOST = frozenset({"superseded", "abandoned", "quarantined", "failed", "held"})


@dataclass(frozen=True)
class Notice:
    """Something that a person should hear: what kind of thing, one sentence, and which save."""

    kind: NoticeKind
    sentence: str
    tag: str = ""
    save_id: str | None = None


@dataclass
class SaveState:
    """What this process knows of one save; ``reason`` says why it is not published.

    ``agreed_at`` is in seconds since the epoch, and 0 before the ranks have agreed on it.
    """

    tag: str
    save_id: str | None = None
    session: Session | None = None
    held_seconds: float = 0.0
    reason: str = ""
    waiting_for_engine: bool = False
    handed_over: bool = False
    told: bool = False
    agreed_at: float = 0.0

    @property
    def volume(self) -> Volume | None:
        """Where it lies, if that is known."""
        return None if self.session is None else self.session.volume

    def look(self) -> SaveStatus:
        """Where the save stands, by this process or by the sidecar."""
        if self.reason:
            return self._status("failed", self.reason)
        if self.session is None or self.save_id is None:
            return self._status("discovered", "the checkpoint engine has not finished writing it")
        if not self.handed_over:
            return self._status("discovered", "its checksums are still being taken on this node")
        found = self.session.volume.save_status(self.save_id)
        return found or self._status("discovered", "the sidecar has said nothing of it yet")

    def _status(self, state: str, reason: str) -> SaveStatus:
        return SaveStatus.model_validate(
            {
                "save_id": self.save_id or "",
                "tag": self.tag,
                "state": state,
                "reason": reason,
                "time": 0.0,
            }
        )


@dataclass
class Hook:
    """All state of the hook in one process.

    Attributes:
        settings: see :class:`Settings`.
        clock, rng, fs: time, chance, the volume's filesystem.
        connect: makes the exchange when it is first needed; raises SettingsError if it cannot.
        left_out: tags that ``save_checkpoint`` has written on no rank, for want of room.
    """

    settings: Settings
    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random = field(default_factory=system_random)
    fs: Filesystem = field(default_factory=Filesystem)
    connect: Callable[[float], Exchange] = connect

    def __post_init__(self) -> None:
        self.saves: list[SaveState] = []
        self.left_out: set[str] = set()
        self.seals = Seals()
        self.unfinished: list[Callable[[], bool]] = []
        self.worker = Worker(self.clock, self.settings.publish_timeout)
        self.sessions: dict[str, Session] = {}
        self.began = self.clock.monotonic()
        self.next_word = 0.0
        self.telling = threading.Lock()
        self.listeners: list[Callable[[Notice], None]] = []
        self._started = sessions.process_started(self.clock)
        self._exchange: Exchange | None = None
        self._attempt = ""

    @property
    def exchange(self) -> Exchange:
        """The ranks of this job.

        Raises:
            SettingsError: they cannot talk yet.
        """
        if self._exchange is None:
            self._exchange = self.connect(self.settings.exchange_timeout)
        return self._exchange

    def locate(self, save_dir: str | os.PathLike[str] | None) -> tuple[Place | None, str]:
        """The place of a save_dir, or None and the reason."""
        try:
            return locate(save_dir, self.settings, self.fs), ""
        except SettingsError as error:
            return None, str(error)

    def session(self, place: Place | None, problem: str) -> Session:
        """This process's session on the volume of ``place``; begins one if there is none.

        A rank without a place takes part all the same, to tell the others.

        Raises:
            HookError: not all ranks could begin.
            SettingsError: the ranks cannot talk yet.
        """
        if place is None and self.sessions:
            return next(iter(self.sessions.values()))
        if place is not None and place.volume.path in self.sessions:
            return self.sessions[place.volume.path]
        made = sessions.begin(
            place,
            problem,
            self.exchange,
            self.settings,
            attempt=self._attempt,
            clock=self.clock,
            rng=self.rng,
            started=self._started,
        )
        self._attempt = made.attempt
        self.sessions[made.volume.path] = made
        return made

    def warn(self, kind: NoticeKind, sentence: str, state: SaveState | None = None) -> None:
        """Say something in the log and to those who listen; what they raise is logged, no more."""
        logger.warning("%s", sentence)
        self.notify(kind, sentence, state)

    def notify(self, kind: NoticeKind, sentence: str, state: SaveState | None = None) -> None:
        """Say to those who listen what is in the log already."""
        tag, save_id = (state.tag, state.save_id) if state is not None else ("", None)
        for listener in list(self.listeners):
            try:
                listener(Notice(kind, sentence, tag, save_id))
            except Exception:
                logger.exception("a listener of ds_ckpt_hook.on_notice failed")

    def catch_up(self) -> None:
        """Take the saves whose checkpoint engine has finished since."""
        self.unfinished = [take for take in self.unfinished if not take()]


def reason_of(error: BaseException) -> str:
    """What to tell of an error: its sentence, its class unless it is one of ours, its remedy."""
    if isinstance(error, (HookError, CkptError)):
        return str(error)
    remedy = access.denied(error, Filesystem())
    return f"{type(error).__name__}: {error}{f'; {remedy}' if remedy else ''}"
