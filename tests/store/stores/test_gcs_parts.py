"""Large objects on Cloud Storage: the XML API's multipart uploads, on SeaweedFS, and composing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import requests

from ds_ckpt_sidecar.demo.s3_server import S3Server
from ds_ckpt_store.contract.digest import combine_all, crc32c
from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    CorruptionError,
    NotFoundError,
    RefusedError,
    StoreError,
    ThrottledError,
    TransientError,
)
from ds_ckpt_store.stores.gcs import parts_composed
from ds_ckpt_store.stores.gcs.options import GCSOptions
from ds_ckpt_store.stores.gcs.parts_xml import UnknownError, XMLParts
from ds_ckpt_store.stores.gcs.service import Service
from ds_ckpt_store.stores.port import BytesSource, Part, Upload
from tests.faultproxy import Fault, FaultProxy
from tests.servers_gcs import GCS

MIB = 1 << 20
KEY = "tag@1/zero pp+%ü.pt"
NO_UPLOAD = "<Error><Code>NoSuchUpload</Code><Message>It is gone.</Message></Error>"


def bodies(count: int, size: int, last: int = 777) -> list[BytesSource]:
    rng = random.Random(count)
    return [BytesSource(rng.randbytes(size)) for _ in range(count - 1)] + [
        BytesSource(rng.randbytes(last))
    ]


def whole(sources: list[BytesSource]) -> bytes:
    return b"".join(source.open().read() for source in sources)


# ---- the XML API


class XMLCloud:
    """Multipart uploads by the XML API; each :meth:`open` is another process."""

    def __init__(self, url: str, bucket: str) -> None:
        self.url = url
        self.bucket = bucket

    def open(self, url: str | None = None, stall: float = 5.0, **options: str) -> XMLParts:
        chosen = GCSOptions(endpoint=url or self.url, anonymous=True, **options)
        return XMLParts(Service(self.bucket, chosen, stall), "run/")

    def stored(self, key: str) -> requests.Response:
        path = requests.utils.quote(f"run/{key}", safe="/")
        return requests.get(f"{self.url}/{self.bucket}/{path}", timeout=10)


@pytest.fixture(scope="module")
def xml(anonymous_seaweed: S3Server) -> XMLCloud:
    anonymous_seaweed.create_bucket("xml-parts")
    return XMLCloud(anonymous_seaweed.url, "xml-parts")


@pytest.fixture
def proxy(xml: XMLCloud) -> Iterator[FaultProxy]:
    parts = urlsplit(xml.url)
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        yield proxy


def send(parts: XMLParts, token: str, number: int, source: BytesSource) -> Part:
    return parts.put_part(KEY, token, number, source, checked=True)


def test_xml_parts_are_sent_at_once_and_make_the_object(xml: XMLCloud) -> None:
    parts = xml.open()
    sources = bodies(3, 5 * MIB)
    token = parts.begin(KEY, {"part_size": str(5 * MIB)})
    with ThreadPoolExecutor(3) as pool:
        sent = list(pool.map(lambda n: send(parts, token, n, sources[n - 1]), (1, 2, 3)))
    assert parts.parts(KEY, token) == {part.number: (part.size, part.token) for part in sent}
    parts.complete(KEY, token, sent)
    assert xml.stored(KEY).content == whole(sources)
    with pytest.raises(NotFoundError):
        parts.parts(KEY, token)


def test_parts_one_after_another_share_a_connection(xml: XMLCloud) -> None:
    parts = xml.open()
    token = parts.begin(KEY, {})
    for number in range(1, 5):
        send(parts, token, number, BytesSource(b"data"))
    session = parts._service._link.session
    pools = session.get_adapter(xml.url).poolmanager.pools
    (pool,) = [pools[key] for key in pools.keys()]  # noqa: SIM118  it is no plain mapping
    assert (pool.num_requests, pool.num_connections) == (5, 1)
    parts.abort(KEY, token)


def test_an_xml_part_sent_again_replaces_the_earlier(xml: XMLCloud) -> None:
    parts = xml.open()
    sources = bodies(2, 5 * MIB)
    token = parts.begin(KEY, {})
    send(parts, token, 1, BytesSource(bytes(5 * MIB)))
    sent = [send(parts, token, number, source) for number, source in enumerate(sources, 1)]
    parts.complete(KEY, token, sent)
    assert xml.stored(KEY).content == whole(sources)


def test_xml_listings_go_over_all_pages(xml: XMLCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = xml.open()
    begun = {(f"pages/{number}", parts.begin(f"pages/{number}", {})) for number in range(5)}
    begun.add(("pages/1", parts.begin("pages/1", {})))
    token = next(token for key, token in begun if key == "pages/0")
    for number in range(1, 6):
        parts.put_part("pages/0", token, number, BytesSource(b"%d" % number), checked=True)
    send_as_is = XMLParts._send
    pages = []

    def in_small_pages(self, link, method, name, query, *rest, **more):
        if method == "GET":
            query = {
                **query,
                **{each: "2" for each in ("max-parts", "max-uploads") if each in query},
            }
            pages.append(query)
        return send_as_is(self, link, method, name, query, *rest, **more)

    monkeypatch.setattr(XMLParts, "_send", in_small_pages)
    assert parts.parts("pages/0", token).keys() == {1, 2, 3, 4, 5}
    assert len(pages) == 3
    assert set(parts.uploads("pages/")) == begun
    assert len(pages) >= 6
    assert {key for key, _ in parts.uploads("pages/1")} == {"pages/1"}
    for key, each in begun:
        parts.abort(key, each)
        parts.abort(key, each)
    assert list(parts.uploads("pages/")) == []


XML_PROCESS = """
import sys, time
from ds_ckpt_store.stores.gcs.options import GCSOptions
from ds_ckpt_store.stores.gcs.parts_xml import XMLParts
from ds_ckpt_store.stores.gcs.service import Service
from ds_ckpt_store.stores.port import BytesSource
import random
url, bucket, key = sys.argv[1:]
parts = XMLParts(Service(bucket, GCSOptions(endpoint=url, anonymous=True), 5.0), "run/")
token = parts.begin(key, {})
data = random.Random(9).randbytes(5 << 20)
part = parts.put_part(key, token, 1, BytesSource(data), checked=True)
print(token, part.token, flush=True)
parts.put_part(key, token, 2, BytesSource(bytes(1 << 20)), checked=True)
time.sleep(60)
"""


def killed(script: str, *arguments: str) -> list[str]:
    """Run a process until it has said one line, and kill it."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        said = process.stdout.readline().split()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return said


