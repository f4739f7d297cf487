"""Status files for the trainer and for ``ds-ckpt status``.

They help people and hold nothing up: one that cannot be written (no byte free, no permission) is
said once in the log, and work goes on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Literal

from ds_ckpt_sidecar.observe.log import Growing
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.manifest import SaveStatus, SidecarStatus
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import InputError

KEPT_STATUSES = 1000
REMEMBERED = 50
HEARTBEAT_SECONDS = 2.0

ENDED = frozenset({"committed", "cleaned", "superseded", "abandoned"})

AgentState = Literal["starting", "standby", "running", "draining", "stopped", "refused"]


class Reporter:
    """Writes ``status/`` of one volume; progress and heartbeat at most every two seconds.

    Attributes:
        current: the last heartbeat; may be read from any thread.
        facts: gives what each heartbeat says beside what it is handed.
    """

    def __init__(self, volume: Volume, clock: Clock, failures: Growing, version: str) -> None:
        self._volume = volume
        self._clock = clock
        self._failures = failures
        self._version = version
        self._last: dict[str, SaveStatus] = {}
        self._unwritten: dict[str, SaveStatus] = {}
        self._next_beat = 0.0
        self._gone: dict[str, SaveStatus] = {}
        self._error: tuple[str, str, float] = ("", "", 0.0)
        self.current: SidecarStatus | None = None
        self.facts: Callable[[], dict[str, object]] = dict

    def said(self) -> SidecarStatus | None:
        """The last heartbeat, with what went wrong since; from any thread."""
        text, kind, at = self._error
        if self.current is None or not text:
            return self.current
        newer = {"last_error": text, "last_error_kind": kind, "last_error_time": at}
        return self.current.model_copy(update=newer)

    def saves(self) -> list[SaveStatus]:
        """Where each save stands, and the last that have left the volume; from any thread."""
        return [*self._gone.values(), *self._last.values()]

    def recall(self) -> None:
        """What an earlier start wrote of saves that have left the volume since."""
        for name in self._save_names()[-REMEMBERED:]:
            with contextlib.suppress(InputError, OSError):
                status = self._volume.save_status(name[: -len(".json")])
                if status is not None and status.state in ENDED:
                    self._gone[status.save_id] = status

    def save(self, status: SaveStatus) -> None:
        """Say where a save stands; progress within one state is written now and then."""
        before = self._last.get(status.save_id)
        if (
            before is not None
            and before.state == status.state
            and before.reason == status.reason
            and before.waiting_for == status.waiting_for
            and (status.time - before.time < HEARTBEAT_SECONDS)
        ):
            return
        self._gone.pop(status.save_id, None)
        self._last[status.save_id] = status
        self._unwritten[status.save_id] = status
        self._write_saves()

    def _write_saves(self) -> None:
        """Write what is not written yet: all of it, once a full disk has room again."""
        try:
            for save_id, status in list(self._unwritten.items()):
                self._volume.write_save_status(status)
                del self._unwritten[save_id]
        except OSError as error:
            self._unwritable(error)

    def forget(self, save_id: str) -> None:
        """A save is gone from this volume; its last status stays for a while.

        Not that of one that was not decided: somebody else took its manifest.
        """
        last = self._last.pop(save_id, None)
        old = self._save_names()[:-KEPT_STATUSES]
        if last is not None and last.state in ENDED:
            self._gone[save_id] = last
            while len(self._gone) > REMEMBERED:
                del self._gone[min(self._gone)]
        elif last is not None:
            old.append(f"{save_id}.json")
        for name in old:
            try:
                self._volume.fs.unlink(f"{self._volume.status}/{name}")
            except OSError as error:
                self._unwritable(error)

    def _save_names(self) -> list[str]:
        """Status files of saves, the oldest first."""
        own = {"sidecar.json", "trainer.json"}
        names = self._volume.fs.names(self._volume.status)
        return [name for name in names if name not in own and not name.startswith(".")]

    def error(self, text: str, kind: str = "") -> None:
        """Remember the last error and its class for the heartbeat; no text: all is well."""
        self._error = (text, kind, self._clock.time()) if text else ("", "", 0.0)
        self._next_beat = 0.0

    def beat(self, state: AgentState, *, now: bool = False, **values: object) -> None:
        """The heartbeat, at most every two seconds unless ``now``."""
        monotonic = self._clock.monotonic()
        if monotonic < self._next_beat and not now:
            return
        self._next_beat = monotonic + HEARTBEAT_SECONDS
        self._write_saves()
        try:
            status = SidecarStatus.model_validate(
                {
                    "schema": 1,
                    "time": self._clock.time(),
                    "pid": os.getpid(),
                    "version": self._version,
                    "state": state,
                    "last_error": self._error[0],
                    "last_error_kind": self._error[1],
                    "last_error_time": self._error[2],
                    **self.facts(),
                    **values,
                }
            )
            self.current = status
            self._volume.write_sidecar_status(status)
        except OSError as error:
            self._unwritable(error)

    def _unwritable(self, error: OSError) -> None:
        """Say it once: names of temporary files would make every time look like another fault."""
        sentence = f"{self._volume.status} cannot be written: {error.strerror}"
        self._failures.error("status", "status.unwritable", error=sentence, uid=os.geteuid())
