"""No credential is ever written: neither to the log, nor to the volume, the message or the page.

The server refuses everything, and puts what it was sent into its answer, as gateways do that were
left in a debugging mode.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import signal
import threading
from collections.abc import Iterator
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.sidecar.handoff import Trainer
from tests.sidecar.world import Process, agent_process

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYzEXAMPLEKEY0"
TOKEN = "FwoGZXIvYXdzEBYaDHqa0AtokenOfASessionThatIsSecret"
SIGNATURE = "0aSecretSignatureOfASharedAccessSignature1234"


class _Telltale(BaseHTTPRequestHandler):
    def _refuse(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(size)
        told = escape(f"{self.path} {self.headers}")
        body = (
            f"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>{told}</Message>"
            "</Error>"
        ).encode()
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _refuse  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def telltale() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Telltale)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def s3(endpoint: str, _: Path) -> tuple[str, dict[str, str], list[str]]:
    environ = {
        "DS_CKPT_S3_ENDPOINT": endpoint,
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    return "s3://bucket/run", environ, [SECRET, TOKEN]


def azure_key(endpoint: str, _: Path) -> tuple[str, dict[str, str], list[str]]:
    key = base64.b64encode(SECRET.encode()).decode()
    environ = {"DS_CKPT_AZURE_ENDPOINT": f"{endpoint}/account", "AZURE_STORAGE_KEY": key}
    return "az://container/run", environ, [key]


def azure_sas(endpoint: str, _: Path) -> tuple[str, dict[str, str], list[str]]:
    sas = f"sv=2024-11-04&se=2999-01-01T00%3A00%3A00Z&sp=rwdl&sig={SIGNATURE}"
    environ = {"DS_CKPT_AZURE_ENDPOINT": f"{endpoint}/account", "AZURE_STORAGE_SAS_TOKEN": sas}
    return "az://container/run", environ, [SIGNATURE]


def gcs(endpoint: str, folder: Path) -> tuple[str, dict[str, str], list[str]]:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
    account = folder / "account.json"
    account.write_text(
        json.dumps(
            {
                "type": "service_account",
                "project_id": "p",
                "private_key_id": "1",
                "private_key": pem,
                "client_email": "me@p.iam.gserviceaccount.com",
                "token_uri": f"{endpoint}/token",
            }
        )
    )
    environ = {"DS_CKPT_GCS_ENDPOINT": endpoint, "GOOGLE_APPLICATION_CREDENTIALS": str(account)}
    return "gs://bucket/run", environ, [pem.splitlines()[3]]


def in_the_url(_: str, __: Path) -> tuple[str, dict[str, str], list[str]]:
    return f"sftp://me:{SECRET}@127.0.0.1/run", {}, [SECRET]


def page(agent: Process) -> bytes:
    (line,) = agent.of("page.listening")
    host, _, port = line["address"].rpartition(":")
    shown = b""
    for path in ("/", "/status", "/metrics", "/readyz"):
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        connection.request("GET", path)
        shown += connection.getresponse().read()
    return shown


@pytest.mark.parametrize("store", [s3, azure_key, azure_sas, gcs, in_the_url])
def test_what_a_store_tells_of_the_request_is_not_told_further(
    store: object, telltale: str, trainer: Trainer, tmp_path: Path
) -> None:
    destination, environ, secrets = store(telltale, tmp_path)  # type: ignore[operator]
    trainer.save("step1", {"x": 100})
    message = tmp_path / "message"
    options = ("--listen", "127.0.0.1:0", "--drain-seconds", "1", "--stall-seconds", "5")
    options += ("--termination-log", str(message))
    log = tmp_path / "log"
    shown = b""
    with agent_process(log, trainer.volume.path, destination, *options, environ=environ) as agent:
        with contextlib.suppress(AssertionError, TimeoutError):
            agent.wait_for("store.unavailable")
        if agent.process.poll() is None:
            shown = page(agent)
        agent.end(signal.SIGTERM)
    written = [log.read_bytes(), message.read_bytes(), shown]
    for path in Path(trainer.volume.path).rglob("*"):
        if path.is_file():
            written.append(path.read_bytes())
    whole = b"\n".join(written)
    assert b"step1" in whole, "the test must see what is written"
    for secret in secrets:
        assert secret.encode() not in whole
