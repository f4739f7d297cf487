"""What the image weighs, and what its agent costs: ``python -m tests.kubernetes.image.cost``.

Prints tables, as docs/image.md has them. Nothing is judged: times are those of this machine, and
only mean something while it does nothing else.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests import servers
from tests.kubernetes.image.container import Agent, agent, own
from tests.kubernetes.tools import machine
from tests.sidecar.handoff import Trainer

USER = 65532
MIB = 1 << 20
STARTS = 5
IDLE_SECONDS = 30.0

# Part of the image to the paths that make it up, relative to /opt/ds-ckpt; the first that fits.
PACKAGES = "lib/python3*/site-packages/"
PARTS: Mapping[str, tuple[str, ...]] = {
    "ds-ckpt itself": ("ds_ckpt_*",),
    "S3: boto3, botocore, s3transfer": ("boto*", "s3transfer*", "jmespath*", "*dateutil*", "six*"),
    "Google: google-cloud-storage and its own": (
        *("google*", "proto*", "pyasn1*", "opentelemetry*", "grpc*"),
        *("requests*", "charset_normalizer*", "idna*"),
    ),
    "Azure: azure-storage-blob, azure-identity": ("azure*", "msal*", "isodate*", "*jwt*", "PyJWT*"),
    "Azure and Google: cryptography": ("crypto*", "*cffi*", "pycparser*"),
    "fsspec": ("fsspec*",),
    "checksums: awscrt": ("*awscrt*",),
    "settings, logs, commands: pydantic, structlog, rich, typer and others": ("*",),
}


def files(root: Path) -> Iterable[Path]:
    """Regular files of a tree."""
    return (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def packed(paths: Iterable[Path]) -> tuple[int, int]:
    """Bytes of files, and of what gzip makes of them, as a registry keeps a layer."""
    plain, small = 0, 0
    for path in paths:
        content = path.read_bytes()
        plain += len(content)
        small += len(gzip.compress(content, 6))
    return plain, small


def part_of(path: Path, root: Path) -> str:
    """Which part of the image a file of /opt/ds-ckpt belongs to."""
    inner = path.relative_to(root)
    if inner.parts[0] == "bytecode":
        python = inner.parts[1:3] != ("opt", "ds-ckpt")
        return "bytecode of Python's own library" if python else "bytecode of the packages"
    if "site-packages" not in inner.parts:
        return next(reversed(PARTS))
    name = Path(inner.parts[inner.parts.index("site-packages") + 1])
    return next(part for part, globs in PARTS.items() if any(name.match(glob) for glob in globs))


def weigh(image: str) -> None:
    """Print what makes the image up."""
    mounted = Path(machine.podman("image", "mount", image).stdout.strip())
    try:
        root = mounted / "opt/ds-ckpt"
        parts: dict[str, list[Path]] = {"base": []}
        for path in files(mounted):
            part = part_of(path, root) if root in path.parents else "base"
            parts.setdefault(part, []).append(path)
        weights = {part: packed(paths) for part, paths in parts.items()}
    finally:
        machine.podman("image", "unmount", image)
    table(
        ("part", "MB", "MB, gzip"),
        [
            *((part, *map(mb, weights[part])) for part in ["base", *PARTS] if part in weights),
            *((part, *map(mb, weights[part])) for part in sorted(weights) if "bytecode" in part),
            ("all", *(mb(sum(weight[i] for weight in weights.values())) for i in (0, 1))),
        ],
    )


def mb(size: int) -> str:
    """Bytes as MB."""
    return f"{size / 1e6:.1f}"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table in Markdown."""
    for row in (head, ("---",) * len(head), *rows):
        print(f"| {' | '.join(row)} |", flush=True)
    print(flush=True)


def forget(image: str) -> None:
    """Have the kernel drop the image's files from its page cache, so that a start reads them."""
    mounted = Path(machine.podman("image", "mount", image).stdout.strip())
    try:
        for path in files(mounted):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    finally:
        machine.podman("image", "unmount", image)


def cpu_seconds(running: Agent) -> float:
    """What an agent has used so far, of all its threads."""
    user, system = running.stat()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def memory(running: Agent) -> tuple[str, str, str]:
    """Resident memory now, that of it which is no file's, and the most that it ever was."""
    keys = ("VmRSS", "RssAnon", "VmHWM")
    now, anonymous, most = (int(running.status(key).split()[0]) * 1024 for key in keys)
    return mb(now), mb(anonymous), mb(most)


def start(image: str, server: servers.S3, folder: Path) -> tuple[float, float, float]:
    """Seconds from the process's begin to ready, from podman's, and of CPU."""
    volume = folder / uuid.uuid4().hex
    volume.mkdir()
    own(volume, USER)
    with agent(image, volume, told(server), folder) as running:
        ready = running.until_ready()
        return ready - running.begun, ready - running.asked, cpu_seconds(running)


def told(server: servers.S3) -> dict[str, str]:
    """A new bucket on a server."""
    return {**server.environ, "DS_CKPT_DESTINATION": f"s3://{server.bucket()}/run"}


def starts(image: str, server: servers.S3, folder: Path) -> None:
    """Print how long a start takes."""
    rows = []
    for how, before in (("warm", None), ("image not in the page cache", forget)):
        start(image, server, folder)
        measured = []
        for _ in range(STARTS):
            if before:
                before(image)
            measured.append(start(image, server, folder))
        for i, what in enumerate(("process to /readyz", "podman run to /readyz", "CPU")):
            taken = sorted(each[i] for each in measured)
            spread = f"{taken[0]:.2f} to {taken[-1]:.2f}"
            rows.append((how, what, f"{statistics.median(taken):.2f}", spread))
    table(("start", "seconds", f"median of {STARTS}", "all"), rows)


def idle(image: str, server: servers.S3, folder: Path, size: int) -> None:
    """Print what an agent costs that has nothing to do, before and after it had."""
    volume = folder / "idle"
    trainer = Trainer(volume, seed=1)
    own(volume, USER)
    rows = []
    with agent(image, volume, told(server), folder) as running:
        running.until_ready()
        for what in ("nothing stored yet", f"{size // MIB} MiB stored"):
            before, begun = cpu_seconds(running), time.monotonic()
            time.sleep(IDLE_SECONDS)
            used = (cpu_seconds(running) - before) / (time.monotonic() - begun)
            rows.append((what, f"{used:.2%}", *memory(running), running.status("Threads")))
            if len(rows) == 1:
                block = random.Random(1).randbytes(size // 4)
                trainer.save("step1", {f"{i}.pt": block for i in range(4)})
                own(volume, USER)
                running.wait_for("save.committed")
    head = ("idle", "CPU of a core", "RSS in MB", "not of files", "peak", "threads")
    table(head, rows)


def main() -> None:
    """Build, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="of weigh, starts, idle; all if none")
    parser.add_argument("--mib", type=int, default=512, help="that the agent stores (%(default)s)")
    options = parser.parse_args()
    image = machine.build_sidecar()
    folder = Path(tempfile.mkdtemp(prefix="ds-ckpt-cost-"))
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret" * 3}
    os.environ["AWS_DEFAULT_REGION"] = servers.REGION
    try:
        if "weigh" in options.only or not options.only:
            weigh(image)
        (folder / "server").mkdir()
        keys = (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
        with servers.seaweed(folder / "server", *keys) as server:
            if "starts" in options.only or not options.only:
                starts(image, server, folder)
            if "idle" in options.only or not options.only:
                idle(image, server, folder, options.mib * MIB)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
