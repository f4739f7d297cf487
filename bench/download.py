"""One checkpoint from a store by ``ds-ckpt restore``, beside what one would use instead.

    python bench/download.py [--full] [--case ...] [--store ...] [--scheme ...] [--client ...]
                             [--repeats N] [--size-scale X] [--json FILE]

The same cases, servers, clients and rules as upload.py, which says how clients are measured. A
server is started for each table, and ``ds-ckpt agent --once`` brings the checkpoint there; then the
clients take turns to fetch its shards into a new folder. The first run of each client is checked
for all bytes.

The row ``ds-ckpt`` is the whole command with default settings: start of the process, record, hold,
shards fetched, each one's CRC32C compared with the record, files and folders synced, everything
put in place. None of the others compares anything with what was saved. Against the sink, which
sends zeros, it is ``transfer/`` alone (``"scope": "transfer"``), with its checksums compared too.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from peers import check, clients, measure, servers
from peers.clients import OURS
from peers.harness import ALL, MAIN, Group, Place, RunOne, main, row_of
from peers.report import Row
from peers.source import Case, hand_in, write_files

DEFAULT = [
    Group("1x4GiB", "http", "fast", ALL),
    Group("1x4GiB", "https", "sink", (*MAIN, "obstore", "boto3")),
    Group("16x256MiB", "http", "fast", MAIN),
    Group("2000x1MiB", "http", "fast", MAIN),
    Group("1x4GiB", "https", "seaweed", (OURS, "s5cmd"), repeats=1),
]


@dataclass(frozen=True)
class Stored:
    """What is to be fetched: keys and sizes, and the checksum of each file, if it is known."""

    keys: Mapping[str, int]
    sums: Mapping[str, str]


@contextmanager
def prepare(group: Group, case: Case, place: Place) -> Iterator[RunOne]:
    """Start the server and bring the checkpoint there; each run gets a new folder."""
    opening = servers.opening(group.store, case.count, case.size)
    folder = place.work / "server"
    folder.mkdir()
    with opening(folder, group.scheme, place.certificates) as server:
        if group.store == "sink":
            keys = {f"{servers.PREFIX}/{name}": case.size for name in case.file_names()}
            stored = Stored(keys, {})
        else:
            stored = _bring(group, case, place, server)

        def run_one(name: str, repeat: int) -> Row:
            work = place.work / "run"
            (work / "files").mkdir(parents=True)
            job = clients.Job(
                way="download",
                store=group.store,
                server=server,
                folder=work / "files",
                volume=work / "volume",
                work=work,
                keys=stored.keys,
            )
            try:
                command, environ = clients.BY_NAME[name].command(job)
                usage = measure.run(command, {**server.environ, **environ}, work / "log")
                if repeat == 0:
                    check.downloaded(work, case, stored.sums)
            finally:
                shutil.rmtree(work)
            return row_of(group, name, repeat, usage)

        yield run_one


def _bring(group: Group, case: Case, place: Place, server: servers.Server) -> Stored:
    work = place.work / "upload"
    folder = work / "files"
    sums = write_files(folder, case)
    hand_in(work / "volume", folder, sums)
    job = clients.Job(
        way="upload",
        store=group.store,
        server=server,
        folder=folder,
        volume=work / "volume",
        work=work,
    )
    command, environ = clients.BY_NAME[OURS].command(job)
    try:
        measure.run(command, {**server.environ, **environ}, work / "log")
    except measure.FailedError as error:
        raise SystemExit(f"the checkpoint cannot be brought to {group.store}: {error}") from None
    check.uploaded(server, case, folder)
    shutil.rmtree(work)
    return Stored(check.stored_sizes(server), sums)


if __name__ == "__main__":
    os.umask(0o022)
    main(__doc__, DEFAULT, prepare, copies=2, goals=[])
