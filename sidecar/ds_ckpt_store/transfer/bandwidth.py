"""A bound on bytes per second that many threads share, and that may be changed at any time.

Each piece takes a ticket in the order in which it comes, and goes when as many bytes have been
allowed: so threads take turns, and no piece passes another. What was not used is not saved up,
but for a tenth of a second, which makes up for threads that wake late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ds_ckpt_store.contract.clock import Clock

LEAST = 64 << 10
"""The smallest bound, bytes per second. With less, one piece of 1 MiB takes longer than stores
leave a connection open on which nothing moves."""

_BURST_SECONDS = 0.1
_LONGEST_SLEEP = 0.1  # so soon a change of the bound is seen
_SHORTEST_SLEEP = 0.001


class Bandwidth:
    """The bound.

    Args:
        clock: time.
        rate: bytes per second; 0 for no bound.
    """

    def __init__(self, clock: Clock, rate: int = 0) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rate = rate
        self._taken = 0.0
        self._allowed = 0.0
        self._time = clock.monotonic()

    @property
    def rate(self) -> int:
        """Bytes per second; 0 for no bound."""
        return self._rate

    def set(self, rate: int) -> None:
        """Change the bound; whoever waits goes on at the new one."""
        with self._lock:
            if rate == self._rate:
                return
            self._refill()
            if not self._rate:
                self._taken = self._allowed = 0.0
            self._rate = rate

    def pace(self, size: int, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until ``size`` more bytes may move; returns at once if there is no bound.

        Args:
            size: bytes of the next piece.
            waiting: called before each short sleep; may raise, and then the piece does not move.
        """
        if not self._rate or size <= 0:
            return
        with self._lock:
            self._refill()
            self._taken += size
            ticket = self._taken
        while (delay := self._due(ticket)) > 0:
            waiting()
            self._clock.sleep(delay)

    def _due(self, ticket: float) -> float:
        """Seconds to sleep before looking again; 0 if it may go."""
        with self._lock:
            if not self._rate:
                return 0.0
            self._refill()
            short = ticket - self._allowed
            if short < 0.5:
                return 0.0
            return min(max(short / self._rate, _SHORTEST_SLEEP), _LONGEST_SLEEP)

    def _refill(self) -> None:
        now = self._clock.monotonic()
        earned = self._allowed + (now - self._time) * self._rate
        self._allowed = min(earned, self._taken + _BURST_SECONDS * self._rate)
        self._time = now
