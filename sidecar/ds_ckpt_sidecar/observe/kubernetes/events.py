"""The documents that are sent, within the limits that the API server sets to them.

An event has a name of its own from the beginning, so one whose answer was lost can be sent again:
the server then says 409, and there is one of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

CONTROLLER = "ds-ckpt.io/sidecar"
LAST_COMMITTED = "ds-ckpt.io/last-committed"
LAST_COMMITTED_AT = "ds-ckpt.io/last-committed-at"

NOTE_BYTES = 1024
_INSTANCE_CHARS = 128
_NAME_CHARS = 253


@dataclass(frozen=True)
class Pod:
    """The own pod, as the downward API names it."""

    name: str
    namespace: str
    uid: str


@dataclass(frozen=True)
class Commit:
    """A save that is durable."""

    tag: str
    folder: str
    time_ms: int

    @property
    def saved(self) -> str:
        """When it was saved."""
        return f"{_moment(self.time_ms / 1000):%Y-%m-%dT%H:%M:%SZ}"


@dataclass(frozen=True)
class Series:
    """An event that stands for several: how many, and when the last was."""

    count: int
    last: float


def committed(commit: Commit, before: int) -> tuple[str, str, str, str]:
    """Type, reason, action and note of it; ``before`` it were so many that nobody was told of."""
    note = f"{commit.tag} is durable as {commit.folder}, saved {commit.saved}"
    if before:
        note += f" ({before} more became durable since the last report)"
    return "Normal", "CheckpointCommitted", "Commit", note


def failing(sentence: str) -> tuple[str, str, str, str]:
    """Type, reason, action and note of what fails again and again."""
    return "Warning", "CheckpointUploadFailing", "Upload", sentence


def not_durable_at_exit(sentences: Sequence[str]) -> tuple[str, str, str, str]:
    """Type, reason, action and note of what the agent leaves; the last ones if there is room."""
    note = "the agent ends, and this is not durable: "
    room = NOTE_BYTES - len(note) - len(" (and 9999 more)")
    kept: list[str] = []
    for sentence in sentences:
        room -= len(_plain(sentence).encode()) + len("; ")
        if kept and room < 0:
            note += f"{'; '.join(kept)} (and {len(sentences) - len(kept)} more)"
            break
        kept.append(sentence)
    else:
        note += "; ".join(kept)
    return "Warning", "CheckpointNotDurableAtExit", "Exit", note


def event(
    pod: Pod, what: tuple[str, str, str, str], now: float, token: str, series: Series | None = None
) -> dict[str, Any]:
    """An event of ``events.k8s.io/v1`` about the pod.

    Args:
        pod: the pod.
        what: type, reason, action and note.
        now: seconds since the epoch.
        token: hexadecimal digits that no other event of this pod has.
        series: set if it stands for several.
    """
    kind, reason, action, note = what
    name = f"{pod.name[: _NAME_CHARS - len(token) - 1].rstrip('.-')}.{token}"
    document: dict[str, Any] = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": pod.namespace},
        "type": kind,
        "reason": reason,
        "action": action,
        "note": short(note, NOTE_BYTES),
        "eventTime": _micro_time(now),
        "reportingController": CONTROLLER,
        "reportingInstance": pod.name[:_INSTANCE_CHARS],
        "regarding": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": pod.name,
            "namespace": pod.namespace,
            "uid": pod.uid,
        },
    }
    if series is not None:
        document["series"] = {
            "count": series.count,
            "lastObservedTime": _micro_time(series.last),
        }
    return document


def last_committed(pod: Pod, commit: Commit) -> dict[str, Any]:
    """A merge patch of the pod, and of no other that has got its name since: it has another uid."""
    return {
        "metadata": {
            "uid": pod.uid,
            "annotations": {
                LAST_COMMITTED: _plain(commit.tag),
                LAST_COMMITTED_AT: commit.saved,
            },
        }
    }


def short(text: str, most: int) -> str:
    """The text in at most so many bytes, and in one line, whatever a trainer put into a tag."""
    data = _plain(text).encode()
    if len(data) > most:
        data = data[: most - 3].decode(errors="ignore").encode() + b"..."
    return data.decode()


def _plain(text: str) -> str:
    printable = "".join(char if char.isprintable() else " " for char in text)
    return printable.encode(errors="replace").decode()


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=timezone.utc)


def _micro_time(seconds: float) -> str:
    return f"{_moment(seconds):%Y-%m-%dT%H:%M:%S.%fZ}"
