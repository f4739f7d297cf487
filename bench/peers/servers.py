"""The servers that all clients are measured against. Each is started anew, and empty, for a run.

``fast``     JuiceFS' S3 gateway (MinIO's S3 code): takes the least CPU of the servers that really
             keep what they get. It ignores conditions and checksums.
``sink``     ``sink.c`` beside this file: keeps nothing, so that the client alone is seen.
``seaweed``  SeaweedFS: refuses wrong checksums and honours conditions, and costs a lot of CPU.
``file``     no server: a folder.

All listen on 127.0.0.1 only: at the scheme's own port, 80 or 443, if that is free and we may, since
some clients know no other; else at a port that the system gives. Certificates come from an
authority that openssl makes at the start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from ds_ckpt_sidecar.demo.s3_server import HOST, S3Server, find_weed, free_ports
from ds_ckpt_store.contract.clock import system_random

HERE = Path(__file__).parent
ACCESS_KEY, SECRET_KEY, REGION = "benchkey", "benchsecret0123456789", "us-east-1"
BUCKET = "bench"
PREFIX = "k"
START_SECONDS = 60.0
OWN_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Certificates:
    """An authority, and a certificate of it for 127.0.0.1; PEM files."""

    authority: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class Server:
    """A running server with an empty bucket, or a folder.

    Attributes:
        url: endpoint; empty for a folder.
        folder: the folder, if it is one.
        authority: the file of certificates to trust.
        received: bytes of objects that it has taken in, if it keeps nothing.
    """

    url: str
    authority: Path
    folder: Path | None = None
    received: Callable[[], int] | None = None

    @property
    def secure(self) -> bool:
        return self.url.startswith("https:")

    @property
    def at_own_port(self) -> bool:
        """Whether it is found without a port in the endpoint."""
        return urlsplit(self.url).port is None

    @property
    def destination(self) -> str:
        """What ``ds-ckpt --destination`` is given."""
        return f"file://{self.folder}/run" if self.folder else f"s3://{BUCKET}/{PREFIX}"

    @property
    def environ(self) -> dict[str, str]:
        """What clients find in their environment, and nothing of the user's own settings."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": os.devnull,
            "LANG": "C.UTF-8",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_CA_BUNDLE": str(self.authority),
            "SSL_CERT_FILE": str(self.authority),
            "DS_CKPT_S3_ENDPOINT": self.url,
            "DS_CKPT_S3_CA_BUNDLE": str(self.authority),
        }

    def client(self) -> Any:
        """To look at what was stored, from outside."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name=REGION,
            verify=str(self.authority) if self.secure else None,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


Opening = Callable[[Path, str, Certificates], AbstractContextManager[Server]]


def make_certificates(folder: Path) -> Certificates:
    """An authority and a certificate for the servers here, valid for two days."""
    folder.mkdir()
    authority, key = folder / "authority.pem", folder / "authority.key"
    leaf, leaf_key, request = folder / "server.pem", folder / "server.key", folder / "server.csr"
    extensions = folder / "extensions"
    extensions.write_text(
        f"subjectAltName=IP:{HOST},DNS:localhost\nbasicConstraints=CA:FALSE\n"
        "extendedKeyUsage=serverAuth\n"
    )
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl("req", "-x509", *new, "-days", "2", "-subj", "/CN=bench authority")(authority, key)
    _openssl("req", *new, "-subj", f"/CN={HOST}")(request, leaf_key)
    subprocess.run(
        [
            *("openssl", "x509", "-req", "-in", request, "-CA", authority, "-CAkey", key),
            *("-CAcreateserial", "-days", "2", "-extfile", extensions, "-out", leaf),
        ],
        check=True,
        capture_output=True,
    )
    return Certificates(authority, leaf, leaf_key)


def _openssl(*arguments: str) -> Callable[[Path, Path], None]:
    def run(out: Path, key: Path) -> None:
        command = ["openssl", *arguments, "-out", str(out), "-keyout", str(key)]
        subprocess.run(command, check=True, capture_output=True)

    return run


# ---- fast


@contextlib.contextmanager
def fast(folder: Path, scheme: str, certificates: Certificates) -> Iterator[Server]:
    """JuiceFS' gateway, with its data in the folder."""
    program = _beside_python("juicefs")
    meta = f"sqlite3://{folder}/meta.db"
    form = [program, "format", "--storage", "file", "--bucket", f"{folder}/data/"]
    subprocess.run([*form, "--trash-days", "0", meta, "bench"], check=True, capture_output=True)
    if scheme == "https":  # MinIO's code looks for them there
        place = folder / ".minio" / "certs"
        place.mkdir(parents=True)
        shutil.copy(certificates.certificate, place / "public.crt")
        shutil.copy(certificates.key, place / "private.key")
    port = _port(scheme)
    command = [program, "gateway", "--multi-buckets", "--keep-etag", "--object-meta"]
    command += ["--no-usage-report", "--cache-size", "0", "--log", f"{folder}/gateway.log"]
    environ = {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY}
    environ |= {"HOME": str(folder), "PATH": os.environ["PATH"]}
    server = Server(_url(scheme, port), certificates.authority)
    with _process([*command, meta, f"{HOST}:{port}"], folder, environ) as process:
        _make_bucket(server, process)
        yield server


