"""What happened to pods, and when: the facts that tests judge by, and a timeline for people."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

WIDTH = 160  # of what is printed of a detail


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        at: seconds since the timeline began.
        pod: its name.
        container: its name; empty if it is about the whole pod.
        what: a short constant, such as ``started`` or ``SIGTERM``.
        detail: for people.
    """

    at: float
    pod: str
    container: str
    what: str
    detail: str = ""


class Timeline:
    """Events in their order; safe to use from any thread."""

    def __init__(self) -> None:
        self._began, self._began_at = time.monotonic(), time.time()
        self._lock = threading.Lock()
        self._events: list[Event] = []

    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def at(self, since_epoch: float) -> float:
        """Seconds from its beginning to a time since the epoch."""
        return since_epoch - self._began_at

    def note(
        self,
        what: str,
        detail: str = "",
        *,
        pod: str = "",
        container: str = "",
        since_epoch: float | None = None,
    ) -> Event:
        """Something happens now, or happened at a time since the epoch, as a log tells it."""
        with self._lock:
            at = self.now() if since_epoch is None else self.at(since_epoch)
            event = Event(at, pod, container, what, detail)
            self._events.append(event)
        return event

    def of(self, what: str, *, pod: str = "", container: str = "") -> list[Event]:
        """All events of a kind, of any pod and container that are not named."""
        with self._lock:
            return [
                event
                for event in self._events
                if event.what == what
                and (not pod or event.pod == pod)
                and (not container or event.container == container)
            ]

    def only(self, what: str, *, pod: str = "", container: str = "") -> Event:
        """The one event of a kind."""
        found = self.of(what, pod=pod, container=container)
        assert len(found) == 1, f"{len(found)} events {what} of {pod} {container}:\n{self}"
        return found[0]

    def __str__(self) -> str:
        with self._lock:
            events = sorted(self._events, key=lambda event: event.at)
        pods = max((len(event.pod) for event in events), default=0)
        names = max((len(event.container) for event in events), default=0)
        return "\n".join(
            f"{event.at:7.2f} s  {event.pod:<{pods}}  {event.container:<{names}}  "
            f"{event.what} {event.detail[:WIDTH]}".rstrip()
            for event in events
        )
