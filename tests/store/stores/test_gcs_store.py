"""Cloud Storage: proofs, settings, ranges, and what goes wrong, on emulators of its JSON API."""

from __future__ import annotations

import gzip
import random
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import certifi
import pytest
import requests

from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    CorruptionError,
    IdentityError,
    NotFoundError,
    PausedError,
    PreconditionError,
    RefusedError,
    SettingsError,
    StoreError,
    ThrottledError,
    TransientError,
)
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.gcs import GCSOptions, GCSStore
from ds_ckpt_store.stores.gcs.answers import Answer, answer_of, kind_of, parse_xml
from ds_ckpt_store.stores.port import BytesSource, IfAbsent, IfVersion, Proof, Upload
from ds_ckpt_store.stores.probe import fit, probe
from ds_ckpt_store.stores.reading_back import ReadingBack
from tests import certificates
from tests.faultproxy import Fault, FaultProxy
from tests.servers_gcs import GCS

KMS_KEY = "projects/p/locations/l/keyRings/r/cryptoKeys/k"
MIB = 1 << 20
CALLS = {
    "put": lambda store: store.put("k", BytesSource(b"data")),
    "get": lambda store: store.get("k"),
    "read": lambda store: store.read("k", 0, 1, bytearray().extend),
    "head": lambda store: store.head("k"),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete("k"),
    "begin": lambda store: store.begin("k", 1, {}),
    "put_part": lambda store: store.put_part(Upload("k", "xml:gone"), 1, BytesSource(b"data")),
    "uploads": lambda store: list(store.uploads("")),
}
BODILESS = ("get", "read", "head", "list", "uploads")


@pytest.fixture
def store(fake_gcs: GCS) -> GCSStore:
    return fake_gcs.store(fake_gcs.bucket())


@pytest.fixture
def proxy(fake_gcs: GCS) -> Iterator[FaultProxy]:
    parts = urlsplit(fake_gcs.endpoint)
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        yield proxy


@pytest.fixture
def proxied(fake_gcs: GCS, proxy: FaultProxy) -> GCSStore:
    return GCS(proxy.url).store(fake_gcs.bucket(), parts="compose")


# ---- proofs


def test_an_emulator_that_accepts_any_checksum_is_read_back(store: GCSStore) -> None:
    findings = probe(store, random.Random(1))
    assert findings.proof is Proof.READ_BACK
    assert findings.conditional_create
    assert findings.swap
    fitted = fit(store, findings)
    assert isinstance(fitted, ReadingBack)
    assert fitted.store is store
    assert list(store.list("")) == []
    assert list(store.uploads("")) == []


def test_a_service_that_refuses_wrong_checksums_is_believed(gcp_emulator: GCS) -> None:
    store = gcp_emulator.store(gcp_emulator.bucket())
    assert store.refuses_corruption(Proof.STORED_CHECKSUM, "probe/k")
    assert list(store.list("")) == []
    assert list(store.uploads("")) == []


class Changed(BytesSource):
    """A body that is not what its checksum says."""

    def open(self):
        reader = super().open()
        reader.getbuffer()[0] ^= 1
        return reader


@pytest.mark.parametrize("size", [1, 300, 3 * MIB])
def test_the_service_refuses_a_changed_body(gcp_emulator: GCS, size: int) -> None:
    store = gcp_emulator.store(gcp_emulator.bucket())
    with pytest.raises(CorruptionError, match="CRC32C"):
        store.put("k", Changed(bytes(size)))
    upload = store.begin("big", size, {})
    with pytest.raises(CorruptionError, match=r"put_part 'big'.*CRC32C"):
        store.put_part(upload, 1, Changed(bytes(size)))
    assert list(store.list("")) == []
    assert store.put("k", BytesSource(bytes(size))).crc32c == BytesSource(bytes(size)).crc32c


