"""What happened to pods, and when: the facts that tests judge by, and a timeline for people."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


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
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._events: list[Event] = []

    def now(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def note(self, what: str, detail: str = "", *, pod: str = "", container: str = "") -> Event:
        """Something happens now."""
        with self._lock:
            event = Event(self.now(), pod, container, what, detail)
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
            events = list(self._events)
        pods = max((len(event.pod) for event in events), default=0)
        names = max((len(event.container) for event in events), default=0)
        return "\n".join(
            f"{event.at:7.2f} s  {event.pod:<{pods}}  {event.container:<{names}}  "
            f"{event.what} {event.detail}".rstrip()
            for event in events
        )
