"""When credentials end, as the SDKs know it: told without a request, and never an error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import google.auth
import pytest
from azure.core.credentials import AccessToken, AccessTokenInfo
from google.oauth2.credentials import Credentials

from ds_ckpt_store.contract.clock import SystemClock, system_random
from ds_ckpt_store.errors import StoreError
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.azure import credentials as azure
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import BytesSource, Store
from ds_ckpt_store.stores.retry import RetryStore
from ds_ckpt_store.stores.swap_by_create import SwapByCreate

END = datetime(2036, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
NOWHERE = "http://127.0.0.1:9"  # a request there fails
ACCOUNT = "devstoreaccount1"


def ask(store: Store) -> None:
    """One call, which looks for credentials; it finds no server."""
    with pytest.raises(StoreError):
        store.put("k", BytesSource(b"x"))


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials of this machine."""
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_CONNECTION_STRING",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def s3() -> Store:
    return open_store(
        "s3://bucket/run", {"DS_CKPT_S3_ENDPOINT": NOWHERE, "DS_CKPT_S3_REGION": "us-east-1"}
    )


def test_s3_tells_when_temporary_credentials_end(tmp_path: Path) -> None:
    told = {
        "Version": 1,
        "AccessKeyId": "a",
        "SecretAccessKey": "s",
        "SessionToken": "t",
        "Expiration": END.isoformat(),
    }
    script = tmp_path / "credentials.py"
    script.write_text(f"print({json.dumps(json.dumps(told))})")
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    store = s3()
    assert store.credentials_expiry() is None, "nothing was asked yet"
    ask(store)
    assert store.credentials_expiry() == END.timestamp()


def test_s3_does_not_know_when_keys_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store = s3()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    ask(store)
    assert store.credentials_expiry() is None


def test_s3_looks_for_no_credentials_to_tell_when_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = s3()
    ask(store)  # finds none
    looked: list[object] = []
    find = "botocore.credentials.CredentialResolver.load_credentials"
    monkeypatch.setattr(find, lambda *args: looked.append(args))
    assert store.credentials_expiry() is None
    assert not looked


def test_gcs_tells_when_the_token_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Credentials(token="t", expiry=END.replace(tzinfo=None))  # as google-auth keeps it
    monkeypatch.setattr(google.auth, "default", lambda **_: (found, "project"))
    store = open_store("gs://bucket/run", {"DS_CKPT_GCS_ENDPOINT": "https://127.0.0.1:9"})
    assert store.credentials_expiry() is None
    ask(store)
    assert store.credentials_expiry() == END.timestamp()
    found.expiry = None
    assert store.credentials_expiry() is None


@pytest.mark.parametrize(
    ("end", "expiry"),
    [
        ("&se=2036-01-02T03%3A04%3A05Z", END.timestamp()),
        ("&se=2036-01-02T03%3A04Z", END.timestamp() - 5),
        ("&se=2036-01-02", datetime(2036, 1, 2, tzinfo=timezone.utc).timestamp()),
        ("", None),
        ("&se=soon", None),
    ],
)
def test_azure_reads_the_end_of_a_shared_access_signature(end: str, expiry: float | None) -> None:
    environ = {
        "DS_CKPT_AZURE_ENDPOINT": f"{NOWHERE}/{ACCOUNT}",
        "DS_CKPT_AZURE_SAS_TOKEN": f"sv=2024-01-01{end}&sig=x",
    }
    assert open_store("az://ctr/run", environ).credentials_expiry() == expiry


def test_azure_keys_do_not_end() -> None:
    environ = {"DS_CKPT_AZURE_ENDPOINT": f"{NOWHERE}/{ACCOUNT}", "AZURE_STORAGE_KEY": "a2V5"}
    assert open_store("az://ctr/run", environ).credentials_expiry() is None


class Old:
    """An identity as azure-identity was."""

    def get_token(self, *scopes: str, **_: object) -> AccessToken:
        return AccessToken("t", int(END.timestamp()))


class New(Old):
    """As it is."""

    def get_token(self, *scopes: str, **_: object) -> AccessToken:
        raise AssertionError("the SDK asks for more")

    def get_token_info(self, *scopes: str, **_: object) -> AccessTokenInfo:
        return AccessTokenInfo("t", int(END.timestamp()))


@pytest.mark.parametrize("identity", [Old, New])
def test_azure_tells_when_the_last_token_of_an_identity_ends(
    identity: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(azure, "_default", identity)
    store = open_store("az://ctr/run", {"DS_CKPT_AZURE_ENDPOINT": f"https://127.0.0.1:9/{ACCOUNT}"})
    assert store.credentials_expiry() is None
    ask(store)
    assert store.credentials_expiry() == END.timestamp()


def test_decorators_pass_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    within = MemoryStore(MemoryBucket(SystemClock()))
    store = SwapByCreate(RetryStore(within, SystemClock(), system_random()))
    assert store.credentials_expiry() is None
    ends = time.time() + timedelta(hours=1).total_seconds()
    monkeypatch.setattr(within, "credentials_expiry", lambda: ends)
    assert store.credentials_expiry() == ends


def test_a_folder_has_no_credentials(tmp_path: Path) -> None:
    assert open_store(tmp_path.as_uri()).credentials_expiry() is None
    assert open_store("memory://run").credentials_expiry() is None