def test_what_a_service_stored_wrongly_is_removed_again(fake_gcs: GCS, store: GCSStore) -> None:
    store.put("k", BytesSource(b"right"))
    with pytest.raises(CorruptionError, match="was sent"):
        store.put("k", Changed(b"wrong"))
    upload = store.begin("big", 4, {})
    with pytest.raises(CorruptionError):
        store.put_part(upload, 1, Changed(b"data"))
    assert store.parts(upload) == {}
    assert not any(info.key == "big" for info in store.list(""))


def test_without_a_proof_no_checksum_is_claimed(store: GCSStore, fake_gcs: GCS) -> None:
    store.use_proof(Proof.READ_BACK)
    assert store.put("k", BytesSource(b"x")).crc32c is None
    assert store.head("k").crc32c is None
    assert [info.crc32c for info in store.list("")] == [None]


# ---- reading


def test_an_object_stored_as_gzip_comes_back_as_it_is_stored(
    fake_gcs: GCS, store: GCSStore
) -> None:
    packed = gzip.compress(b"unpacked" * 100)
    bucket = urlsplit(store.url).netloc
    url = f"{fake_gcs.endpoint}/upload/storage/v1/b/{bucket}/o?uploadType=media&name=run/k"
    url += "&contentEncoding=gzip"
    requests.post(url, data=packed, timeout=10).raise_for_status()
    assert store.head("k").size == len(packed)
    assert store.get("k")[0] == packed
    found = bytearray()
    store.read("k", 2, 20, found.extend)
    assert bytes(found) == packed[2:22]


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {"Content-Length": "10"}),
        (206, {"Content-Length": "10", "Content-Range": "bytes 0-9/99"}),
        (206, {"Content-Length": "10", "Content-Range": "bytes 5-9/10"}),
        (206, {"Content-Length": "10"}),
    ],
)
def test_another_range_than_asked_for_is_never_handed_over(
    proxied: GCSStore, proxy: FaultProxy, status: int, headers: dict[str, str]
) -> None:
    proxy.add(Fault("alt=media", "status", status=status, body="0123456789", headers=headers))
    found = bytearray()
    with pytest.raises(CorruptionError, match="asked for bytes 5-14"):
        proxied.read("k", 5, 10, found.extend)
    assert found == b""


@pytest.mark.parametrize("after", [0, 10, MIB + 5])
def test_a_read_that_breaks_off_hands_over_what_came(
    proxied: GCSStore, proxy: FaultProxy, after: int
) -> None:
    data = random.Random(1).randbytes(2 * MIB)
    proxied.put("k", BytesSource(data))
    proxy.add(Fault("alt=media", "cut_response", after=after))
    found = bytearray()
    with pytest.raises(TransientError):
        proxied.read("k", 0, len(data), found.extend)
    assert bytes(found) == data[: len(found)]
    assert len(found) <= after


def test_a_small_object_that_arrives_changed_is_read_again(
    proxied: GCSStore, proxy: FaultProxy
) -> None:
    proxied.put("k", BytesSource(b"data"))
    proxy.add(Fault("alt=media", "flip_response"))
    with pytest.raises(TransientError, match="arrived changed"):
        proxied.get("k")
    assert proxied.get("k")[0] == b"data"


def test_an_answer_without_a_generation_is_not_taken(proxied: GCSStore, proxy: FaultProxy) -> None:
    proxy.add(Fault("alt=media", "status", status=200, body="data"))
    with pytest.raises(RefusedError, match="generation"):
        proxied.get("k")


# ---- what goes wrong


