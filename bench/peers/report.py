"""Rows, tables and the goals that are computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

from peers.clients import OURS


@dataclass(frozen=True)
class Row:
    """One run. ``scope`` is ``transfer`` where only a part of the command could be measured."""

    case: str
    scheme: str
    store: str
    client: str
    wall_s: float
    cpu_s: float
    peak_mib: float
    scope: str
    repeat: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    @property
    def group(self) -> tuple[str, str, str]:
        return self.case, self.scheme, self.store


@dataclass(frozen=True)
class Medians:
    """Of the runs of one client in one group; memory is the largest seen."""

    runs: int
    wall: float
    cpu: float
    peak: float
    scope: str


def medians(rows: list[Row]) -> dict[str, Medians]:
    """By client, in the order of the first run."""
    result = {}
    for client in dict.fromkeys(row.client for row in rows):
        mine = [row for row in rows if row.client == client]
        result[client] = Medians(
            len(mine),
            statistics.median(row.wall_s for row in mine),
            statistics.median(row.cpu_s for row in mine),
            max(row.peak_mib for row in mine),
            mine[0].scope,
        )
    return result


def print_group(rows: list[Row], mib: float) -> None:
    """A table of one group; ratios are each client's figure over ours, so above 1 is worse."""
    case, scheme, store = rows[0].group
    print(f"\n{case} over {scheme}, store {store}" if store != scheme else f"\n{case}, a folder")
    print(
        f"{'':20}{'runs':>5}{'MiB/s':>8}{'wall s':>9}{'CPU s':>8}{'peak MiB':>10}"
        f"{'wall /':>9}{'CPU /':>8}{'memory /':>10}  {OURS}"
    )
    figures = medians(rows)
    ours = figures.get(OURS)
    for client, mine in sorted(figures.items(), key=lambda item: item[1].wall):
        line = f"{client:20}{mine.runs:5}{mib / mine.wall:8.0f}{mine.wall:9.2f}{mine.cpu:8.2f}"
        line += f"{mine.peak:10.0f}"
        if ours:
            line += f"{mine.wall / ours.wall:9.2f}{_over(mine.cpu, ours.cpu):8.2f}"
            line += f"{_over(mine.peak, ours.peak):10.2f}"
        print(line + ("  (transfer only)" if mine.scope == "transfer" else ""))


def _over(value: float, base: float) -> float:
    return value / base if base else float("nan")


@dataclass(frozen=True)
class Goal:
    """``figure`` of a group's medians must be at most, or at least, ``bound``.

    Attributes:
        text: what is compared.
        case: the case it is for; empty: all others than 1x4GiB; ``*``: all.
        peer: whom it needs, beside ours; empty: nobody.
        figure: of ours and the peer's.
        bound: the limit.
        most: whether the bound is the most that is allowed, or the least.
    """

    text: str
    case: str
    peer: str
    figure: Callable[[Medians, Medians], float]
    bound: float
    most: bool = True

    def is_for(self, case: str) -> bool:
        return self.case in ("*", case) or (not self.case and case != "1x4GiB")


def _wall(ours: Medians, peer: Medians) -> float:
    return ours.wall / peer.wall


def _faster(ours: Medians, peer: Medians) -> float:
    return peer.wall / ours.wall


def _cpu(ours: Medians, peer: Medians) -> float:
    return _over(ours.cpu, peer.cpu)


def _peak(ours: Medians, _: Medians) -> float:
    return ours.peak


UPLOAD_GOALS = [
    Goal("wall / obstore-nochecksum", "1x4GiB", "obstore-nochecksum", _wall, 1.15),
    Goal("times faster than s5cmd", "1x4GiB", "s5cmd", _faster, 1.7, most=False),
    Goal("times faster than rclone", "1x4GiB", "rclone", _faster, 2.0, most=False),
    Goal("CPU / s5cmd", "1x4GiB", "s5cmd", _cpu, 0.45),
    Goal("times faster than s5cmd", "", "s5cmd", _faster, 1.4, most=False),
    Goal("peak MiB", "*", "", _peak, 100.0),
]


def print_goals(rows: list[Row], goals: list[Goal]) -> bool:
    """One line for each goal that these rows can answer; returns whether none is missed."""
    met = True
    for group in dict.fromkeys(row.group for row in rows if row.store != "file"):
        figures = medians([row for row in rows if row.group == group])
        case, scheme, store = group
        for goal in goals:
            peer = goal.peer or OURS
            if not goal.is_for(case) or OURS not in figures or peer not in figures:
                continue
            value = goal.figure(figures[OURS], figures[peer])
            kept = value <= goal.bound if goal.most else value >= goal.bound
            met = met and kept
            runs = min(figures[OURS].runs, figures[peer].runs)
            note = "" if runs >= 3 else f" (of {runs} runs only)"
            bound = f"{'<=' if goal.most else '>='} {goal.bound:g}"
            verdict = "ok" if kept else "MISSED"
            print(f"{case} {scheme} {store}: {goal.text} {bound}: {value:.2f} {verdict}{note}")
    return met
