"""What upload.py and download.py share: the command line, the plan, the turns, the output."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from peers import clients, measure, report, servers
from peers.clients import OURS
from peers.source import CASES, GIB, MEMORY, MIB, Case, choose_folder

STORES = ("fast", "sink", "seaweed", "file")
SCHEMES = ("http", "https")
MAIN = (OURS, "obstore-nochecksum", "s5cmd", "rclone")
ALL = (*MAIN, "obstore", "boto3", "aws-v1", "aws-v2", "s3torchconnector")

# For the estimate only: CPU seconds a GiB over http and https, as seen on one machine.
SERVER_CPU = {"fast": (2.7, 3.9), "sink": (0.3, 0.9), "seaweed": (10.0, 11.5), "file": (0.0, 0.0)}
CLIENT_CPU = {
    OURS: (0.9, 1.6),
    "obstore-nochecksum": (0.9, 1.2),
    "obstore": (1.5, 1.9),
    "boto3": (1.3, 2.4),
    "boto3-default": (3.8, 3.1),
    "aws-v2": (1.4, 2.6),
    "s3torchconnector": (1.5, 2.0),
    "s5cmd": (2.8, 3.3),
    "aws-v1": (2.8, 3.7),
    "rclone": (2.9, 2.7),
    "rclone-md5": (4.5, 4.3),
}
CORES = 2
RUN_SECONDS = {"seaweed": 6.0}  # to start a server, and to clear up
FILE_SECONDS = 0.005


@dataclass(frozen=True)
class Group:
    """Runs that are compared with each other."""

    case: str
    scheme: str
    store: str
    clients: tuple[str, ...]
    repeats: int = 3

    def seconds(self, case: Case) -> float:
        column = 1 if self.scheme == "https" else 0
        result = 0.0
        for name in self.clients:
            cpu = CLIENT_CPU.get(name, (1.0, 1.0))[column] + SERVER_CPU[self.store][column]
            result += 1.0 + RUN_SECONDS.get(self.store, 2.0) + case.total / GIB * cpu / CORES * 1.2
            result += FILE_SECONDS * case.count
        return result * self.repeats


def row_of(group: Group, name: str, repeat: int, usage: measure.Usage) -> report.Row:
    """The row of one run."""
    return report.Row(
        case=group.case,
        scheme=group.scheme,
        store=group.store,
        client=name,
        wall_s=round(usage.wall_s, 4),
        cpu_s=round(usage.cpu_s, 4),
        peak_mib=round(usage.peak_mib, 1),
        scope=clients.BY_NAME[name].scope(group.store),
        repeat=repeat,
    )


def every_client(store: str) -> tuple[str, ...]:
    return tuple(client.name for client in clients.CLIENTS if store in client.stores)


def parse(document: str, default: list[Group]) -> tuple[argparse.Namespace, list[Group]]:
    """The command line, and the groups that it asks for.

    Args:
        document: of the script.
        default: the groups without any choice.
    """
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = [case.name for case in CASES]
    add = parser.add_argument
    add("--full", action="store_true", help="all cases, stores but file, schemes and clients")
    add("--case", action="append", choices=cases, help="may be repeated, as the next three")
    add("--store", action="append", choices=STORES)
    add("--scheme", action="append", choices=SCHEMES)
    add("--client", action="append", choices=list(clients.BY_NAME))
    add("--repeats", type=int, help="default: 3")
    add("--size-scale", type=float, default=1.0, help="for a quick try: 0.01 is a hundredth")
    add("--json", type=Path, metavar="FILE", help="write the rows there, one for each run")
    add("--dir", help="work here; default: /dev/shm if there is room, else a temporary folder")
    add("--aws2", metavar="PATH", help="version 2 of the aws command")
    add("--allow-missing", action="store_true", help="exit with 0 without clients that are missing")
    add("--plan", action="store_true", help="print the plan and end")
    args = parser.parse_args()
    if args.size_scale <= 0:
        parser.error("--size-scale must be above 0")
    if args.repeats is not None and args.repeats < 1:
        parser.error("--repeats must be at least 1")
    if args.aws2:
        clients.AwsVersion2.told = args.aws2
    if args.store and "file" in args.store and len(args.store) > 1:
        parser.error("--store file works on a disk and the others in memory: run it by itself")
    groups = default
    if args.full or args.case or args.store or args.scheme:
        groups = [
            Group(case, scheme, store, every_client(store))
            for store in args.store or STORES[:3]
            for scheme in schemes_of(store, args.scheme)
            for case in args.case or cases
        ]
    chosen = []
    for group in groups:
        names = tuple(name for name in group.clients if not args.client or name in args.client)
        if names:
            repeats = args.repeats or group.repeats
            chosen.append(Group(group.case, group.scheme, group.store, names, repeats))
    if not chosen:
        parser.error("none of these clients is measured there; --full has them all")
    return args, chosen


def schemes_of(store: str, chosen: list[str] | None) -> Sequence[str]:
    """A folder has no scheme to choose."""
    return ("file",) if store == "file" else chosen or SCHEMES


RunOne = Callable[[str, int], report.Row]
"""Runs one client once, and checks the outcome if it is its first run."""


@dataclass(frozen=True)
class Place:
    """Where a group works."""

    work: Path
    certificates: servers.Certificates
    on_disk: bool


Preparing = Callable[[Group, Case, Place], AbstractContextManager[RunOne]]
"""Brings the files, and for a download the server; gives what runs one client."""


def main(
    document: str,
    default: list[Group],
    prepare: Preparing,
    *,
    copies: int,
    goals: list[report.Goal],
) -> None:
    """Run all that the command line asks for.

    Args:
        document: of the script.
        default: the groups without any choice.
        prepare: a context for each group.
        copies: how often the bytes of a case lie in the work folder at a time.
        goals: what the medians are held against.
    """
    args, groups = parse(document, default)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped
    cases = {case.name: case.scaled(args.size_scale) for case in CASES}
    asked = list(dict.fromkeys(name for group in groups for name in group.clients))
    missing = clients.which_missing(asked)
    problems = servers.needed_programs({group.store for group in groups})
    if problems:
        raise SystemExit("\n".join(problems))
    on_file = any(group.store == "file" for group in groups)
    needed = copies * max(cases[group.case].total for group in groups)
    folder, sentence = choose_folder(args.dir, needed, in_memory=not on_file)
    compared = clients.versions(asked)
    print(f"files, volume and what the servers keep lie {sentence}")
    if compared:
        print(f"compared with: {compared}")
    _print_plan(groups, cases, missing)
    if args.plan:
        return
    rows: list[report.Row] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="ds-ckpt-bench-") as name:
        work = Path(name)
        certificates = servers.make_certificates(work / "certificates")
        for group in groups:
            able = tuple(name for name in group.clients if name not in missing)
            if not able:
                continue
            case = cases[group.case]
            place = Place(work / "group", certificates, on_disk=folder != MEMORY)
            place.work.mkdir()
            with prepare(group, case, place) as run_one:
                mine = list(_take_turns(able, group.repeats, run_one, failures))
            shutil.rmtree(place.work)
            rows += mine
            if mine:
                report.print_group(mine, case.total / MIB)
            if args.json:
                args.json.write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    _print_end(rows, goals, missing, failures, scaled=args.size_scale != 1.0)
    if failures or (missing and not args.allow_missing):
        sys.exit(1)


def _take_turns(
    able: tuple[str, ...], repeats: int, run_one: RunOne, failures: list[str]
) -> Iterator[report.Row]:
    """A B C, then A C B, then C A B: none always runs first, or after the same one."""
    for repeat in range(repeats):
        start = repeat % max(1, len(able))
        order = able[start:] + able[:start]
        for name in order if repeat % 2 == 0 else reversed(order):
            try:
                row = run_one(name, repeat)
            except measure.FailedError as error:
                failures.append(f"{name}: {str(error).splitlines()[0]}")
                print(f"  {name:20} FAILED: {error}", file=sys.stderr, flush=True)
                continue
            print(
                f"  {time.strftime('%H:%M:%S')} {row.case} {row.scheme} {row.store} {name:20}"
                f"{row.wall_s:8.2f} s {row.cpu_s:7.2f} CPU s {row.peak_mib:6.0f} MiB",
                file=sys.stderr,
                flush=True,
            )
            yield row


def _print_plan(groups: list[Group], cases: dict[str, Case], missing: dict[str, str]) -> None:
    for name, reason in missing.items():
        print(f"MISSING {name}: {reason}")
    total = 0.0
    for group in groups:
        seconds = group.seconds(cases[group.case])
        total += seconds
        print(
            f"plan: {group.case} {group.scheme} {group.store}, {group.repeats} x "
            f"({', '.join(group.clients)}): about {seconds / 60:.1f} min"
        )
    print(f"plan: about {total / 60:.0f} min in all, on {CORES} cores", flush=True)


def _print_end(
    rows: list[report.Row],
    goals: list[report.Goal],
    missing: dict[str, str],
    failures: list[str],
    *,
    scaled: bool,
) -> None:
    print()
    if scaled:
        print("sizes were scaled: these figures say nothing of the goals")
    else:
        report.print_goals(rows, goals)
    for name, reason in missing.items():
        print(f"MISSING {name}: {reason}")
    for failure in failures:
        print(f"FAILED {failure}")
