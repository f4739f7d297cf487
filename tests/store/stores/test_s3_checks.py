"""A file that is written to while it is sent: what the server checks is what is compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.digest import crc32c
from ds_ckpt_store.errors import CorruptionError
from ds_ckpt_store.stores.port import Proof
from ds_ckpt_store.stores.s3 import S3Options, S3Store
from ds_ckpt_store.transfer.budget import Budget
from ds_ckpt_store.transfer.source import FileSlice
from ds_ckpt_store.transfer.upload import LocalShard, MemoryUploadLog, Uploader
from tests.faultproxy import FaultProxy

HASHED = [Proof.SIGNED_PAYLOAD, Proof.CONTENT_MD5]
BEFORE, AFTER = b"before" * 100_000, b"later!" * 100_000


@pytest.fixture
def changed(tmp_path: Path) -> Iterator[FileSlice]:
    """A source whose file was written to after its checksum was taken."""
    path = tmp_path / "shard"
    path.write_bytes(BEFORE)
    fd = os.open(path, os.O_RDONLY)
    source = FileSlice(fd, 0, len(BEFORE), "shard")
    assert source.crc32c == crc32c(BEFORE)
    path.write_bytes(AFTER)
    yield source
    os.close(fd)


@pytest.fixture(params=HASHED)
def store(request: pytest.FixtureRequest, seaweed) -> S3Store:
    store = seaweed.store(seaweed.bucket())
    store.use_proof(request.param)
    return store


def test_no_object_is_made_of_bytes_that_are_not_those_that_were_compared(store, changed) -> None:
    with pytest.raises(CorruptionError, match="changed while"):
        store.put("k", changed)
    assert list(store.list("")) == []


def test_a_part_tells_the_checksum_of_the_bytes_that_the_server_checked(store, changed) -> None:
    upload = store.begin("k", len(BEFORE), {})
    assert store.put_part(upload, 1, changed).crc32c == crc32c(AFTER)
    store.abort(upload)


@pytest.mark.parametrize(
    ("proof", "requests"),
    [(Proof.STORED_CHECKSUM, ["PUT"]), *((proof, ["PUT", "HEAD"]) for proof in HASHED)],
)
def test_a_small_shard_is_one_request_where_the_answer_tells_what_is_stored(
    seaweed, tmp_path: Path, proof: Proof, requests: list[str]
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(BEFORE)
    shard = LocalShard("k", len(BEFORE), crc32c(BEFORE), lambda: os.open(path, os.O_RDONLY))
    with FaultProxy("127.0.0.1", int(seaweed.endpoint.rpartition(":")[2])) as proxy:
        store = S3Store.from_url(f"s3://{seaweed.bucket()}/run", S3Options(endpoint_url=proxy.url))
        store.use_proof(proof)
        clock = SystemClock()
        with ThreadPoolExecutor(1) as pool:
            [stored] = Uploader(store, pool, budget=Budget(clock, streams=1), clock=clock).upload(
                [shard],
                MemoryUploadLog(),
                check=lambda: None,
                progress=lambda _: None,
                stored=lambda _: None,
            )
        assert stored.proof is proof
        assert [line.split()[0] for line in proxy.lines(".")] == requests
        assert store.get("k")[0] == BEFORE
