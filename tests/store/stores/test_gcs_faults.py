"""An upload to Cloud Storage ends right whatever the network does, or nothing is there and it
says why.

The stories run on fake-gcs-server, by composing; there our own comparison with the service's
checksum finds changed bytes, which the real service would refuse. What can go wrong with the XML
API's multipart uploads is told for each request, on SeaweedFS.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from ds_ckpt_store.errors import (
    AccessError,
)
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import Store
from tests.faultproxy import Fault, FaultProxy
from tests.servers_gcs import GCS
from tests.store.stores.fault_scenarios import (
    STALL_SECONDS,
    Cloud,
    ExpiryStories,
    FaultStories,
    Wire,
)

PART = 512 << 10
BUSY = '{"error": {"message": "slow down", "errors": [{"reason": "rateLimitExceeded"}]}}'
UNAUTHORIZED = '{"error": {"message": "Invalid Credentials", "errors": [{"reason": "authError"}]}}'
WIRE = Wire(
    put=r"^POST /upload/.*name=run%2F(?!\.ds_ckpt-parts)",
    part=r"^POST /upload/.*name=run%2F\.ds_ckpt-parts%2F\w+%2F\d",
    complete=r"^POST .*/compose",
    read=r"^GET .*alt=media",
    list=r"^GET /storage/v1/b/[^/]+/o\?",
    throttled={"body": BUSY},
    expired={"status": 401, "body": UNAUTHORIZED},
)


@pytest.fixture
def proxy(fake_gcs: GCS) -> Iterator[FaultProxy]:
    parts = urlsplit(fake_gcs.endpoint)
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        yield proxy


def through(proxy: FaultProxy, bucket: str, **settings: str) -> Store:
    environ = GCS(proxy.url).environ(parts="compose", **settings)
    return open_store(f"gs://{bucket}/run", environ, stall_seconds=STALL_SECONDS)


class TestFaults(FaultStories):
    @pytest.fixture
    def cloud(self, fake_gcs: GCS, proxy: FaultProxy, tmp_path: Path) -> Iterator[Cloud]:
        bucket = fake_gcs.bucket()
        store = through(proxy, bucket)
        yield Cloud(proxy, WIRE, store, fake_gcs.store(bucket), PART, tmp_path)
        store.close()

    @pytest.mark.parametrize("status", [404, 410])
    def test_an_upload_that_is_gone_is_begun_anew(self, cloud: Cloud, status: int) -> None:
        def drop() -> None:
            for upload in cloud.direct.uploads(""):
                cloud.direct.abort(upload)

        shard = cloud.large()
        gone = cloud.proxy.add(
            Fault(r"^GET .*%2Fupload\?", "status", skip=1, status=status, body="", then=drop)
        )
        cloud.upload(shard, streams=1)
        assert cloud.proxy.hits(gone) == 1
        assert len(cloud.proxy.lines(r"name=run%2F\.ds_ckpt-parts%2F\w+%2Fupload")) == 2
        assert cloud.direct.get(shard.key)[0] == cloud.bytes_of(shard)


# ---- credentials that expire


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A service account's key, and an endpoint that gives a new token each time; the tokens."""
    given: list[str] = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            given.append(f"token-{len(given)}")
            answer = {"access_token": given[-1], "expires_in": 3600, "token_type": "Bearer"}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        account = {
            "type": "service_account",
            "project_id": "p",
            "private_key_id": "1",
            "private_key": key.decode(),
            "client_email": "agent@p.iam.gserviceaccount.com",
            "token_uri": f"http://127.0.0.1:{server.server_address[1]}/token",
        }
        path = tmp_path / "key.json"
        path.write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        yield given
        server.shutdown()


class TestExpiry(ExpiryStories):
    @pytest.fixture
    def cloud(
        self, fake_gcs: GCS, proxy: FaultProxy, tokens: list[str], tmp_path: Path
    ) -> Iterator[Cloud]:
        bucket = fake_gcs.bucket()
        store = through(proxy, bucket, anonymous="false")
        yield Cloud(proxy, WIRE, store, fake_gcs.store(bucket), PART, tmp_path)
        store.close()

    def test_a_new_token_is_used_for_the_same_upload(self, cloud: Cloud, tokens: list[str]) -> None:
        shard = cloud.large()
        cloud.proxy.add(Fault(WIRE.part, "status", skip=1, **WIRE.expired))  # type: ignore[arg-type]
        cloud.upload(shard, streams=1)
        used = [seen.headers.get("authorization", "") for seen in cloud.proxy.seen]
        assert used[0] == "Bearer token-0"
        assert used[-1] == "Bearer token-1"
        assert len(cloud.proxy.lines(r"name=run%2F\.ds_ckpt-parts%2F\w+%2Fupload")) == 1
        cloud.assert_stored(shard)

    def test_credentials_that_never_worked_are_told_at_once(self, cloud: Cloud) -> None:
        cloud.proxy.add(Fault("", "status", times=None, **WIRE.expired))  # type: ignore[arg-type]
        with pytest.raises(AccessError, match=r"401 authError.*roles/storage\.objectUser"):
            cloud.retrying().get("k")
        assert len(cloud.proxy.seen) == 1

    def test_a_key_that_is_refused_is_told(
        self, cloud: Cloud, tokens: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = cloud.folder / "key.json"
        account = json.loads(path.read_text())
        parts = urlsplit(account["token_uri"])
        with FaultProxy(str(parts.hostname), int(parts.port or 0)) as token_proxy:
            account["token_uri"] = f"{token_proxy.url}/token"
            path.write_text(json.dumps(account))
            body = '{"error": "invalid_grant", "error_description": "Invalid JWT Signature."}'
            token_proxy.add(Fault("/token", "status", times=None, status=400, body=body))
            with pytest.raises(AccessError, match=r"invalid_grant.*GOOGLE_APPLICATION_CREDENTIALS"):
                cloud.retrying().get("k")
