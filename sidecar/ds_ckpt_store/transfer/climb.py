"""How many requests at a time: as many as bring more bytes, and fewer when the store asks for it.

The number climbs while throughput grows with it: it is doubled until that brings little, then
kept, and tried half as high again now and then, ever more seldom. What a trial did not bring is
taken back. When the store throttles, the number is halved, at most once in a while, and comes back
one by one.

Nothing here waits or reads a clock: whoever asks says what time it is, so a run over a simulated
network repeats exactly.
"""

from __future__ import annotations

START = 4
INTERVAL = 0.5
"""Seconds of a measurement at least."""
LONGEST_INTERVAL = 10.0
RECOVER_SECONDS = 2.0
"""Seconds between two steps back up after the store throttled, and between two halvings."""

_PIECES = 8  # that each request should have moved in a measurement
_SETTLE = 0.25  # seconds that a new number is given before it is measured
_FIRST_PATIENCE = 8  # intervals that a number is kept before a higher one is tried
_LONGEST_PATIENCE = 64
_WORTH = 0.2  # of the growth that would be fair to the number's


class Climb:
    """The number of requests at a time.

    Args:
        most: it is never higher; at least 1.
        now: seconds, as all times here.
    """

    def __init__(self, most: int, now: float) -> None:
        self._most = most
        self._limit = min(START, most)
        self._steep = True  # nothing has failed yet: double
        self._before: tuple[int, float] | None = None  # what a trial is compared with
        self._rest = 0
        self._patience = _FIRST_PATIENCE
        self._recover_to = 0
        self._throttled_at: float | None = None
        self._begin(now)

    @property
    def most(self) -> int:
        """It is never higher."""
        return self._most

    def set_most(self, most: int, now: float) -> None:
        """Change the bound; a higher one is climbed to at once if that brings something."""
        if most == self._most:
            return
        self._most = most
        self._limit = min(self._limit, most)
        self._before, self._rest, self._patience = None, 0, _FIRST_PATIENCE
        self._begin(now)

    def moved(self, size: int, now: float) -> None:
        """So many bytes are on their way."""
        if now >= self._started:
            self._bytes += size
            self._pieces += 1

    def idle(self) -> None:
        """There was less to do than might have been done: this measurement tells nothing."""
        self._idle = True

    def rush(self, now: float) -> None:
        """As many as may be, at once: there is no time to find out how many bring something."""
        self._limit, self._before = self._most, None
        self._recover_to, self._rest = 0, self._patience
        self._begin(now)

    def throttled(self, now: float) -> None:
        """The store asked for less."""
        if self._throttled_at is not None and now - self._throttled_at < RECOVER_SECONDS:
            return
        self._throttled_at = now
        # A trial that the store throttles is the store's word about the number before it.
        self._recover_to = max(self._recover_to, self._before[0] if self._before else self._limit)
        self._limit = max(1, self._limit // 2)
        self._before, self._steep = None, False
        self._begin(now)

    def limit(self, now: float) -> int:
        """The number now."""
        if self._recover_to:
            self._recover(now)
        else:
            self._measure(now)
        return self._limit

    # ---- how

    def _begin(self, now: float, settle: float = _SETTLE) -> None:
        self._started = now + settle
        self._bytes = self._pieces = 0
        self._idle = False

    def _recover(self, now: float) -> None:
        last = self._throttled_at or 0.0
        if now - max(last, self._started - _SETTLE) < RECOVER_SECONDS:
            return
        self._limit = min(self._limit + 1, self._most)
        self._begin(now)
        if self._limit >= min(self._recover_to, self._most):
            self._recover_to, self._rest = 0, self._patience

    def _measure(self, now: float) -> None:
        elapsed = now - self._started
        enough = self._pieces >= _PIECES * self._limit or elapsed >= LONGEST_INTERVAL
        if elapsed < INTERVAL or not enough:
            return
        rate, tells = self._bytes / elapsed, not self._idle
        self._begin(now, settle=0.0)
        if tells:
            self._judge(rate, now)

    def _judge(self, rate: float, now: float) -> None:
        if self._before is not None:
            (lower, before), self._before = self._before, None
            if rate < before * (1 + _WORTH * (self._limit - lower) / lower):
                self._limit, self._steep, self._rest = lower, False, self._patience
                self._patience = min(2 * self._patience, _LONGEST_PATIENCE)
                self._begin(now)
                return
            self._patience, self._rest = _FIRST_PATIENCE, 0
        if self._rest > 0:
            self._rest -= 1
        elif self._limit < self._most and rate > 0:
            self._before = self._limit, rate
            higher = self._limit * 2 if self._steep else self._limit + max(1, self._limit // 2)
            self._limit = min(higher, self._most)
            self._begin(now)
