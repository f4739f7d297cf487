"""What the agent's thread says of itself, for other threads to read."""

from __future__ import annotations

from collections.abc import Callable

from ds_ckpt_store.contract.clock import Clock


class Health:
    """Whether the agent is alive, has started, and can store.

    One thread writes; any may read.

    Args:
        clock: time.
        silent_seconds: of silence, after which it is dead. A call to the store may take as long as
            the store's timeouts allow, and each that ends is a sign of life.

    Attributes:
        started: the volume is locked, or another agent has the lock and this one stands by.
        unready: why it cannot store; empty if it can.
        other_signs: when, on the monotonic clock, something else was last seen to move.
    """

    def __init__(self, clock: Clock, silent_seconds: float) -> None:
        self._clock = clock
        self._silent_seconds = silent_seconds
        self._until = clock.monotonic() + silent_seconds
        self.started = False
        self.unready = "starting: the store has not been reached yet"
        self.other_signs: Callable[[], float] = lambda: float("-inf")

    def beat(self, pause: float = 0.0) -> None:
        """It lives, and will say nothing for ``pause`` seconds."""
        self._until = max(self._until, self._clock.monotonic() + pause + self._silent_seconds)

    def why_dead(self) -> str:
        """Empty while it is alive."""
        until = max(self._until, self.other_signs() + self._silent_seconds)
        late = self._clock.monotonic() - until
        if late <= 0:
            return ""
        return (
            f"the agent's main loop has not moved for {late + self._silent_seconds:.0f} s: it "
            "hangs in a call to the volume or the store; end it, a new start goes on"
        )

    def why_not_started(self) -> str:
        """Empty once it has started."""
        return "" if self.started else "starting: the volume is not locked yet"