def test_another_process_goes_on_with_an_xml_upload_after_a_kill(xml: XMLCloud) -> None:
    token, etag = killed(XML_PROCESS, xml.url, xml.bucket, KEY)
    parts = xml.open()
    assert (KEY, token) in set(parts.uploads("tag@1/"))
    first = random.Random(9).randbytes(5 * MIB)
    assert parts.parts(KEY, token)[1] == (len(first), etag)
    rest = send(parts, token, 2, BytesSource(b"the rest"))
    parts.complete(KEY, token, [Part(1, len(first), crc32c(first), etag), rest])
    assert xml.stored(KEY).content == first + b"the rest"


def test_an_xml_upload_that_is_gone_is_not_found(xml: XMLCloud) -> None:
    parts = xml.open()
    token = parts.begin(KEY, {})
    part = send(parts, token, 1, BytesSource(b"data"))
    parts.abort(KEY, token)
    for call in (
        lambda: parts.parts(KEY, token),
        lambda: send(parts, token, 1, BytesSource(b"data")),
        lambda: parts.complete(KEY, token, [part]),
    ):
        with pytest.raises(NotFoundError):
            call()


def test_completing_an_xml_upload_with_another_part_is_refused(xml: XMLCloud) -> None:
    parts = xml.open()
    token = parts.begin(KEY + "2", {})
    part = parts.put_part(KEY + "2", token, 1, BytesSource(b"data"), checked=True)
    with pytest.raises(CorruptionError):
        parts.complete(KEY + "2", token, [Part(1, part.size, part.crc32c, "0" * 32)])
    assert xml.stored(KEY + "2").status_code == 404


def test_a_bucket_that_is_not_there_is_named_by_xml_too(xml: XMLCloud) -> None:
    parts = XMLCloud(xml.url, "no-such-bucket").open()
    with pytest.raises(RefusedError, match="'no-such-bucket' does not exist"):
        parts.begin(KEY, {})


