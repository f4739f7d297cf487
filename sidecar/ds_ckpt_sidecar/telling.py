"""What others are told of durability: the termination message, and reports to the cluster.

Nothing here raises or waits: both take what they are given, and do with it what they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Protocol

from ds_ckpt_sidecar.lifecycle import Save
from ds_ckpt_sidecar.observe.termination import TerminationMessage, compose
from ds_ckpt_sidecar.syncer import Syncer
from ds_ckpt_store.contract import names

FAILING_TRIES = 3
_UNKNOWN = "unknown"
_DONE = "nothing to do: every save that was handed over is durable"
_LEFT = (
    "what to do: start the agent on this volume again, and it goes on; if the volume ended with "
    "the pod, resume from what is durable"
)
_MEND = (
    "what to do: first mend what the lines above name; then start the agent on this volume again, "
    "and it goes on; if the volume ended with the pod, resume from what is durable"
)


_OVER = (
    "what to do: these saves are lost, and no start of the agent changes that; resume from what is "
    "durable"
)


class Reports(Protocol):
    """Where a cluster hears of it; :class:`ds_ckpt_sidecar.observe.kubernetes.PodReporter`."""

    def committed(self, tag: str, folder: str, time_ms: int) -> None:
        """A save is durable."""

    def failing(self, sentence: str) -> None:
        """Something fails again and again."""

    def not_durable_at_exit(self, sentences: Sequence[str]) -> None:
        """The agent ends, and these saves are no checkpoints."""


class Telling:
    """Tells others.

    Args:
        message: the container's termination message, if there is one.
        reports: to the cluster, if there are any.

    Attributes:
        not_durable: one sentence for each save that is not; may be read from any thread.
    """

    def __init__(self, message: TerminationMessage | None, reports: Reports | None) -> None:
        self._message = message
        self._reports = reports
        self._durable = f"{_UNKNOWN}: the store has not been reached yet"
        self.not_durable: tuple[str, ...] = ()
        self._refused: frozenset[str] = frozenset()
        self._warned = False
        self._in_trouble = False
        self._may_come = True
        self._write()

    def heard(self, save: Save, error: str) -> None:
        """A save was taken a step further, or failed."""
        if self._reports is None:
            return
        manifest = save.manifest
        if save.state == "committed" and not save.told:
            save.told = True
            if save.record is None or save.record.state == "committed":
                self._reports.committed(manifest.tag, manifest.folder, manifest.time_ms)
        if error:
            self.failing(f"{manifest.tag}: {error}", save.tries)

    def failing(self, sentence: str, tries: int) -> None:
        """Something has failed so many times in a row."""
        if self._reports is not None and tries >= FAILING_TRIES:
            self._reports.failing(sentence)

    def refresh(self, syncer: Syncer, trouble: str = "") -> None:
        """Say what is durable now; ``trouble`` keeps the agent from storing, if set."""
        newest = syncer.newest_committed()
        if newest is not None:
            self._durable = _describe(*newest)
        elif trouble:
            self._durable = f"{_UNKNOWN}: {trouble}"
        self.not_durable = tuple(syncer.not_durable(trouble))
        self._in_trouble = bool(trouble or syncer.trouble or syncer.refused())
        self._may_come = bool(self._in_trouble or syncer.unfinished())
        self._write()
        refused = syncer.refused()
        if self._reports is not None:
            for sentence in refused:
                if sentence not in self._refused:
                    self._reports.failing(sentence)
        self._refused = frozenset(refused)

    def unreached(self, why: str, tags: Sequence[str]) -> None:
        """The store could not be reached so far, and the volume holds these saves."""
        self._durable = f"{_UNKNOWN}: {why}"
        self._in_trouble = True
        self.not_durable = tuple(f"{tag}: discovered, {why}" for tag in tags)
        self._write()

    def ending(self) -> None:
        """The agent may be killed any moment, and then could tell no more."""
        if self._reports is not None and self.not_durable and not self._warned:
            self._warned = True
            self._reports.not_durable_at_exit(self.not_durable)

    def ended(self, why: str = "") -> None:
        """The agent ends; ``why`` if it cannot go on."""
        self.ending()
        self._write(why)

    def _write(self, why: str = "") -> None:
        if self._message is not None:
            advice = _MEND if self._in_trouble else _LEFT if self._may_come else _OVER
            if not self.not_durable:
                advice = _DONE
            if self._durable.startswith(_UNKNOWN) and not self.not_durable:
                advice = "what to do: look at the agent's log"
            self._message.write(
                compose(
                    self._durable, self.not_durable, f"the agent gave up: {why}" if why else advice
                )
            )


def _describe(time_ms: int, tag: str, save_id: str) -> str:
    if not save_id:
        return "nothing"
    saved = datetime.fromtimestamp(time_ms / 1000, tz=timezone.utc)
    return f"{tag} ({names.folder_of(tag, save_id)}, saved {saved:%Y-%m-%dT%H:%M:%SZ})"