@pytest.mark.parametrize("call", ["put", "get", "read", "head", "list", "begin", "uploads"])
def test_a_bucket_that_does_not_exist_is_named(fake_gcs: GCS, call: str) -> None:
    with pytest.raises(RefusedError, match=r"'no-such-bucket' does not exist at http.*create it"):
        CALLS[call](fake_gcs.store("no-such-bucket"))


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_is_down_may_come_back(call: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(TransientError, match=f"{endpoint} cannot be reached") as raised:
            CALLS[call](GCS(endpoint).store("bkt"))
    assert not isinstance(raised.value, AmbiguousError), "nothing was sent"


@pytest.mark.parametrize("call", CALLS)
def test_only_a_write_whose_answer_is_lost_is_ambiguous(
    proxied: GCSStore, proxy: FaultProxy, call: str
) -> None:
    proxy.add(Fault("", "drop_response", times=None))
    with pytest.raises(TransientError) as raised:
        CALLS[call](proxied)
    assert isinstance(raised.value, AmbiguousError) == (call not in BODILESS)


@pytest.mark.parametrize("call", CALLS)
def test_no_access_says_what_to_grant(proxied: GCSStore, proxy: FaultProxy, call: str) -> None:
    body = '{"error": {"message": "no", "errors": [{"reason": "forbidden"}]}}'
    proxy.add(Fault("", "status", times=None, status=403, body=body))
    with pytest.raises(AccessError, match=r"bucket b-.* at http.*; grant roles/storage.objectUser"):
        CALLS[call](proxied)


@pytest.mark.parametrize("call", CALLS)
def test_an_answer_that_is_no_json_is_no_answer(
    proxied: GCSStore, proxy: FaultProxy, call: str
) -> None:
    if call in ("get", "read", "delete", "put_part"):
        return  # these answer with no JSON
    proxy.add(Fault("", "status", times=None, status=200, body="<html>hello</html>"))
    with pytest.raises(TransientError) as raised:
        CALLS[call](proxied)
    assert isinstance(raised.value, AmbiguousError) == (call not in BODILESS)


def test_no_credentials_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(AccessError, match="GOOGLE_APPLICATION_CREDENTIALS"):
        open_store("gs://bkt/run", {}).get("k")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/no/such/file")
    with pytest.raises(AccessError, match="/no/such/file"):
        open_store("gs://bkt/run", {}).get("k")


def test_what_a_source_raises_while_it_is_sent_comes_through(store: GCSStore) -> None:
    class Stopped(BytesSource):
        def open(self):
            reader = super().open()

            class Reader:
                def read(self, _=-1):
                    raise PausedError("asked to stop")

                seek, tell, close = reader.seek, reader.tell, reader.close

            return Reader()

    with pytest.raises(PausedError):
        store.put("k", Stopped(b"data"))
    assert list(store.list("")) == []


@pytest.mark.parametrize("version", ["", '"etag"', "0", "1", "99999999999999999999"])
def test_a_swap_of_what_is_not_there_has_lost(store: GCSStore, version: str) -> None:
    with pytest.raises(PreconditionError):
        store.put("k", BytesSource(b"x"), condition=IfVersion(version))
    assert list(store.list("")) == []


@pytest.mark.parametrize(
    ("answer", "write", "kind"),
    [
        (Answer(429, "rateLimitExceeded", ""), True, ThrottledError),
        (Answer(403, "rateLimitExceeded", ""), False, ThrottledError),
        (Answer(503, "SlowDown", "", xml=True), True, ThrottledError),
        (Answer(503, "backendError", ""), True, AmbiguousError),
        (Answer(503, "backendError", ""), False, TransientError),
        (Answer(500, "internalError", ""), True, AmbiguousError),
        (Answer(409, "conflict", ""), True, AmbiguousError),
        (Answer(408, "", ""), True, TransientError),
        (Answer(410, "", ""), True, NotFoundError),
        (Answer(404, "notFound", ""), False, NotFoundError),
        (Answer(412, "conditionNotMet", ""), True, PreconditionError),
        (Answer(416, "requestedRangeNotSatisfiable", ""), False, CorruptionError),
        (Answer(400, "invalid", "Provided CRC32C differs"), True, CorruptionError),
        (Answer(400, "invalid", "Bad name"), True, RefusedError),
        (Answer(400, "CrcMismatch", "", xml=True), True, CorruptionError),
        (Answer(403, "retentionPolicyNotMet", ""), True, RefusedError),
        (Answer(403, "objectUnderActiveHold", ""), True, RefusedError),
        (Answer(401, "required", ""), True, IdentityError),
        (Answer(403, "forbidden", ""), True, AccessError),
        (Answer(400, "UserProjectMissing", ""), True, AccessError),
        (Answer(501, "NotImplemented", ""), True, RefusedError),
    ],
)
def test_answers_that_no_server_gives_on_demand(
    answer: Answer, write: bool, kind: type[StoreError]
) -> None:
    assert kind_of(answer, write) is kind


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b"", Answer(500, "", "")),
        (b"oops", Answer(500, "", "oops")),
        (b"[1]", Answer(500, "", "[1]")),
        (b"<html><body>", Answer(500, "", "<html><body>")),
        (b'{"error": "invalid_grant"}', Answer(500, "invalid_grant", '{"error": "invalid_grant"}')),
        (
            b'<?xml version="1.0" encoding="UTF-8"?><Error xmlns="x"><Code>A</Code>'
            b"<Message>b</Message><Details>c</Details></Error>",
            Answer(500, "A", "b c", xml=True),
        ),
    ],
)
def test_whatever_an_answer_says_is_understood(body: bytes, answer: Answer) -> None:
    assert answer_of(500, body) == answer


