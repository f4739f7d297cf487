"""Chance by name: each kind of accident of each process has a stream of its own.

An accident is known by its name, like ``agent-2.1 lost answer 7``: the seventh time that an answer
to that process could have been lost and was. A run can be repeated with only some of its accidents,
and what is taken away changes no other stream: that is how a failing run is made small.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable


class Chance:
    """All chance of one run.

    Args:
        seed: of the run.
        only: names of the accidents that may happen; None: all.
    """

    def __init__(self, seed: str, only: frozenset[str] | None = None) -> None:
        self._seed = seed
        self._only = only
        self.happened: list[str] = []
        self.counts: dict[str, int] = {}
        self.resting = False

    def rng(self, name: str) -> random.Random:
        """A generator of its own for something that is no accident."""
        return random.Random(f"{self._seed}/{name}")

    def allows(self, accident: str) -> bool:
        """Whether an accident may happen; if so it is noted as one that did."""
        if self.resting or (self._only is not None and accident not in self._only):
            return False
        self.happened.append(accident)
        return True

    def count(self, what: str) -> None:
        """Something happened that the figures tell of."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def stream(self, owner: str, odds: Callable[[str], float]) -> Stream:
        """The accidents of one owner.

        Args:
            owner: a process, by a name that no other has.
            odds: probability of each kind.
        """
        return Stream(self, owner, odds)


class Stream:
    """The accidents of one owner; see :meth:`Chance.stream`."""

    def __init__(self, chance: Chance, owner: str, odds: Callable[[str], float]) -> None:
        self._chance = chance
        self._owner = owner
        self._odds = odds
        self._left: dict[str, int] = {}
        self._number: dict[str, int] = {}
        self._rngs: dict[str, random.Random] = {}
        self.rng = chance.rng(owner)

    def strikes(self, kind: str) -> bool:
        """Whether an accident of this kind happens now."""
        lefts = self._left
        left = lefts.get(kind)
        if left is None:
            left = self._gap(kind)
        if left > 0:
            lefts[kind] = left - 1
            return False
        lefts[kind] = self._gap(kind)
        return self.happens(kind)

    def calls_until(self, kind: str) -> int:
        """How many calls go well before the next of this kind; for a caller that counts itself."""
        return self._gap(kind)

    def happens(self, kind: str) -> bool:
        """It is time for the next of this kind; whether it may happen."""
        number = self._number[kind] = self._number.get(kind, 0) + 1
        if not self._chance.allows(f"{self._owner} {kind} {number}"):
            return False
        self._chance.count(kind)
        return True

    def _gap(self, kind: str) -> int:
        """How many times it does not happen before it does."""
        odds = self._odds(kind)
        if odds <= 0:
            return 1 << 60
        rng = self._rngs.get(kind)
        if rng is None:
            rng = self._rngs[kind] = self._chance.rng(f"{self._owner}/{kind}")
        if odds >= 1:
            return 0
        return int(math.log(1.0 - rng.random()) / math.log(1.0 - odds))
