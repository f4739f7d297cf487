"""One checkpoint to a store by ``ds-ckpt agent --once``, beside what one would use instead.

    python bench/upload.py [--full] [--case ...] [--store ...] [--scheme ...] [--client ...]
                           [--repeats N] [--size-scale X] [--json FILE]

Without a choice it runs a set that ends within 20 minutes on two cores; ``--plan`` prints it. The
clients are those of ``make bench-venv`` and version 2 of the aws command; one that is missing is
named, and makes the exit code 1 unless ``--allow-missing`` is given.

The row ``ds-ckpt`` is the whole command with default settings and every check on: start of the
process, probe of the store, checksums of what is read, upload, verification, receipt, record,
pointer. Against the sink, which keeps nothing, it is ``transfer/`` alone (``"scope": "transfer"``,
see peers/transfer_only.py). Against the fast server, which ignores conditional writes, the agent
runs with DS_CKPT_ALLOW_WEAK_STORE=1, as it says itself it must. All other rows are whole commands
too, from the start of their process to its end.

The clients take turns, in another order each time, on the same files, against a server that is
started anew and empty for each run; the first run of each client is checked for all bytes. Files
lie in memory if there is room: the agent tells the kernel to drop what it has uploaded from the
page cache and others do not, which must not make the next one slower. Wall and CPU are medians, of
the client alone and not of the server; memory is the largest peak of the client's largest process.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from peers import check, clients, measure, servers
from peers.clients import OURS
from peers.harness import ALL, MAIN, Group, Place, RunOne, main, row_of
from peers.report import UPLOAD_GOALS, Row
from peers.source import Case, hand_in, warm, write_files

DEFAULT = [
    Group("1x4GiB", "http", "fast", ALL),
    Group("1x4GiB", "https", "sink", (*MAIN, "obstore", "boto3")),
    Group("16x256MiB", "http", "fast", MAIN),
    Group("2000x1MiB", "http", "fast", MAIN),
    Group("1x4GiB", "https", "seaweed", (OURS, "s5cmd"), repeats=1),
]


@contextmanager
def prepare(group: Group, case: Case, place: Place) -> Iterator[RunOne]:
    """Write the files once; each run gets a new server, and the agent a new volume."""
    folder = place.work / "files"
    sums = write_files(folder, case)

    def run_one(name: str, repeat: int) -> Row:
        work = place.work / "run"
        work.mkdir()
        try:
            if place.on_disk:
                warm(folder)
            usage = _upload(group, case, place, folder, sums, name, check_it=repeat == 0)
        finally:
            shutil.rmtree(work)
        return row_of(group, name, repeat, usage)

    yield run_one


def _upload(
    group: Group,
    case: Case,
    place: Place,
    folder: Path,
    sums: Mapping[str, str],
    name: str,
    *,
    check_it: bool,
) -> measure.Usage:
    work = place.work / "run"
    (work / "server").mkdir()
    hand_in(work / "volume", folder, sums)
    opening = servers.opening(group.store, 0, 0)
    with opening(work / "server", group.scheme, place.certificates) as server:
        job = clients.Job(
            way="upload",
            store=group.store,
            server=server,
            folder=folder,
            volume=work / "volume",
            work=work,
            sums=sums,
        )
        command, environ = clients.BY_NAME[name].command(job)
        usage = measure.run(command, {**server.environ, **environ}, work / "log")
        if check_it:
            check.uploaded(server, case, folder)
    return usage


if __name__ == "__main__":
    os.umask(0o022)
    main(__doc__, DEFAULT, prepare, copies=2, goals=UPLOAD_GOALS)
