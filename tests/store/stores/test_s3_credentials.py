"""Credentials that expire or are corrected while a store is open: the next call takes them anew."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ds_ckpt_store.errors import AccessError, ExpiredError, NotFoundError
from ds_ckpt_store.stores.port import BytesSource, Store
from ds_ckpt_store.stores.s3.clients import Clients
from ds_ckpt_store.transfer.upload import MemoryUploadLog
from tests.faultproxy import Fault, FaultProxy
from tests.servers import S3
from tests.store.stores.fault_scenarios import Cloud
from tests.store.stores.test_s3_faults import WIRE

MIB = 1 << 20
THREADS = 16


@pytest.fixture
def proxy(seaweed: S3) -> Iterator[FaultProxy]:
    parts = urlsplit(seaweed.endpoint)
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        yield proxy


@pytest.fixture
def through(seaweed: S3, proxy: FaultProxy) -> Callable[[str], Store]:
    return lambda bucket: S3(proxy.url, seaweed.access_key, seaweed.secret_key).store(bucket)


@pytest.fixture
def rotate(seaweed: S3, tmp_path: Path, monkeypatch) -> Callable[[], None]:
    """Credentials in a file that the server does not know; the call puts the right ones there."""
    file = tmp_path / "credentials"

    def write(access_key: str, secret_key: str) -> None:
        new = tmp_path / "credentials.new"
        new.write_text(
            f"[default]\naws_access_key_id={access_key}\naws_secret_access_key={secret_key}\n"
        )
        new.replace(file)

    write("old", "old")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    return lambda: write(seaweed.access_key, seaweed.secret_key)


def test_a_file_renewed_in_mid_upload_continues_the_same_upload(
    seaweed: S3, proxy: FaultProxy, through, tmp_path: Path, request
) -> None:
    bucket = seaweed.bucket()
    direct = seaweed.store(bucket)
    log = MemoryUploadLog()
    cloud = Cloud(proxy, WIRE, through(bucket), direct, 5 * MIB, tmp_path)
    shard = cloud.large_begun(log)
    rotate = request.getfixturevalue("rotate")  # from now on keys are in a file, and old
    expired = proxy.add(Fault("", "status", times=4, then=rotate, **WIRE.expired))
    (stored,) = cloud.upload(shard, log=log)
    assert proxy.hits(expired) == 4
    assert stored.resumed_parts == 1
    assert proxy.lines(r"^POST .*\?uploads") == [], "no other upload was begun"
    cloud.assert_stored(shard)


def test_of_many_threads_that_meet_the_expiry_one_renews(
    seaweed: S3, proxy: FaultProxy, through, tmp_path: Path, monkeypatch
) -> None:
    built = []
    new = Clients.new
    monkeypatch.setattr(Clients, "new", lambda *args: built.append(1) or new(*args))
    bucket = seaweed.bucket()
    store = through(bucket)
    cloud = Cloud(proxy, WIRE, store, seaweed.store(bucket), 5 * MIB, tmp_path)
    store.put("before", BytesSource(bytes(MIB)))
    reading, expired = threading.Event(), threading.Event()
    all_there = threading.Barrier(THREADS, action=expired.set)
    for number in range(THREADS):
        proxy.add(Fault(f"PUT .*/k{number}$", "status", then=all_there.wait, **WIRE.expired))

    def sink(_: memoryview) -> None:
        reading.set()
        assert expired.wait(30)

    with ThreadPoolExecutor(THREADS + 1) as pool:
        read = pool.submit(store.read, "before", 0, MIB, sink)
        assert reading.wait(30)
        retrying = cloud.retrying()
        puts = [
            pool.submit(retrying.put, f"k{number}", BytesSource(b"%d" % number))
            for number in range(THREADS)
        ]
        for put in puts:
            put.result()
        read.result()  # with a connection of the clients that were forgotten meanwhile
    assert proxy.hits() == THREADS
    assert len(built) == 2, "the first one, and one for all after the expiry"
    for number in range(THREADS):
        assert cloud.direct.get(f"k{number}")[0] == b"%d" % number


def test_a_head_whose_answer_says_nothing_is_asked_again(
    seaweed: S3, proxy: FaultProxy, through
) -> None:
    store = through(seaweed.bucket())
    proxy.add(Fault("HEAD", "status", status=400, body="", times=3))
    expired = proxy.add(Fault("GET", "status", **WIRE.expired))
    with pytest.raises(ExpiredError):
        store.head("k")
    assert proxy.hits(expired) == 1
    with pytest.raises(NotFoundError):  # the second GET goes through
        store.head("k")


def test_wrong_keys_are_no_expiry_and_may_be_corrected(seaweed: S3, rotate) -> None:
    bucket = "b-corrected"
    S3(seaweed.endpoint, seaweed.access_key, seaweed.secret_key).client().create_bucket(
        Bucket=bucket
    )
    store = seaweed.store(bucket)
    with pytest.raises(AccessError, match="check AWS_ACCESS_KEY_ID"):
        store.put("k", BytesSource(b"x"))
    rotate()
    store.put("k", BytesSource(b"x"))
    assert store.get("k")[0] == b"x"


def test_the_message_says_what_has_expired_and_what_to_do(
    seaweed: S3, proxy: FaultProxy, through
) -> None:
    proxy.add(Fault("PUT", "status", **WIRE.expired))
    with pytest.raises(ExpiredError, match=r"put 'k': 400 ExpiredToken: .*renew them") as raised:
        through(seaweed.bucket()).put("k", BytesSource(b"x"))
    assert proxy.url in str(raised.value)
