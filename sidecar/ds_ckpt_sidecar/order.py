"""Which save is uploaded next when there is little time, and which has to make room.

A save that cannot be stored in the time that is left must not keep back one that can, however new
it is. How long a save takes is guessed from the bytes that are left of it and from what the
network has moved of late. A guess is no more than that, so what is under way goes on unless it is
far from fitting, and what would take its place must fit well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ds_ckpt_sidecar.lifecycle import Save
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.transfer.budget import Budget

COMMIT_SECONDS = 0.5  # receipt, commit and pointer
_WINDOW = 10.0  # seconds that are looked back
_LEAST = 1.0  # seconds before a measurement tells anything
_PAUSE = 5.0  # a longer one between two looks is no part of an upload
_KEPT, _TAKEN = 1.5, 0.9  # of the time left: what may go on, and what may take its place
_BESIDE = 0.5  # and what may go before one that lacks its commit alone


class Rate:
    """Bytes per second of late, while something was under way.

    Args:
        budget: that counts them.
        clock: time.
    """

    def __init__(self, budget: Budget, clock: Clock) -> None:
        self._budget = budget
        self._clock = clock
        self._looks: deque[tuple[float, int]] = deque()
        self._known: float | None = None

    def look(self) -> None:
        """Note what was moved; called again and again in an upload."""
        now, moved = self._clock.monotonic(), self._budget.moved
        if self._looks and now - self._looks[-1][0] > _PAUSE:
            self._looks.clear()
        self._looks.append((now, moved))
        while now - self._looks[0][0] > _WINDOW:
            self._looks.popleft()
        (began, before) = self._looks[0]
        if now - began >= _LEAST and moved > before:
            self._known = (moved - before) / (now - began)

    def forget(self) -> None:
        """What may be used has changed: what was measured tells nothing."""
        self._looks.clear()
        self._known = None

    @property
    def known(self) -> float:
        """Bytes per second, as they were measured last; 0 if they never were."""
        return self._known or 0.0

    @property
    def current(self) -> float:
        """Bytes per second of the last seconds; 0 while nothing moves, or nobody looks."""
        now = self._clock.monotonic()
        if not self._looks or now - self._looks[-1][0] > _PAUSE:
            return 0.0
        (began, before), (last, moved) = self._looks[0], self._looks[-1]
        return (moved - before) / (last - began) if last - began >= _LEAST else self.known

    def seconds(self, save: Save) -> float:
        """In which a save would be stored; 0 as long as nothing was measured."""
        if self._known is None:
            return 0.0
        return save.bytes_left / self._known + COMMIT_SECONDS


def first_in_hurry(
    saves: Sequence[Save], rate: Rate, seconds_left: float, current: Save | None = None
) -> Save:
    """The save that goes first: the newest that can be stored in time; else the nearest to that.

    One of which no byte is left needs moments, and is sure: it goes before all others, unless a
    newer one is known to leave plenty of time for it.

    Those of which this node has stored all come last: whichever node has stored its part last
    commits them.

    Args:
        saves: at least one.
        rate: what is moved.
        seconds_left: until all must be done.
        current: the one that is under way.
    """
    own = [save for save in saves if not save.waiting_for] or list(saves)
    newest_first = sorted(own, key=lambda save: save.save_id, reverse=True)

    def bound(save: Save) -> float:
        return seconds_left * (_KEPT if save is current else _TAKEN)

    whole = next((save for save in newest_first if not save.bytes_left), None)
    for save in newest_first:
        if save is whole:
            return save
        if whole is None and rate.seconds(save) <= bound(save):
            return save
        if rate.known and rate.seconds(save) + COMMIT_SECONDS <= seconds_left * _BESIDE:
            return save
    return min(newest_first, key=lambda save: rate.seconds(save) / bound(save))
