"""Time and chance, passed in so that both can be simulated."""

from __future__ import annotations

import random
import secrets
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. Nothing in this project calls ``time`` elsewhere."""

    def time(self) -> float:
        """Seconds since the epoch, as this machine believes."""

    def monotonic(self) -> float:
        """Seconds that only grow; for intervals and deadlines."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's own clock."""

    def time(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that only grow."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


def system_random() -> random.Random:
    """The operating system's randomness; a simulation passes ``random.Random(seed)``."""
    return secrets.SystemRandom()


def fresh_token(rng: random.Random) -> str:
    """64 random bits as 16 hexadecimal digits."""
    return f"{rng.getrandbits(64):016x}"
