"""A campaign against the agent: it dies at each of many points, and another start mends it.

Run as a program of one thread (``python -m tests.sidecar.crashes.dying_agent``), because it forks
a child for every death. Prints JSON: points tried, and what was broken at which.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable

from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import Store
from tests.sidecar.crashes import scene as scenes
from tests.sidecar.crashes.dying import (
    Call,
    DyingFilesystem,
    DyingJournal,
    DyingStore,
    Fate,
    Point,
    watch_system_calls,
)


def in_child(run: Callable[[], None]) -> int:
    """Run in a forked child; returns how it ended, as ``os.waitstatus_to_exitcode`` says."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def live_or_die(scene: scenes.Scene, store: Store, fate: Fate, *, remote: bool) -> None:
    """Two starts of an agent whose parts may die."""
    if not remote:
        watch_system_calls(fate)

    class Mortal(DyingJournal):
        pass

    Mortal.fate = fate
    for seed in (1, 2):
        code, log = scenes.run_agent(
            scene,
            DyingStore(store, fate, remote=remote),
            fs=DyingFilesystem(fate),
            journal=Mortal,
            seed=seed,
        )
        scenes.must(code == 0, f"exit code {code}: {log.troubles}")


class Campaign:
    """Deaths of one agent against one kind of store.

    Args:
        base: URL under which each death gets a prefix of its own.
        folder: scratch space.
    """

    def __init__(self, base: str, folder: str) -> None:
        self._base = base
        self._folder = folder
        self._remote = not base.startswith("file:")
        self._count = 0

    def _scene(self) -> tuple[scenes.Scene, str]:
        self._count += 1
        here = f"{self._folder}/{self._count}"
        os.makedirs(here)
        url = f"{self._base}/{self._count}" if self._remote else f"file://{here}/store"
        return scenes.build(f"{here}/volume", url), here

    def rehearse(self) -> tuple[list[Call], scenes.Rest]:
        """A run that nobody kills: the calls that it makes, and what it leaves."""
        scene, here = self._scene()
        fate = Fate()

        def run() -> None:
            live_or_die(scene, open_store(scene.url), fate, remote=self._remote)
            with open(f"{here}/calls.json", "w") as file:
                json.dump([vars(call) for call in fate.calls], file)

        if (code := in_child(run)) != 0:
            raise SystemExit(f"the rehearsal ended with {code}")
        with open(f"{here}/calls.json") as file:
            calls = [Call(**call) for call in json.load(file)]
        store = open_store(scene.url)
        rest = scenes.look(scene, store)
        scenes.check_always(scene, store)
        scenes.check_rest(scene, store, rest, f"{here}/restored")
        store.close()
        shutil.rmtree(here)
        return calls, rest

    def die(self, point: Point, rest: scenes.Rest) -> str:
        """One death and the starts after it; returns what was broken, or nothing."""
        scene, here = self._scene()
        code = in_child(
            lambda: live_or_die(scene, open_store(scene.url), Fate(point), remote=self._remote)
        )
        if code != -signal.SIGKILL:
            return f"did not die there: ended with {code}"
        store = open_store(scene.url)
        try:
            scenes.check_always(scene, store)
            for seed in (3, 4):
                ended, log = scenes.run_agent(scene, store, seed=seed)
                scenes.must(ended == 0, f"the next start ended with {ended}: {log.troubles}")
                scenes.check_always(scene, store)
            scenes.check_rest(scene, store, rest, f"{here}/restored")
        except scenes.BrokenError as broken:
            return str(broken)
        finally:
            store.close()
            shutil.rmtree(here)
        return ""


def choose(calls: list[Call], *, remote: bool) -> list[Point]:
    """Which deaths are tried.

    Every kind of call dies in all of its ways at its first use. Each later call that changes
    something dies in one of them, in turn; of those that only read, where a death leaves what the
    call before left, one in four does. Against a server only calls of the store count.
    """
    points: list[Point] = []
    seen: set[tuple[str, int]] = set()
    turns = {True: 0, False: 0}
    for number, call in enumerate(calls):
        if remote and not call.kind.startswith("store."):
            continue
        ways: list[int | None] = [*range(call.points - 1), None]
        if (call.kind, call.changes) not in seen:
            seen.add((call.kind, call.changes))
            points += [Point(number, step) for step in ways]
            continue
        changes = call.changes > 0 or call.kind == "journal.write"
        turns[changes] += 1
        if changes or turns[False] % 4 == 0:
            points.append(Point(number, ways[turns[changes] % len(ways)]))
    return points


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("--share", default="0/1", help="this one of so many programs")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    mine, of = map(int, options.share.split("/"))
    folder = tempfile.mkdtemp(prefix="deaths", dir=os.environ.get("DEATHS"))
    broken = []
    try:
        campaign = Campaign(options.base, folder)
        calls, rest = campaign.rehearse()
        points = choose(calls, remote=not options.base.startswith("file:"))
        if options.list:
            for number, call in enumerate(calls):
                print(number, call, file=sys.stderr)
            print(len(calls), sum(c.points for c in calls), len(points), file=sys.stderr)
            return
        for point in points[mine::of]:
            if trouble := campaign.die(point, rest):
                call = calls[point.number]
                broken.append(f"{point} {call.kind} {call.subject!r}: {trouble}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kinds = sorted({call.kind for call in calls})
    json.dump({"points": len(points[mine::of]), "kinds": kinds, "broken": broken}, sys.stdout)


if __name__ == "__main__":
    main()