def test_what_an_xml_part_is_checked_with_and_stored_as(xml: XMLCloud, proxy: FaultProxy) -> None:
    kms_key = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
    parts = xml.open(proxy.url, storage_class="NEARLINE", kms_key=kms_key, user_project="payer")
    begun = proxy.add(Fault(r"^POST .*uploads", "status", status=400, body=NO_UPLOAD))
    with pytest.raises(RefusedError):
        parts.begin(KEY, {"crc32c": "00"})
    assert proxy.hits(begun) == 1
    headers = proxy.seen[-1].headers
    assert headers["x-goog-storage-class"] == "NEARLINE"
    assert headers["x-goog-encryption-kms-key-name"] == kms_key
    assert headers["x-goog-user-project"] == "payer"
    assert headers["x-goog-meta-crc32c"] == "00"
    assert "authorization" not in headers
    token = xml.open().begin(KEY, {})
    part = send(xml.open(proxy.url), token, 1, BytesSource(b"123456789"))
    headers = proxy.seen[-1].headers
    assert headers["x-goog-hash"] == "crc32c=4waSgw=="
    assert headers["content-length"] == "9"
    assert "transfer-encoding" not in headers
    assert (part.size, part.crc32c) == (9, 0xE3069283)
    xml.open().abort(KEY, token)


def test_the_catalog_gets_no_storage_class(xml: XMLCloud, proxy: FaultProxy) -> None:
    parts = xml.open(proxy.url, storage_class="ARCHIVE")
    token = parts.begin(".ds_ckpt/probe/k", {})
    assert "x-goog-storage-class" not in proxy.seen[-1].headers
    parts.abort(".ds_ckpt/probe/k", token)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ({"do": "status", "status": 429}, ThrottledError, "SlowDown"),
        ({"do": "status", "status": 503, "body": ""}, AmbiguousError, "503"),
        ({"do": "status", "status": 500, "body": "<html>"}, AmbiguousError, "500"),
        ({"do": "status", "status": 408, "body": ""}, TransientError, "408"),
        ({"do": "status", "status": 404, "body": NO_UPLOAD}, NotFoundError, "NoSuchUpload"),
        ({"do": "status", "status": 410, "body": ""}, NotFoundError, "410"),
        ({"do": "status", "status": 403, "body": ""}, AccessError, "roles/storage.objectUser"),
        (
            {
                "do": "status",
                "status": 400,
                "body": "<Error><Code>BadDigest</Code><Details>CRC32C differs</Details></Error>",
            },
            CorruptionError,
            "BadDigest: CRC32C differs",
        ),
        ({"do": "reset", "after": 1 << 16}, AmbiguousError, "connection"),
        ({"do": "stall", "after": 1 << 16}, AmbiguousError, "timed out"),
        ({"do": "drop_response"}, AmbiguousError, "connection"),
        ({"do": "stall_response"}, AmbiguousError, "timed out"),
    ],
)
def test_what_can_happen_to_an_xml_part(
    xml: XMLCloud, proxy: FaultProxy, fault: dict[str, object], kind: type[StoreError], words: str
) -> None:
    token = xml.open().begin(KEY, {})
    made = proxy.add(Fault("partNumber=1", **fault))  # type: ignore[arg-type]
    parts = xml.open(proxy.url, stall=0.5)
    with pytest.raises(kind, match=words) as raised:
        send(parts, token, 1, BytesSource(bytes(MIB)))
    assert type(raised.value) is kind
    assert str(raised.value).startswith(f"put_part {KEY!r}: ")
    assert proxy.hits(made) == 1
    again = send(parts, token, 1, BytesSource(bytes(MIB)))
    assert parts.parts(KEY, token) == {1: (MIB, again.token)}
    parts.abort(KEY, token)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"do": "drop_response"}, AmbiguousError),
        ({"do": "stall_response"}, AmbiguousError),
        ({"do": "swap_response", "status": 200, "body": "<html></html>"}, AmbiguousError),
        ({"do": "swap_response", "status": 200, "body": "<!DOCTYPE a>"}, AmbiguousError),
        (
            {
                "do": "status",
                "status": 200,
                "body": "<Error><Code>InternalError</Code></Error>",
            },
            AmbiguousError,
        ),
        ({"do": "status", "status": 200, "body": NO_UPLOAD}, NotFoundError),
    ],
)
def test_an_xml_completion_whose_answer_is_lost_is_ambiguous(
    xml: XMLCloud, proxy: FaultProxy, fault: dict[str, object], kind: type[StoreError]
) -> None:
    parts = xml.open(proxy.url, stall=0.1)
    token = parts.begin(KEY, {})
    sent = [send(parts, token, 1, BytesSource(b"data"))]
    proxy.add(Fault(r"^POST .*uploadId", **fault))  # type: ignore[arg-type]
    with pytest.raises(kind) as raised:
        parts.complete(KEY, token, sent)
    assert type(raised.value) is kind
    if fault["do"] != "status":
        assert xml.stored(KEY).content == b"data"
    parts.abort(KEY, token)


