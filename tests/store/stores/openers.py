"""The stores that the conformance suite judges: one entry in ``OPENERS`` for each.

An opener returns a function that opens the same, empty prefix as often as it is called: each call
is another process, which shares nothing with the first but what is stored.
"""

from __future__ import annotations

import functools
import json
import random
import uuid
from collections.abc import Callable

import pytest

from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.stores.file import FileStore
from ds_ckpt_store.stores.fsspec import open_url as open_fsspec
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import Proof, Store
from ds_ckpt_store.stores.probe import Findings, fit, probe
from ds_ckpt_store.stores.retry import RetryStore
from ds_ckpt_store.stores.swap_by_create import SwapByCreate
from tests.servers import S3

Open = Callable[[], Store]


def open_memory(request: pytest.FixtureRequest) -> Open:
    bucket = MemoryBucket(SystemClock())
    return lambda: MemoryStore(bucket)


def open_file(request: pytest.FixtureRequest) -> Open:
    root = request.getfixturevalue("tmp_path") / "root"
    return lambda: FileStore(str(root))


def open_s3(request: pytest.FixtureRequest) -> Open:
    server = request.getfixturevalue("seaweed")
    bucket = server.bucket()
    return lambda: server.store(bucket)


def open_s3_https(request: pytest.FixtureRequest) -> Open:
    server = request.getfixturevalue("seaweed").https
    bucket = server.bucket()
    return lambda: server.store(bucket)


def open_s3_swift(request: pytest.FixtureRequest) -> Open:
    """As the agent uses it where a weak store is allowed: with what the probe has found out."""
    server = request.getfixturevalue("swift")
    bucket = server.bucket()
    findings = _findings(server)
    return lambda: fit(server.store(bucket), findings, allow_weak=True)


@functools.cache
def _findings(server: S3) -> Findings:
    return probe(server.store(server.bucket()), random.Random(1))


def open_azure(request: pytest.FixtureRequest) -> Open:
    server = request.getfixturevalue("azurite")
    container = server.container()
    return lambda: server.store(container)


def open_retry(request: pytest.FixtureRequest) -> Open:
    inner = open_memory(request)
    return lambda: RetryStore(inner(), SystemClock(), random.Random(1))


def open_swap_by_create(request: pytest.FixtureRequest) -> Open:
    bucket = MemoryBucket(SystemClock())
    return lambda: SwapByCreate(MemoryStore(bucket, honours_swap=False))


def open_fsspec_local(request: pytest.FixtureRequest) -> Open:
    root = request.getfixturevalue("tmp_path") / "root"
    return lambda: open_fsspec(f"local://{root}", {}, 60.0)


def open_fsspec_memory(request: pytest.FixtureRequest) -> Open:
    url = f"memory://{uuid.uuid4().hex}/run"
    return lambda: open_fsspec(url, {}, 60.0)


def open_fsspec_ftp(request: pytest.FixtureRequest) -> Open:
    server = request.getfixturevalue("ftp")
    url = server.url()
    return lambda: open_fsspec(url, server.environ, 60.0)


def open_fsspec_sftp(request: pytest.FixtureRequest) -> Open:
    server = request.getfixturevalue("sftp")
    url = server.url()
    return lambda: open_fsspec(url, server.environ, 60.0)


def open_fsspec_abfs(request: pytest.FixtureRequest) -> Open:
    server = request.getfixturevalue("azurite")
    url = f"abfs://{server.container()}/run"
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={server.account};AccountKey={server.key};"
        f"BlobEndpoint={server.endpoint};"
    )
    environ = {"DS_CKPT_FSSPEC_OPTIONS": json.dumps({"connection_string": connection})}
    return lambda: open_fsspec(url, environ, 60.0)


def open_gcs(request: pytest.FixtureRequest) -> Open:
    """With the proof that the probe finds there: fake-gcs-server accepts any checksum."""
    server = request.getfixturevalue("fake_gcs")
    bucket = server.bucket()

    def opened() -> Store:
        store = server.store(bucket, parts="compose")
        store.use_proof(Proof.READ_BACK)
        return store

    return opened


OPENERS = {
    "memory": open_memory,
    "file": open_file,
    "s3": open_s3,
    "s3-https": open_s3_https,
    "s3-swift": open_s3_swift,
    "azure": open_azure,
    "retry": open_retry,
    "swap-by-create": open_swap_by_create,
    "gcs": open_gcs,
    "fsspec-local": open_fsspec_local,
    "fsspec-memory": open_fsspec_memory,
    "fsspec-ftp": open_fsspec_ftp,
    "fsspec-sftp": open_fsspec_sftp,
    "fsspec-abfs": open_fsspec_abfs,
}

# Those that claim no conditions and no parts, and refuse them.
LIMITED = {"fsspec-local", "fsspec-memory", "fsspec-ftp", "fsspec-sftp", "fsspec-abfs"}
# Those whose versions are no finer than a second.
COARSE = {"fsspec-ftp", "fsspec-sftp"}
# Those that keep a folder when its last object is deleted.
KEEPS_FOLDERS = {"fsspec-local", "fsspec-ftp", "fsspec-sftp"}
# Those whose conditions hold against what one node does, and not against a race.
RACY = {"s3-swift"}
# Those that go on to know an upload that is completed; completing it again changes nothing.
REMEMBERS_UPLOADS = {"s3-swift"}
# How many keys a page of a listing has, if not 1000.
PAGES = {"s3-swift": 50, "azure": 500}
