"""What all transfers of a process may use together: requests at a time, memory, bandwidth.

One budget for the uploads of a process, so that neither the network (which training needs too)
nor memory (whose limit kills) is taken by more than was allowed, however many shards there are.
A restore or a check has one of its own.

* **Requests at a time**: between 1 and a maximum, as many as bring more bytes
  (:mod:`~ds_ckpt_store.transfer.climb`); halved when the store throttles.
* **Memory**: what a request holds is known (:data:`BUFFER` and the store's ``request_memory``),
  so memory bounds how many there may be (:func:`streams_within`).
* **Bandwidth**: bytes per second (:mod:`~ds_ckpt_store.transfer.bandwidth`).

All methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.digest import CHUNK
from ds_ckpt_store.errors import PausedError, SettingsError, ThrottledError
from ds_ckpt_store.stores.port import Capabilities
from ds_ckpt_store.transfer.bandwidth import Bandwidth
from ds_ckpt_store.transfer.climb import Climb

STREAMS = 16
MIB = 1 << 20
BUFFER = CHUNK
"""Bytes that a request's source holds: one buffer, while it is read or summed."""

STALL_SECONDS = 60.0
_PATIENT_SECONDS = 5.0  # that a piece may wait for its turn: stores close a connection after 20


@dataclass(frozen=True)
class Stall:
    """Nothing moves.

    Attributes:
        requests: under way.
        seconds: since a byte moved, or a request ended.
    """

    requests: int
    seconds: float


def streams_within(memory: int, capabilities: Capabilities) -> int:
    """How many requests fit into so many bytes.

    Raises:
        SettingsError: not one.
    """
    each = BUFFER + capabilities.request_memory
    if memory < each:
        raise SettingsError(
            f"{memory // MIB} MiB of memory have no room for one request to this store, which "
            f"holds {-(-each // MIB)} MiB: set --memory-mib (or DS_CKPT_MEMORY_MIB) to that or more"
        )
    return memory // each


class Budget:
    """What all transfers may use together.

    Args:
        clock: time.
        streams: requests at a time at most; it begins with fewer and finds out.
        fit: requests that fit into memory; None: as many as ``streams``.
        bandwidth: bytes per second; 0 for no bound.
        stall_seconds: after so long without a byte or an answer, ``on_stall`` is called.
        on_stall: told once for each stall, in the thread of the coordinator.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        streams: int = STREAMS,
        fit: int | None = None,
        bandwidth: int = 0,
        stall_seconds: float = STALL_SECONDS,
        on_stall: Callable[[Stall], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._fit = streams if fit is None else fit
        now = clock.monotonic()
        self._climb = Climb(min(streams, self._fit), now)
        self._bandwidth = Bandwidth(clock, bandwidth)
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall
        self._moved = 0
        self._moved_at = now
        self._stalled = False
        self._failing = False
        self._cut = False

    # ---- what is allowed

    @property
    def fit(self) -> int:
        """Requests at a time that memory has room for; an executor needs as many threads."""
        return self._fit

    @property
    def most(self) -> int:
        """Requests at a time at most, as they are set now."""
        return self._climb.most

    @property
    def bandwidth(self) -> int:
        """Bytes per second as they are set now; 0 for no bound."""
        return self._bandwidth.rate

    @property
    def moved(self) -> int:
        """Bytes on their way so far, those included that were sent again."""
        return self._moved

    def rush(self) -> None:
        """Make as many requests at a time as may be, at once."""
        with self._lock:
            self._climb.rush(self._clock.monotonic())

    def set_streams(self, streams: int) -> int:
        """Change the maximum; the one that holds now, since memory bounds it too."""
        with self._lock:
            self._climb.set_most(min(streams, self._fit), self._clock.monotonic())
            return self._climb.most

    def set_bandwidth(self, rate: int) -> None:
        """Change the bound on bytes per second; 0 for none. Holds for transfers under way too."""
        self._bandwidth.set(rate)

    def cut(self) -> None:
        """Let not one byte more move, now and later: what is under way fails at its next piece."""
        self._cut = True

    # ---- what transfers ask and say

    def streams(self) -> int:
        """How many requests may run now.

        With little bandwidth there are fewer, so that none waits for its turn until the store
        closes its connection.
        """
        with self._lock:
            limit = self._climb.limit(self._clock.monotonic())
        rate = self._bandwidth.rate
        return min(limit, max(1, int(rate * _PATIENT_SECONDS) // BUFFER)) if rate else limit

    def pace(self, size: int) -> None:
        """Wait until ``size`` more bytes may move, and count them; 0 says: still at work.

        Raises:
            PausedError: none may any more.
        """
        self._go_on()
        self._bandwidth.pace(size, self._go_on)
        now = self._clock.monotonic()
        with self._lock:
            if not self._failing:
                self._moved_at = now
            if size > 0:
                self._moved += size
                self._climb.moved(size, now)

    def _go_on(self) -> None:
        if self._cut:
            raise PausedError("the process ends in the middle of it")
        self.alive()

    def alive(self) -> None:
        """A request goes on without a byte on the network."""
        if not self._failing:
            self._moved_at = self._clock.monotonic()

    def arrived(self) -> None:
        """A request ended well."""
        self._failing = False
        self._moved_at = self._clock.monotonic()

    def idle(self) -> None:
        """Fewer requests run than may, because there is no more work."""
        with self._lock:
            self._climb.idle()

    def heed(self, error: Exception) -> None:
        """A call failed and will be made again: if the store throttles, ask it for less.

        Until one ends well, bytes on their way say nothing: the kernel takes some of each attempt,
        also for a store that takes none.
        """
        self._failing = True
        if isinstance(error, ThrottledError):
            self.throttled()

    def throttled(self) -> None:
        """The store asked for less."""
        with self._lock:
            self._climb.throttled(self._clock.monotonic())

    def watch(self, requests: int) -> None:
        """Notice a stall.

        Args:
            requests: under way; without any, nothing has to move.
        """
        still = self._clock.monotonic() - self._moved_at
        if not requests or still < self._stall_seconds:
            self._stalled = False
        elif not self._stalled:
            self._stalled = True
            self._on_stall(Stall(requests, still))
