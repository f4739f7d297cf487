"""One checkpoint to the store by ``ds-ckpt agent --once``, beside what one would type instead.

    python bench/upload.py [--store file|s3|all] [--size-gib 4] [--shards 4] [--repeats 3]

``file`` compares with ``cp -r``, with and without the sync that makes the copy survive a power
loss; ``s3`` with ``aws s3 cp --recursive``, against a SeaweedFS server on this machine that is
started anew, empty, for each run. The rows take turns, on the same files, warm in the page cache
if it is large enough.

Our row is the whole command: start of the process, probe of the store, checksums of what is read,
upload, verification, receipt, record, pointer, sync. On ``file`` it reads every byte twice, since
a folder proves nothing by itself; the others verify nothing. Wall and CPU are medians, in seconds
of this command alone (not the server); memory is the largest peak of one process, and never
less than this script's own, which the kernel hands on to what it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ds_ckpt_sidecar.demo.s3_server import S3Server
from ds_ckpt_store.contract import digest, names
from ds_ckpt_store.contract.clock import SystemClock, system_random
from ds_ckpt_store.contract.manifest import NodeManifest, Shard
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.stores import open_store

MIB = 1 << 20
TAG = "global_step1"
BUCKET = "bench"
OURS = "ds-ckpt agent --once"
CLOCK = SystemClock()
Destination = Callable[[Path], AbstractContextManager[str]]


@dataclass(frozen=True)
class Run:
    """One command: seconds, and bytes of the largest process."""

    row: str
    wall: float
    cpu: float
    peak: int


@dataclass(frozen=True)
class Row:
    """A way to upload: from the folder of the checkpoint, or from a volume, to a URL."""

    name: str
    command: Callable[[Source, str], list[str]]


@dataclass(frozen=True)
class Source:
    """What is uploaded: the same files as a plain folder and as a volume with a save handed in."""

    folder: Path
    volume: Path


def write_shards(folder: Path, count: int, size: int) -> None:
    folder.mkdir(parents=True)
    for rank in range(count):
        with (folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").open("wb") as file:
            left = size
            while left:
                left -= file.write(os.urandom(min(left, 16 * MIB)))
            os.fsync(file.fileno())


def checksums(folder: Path) -> dict[str, str]:
    """As the hook makes them, outside of what is timed."""
    result = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            value, _ = digest.crc32c_of_fd(file.fileno(), 0, path.stat().st_size)
        result[path.name] = digest.to_hex(value)
    return result


def hand_in(path: Path, folder: Path, sums: Mapping[str, str]) -> None:
    """A volume with these files as a fresh save in its outbox, as the hook leaves it."""
    path.mkdir()
    volume = Volume(str(path))
    volume.prepare()
    save_id = names.new_save_id(int(CLOCK.time() * 1000), system_random())
    links = Path(volume.link_folder(save_id))
    links.mkdir(parents=True)
    (path / TAG).mkdir()
    shards = []
    for rank, source in enumerate(sorted(folder.iterdir())):
        os.link(source, path / TAG / source.name)
        os.link(source, links / source.name)
        state = source.stat()
        shards.append(
            Shard(
                path=source.name,
                size=state.st_size,
                crc32c=sums[source.name],
                device=state.st_dev,
                inode=state.st_ino,
                mtime_ns=state.st_mtime_ns,
                rank=rank,
            )
        )
    node = volume.node_id()
    volume.publish(
        NodeManifest(
            run_id="bench",
            attempt=save_id,
            save_id=save_id,
            tag=TAG,
            time_ms=int(CLOCK.time() * 1000),
            nodes=[node],
            node=node,
            ranks=list(range(len(shards))),
            shards=shards,
        )
    )


def measure(name: str, command: list[str], log: Path) -> Run:
    os.sync()  # what an earlier row left unwritten is not this one's
    started = CLOCK.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
    wall = CLOCK.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} failed ({process.returncode}):\n{log.read_text()[-3000:]}")
    return Run(name, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def check_arrived(url: str, expected: int) -> None:
    """Every row must have brought all bytes of the shards."""
    store = open_store(url)
    try:
        arrived = sum(info.size for info in store.list("") if info.key.endswith("states.pt"))
    finally:
        store.close()
    if arrived != expected:
        raise SystemExit(f"{url} holds {arrived} bytes of shards, {expected} were to come")


def agent(source: Source, url: str) -> list[str]:
    command = str(Path(sys.executable).with_name("ds-ckpt"))
    return [command, "agent", "--volume", str(source.volume), "--destination", url, "--once"]


def copy(source: Source, url: str) -> list[str]:
    return ["cp", "-r", str(source.folder), url.removeprefix("file://")]


def copy_and_sync(source: Source, url: str) -> list[str]:
    return ["sh", "-c", 'cp -r "$1" "$2" && sync -f "$2"', "sh", *copy(source, url)[2:]]


def aws(path: str, endpoint: Callable[[], str]) -> Callable[[Source, str], list[str]]:
    def command(source: Source, url: str) -> list[str]:
        options = ["--recursive", "--only-show-errors", "--endpoint-url", endpoint()]
        return [path, "s3", "cp", str(source.folder), f"{url}/{TAG}", *options]

    return command


@contextmanager
def folder_destination(work: Path) -> Iterator[str]:
    target = work / "destination"
    target.mkdir()
    try:
        yield f"file://{target / 'run'}"
    finally:
        shutil.rmtree(target)


class ServerDestination:
    """A fresh S3 server for each run; this process's environment says how to reach it."""

    def __init__(self) -> None:
        self.endpoint = ""

    @contextmanager
    def __call__(self, work: Path) -> Iterator[str]:
        folder = work / "server"
        folder.mkdir()
        os.environ.update(AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE=os.devnull)
        try:
            with S3Server(folder) as server:
                server.create_bucket(BUCKET)
                self.endpoint = server.url
                os.environ.update(server.environ)
                yield f"s3://{BUCKET}/run"
        finally:
            shutil.rmtree(folder)


