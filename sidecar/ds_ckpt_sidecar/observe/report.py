"""Status files for the trainer and for ``ds-ckpt status``.

They help people and hold nothing up: one that cannot be written (no byte free, no permission) is
said once in the log, and work goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

from ds_ckpt_sidecar.observe.log import Growing
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.manifest import SaveStatus, SidecarStatus
from ds_ckpt_store.contract.volume import Volume

KEPT_STATUSES = 1000
HEARTBEAT_SECONDS = 2.0

AgentState = Literal["starting", "standby", "running", "draining", "stopped", "refused"]


class Reporter:
    """Writes ``status/`` of one volume; progress and heartbeat at most every two seconds."""

    def __init__(self, volume: Volume, clock: Clock, failures: Growing, version: str) -> None:
        self._volume = volume
        self._clock = clock
        self._failures = failures
        self._version = version
        self._last: dict[str, SaveStatus] = {}
        self._unwritten: dict[str, SaveStatus] = {}
        self._next_beat = 0.0
        self._error: tuple[str, float] = ("", 0.0)
        self.limits: Callable[[], dict[str, object]] = dict

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
        """A save is gone from this volume; its last status stays for a while."""
        self._last.pop(save_id, None)
        own = {"sidecar.json", "trainer.json"}
        old = [
            name
            for name in self._volume.fs.names(self._volume.status)
            if name not in own and not name.startswith(".")
        ]
        for name in old[:-KEPT_STATUSES]:
            try:
                self._volume.fs.unlink(f"{self._volume.status}/{name}")
            except OSError as error:
                self._unwritable(error)

    def error(self, text: str) -> None:
        """Remember the last error for the heartbeat; empty text says that all is well."""
        self._error = (text, self._clock.time()) if text else ("", 0.0)
        self._next_beat = 0.0

    def beat(self, state: AgentState, *, now: bool = False, **values: object) -> None:
        """The heartbeat, at most every two seconds unless ``now``."""
        monotonic = self._clock.monotonic()
        if monotonic < self._next_beat and not now:
            return
        self._next_beat = monotonic + HEARTBEAT_SECONDS
        self._write_saves()
        try:
            space = self._volume.fs.space(self._volume.path)
            status = SidecarStatus.model_validate(
                {
                    "schema": 1,
                    "time": self._clock.time(),
                    "pid": os.getpid(),
                    "version": self._version,
                    "state": state,
                    "free_bytes": space.free,
                    "total_bytes": space.total,
                    "last_error": self._error[0],
                    "last_error_time": self._error[1],
                    **self.limits(),
                    **values,
                }
            )
            self._volume.write_sidecar_status(status)
        except OSError as error:
            self._unwritable(error)

    def _unwritable(self, error: OSError) -> None:
        """Say it once: names of temporary files would make every time look like another fault."""
        sentence = f"{self._volume.status} cannot be written: {error.strerror}"
        self._failures.error("status", "status.unwritable", error=sentence, uid=os.geteuid())
