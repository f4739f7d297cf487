"""An upload to S3 ends right whatever the network does, or nothing is there and it says why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ds_ckpt_store.errors import CorruptionError
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import BytesSource, Proof
from tests.faultproxy import Fault, FaultProxy
from tests.servers import S3
from tests.store.stores.fault_scenarios import (
    STALL_SECONDS,
    Cloud,
    ExpiryStories,
    FaultStories,
    Wire,
)

MIB = 1 << 20
WIRE = Wire(
    put=r"^PUT [^?]*$",
    part=r"^PUT .*partNumber=",
    complete=r"^POST .*uploadId=",
    read=r"^GET [^?]*$",
    list=r"^GET .*list-type=2",
    expired={
        "status": 400,
        "body": "<Error><Code>ExpiredToken</Code><Message>The provided token has expired."
        "</Message></Error>",
    },
)


@contextlib.contextmanager
def cloud_of(server: S3, folder: Path, proof: Proof) -> Iterator[Cloud]:
    parts = urlsplit(server.endpoint)
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        bucket = server.bucket()
        store = open_store(
            f"s3://{bucket}/run",
            {**server.environ, "DS_CKPT_S3_ENDPOINT": proxy.url},
            stall_seconds=STALL_SECONDS,
        )
        store.use_proof(proof)
        yield Cloud(proxy, WIRE, store, server.store(bucket), 5 * MIB, folder)
        store.close()


@pytest.fixture
def cloud(seaweed: S3, tmp_path: Path) -> Iterator[Cloud]:
    with cloud_of(seaweed, tmp_path, Proof.STORED_CHECKSUM) as cloud:
        yield cloud


class TestFaults(FaultStories):
    pass


class TestExpiry(ExpiryStories):
    pass


@pytest.mark.parametrize(
    ("server", "proof"),
    [
        ("seaweed", Proof.CONTENT_MD5),
        ("seaweed", Proof.READ_BACK),
        ("swift", Proof.SIGNED_PAYLOAD),
        ("swift", Proof.CONTENT_MD5),
    ],
)
def test_a_changed_byte_is_found_under_each_proof(
    request: pytest.FixtureRequest, tmp_path: Path, server: str, proof: Proof
) -> None:
    with cloud_of(request.getfixturevalue(server), tmp_path, proof) as cloud:
        faults = [
            cloud.proxy.add(Fault(cloud.wire.put, "flip", after=123_456)),
            cloud.proxy.add(Fault(cloud.wire.part, "flip", after=100)),
        ]
        shards = cloud.small(), cloud.large()
        stored = cloud.upload(*shards)
        assert [each.proof for each in stored] == [proof, proof]
        assert all(cloud.proxy.hits(fault) == 1 for fault in faults)
        for shard in shards:
            cloud.assert_stored(shard)


def test_a_body_that_is_always_changed_makes_no_checkpoint_even_if_it_is_stored(
    seaweed: S3, tmp_path: Path
) -> None:
    """Without a checksum the server takes it; reading it back shows what it is."""
    with cloud_of(seaweed, tmp_path, Proof.READ_BACK) as cloud:
        cloud.proxy.add(Fault(cloud.wire.put, "flip", after=1, times=None))
        with pytest.raises(CorruptionError, match=r"reads back as CRC32C \w+, \w+ was sent"):
            cloud.upload(cloud.small())


def test_an_object_of_another_size_than_was_sent_is_found(seaweed: S3, tmp_path: Path) -> None:
    """A server that stores framing as content, or cuts a body: its own ETag would be right."""
    with cloud_of(seaweed, tmp_path, Proof.CONTENT_MD5) as cloud:
        shard = cloud.small()
        framed = BytesSource(b"10\r\n" + cloud.bytes_of(shard))
        answer = {"ETag": '"0"', "Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT"}
        fault = Fault(
            cloud.wire.put,
            "status",
            status=200,
            body="",
            headers=answer,
            times=None,
            then=lambda: cloud.direct.put(shard.key, framed) and None,
        )
        cloud.proxy.add(fault)
        with pytest.raises(CorruptionError, match="has 300004 bytes, 300000 were sent"):
            cloud.upload(shard)
        assert cloud.proxy.hits(fault) >= 1


def test_an_etag_is_no_checksum(cloud: Cloud) -> None:
    """Of encrypted objects and of those made of parts it is none; here it is anything."""
    shard = cloud.small()
    answer = {"ETag": '"no-md5-at-all"'}
    fault = cloud.proxy.add(
        Fault(cloud.wire.put, "swap_response", status=200, body="", headers=answer)
    )
    cloud.upload(shard)
    assert _hit_once(cloud, fault)
    cloud.assert_stored(shard)


def _hit_once(cloud: Cloud, fault: Fault) -> bool:
    """Not sent again for its answer's sake."""
    return cloud.proxy.hits(fault) == len(cloud.proxy.lines(cloud.wire.put)) == 1
