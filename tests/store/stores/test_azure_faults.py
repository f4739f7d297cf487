"""An upload to Azure ends right whatever the network does, or nothing is there and it says why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ds_ckpt_store.errors import ExpiredError
from ds_ckpt_store.stores.port import Proof
from ds_ckpt_store.transfer.upload import MemoryUploadLog
from tests.faultproxy import Fault, FaultProxy
from tests.servers_azure import Azure
from tests.store.stores.fault_scenarios import (
    HASTY,
    STALL_SECONDS,
    Cloud,
    ExpiryStories,
    FaultStories,
    Wire,
)

MIB = 1 << 20
XML = {"Content-Type": "application/xml"}
WIRE = Wire(
    put=r"^PUT [^?]*$",
    part=r"^PUT .*blockid=.{28}(M[^C]|[NO])",  # whose number ends in 1 to 9: not the mark
    complete=r"^PUT .*comp=blocklist",
    read=r"^GET [^?]*$",
    list=r"^GET .*comp=list",
    throttled={
        "headers": XML,
        "body": "<Error><Code>ServerBusy</Code><Message>The server is busy.</Message></Error>",
    },
)


@pytest.fixture
def proxy(azurite: Azure) -> Iterator[FaultProxy]:
    parts = urlsplit(azurite.origin)
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        yield proxy


@pytest.fixture(params=[Proof.CONTENT_CRC64])
def cloud(azurite: Azure, proxy: FaultProxy, tmp_path: Path, request) -> Iterator[Cloud]:
    container = azurite.container()
    store = azurite.through(proxy.url).store(container, stall_seconds=STALL_SECONDS)
    store.use_proof(request.param)
    yield Cloud(proxy, WIRE, store, azurite.store(container), MIB, tmp_path)
    store.close()


class TestFaults(FaultStories):
    pass


@pytest.mark.parametrize("cloud", [Proof.CONTENT_MD5], indirect=True)
class TestFaultsWithMd5:
    test_a_part = FaultStories.test_a_large_shard_arrives_though_all_parts_meet_it_at_once


class TestExpiry:
    """Signatures come from a file; whoever rotates it need not tell us."""

    @pytest.fixture
    def file(self, azurite: Azure, tmp_path: Path) -> Path:
        path = tmp_path / "sas"
        path.write_text(azurite.sas())
        return path

    @pytest.fixture
    def cloud(
        self, azurite: Azure, proxy: FaultProxy, tmp_path: Path, file: Path
    ) -> Iterator[Cloud]:
        lifetimes = iter(range(4000, 5000))
        wire = replace(
            WIRE,
            expired={
                "status": 403,
                "headers": XML,
                "body": "<Error><Code>AuthenticationFailed</Code><Message>Signature not valid in "
                "the specified time frame</Message></Error>",
                "then": lambda: file.write_text(azurite.sas(next(lifetimes))),
            },
        )
        container = azurite.container()
        environ = {
            "DS_CKPT_AZURE_ENDPOINT": azurite.through(proxy.url).endpoint,
            "DS_CKPT_AZURE_SAS_FILE": str(file),
        }
        store = azurite.store(container, stall_seconds=STALL_SECONDS, environ=environ)
        yield Cloud(proxy, wire, store, azurite.store(container), MIB, tmp_path)
        store.close()

    test_an_upload_goes_on = ExpiryStories.test_an_upload_goes_on_with_credentials_taken_anew

    def test_a_signature_that_nobody_renews_is_told_and_one_renewed_later_goes_on(
        self, cloud: Cloud, azurite: Azure, file: Path
    ) -> None:
        file.write_text(azurite.sas(3))
        cloud = replace(
            cloud,
            store=azurite.store(
                cloud.direct.url.split("/")[2],
                stall_seconds=30,
                environ={
                    "DS_CKPT_AZURE_ENDPOINT": azurite.through(cloud.proxy.url).endpoint,
                    "DS_CKPT_AZURE_SAS_FILE": str(file),
                },
            ),
        )
        shard, log = cloud.large(), MemoryUploadLog()
        late = cloud.proxy.add(Fault(WIRE.part, "delay", after=4, skip=1))
        with pytest.raises(ExpiredError, match=r"(?i)expired.*renew") as raised:
            cloud.upload(shard, policy=replace(HASTY, deadline=1), log=log, streams=1)
        assert cloud.proxy.hits(late) == 1
        assert "put_part 'large'" in str(raised.value)
        assert "sig=" not in str(raised.value)
        cloud.assert_absent(shard)
        file.write_text(azurite.sas())
        [stored] = cloud.upload(shard, log=log)
        assert stored.resumed_parts == 1
        cloud.assert_stored(shard)
