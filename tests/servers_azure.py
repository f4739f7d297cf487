"""Azurite, Microsoft's emulator of Azure's storage, as a real server for tests.

It checks CRC64 and MD5 of bodies, signatures and conditions, and keeps blocks that were not
committed. ``make servers`` installs it. It listens on loopback only, on a free port, with its data
in a folder of the test run and an account whose key nobody else has.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from azure.storage.blob import (
    AccountSasPermissions,
    BlobServiceClient,
    ContainerClient,
    ResourceTypes,
    generate_account_sas,
)

from ds_ckpt_sidecar.demo.s3_server import HOST, free_ports
from ds_ckpt_store.contract.clock import system_random
from ds_ckpt_store.stores.azure import AzureOptions, AzureStore

SERVERS = Path(__file__).parent.parent / ".servers"
PROGRAM = SERVERS / "node_modules/.bin/azurite-blob"


@dataclass(frozen=True)
class Azure:
    """A running blob service with one account."""

    origin: str
    account: str
    key: str = field(repr=False)

    @property
    def endpoint(self) -> str:
        return f"{self.origin}/{self.account}"

    @property
    def environ(self) -> dict[str, str]:
        """With this, a process of ours finds the server and may use it."""
        return {"DS_CKPT_AZURE_ENDPOINT": self.endpoint, "AZURE_STORAGE_KEY": self.key}

    def through(self, url: str) -> Azure:
        """The same account by way of a proxy."""
        return Azure(url, self.account, self.key)

    def service(self) -> BlobServiceClient:
        credential = {"account_name": self.account, "account_key": self.key}
        return BlobServiceClient(self.endpoint, credential=credential)

    def container(self) -> str:
        """Name of a new, empty container."""
        name = f"c-{uuid.uuid4().hex[:16]}"
        self.service().create_container(name)
        return name

    def client(self, container: str) -> ContainerClient:
        """The SDK's client, to look at what was stored from outside."""
        return self.service().get_container_client(container)

    def sas(self, seconds: float = 3600, permission: str = "racwdl") -> str:
        """A shared access signature for the account that ends after so many seconds."""
        return generate_account_sas(
            self.account,
            self.key,
            ResourceTypes(container=True, object=True),
            AccountSasPermissions.from_string(permission),
            datetime.now(timezone.utc) + timedelta(seconds=seconds),
        )

    def store(
        self,
        container: str,
        prefix: str = "run",
        *,
        stall_seconds: float = 60,
        environ: Mapping[str, str] | None = None,
    ) -> AzureStore:
        """A store there, with the account's key unless told otherwise."""
        options = AzureOptions.read(
            f"az://{container}/{prefix}", self.environ if environ is None else environ
        )
        return AzureStore(options, stall_seconds)


@contextlib.contextmanager
def azurite(folder: Path, *, https: tuple[Path, Path] | None = None) -> Iterator[Azure]:
    """Run Azurite.

    Args:
        folder: for its data.
        https: files with a certificate for loopback, and with its key.
    """
    assert PROGRAM.exists(), f"{PROGRAM} is missing: make servers"
    account, key = "ckpttest", base64.b64encode(secrets.token_bytes(64)).decode()
    (port,) = free_ports(1, system_random())
    path = f"{PROGRAM.parents[2] / 'venv/bin'}:{os.environ['PATH']}"  # with Node.js
    command = [str(PROGRAM), "--blobHost", HOST, "--blobPort", str(port), "--location", str(folder)]
    # The SDK speaks a newer version of the API than Azurite knows; loose: encryption is ignored.
    command += ["--skipApiVersionCheck", "--loose", "--disableTelemetry", "--silent"]
    if https is not None:
        command += ["--cert", str(https[0]), "--key", str(https[1])]
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "AZURITE_ACCOUNTS": f"{account}:{key}", "PATH": path},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
                break
            assert process.poll() is None, (folder / "output.log").read_text()
            assert time.monotonic() < deadline, "Azurite does not answer"
            time.sleep(0.05)
        yield Azure(f"{'http' if https is None else 'https'}://{HOST}:{port}", account, key)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its data is thrown away
        process.wait()
