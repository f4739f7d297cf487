"""Real servers for tests: SeaweedFS, an S3 that checks and honours, and the JuiceFS gateway, an
older S3 that accepts wrong checksums and ignores conditions. Each listens on loopback only, on
free ports, with its data in a folder of the test run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import boto3

from ds_ckpt_sidecar.demo.s3_server import HOST, S3Server, free_ports
from ds_ckpt_store.contract.clock import system_random
from ds_ckpt_store.stores.s3 import S3Options, S3Store
from tests import certificates

REGION = "us-east-1"
INSTALLED = Path(__file__).parent.parent / ".servers"


@dataclass(frozen=True)
class S3:
    """A running S3 server."""

    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    ca_bundle: str | None = None
    https: S3 | None = None  # the same server by its other port

    @property
    def environ(self) -> dict[str, str]:
        """With this, a process of ours finds the server and may use it."""
        bundle = {"DS_CKPT_S3_CA_BUNDLE": self.ca_bundle} if self.ca_bundle else {}
        return {
            **bundle,
            "DS_CKPT_S3_ENDPOINT": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
        }

    def client(self):
        """A boto3 client, to look at what was stored from outside."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
            verify=self.ca_bundle,
        )

    def bucket(self) -> str:
        """Name of a new, empty bucket."""
        name = f"b-{uuid.uuid4().hex[:16]}"
        self.client().create_bucket(Bucket=name)
        return name

    def store(self, bucket: str, prefix: str = "run", **settings: str) -> S3Store:
        """A store there; credentials come from the environment, as always.

        Args:
            bucket: its name.
            prefix: in it.
            settings: further ones, without ``DS_CKPT_S3_`` and in lower case.
        """
        more = {f"DS_CKPT_S3_{name.upper()}": value for name, value in settings.items()}
        options = S3Options.from_environ({**self.environ, **more})
        return S3Store.from_url(f"s3://{bucket}/{prefix}", options)


def installed(path: str) -> Path:
    """What ``make servers`` has installed there, below its folder."""
    found = INSTALLED / path
    assert found.exists(), f"{found} is missing: run `make servers` first"
    return found


@contextlib.contextmanager
def seaweed(folder: Path, access_key: str, secret_key: str) -> Iterator[S3]:
    files = certificates.make(folder)
    (port,) = free_ports(1, system_random())
    tls = [f"-s3.port.https={port}", f"-s3.cert.file={files.certificate}"]
    server = S3Server(folder, arguments=[*tls, f"-s3.key.file={files.key}"])
    server.access_key, server.secret_key = access_key, secret_key
    with server:
        https = S3(f"https://{HOST}:{port}", access_key, secret_key, str(files.authority))
        yield S3(server.url, access_key, secret_key, https=https)


@contextlib.contextmanager
def juicefs(folder: Path, access_key: str, secret_key: str) -> Iterator[S3]:
    program = str(Path(sys.executable).parent / "juicefs")
    meta = f"sqlite3://{folder}/meta.db"
    form = [program, "format", "--storage", "file", "--bucket", f"{folder}/data/"]
    form += ["--trash-days", "0", meta, "jfs"]
    subprocess.run(form, check=True, capture_output=True)
    (port,) = free_ports(1, system_random())
    command = [program, "gateway", "--multi-buckets", "--keep-etag", "--object-meta"]
    command += ["--no-usage-report", "--cache-size", "0", "--log", f"{folder}/gateway.log"]
    command += [meta, f"{HOST}:{port}"]
    keys = {"MINIO_ROOT_USER": access_key, "MINIO_ROOT_PASSWORD": secret_key}
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **keys},
            start_new_session=True,
        )
    server = S3(f"http://{HOST}:{port}", access_key, secret_key)
    try:
        wait_for_buckets(server, process)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its data is thrown away
        process.wait()


def wait_for_buckets(server: S3, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    """Return when a bucket can be made."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            server.bucket()
        except Exception:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)
        else:
            return
