"""An upload to S3 ends right whatever the network does, or nothing is there and it says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ds_ckpt_store.stores import open_store
from tests.faultproxy import FaultProxy
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


@pytest.fixture
def proxy(seaweed: S3) -> Iterator[FaultProxy]:
    parts = urlsplit(seaweed.endpoint)
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        yield proxy


@pytest.fixture
def cloud(seaweed: S3, proxy: FaultProxy, tmp_path: Path) -> Iterator[Cloud]:
    bucket = seaweed.bucket()
    store = open_store(
        f"s3://{bucket}/run",
        {"DS_CKPT_S3_ENDPOINT": proxy.url, "DS_CKPT_S3_PATH_STYLE": "true"},
        stall_seconds=STALL_SECONDS,
    )
    yield Cloud(proxy, WIRE, store, seaweed.store(bucket), 5 * MIB, tmp_path)
    store.close()


class TestFaults(FaultStories):
    pass


class TestExpiry(ExpiryStories):
    pass
