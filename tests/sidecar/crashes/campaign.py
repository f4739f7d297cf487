"""A campaign: one program dies at each of many points, and a later start mends what it left.

A campaign runs in a process of one thread, because it forks a child for every death, so tests
start it as a program (:func:`main`) and read its report.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

from tests.sidecar.crashes.dying import Call, Fate, Point, without_fsync
from tests.sidecar.crashes.scene import BrokenError

_READS = ("store.get", "store.head", "store.list", "store.read", "store.uploads", "store.parts")


class Campaign(Protocol):
    """What is to die, and how to see whether it did so well."""

    remote: bool
    dies_elsewhere: str
    """Calls whose subject holds this are left to another campaign; empty: none."""

    def rehearse(self, folder: str, fate: Fate, child: Callable[[Callable[[], None]], int]) -> None:
        """Run once in a child without dying, and learn what that leaves. ``fate`` counts there."""

    def die(self, folder: str, fate: Fate, child: Callable[[Callable[[], None]], int]) -> None:
        """Run in a child with this fate; look; start again; look.

        Raises:
            BrokenError: something that must hold does not.
        """


def in_child(run: Callable[[], None]) -> int:
    """Run in a forked child; returns its exit code, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
            os._exit(0)
        except BaseException:  # the child must never go on as a second parent
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def rehearse(campaign: Campaign, folder: str) -> list[Call]:
    """The calls of a run that nobody kills."""
    fate = Fate()
    told = f"{folder}/calls.json"

    def child(run: Callable[[], None]) -> int:
        def tell() -> None:
            run()
            with open(told, "w") as file:
                json.dump([vars(call) for call in fate.calls], file)

        if (code := in_child(tell)) != 0:
            raise SystemExit(f"nobody killed it, and it ended with {code}")
        return code

    campaign.rehearse(folder, fate, child)
    with open(told) as file:
        return [Call(**call) for call in json.load(file)]


def die(campaign: Campaign, folder: str, point: Point) -> str:
    """One death; returns what was broken, or nothing."""

    def child(run: Callable[[], None]) -> int:
        code = in_child(run)
        if code != -signal.SIGKILL:
            raise BrokenError(f"did not die there: ended with {code}")
        return code

    try:
        campaign.die(folder, Fate(point), child)
    except BrokenError as broken:
        return str(broken)
    except Exception:  # a start that fails is as broken as one that leaves something
        return traceback.format_exc()
    return ""


def choose(calls: list[Call]) -> list[Point]:
    """Which deaths are tried, where one costs little.

    Every kind of call dies in all of its ways at its first use. Each later call that changes
    something dies in one of them, in turn; of those that only read, where a death leaves what the
    call before left, one in four does.
    """
    points: list[Point] = []
    seen: set[tuple[str, int]] = set()
    turns = {True: 0, False: 0}
    for number, call in enumerate(calls):
        if (call.kind, call.changes) not in seen:
            seen.add((call.kind, call.changes))
            points += [Point(number, step) for step in call.ways]
            continue
        changes = call.changes > 0 or call.kind == "journal.write"
        turns[changes] += 1
        if changes or turns[False] % 4 == 0:
            points.append(Point(number, call.ways[turns[changes] % len(call.ways)]))
    return points


def choose_remote(calls: list[Call], *, every: bool) -> list[Point]:
    """Which deaths are tried against a server: calls of the store alone.

    Args:
        calls: of the rehearsal.
        every: each call dies once, before, in or after it, in turn; else one call of each kind on
            each kind of object does, of those that only read every fourth, and the first of a
            kind that writes dies before, in and after it.
    """
    points: list[Point] = []
    seen: set[tuple[str, str]] = set()
    for number, call in enumerate(calls):
        if not call.kind.startswith("store."):
            continue
        what = (call.kind, re.sub(r"[0-9a-f]{12,}|[^/]*@", "*", call.subject))
        if every:
            points.append(Point(number, call.ways[number % len(call.ways)]))
        elif what not in seen:
            ways: list[int | None] = [call.ways[len(seen) % len(call.ways)]]
            if call.kind in _READS:
                ways = ways if len(seen) % 4 == 0 else []
            elif call.kind not in {kind for kind, _ in seen}:
                ways = [call.ways[0], call.ways[len(call.ways) // 2], None]
            points += [Point(number, step) for step in ways]
        seen.add(what)
    return points


def main(make: Callable[[str], Campaign]) -> None:
    """Run as a program: rehearse, die at every chosen point, print a report as JSON.

    Args:
        make: makes the campaign from the URL that it works under.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("base", help="URL under which each death gets a prefix of its own")
    parser.add_argument("folder", help="scratch space")
    parser.add_argument("--share", default="0/1", help="this one of so many programs")
    parser.add_argument("--every", action="store_true", help="every call of a server: minutes")
    options = parser.parse_args()
    mine, of = map(int, options.share.split("/"))
    without_fsync()
    folder = tempfile.mkdtemp(dir=options.folder)
    campaign = make(options.base)
    calls = rehearse(campaign, folder)
    points = choose_remote(calls, every=options.every) if campaign.remote else choose(calls)
    if elsewhere := campaign.dies_elsewhere:
        points = [point for point in points if elsewhere not in calls[point.number].subject]
    broken = []
    for number, point in enumerate(points[mine::of]):
        here = f"{folder}/{mine}-{number}"
        os.mkdir(here)
        if trouble := die(campaign, here, point):
            call = calls[point.number]
            broken.append(f"{point} {call.kind} {call.subject!r}: {trouble}")
        shutil.rmtree(here)
    report = {
        "points": len(points[mine::of]),
        "died_in": sorted({calls[point.number].kind for point in points}),
        "broken": broken,
    }
    json.dump(report, sys.stdout)


def run_in_parallel(
    module: str, base: str, folder: str, environ: Mapping[str, str], programs: int = 2
) -> tuple[int, set[str], list[str]]:
    """Share a campaign among programs; returns points, kinds of calls died in, and what broke."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, base, folder, "--share", f"{number}/{programs}"],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(programs)
    ]
    points, kinds, broken = 0, set[str](), list[str]()
    try:
        for process in running:
            output, errors = process.communicate()
            assert process.returncode == 0, errors
            report = json.loads(output)
            points += report["points"]
            kinds |= set(report["died_in"])
            broken += report["broken"]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return points, kinds, broken