@pytest.mark.parametrize(
    "body",
    [
        b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>',
        '<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'.encode("utf-16"),
        b"<a>&b;</a>",
        b"<a",
        b"",
    ],
)
def test_xml_that_declares_anything_is_not_parsed(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"document type|undefined entity|token|no element|decode"):
        parse_xml(body)


# ---- on the wire


def test_a_body_is_streamed_with_its_checksum(proxied: GCSStore, proxy: FaultProxy) -> None:
    proxied.put("a b/ü", BytesSource(b"123456789"), condition=IfAbsent())
    (sent,) = proxy.seen
    assert "uploadType=multipart&name=run%2Fa+b%2F%C3%BC&ifGenerationMatch=0" in sent.line
    assert "transfer-encoding" not in sent.headers
    assert sent.headers["content-type"].startswith("multipart/related")
    assert "authorization" not in sent.headers
    assert proxied.head("a b/ü").crc32c == 0xE3069283


def test_who_pays_and_what_encrypts_is_said(fake_gcs: GCS, proxy: FaultProxy) -> None:
    settings = {"user_project": "payer", "kms_key": KMS_KEY, "parts": "compose"}
    store = GCS(proxy.url).store(fake_gcs.bucket(), **settings)
    store.put("k", BytesSource(b"data"))
    upload = store.begin("big", 4, {})
    store.complete(upload, [store.put_part(upload, 1, BytesSource(b"data"))])
    for call in ("get", "read", "head", "list", "delete"):
        CALLS[call](store)
    assert [line for line in proxy.lines() if "userProject=payer" not in line] == []
    written = proxy.lines("^POST")
    assert len(written) == 4
    assert [line for line in written if "kmsKeyName=projects" not in line] == []


# ---- an endpoint of one's own, over TLS


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> certificates.Certificates:
    return certificates.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls(fake_gcs: GCS, files: certificates.Certificates) -> Iterator[FaultProxy]:
    parts = urlsplit(fake_gcs.endpoint)
    context = files.context()
    with FaultProxy(str(parts.hostname), int(parts.port or 0), tls=context) as proxy:
        yield proxy