def compare(
    rows: list[Row],
    destination: Destination,
    work: Path,
    sums: Mapping[str, str],
    repeats: int,
) -> list[Run]:
    folder = work / "data" / TAG
    total = sum(path.stat().st_size for path in folder.iterdir())
    runs = []
    for repeat in range(repeats):
        for row in rows[repeat % len(rows) :] + rows[: repeat % len(rows)]:
            volume = work / "volume"
            hand_in(volume, folder, sums)
            with destination(work) as url:
                run = measure(row.name, row.command(Source(folder, volume), url), work / "log")
                check_arrived(url, total)
            shutil.rmtree(volume)
            print(f"  {run.row:32}{run.wall:8.2f} s", file=sys.stderr)
            runs.append(run)
    return runs


def report(store: str, rows: list[Row], runs: list[Run], total: int) -> list[dict[str, object]]:
    """Print one line for each row; ratio is its wall over ours, so above 1 is slower than ours."""
    print(f"\n{store:32}{'MiB/s':>8}{'wall s':>9}{'CPU s':>8}{'peak MiB':>10}{'ratio':>7}")
    result: list[dict[str, object]] = []
    ours = statistics.median(run.wall for run in runs if run.row == OURS)
    for row in rows:
        mine = [run for run in runs if run.row == row.name]
        wall = statistics.median(run.wall for run in mine)
        cpu = statistics.median(run.cpu for run in mine)
        peak = max(run.peak for run in mine) / MIB
        print(
            f"{row.name:32}{total / MIB / wall:8.0f}{wall:9.2f}{cpu:8.2f}{peak:10.0f}"
            f"{wall / ours:7.2f}"
        )
        summary = {"store": store, "row": row.name, "wall": wall, "cpu": cpu, "peak_mib": peak}
        summary |= {"mib_per_s": total / MIB / wall, "ratio": wall / ours}
        result.append({**summary, "runs": [asdict(run) for run in mine]})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", choices=("file", "s3", "all"), default="all")
    parser.add_argument("--size-gib", type=float, default=4.0, help="of all shards together")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", help="work here (needs twice the size); default: temporary")
    parser.add_argument("--aws", default=shutil.which("aws"), help="the aws command")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    if args.store != "file" and not args.aws:
        parser.error("no aws command: pip install awscli somewhere and name it with --aws")
    size = int(args.size_gib * (1 << 30) / args.shards)
    server = ServerDestination()
    all_rows: dict[str, tuple[list[Row], Destination]] = {
        "file": (
            [Row(OURS, agent), Row("cp -r", copy), Row("cp -r, then sync -f", copy_and_sync)],
            folder_destination,
        ),
        "s3": (
            [
                Row(OURS, agent),
                Row("aws s3 cp --recursive", aws(args.aws, lambda: server.endpoint)),
            ],
            server,
        ),
    }
    figures: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        work = Path(name)
        write_shards(work / "data" / TAG, args.shards, size)
        sums = checksums(work / "data" / TAG)
        for store, (rows, destination) in all_rows.items():
            if args.store in (store, "all"):
                runs = compare(rows, destination, work, sums, args.repeats)
                figures += report(store, rows, runs, args.shards * size)
    if args.json:
        args.json.write_text(json.dumps({"settings": vars(args) | {"json": None}, "rows": figures}))


if __name__ == "__main__":
    main()
