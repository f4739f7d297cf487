"""One structured line per step of a save, as text or JSON, to standard error."""

from __future__ import annotations

import sys
import threading
from typing import Any, Literal, Protocol

import structlog

from ds_ckpt_store.contract.clock import Clock


class Log(Protocol):
    """The part of a structured logger that is used here: an event's name and plain values."""

    def info(self, event: str, **values: Any) -> Any:
        """Something went as it should."""

    def warning(self, event: str, **values: Any) -> Any:
        """Somebody should look at this some time."""

    def error(self, event: str, **values: Any) -> Any:
        """Something failed, and what happens next."""


def make_log(format: Literal["text", "json"]) -> Log:
    """A logger that writes to standard error."""
    render: Any = (
        structlog.processors.JSONRenderer(sort_keys=False)
        if format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=22)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            render,
        ],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    log: Log = structlog.get_logger()
    return log


class Growing:
    """Logs a failure that repeats at growing intervals: 0, 1, 3, 7, 15 ... minutes."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, float, float, int]] = {}

    def error(self, subject: str, event: str, **values: Any) -> None:
        """Log unless the same was said of this subject a short while ago.

        The same is an error of the same class, if ``kind`` tells it: its words may name another
        key, or another request, each time.
        """
        repeated = self._repeated(subject, str(values.get("kind") or values.get("error", "")))
        if repeated is not None:
            self._log.error(event, **values, **repeated)

    def warning(self, subject: str, event: str, **values: Any) -> None:
        """Log unless something was said of this subject a short while ago, whatever it was.

        From any thread.
        """
        repeated = self._repeated(subject, "")
        if repeated is not None:
            self._log.warning(event, **values, **repeated)

    def _repeated(self, subject: str, text: str) -> dict[str, int] | None:
        """What to add to the line; None if it is not to be written."""
        now = self._clock.monotonic()
        with self._lock:
            known = self._seen.get(subject)
            last, due, interval, times = known or ("", 0.0, 30.0, 0)
            same = known is not None and text == last
            if same and now < due:
                self._seen[subject] = (text, due, interval, times + 1)
                return None
            interval = min(interval * 2, 3600.0) if same else 60.0
            self._seen[subject] = (text, now + interval, interval, 0)
        return {"repeated": times} if same and times else {}

    def clear(self, subject: str) -> None:
        """The subject is well again."""
        self._seen.pop(subject, None)