def test_the_checksum_that_comes_back_for_a_part_is_compared(
    xml: XMLCloud, proxy: FaultProxy
) -> None:
    token = xml.open().begin(KEY, {})
    told = {"etag": '"1"', "x-goog-hash": "crc32c=AAAAAA==,md5=AAAA"}
    proxy.add(Fault("partNumber", "swap_response", status=200, body="", headers=told))
    with pytest.raises(CorruptionError, match="part 1 was stored with CRC32C 00000000"):
        send(xml.open(proxy.url), token, 1, BytesSource(b"data"))
    xml.open().abort(KEY, token)


# ---- composing


@pytest.fixture
def opened(fake_gcs: GCS) -> Callable[..., object]:
    bucket = fake_gcs.bucket()
    return lambda **settings: fake_gcs.store(bucket, **settings)


def names(fake_gcs: GCS, url: str) -> dict[str, dict[str, object]]:
    """Every object of a bucket, as any tool sees it."""
    bucket = urlsplit(url).netloc
    answer = requests.get(f"{fake_gcs.endpoint}/storage/v1/b/{bucket}/o", timeout=10).json()
    return {item["name"]: item for item in answer.get("items", ())}


@pytest.mark.parametrize("count", [1, 32, 33, 100])
def test_parts_are_composed_however_many(fake_gcs: GCS, opened, count: int) -> None:
    store = opened(parts="compose")
    sources = bodies(count, 10, last=3)
    upload = store.begin("k", sum(source.size for source in sources), {"crc32c": "x"})
    with ThreadPoolExecutor(8) as pool:
        sent = list(
            pool.map(lambda n: store.put_part(upload, n, sources[n - 1]), range(1, count + 1))
        )
    info = store.complete(upload, sent)
    assert store.get("k")[0] == whole(sources)
    assert info.crc32c == combine_all((source.crc32c, source.size) for source in sources)
    left = names(fake_gcs, store.url)
    assert left.keys() == {"run/k"}
    assert left["run/k"]["metadata"]["crc32c"] == "x"


def test_a_tree_of_several_levels_keeps_the_order(opened, monkeypatch) -> None:
    monkeypatch.setattr(parts_composed, "AT_ONCE", 3)
    store = opened(parts="compose")
    sources = bodies(29, 10, last=3)
    upload = store.begin("k", 283, {})
    sent = [store.put_part(upload, number, source) for number, source in enumerate(sources, 1)]
    store.complete(upload, sent)
    assert store.get("k")[0] == whole(sources)


def test_temporary_objects_are_of_the_class_and_key_of_their_target(fake_gcs: GCS, opened) -> None:
    store = opened(parts="compose", storage_class="nearline")
    upload = store.begin("tag/k", 4, {})
    store.put_part(upload, 1, BytesSource(b"data"))
    found = names(fake_gcs, store.url)
    assert len(found) == 2
    for name, item in found.items():
        assert name.startswith("run/.ds_ckpt-parts/")
        assert item["storageClass"] == "NEARLINE"
        assert item["metadata"]["key"] == "tag/k"
    assert list(store.list("")) == []
    store.put(".ds_ckpt/owner.json", BytesSource(b"{}"))
    assert names(fake_gcs, store.url)["run/.ds_ckpt/owner.json"]["storageClass"] == "STANDARD"


