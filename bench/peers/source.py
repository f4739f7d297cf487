"""What is moved: the cases, their files, and a save handed in as the trainer's hook does it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_ckpt_store.contract import digest, names
from ds_ckpt_store.contract.clock import SystemClock, system_random
from ds_ckpt_store.contract.manifest import NodeManifest, Shard
from ds_ckpt_store.contract.volume import Volume

MIB = 1 << 20
GIB = 1 << 30
TAG = "global_step1"
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Case:
    """So many files of so many bytes each."""

    name: str
    count: int
    size: int

    @property
    def total(self) -> int:
        return self.count * self.size

    def scaled(self, scale: float) -> Case:
        """Under the same name: fewer files where they are many, else smaller ones."""
        if self.count > 100:
            return Case(self.name, max(2, int(self.count * scale)), self.size)
        return Case(self.name, self.count, max(1, int(self.size * scale)))

    def file_names(self) -> list[str]:
        return [f"{number:06d}.pt" for number in range(self.count)]


CASES = [
    Case("1x4GiB", 1, 4 * GIB),
    Case("16x256MiB", 16, 256 * MIB),
    Case("2000x1MiB", 2000, 1 * MIB),
]


def choose_folder(wanted: str | None, needed: int, *, in_memory: bool) -> tuple[Path, str]:
    """Where to work, and a sentence about it: in memory if that is wanted and fits."""
    if wanted:
        return Path(wanted), f"in {wanted}, as told; files are read before each run"
    folder = Path(tempfile.gettempdir())
    reason = "as a folder's store is a disk's"
    if in_memory:
        free = _free_memory()
        if needed + 2 * GIB < free:
            return MEMORY, f"in {MEMORY}: in memory, so that no disk has a part in it"
        reason = f"since {MEMORY} has no room for {needed / GIB:.1f} GiB and some to spare"
    return folder, f"in {folder}, {reason}; files are read before each run"


def _free_memory() -> int:
    if not os.access(MEMORY, os.W_OK):
        return 0
    return min(shutil.disk_usage(MEMORY).free, _available_memory())


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def write_files(folder: Path, case: Case) -> dict[str, str]:
    """Random bytes; returns the CRC32C of each file, as the hook makes it before what is timed."""
    folder.mkdir(parents=True)
    block = os.urandom(min(case.size, 64 * MIB))
    sums = {}
    for number, name in enumerate(case.file_names()):
        path = folder / name
        with path.open("wb") as file:
            file.write(number.to_bytes(8, "big")[: case.size])
            left = case.size - file.tell()
            while left:
                left -= file.write(memoryview(block)[: min(left, len(block))])
        with path.open("rb") as file:
            value, _ = digest.crc32c_of_fd(file.fileno(), 0, case.size)
        sums[name] = digest.to_hex(value)
    return sums


def warm(folder: Path) -> None:
    """Read all files, so that every run finds them in the page cache if it is large enough.

    The agent tells the kernel that it needs what it has uploaded no more; others do not.
    """
    buffer = bytearray(8 * MIB)
    for path in sorted(folder.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def hand_in(volume_folder: Path, folder: Path, sums: Mapping[str, str]) -> None:
    """A volume with these files as a fresh save in its outbox, as the hook leaves it."""
    clock = SystemClock()
    volume_folder.mkdir()
    volume = Volume(str(volume_folder))
    volume.prepare()
    save_id = names.new_save_id(int(clock.time() * 1000), system_random())
    links = Path(volume.link_folder(save_id))
    links.mkdir(parents=True)
    (volume_folder / TAG).mkdir()
    shards = []
    for rank, source in enumerate(sorted(folder.iterdir())):
        os.link(source, volume_folder / TAG / source.name)
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
            time_ms=int(clock.time() * 1000),
            nodes=[node],
            node=node,
            ranks=list(range(len(shards))),
            shards=shards,
        )
    )