def test_an_authority_of_ones_own_is_trusted_if_it_is_named(
    fake_gcs: GCS, tls: FaultProxy, files: certificates.Certificates, monkeypatch
) -> None:
    """Whatever the environment says to all who use requests."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certifi.where())
    data = random.Random(1).randbytes(3 * MIB)
    settings = {"anonymous": "true", "ca_bundle": str(files.authority)}
    store = GCS(tls.url).store(fake_gcs.bucket(), **settings)
    store.put("k", BytesSource(data))
    upload = store.begin("big", len(data), {})
    store.complete(upload, [store.put_part(upload, 1, BytesSource(data))])
    found = bytearray()
    store.read("big", 0, len(data), found.extend)
    assert found == data
    assert store.get("k")[0] == data


def test_an_endpoint_that_is_not_trusted_says_what_to_set(fake_gcs: GCS, tls: FaultProxy) -> None:
    store = GCS(tls.url).store("bkt", anonymous="true")
    for call in ("put", "get", "read", "head", "list", "delete", "begin"):
        with pytest.raises(RefusedError, match=r"is not trusted.*DS_CKPT_GCS_CA_BUNDLE"):
            CALLS[call](store)
    assert tls.seen == []


# ---- settings


def test_settings_come_from_the_environment() -> None:
    environ = {
        "DS_CKPT_GCS_ENDPOINT": "https://storage.example:9000/",
        "DS_CKPT_GCS_ANONYMOUS": "True",
        "DS_CKPT_GCS_USER_PROJECT": "payer",
        "DS_CKPT_GCS_KMS_KEY": KMS_KEY,
        "DS_CKPT_GCS_STORAGE_CLASS": "coldline",
        "DS_CKPT_GCS_PARTS": "XML",
        "DS_CKPT_GCS_CA_BUNDLE": __file__,
        "STORAGE_EMULATOR_HOST": "http://other:1",
    }
    assert GCSOptions.from_environ(environ) == GCSOptions(
        "https://storage.example:9000", True, "payer", KMS_KEY, "COLDLINE", "xml", __file__
    )
    assert GCSOptions.from_environ({}) == GCSOptions()


@pytest.mark.parametrize("name", ["DS_CKPT_GCS_ENDPOINT", "STORAGE_EMULATOR_HOST"])
def test_no_token_goes_in_the_clear_unless_asked_for(name: str) -> None:
    environ = {name: "http://emulator:4443"}
    assert GCSOptions.from_environ(environ) == GCSOptions("http://emulator:4443", anonymous=True)
    environ["DS_CKPT_GCS_ANONYMOUS"] = "no"
    assert not GCSOptions.from_environ(environ).anonymous


@pytest.mark.parametrize(
    "environ",
    [
        {"DS_CKPT_GCS_ENDPOINT": "storage.example"},
        {"DS_CKPT_GCS_ENDPOINT": "https://storage.example/path"},
        {"STORAGE_EMULATOR_HOST": "localhost:4443"},
        {"DS_CKPT_GCS_ANONYMOUS": "maybe"},
        {"DS_CKPT_GCS_KMS_KEY": "my-key"},
        {"DS_CKPT_GCS_STORAGE_CLASS": "CHEAP"},
        {"DS_CKPT_GCS_PARTS": "many"},
        {"DS_CKPT_GCS_CA_BUNDLE": "/no/such/file"},
    ],
)
def test_a_setting_that_cannot_work_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=next(iter(environ))):
        open_store("gs://bkt/run", environ)


@pytest.mark.parametrize(
    "url",
    ["gs:///prefix", "gs://key:secret@bkt/run", "gs://bkt:1/run", "gs://bkt/a//b", "gs://bkt/../a"],
)
def test_a_url_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(SettingsError):
        open_store(url, {})


@pytest.mark.parametrize(
    ("url", "shown"),
    [("gs://bkt/a/b/", "gs://bkt/a/b"), ("gs://bkt", "gs://bkt"), ("gs://b_k.t/", "gs://b_k.t")],
)
def test_a_url_is_shown_as_it_is_meant(url: str, shown: str) -> None:
    assert open_store(url, {}).url == shown


def test_a_store_without_a_prefix_has_the_whole_bucket(fake_gcs: GCS) -> None:
    store = fake_gcs.store(fake_gcs.bucket(), "")
    store.put("a/b", BytesSource(b"x"))
    upload = store.begin("c", 1, {})
    assert [info.key for info in store.list("")] == ["a/b"]
    assert list(store.uploads("")) == [upload]