def test_what_a_killed_completion_left_is_found_and_removed(fake_gcs: GCS, opened) -> None:
    """Of a process that died after it had removed the mark of the upload, and before the parts."""
    store = opened(parts="compose")
    upload = store.begin("tag/k", 4, {})
    store.put_part(upload, 1, BytesSource(b"data"))
    store.delete(next(key for key in names(fake_gcs, store.url) if "upload" in key)[4:])
    assert list(opened().uploads("tag/")) == [upload]
    assert list(opened().uploads("other/")) == []
    with pytest.raises(NotFoundError):
        store.parts(upload)
    store.abort(upload)
    assert names(fake_gcs, store.url) == {}


COMPOSE_PROCESS = """
import random, sys, time
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import BytesSource
url, endpoint = sys.argv[1:]
store = open_store(url, {"DS_CKPT_GCS_ENDPOINT": endpoint})
upload = store.begin("k", 0, {})
part = store.put_part(upload, 1, BytesSource(random.Random(9).randbytes(1000)))
print(upload.token, part.token, flush=True)
time.sleep(60)
"""


def test_another_process_goes_on_by_composing_after_a_kill(fake_gcs: GCS, opened) -> None:
    store = opened()
    token, generation = killed(COMPOSE_PROCESS, store.url, fake_gcs.endpoint)
    upload = Upload("k", token)
    assert token.startswith("compose:")
    assert list(store.uploads("")) == [upload]
    assert store.parts(upload) == {1: (1000, generation)}
    first = random.Random(9).randbytes(1000)
    rest = store.put_part(upload, 2, BytesSource(b"rest"))
    store.complete(upload, [Part(1, 1000, crc32c(first), generation), rest])
    assert store.get("k")[0] == first + b"rest"
    assert names(fake_gcs, store.url).keys() == {"run/k"}


# ---- which way


def test_the_way_is_found_out_and_said_by_the_token(opened) -> None:
    upload = opened().begin("k", 4, {})
    assert upload.token.startswith("compose:")
    with pytest.raises(RefusedError, match="set DS_CKPT_GCS_PARTS=compose or auto"):
        opened(parts="xml").begin("k", 4, {})
    other = opened(parts="xml")
    part = other.put_part(upload, 1, BytesSource(b"data"))
    other.complete(upload, [part])
    assert other.get("k")[0] == b"data"


def test_a_server_that_knows_xml_is_asked_for_it(xml: XMLCloud) -> None:
    store = GCS(xml.url).store(xml.bucket)
    upload = store.begin(KEY, 4, {})
    assert upload.token.startswith("xml:")
    part = store.put_part(upload, 1, BytesSource(b"data"))
    assert store.parts(upload) == {1: (4, part.token)}
    store.abort(upload)
    with pytest.raises(NotFoundError):
        store.parts(upload)


@pytest.mark.parametrize(
    ("status", "body"), [(404, ""), (404, "{}"), (405, "no"), (501, ""), (200, "{}"), (400, "<a/>")]
)
def test_only_a_server_without_xml_is_taken_for_one(
    xml: XMLCloud, proxy: FaultProxy, status: int, body: str
) -> None:
    proxy.add(Fault("uploads", "status", times=None, status=status, body=body))
    with pytest.raises(UnknownError):
        xml.open(proxy.url).begin(KEY, {})
    with pytest.raises(UnknownError):
        list(xml.open(proxy.url).uploads(""))


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (403, "<Error><Code>AccessDenied</Code></Error>", AccessError),
        (404, "<Error><Code>NoSuchBucket</Code></Error>", RefusedError),
        (400, "<Error><Code>InvalidArgument</Code></Error>", RefusedError),
        (503, "", AmbiguousError),
        (429, "", ThrottledError),
    ],
)
def test_a_server_that_refuses_is_not_taken_for_one_without_xml(
    xml: XMLCloud, proxy: FaultProxy, status: int, body: str, kind: type[StoreError]
) -> None:
    proxy.add(Fault("uploads", "status", status=status, body=body))
    with pytest.raises(kind):
        xml.open(proxy.url).begin(KEY, {})


@pytest.mark.parametrize("token", ["", "xml:", "compose:", "compose:a/b", "other:1", "1"])
def test_a_token_of_another_store_is_gone(opened, token: str) -> None:
    with pytest.raises(NotFoundError):
        opened().parts(Upload("k", token))