# ---- seaweed


@contextlib.contextmanager
def seaweed(folder: Path, scheme: str, certificates: Certificates) -> Iterator[Server]:
    """SeaweedFS, with its data in the folder; it has a port for https beside the one for http."""
    port = _port("https")
    tls = (
        f"-s3.port.https={port}",
        f"-s3.cert.file={certificates.certificate}",
        f"-s3.key.file={certificates.key}",
    )
    server = S3Server(folder, arguments=tls if scheme == "https" else ())
    server.access_key, server.secret_key = ACCESS_KEY, SECRET_KEY
    with server:
        server.create_bucket(BUCKET)
        url = _url(scheme, port) if scheme == "https" else server.url
        yield Server(url, certificates.authority)


# ---- sink


@cache
def _sink_program(folder: Path) -> Path:
    program = folder / "sink"
    command = ["gcc", "-O2", "-pthread", str(HERE / "sink.c"), "-lssl", "-lcrypto"]
    try:
        subprocess.run([*command, "-o", str(program)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"the sink cannot be built: {error} {getattr(error, 'stderr', '')}\n"
            "it needs gcc and OpenSSL's headers (Debian: gcc libssl-dev)"
        ) from None
    return program


def sink(count: int, size: int) -> Opening:
    """A sink that serves ``count`` objects of ``size`` zeros."""

    @contextlib.contextmanager
    def opening(folder: Path, scheme: str, certificates: Certificates) -> Iterator[Server]:
        program = _sink_program(certificates.authority.parent)
        port = _port(scheme)
        command = [str(program), str(port), str(count), str(size)]
        if scheme == "https":
            command += [str(certificates.certificate), str(certificates.key)]
        del folder
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    raise SystemExit("the sink did not start")
                url = _url(scheme, port)
                context = ssl.create_default_context(cafile=str(certificates.authority))

                def received() -> int:
                    tls = context if scheme == "https" else None
                    with urllib.request.urlopen(f"{url}/-/received", context=tls) as answer:
                        return int(answer.read())

                yield Server(url, certificates.authority, received=received)
            finally:
                process.kill()

    return opening


# ---- file


@contextlib.contextmanager
def file(folder: Path, scheme: str, certificates: Certificates) -> Iterator[Server]:
    """A folder; the scheme says nothing."""
    del scheme
    target = folder / "destination"
    target.mkdir()
    yield Server("", certificates.authority, folder=target)


OPENINGS: dict[str, Opening] = {"fast": fast, "seaweed": seaweed, "file": file}


def opening(store: str, count: int, size: int) -> Opening:
    """How the server is started that serves, if it is the sink, these objects."""
    return sink(count, size) if store == "sink" else OPENINGS[store]


def needed_programs(stores: set[str]) -> list[str]:
    """What must be there and is not, as sentences."""
    missing = []
    if "fast" in stores and not os.access(_beside_python("juicefs"), os.X_OK):
        missing.append("store fast: no juicefs (make venv)")
    if "seaweed" in stores:
        try:
            find_weed()
        except Exception as error:
            missing.append(f"store seaweed: {error}")
    if stores - {"file"} and not shutil.which("openssl"):
        missing.append("no openssl, which makes the certificates")
    return missing


# ---- common


def _port(scheme: str) -> int:
    """The scheme's own, if we may listen there, else a free one."""
    own = OWN_PORTS[scheme]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind((HOST, own))
            return own
    (port,) = free_ports(1, system_random())
    return port


def _url(scheme: str, port: int) -> str:
    return f"{scheme}://{HOST}" + ("" if port == OWN_PORTS[scheme] else f":{port}")


def _beside_python(name: str) -> str:
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


@contextlib.contextmanager
def _process(
    command: list[str], folder: Path, environ: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its data is thrown away
        process.wait()


def _make_bucket(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            server.client().create_bucket(Bucket=BUCKET)
        except (BotoCoreError, ClientError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server at {server.url} does not answer: {error}") from None
            time.sleep(0.05)
        else:
            return
