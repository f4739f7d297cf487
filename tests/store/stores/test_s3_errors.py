"""What goes wrong with an S3 says what, where, and what to do; against real servers."""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from collections.abc import Iterator

import pytest

from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    CkptError,
    CorruptionError,
    ExpiredError,
    IdentityError,
    NotFoundError,
    PausedError,
    PreconditionError,
    RefusedError,
    SettingsError,
    SkewedClockError,
    StoreError,
    ThrottledError,
    TransientError,
)
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import BytesSource, IfAbsent, IfVersion, Proof, Upload
from ds_ckpt_store.stores.s3 import S3Options, S3Store
from ds_ckpt_store.stores.s3.answers import kind_of
from tests.servers import S3

CALLS = {
    "put": lambda store: store.put("k", BytesSource(b"data")),
    "get": lambda store: store.get("k"),
    "read": lambda store: store.read("k", 0, 1, bytearray().extend),
    "head": lambda store: store.head("k"),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete("k"),
    "begin": lambda store: store.begin("k", 1, {}),
    "put_part": lambda store: store.put_part(Upload("k", "gone"), 1, BytesSource(b"data")),
    "uploads": lambda store: list(store.uploads("")),
}


@pytest.fixture
def store(seaweed: S3) -> S3Store:
    return seaweed.store(seaweed.bucket())


@pytest.mark.parametrize("call", ["put", "get", "read", "list", "begin"])
def test_a_bucket_that_does_not_exist_is_named(seaweed: S3, call: str) -> None:
    store = seaweed.store("no-such-bucket")
    with pytest.raises(RefusedError, match=r"'no-such-bucket' does not exist at http.*create it"):
        CALLS[call](store)


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_key_id_says_what_to_check(seaweed: S3, monkeypatch, call: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
    with pytest.raises(AccessError, match=r"bucket bkt at http.*; "):
        CALLS[call](seaweed.store("bkt"))


def test_a_wrong_secret_says_what_to_check(seaweed: S3, monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessError, match="check AWS_SECRET_ACCESS_KEY"):
        seaweed.store("bkt").get("k")


@pytest.mark.parametrize("call", CALLS)
def test_no_credentials_at_all(seaweed: S3, monkeypatch, call: str) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        CALLS[call](seaweed.store("bkt"))


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_is_down_may_come_back(aws_credentials, call: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        store = S3Store.from_url("s3://bkt/run", S3Options(endpoint_url=endpoint))
        with pytest.raises(TransientError, match=f"{endpoint} cannot be reached") as raised:
            CALLS[call](store)
    assert not isinstance(raised.value, AmbiguousError), "nothing was sent"


@pytest.fixture
def hangs_up(aws_credentials) -> Iterator[S3Store]:
    """A server that reads a request and then closes the connection without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    received = connection.recv(1 << 16)
                    if b"100-continue" in received:
                        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                        connection.recv(1 << 16)

        threading.Thread(target=serve, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        yield S3Store.from_url("s3://bkt/run", S3Options(endpoint_url=endpoint))
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("call", ["put", "delete", "begin", "put_part"])
def test_a_write_whose_answer_is_lost_is_ambiguous(hangs_up: S3Store, call: str) -> None:
    with pytest.raises(AmbiguousError):
        CALLS[call](hangs_up)


@pytest.mark.parametrize("call", ["get", "read", "head", "list"])
def test_a_read_whose_answer_is_lost_is_not(hangs_up: S3Store, call: str) -> None:
    with pytest.raises(TransientError) as raised:
        CALLS[call](hangs_up)
    assert not isinstance(raised.value, AmbiguousError)


def test_what_a_source_raises_while_it_is_sent_comes_through(store: S3Store) -> None:
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


def test_an_upload_that_is_gone_is_not_found(store: S3Store) -> None:
    upload = Upload("k", uuid.uuid4().hex)
    for call in (
        lambda: store.parts(upload),
        lambda: store.put_part(upload, 1, BytesSource(b"x")),
        lambda: store.complete(upload, []),
    ):
        with pytest.raises((NotFoundError, RefusedError)):
            call()
    store.abort(upload)


def test_a_swap_of_what_is_not_there_has_lost(store: S3Store) -> None:
    with pytest.raises(PreconditionError):
        store.put("k", BytesSource(b"x"), condition=IfVersion('"0123"'))


def test_credentials_are_in_no_message(seaweed: S3, monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    with pytest.raises(StoreError) as raised:
        seaweed.store("bkt").put("k", BytesSource(b"x"))
    assert "wrong-secret" not in str(raised.value)


# ---- an older S3, which answers 200 to what it does not know


def test_a_corrupt_body_passes_an_old_s3_unless_it_is_signed(juicefs: S3) -> None:
    store = juicefs.store(juicefs.bucket())
    assert not store.refuses_corruption(Proof.STORED_CHECKSUM, "k")
    assert store.refuses_corruption(Proof.SIGNED_PAYLOAD, "k")
    assert store.refuses_corruption(Proof.CONTENT_MD5, "k")


# ---- answers that are not what was asked for


@contextlib.contextmanager
def answering(head: str, body: bytes) -> Iterator[S3Store]:
    """A server that gives one answer to one request, and then closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        yield S3Store.from_url("s3://bkt/run", S3Options(endpoint_url=endpoint))
        thread.join(10)


def test_a_read_that_breaks_off_hands_over_what_came(aws_credentials) -> None:
    head = "HTTP/1.1 206 Partial Content\nContent-Length: 10\nContent-Range: bytes 5-14/99"
    found = bytearray()
    with answering(head, b"01234") as store, pytest.raises(TransientError):
        store.read("k", 5, 10, found.extend)
    assert bytes(found) in (b"", b"01234")


@pytest.mark.parametrize(
    "head",
    [
        "HTTP/1.1 200 OK\nContent-Length: 10",
        "HTTP/1.1 206 Partial Content\nContent-Length: 10\nContent-Range: bytes 0-9/99",
        "HTTP/1.1 206 Partial Content\nContent-Length: 10\nContent-Range: bytes 5-9/10",
    ],
)
def test_another_range_than_asked_for_is_never_handed_over(aws_credentials, head: str) -> None:
    found = bytearray()
    with answering(head, b"0123456789") as store, pytest.raises(CorruptionError):
        store.read("k", 5, 10, found.extend)
    assert found == b""


def test_a_server_without_ranges_may_answer_with_the_whole(aws_credentials) -> None:
    found = bytearray()
    with answering("HTTP/1.1 200 OK\nContent-Length: 10", b"0123456789") as store:
        store.read("k", 0, 10, found.extend)
    assert found == b"0123456789"


# ---- on the wire


@pytest.mark.parametrize(
    ("proof", "present"),
    [
        (Proof.STORED_CHECKSUM, {"x-amz-checksum-crc32c": "4waSgw=="}),
        (Proof.SIGNED_PAYLOAD, {}),
        (Proof.CONTENT_MD5, {"content-md5": "JfnnlDI7RTiF9RgfG2JNCw=="}),
        (Proof.READ_BACK, {}),
    ],
)
def test_a_body_is_hashed_once_and_not_sent_in_chunks(aws_credentials, proof, present) -> None:
    sent = {}
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                received = b""
                while not received.endswith(b"123456789"):
                    received += connection.recv(1 << 16)
                head, sent["body"] = received.split(b"\r\n\r\n")
                lines = head.decode().split("\r\n")[1:]
                sent.update(
                    (name.lower(), value)
                    for name, value in (line.split(": ", 1) for line in lines if line)
                )
                answer = b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n'
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        store = S3Store.from_url("s3://bkt/run", S3Options(endpoint_url=endpoint))
        store.use_proof(proof)
        store.put("k", BytesSource(b"123456789"), condition=IfAbsent())
        thread.join(10)
    assert sent["body"] == b"123456789"
    assert sent["content-length"] == "9"
    assert sent["if-none-match"] == "*"
    assert "expect" not in sent, "which would cost a round trip for each body"
    assert "transfer-encoding" not in sent
    assert "aws-chunked" not in sent.get("content-encoding", "")
    unsigned = sent["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert unsigned == (proof is not Proof.SIGNED_PAYLOAD)
    checks = {name: value for name, value in sent.items() if "checksum" in name or "md5" in name}
    assert {k: v for k, v in checks.items() if "sdk-checksum" not in k} == present


# ---- settings


def test_settings_come_from_the_environment() -> None:
    environ = {
        "DS_CKPT_S3_ENDPOINT": "https://s3.example:9000",
        "DS_CKPT_S3_REGION": "eu-1",
        "DS_CKPT_S3_PATH_STYLE": "False",
        "DS_CKPT_S3_CA_BUNDLE": __file__,
    }
    expected = S3Options("https://s3.example:9000", "eu-1", False, __file__)
    assert S3Options.from_environ(environ) == expected
    assert S3Options.from_environ({}) == S3Options()


@pytest.mark.parametrize(
    "environ",
    [
        {"DS_CKPT_S3_ENDPOINT": "s3.example"},
        {"DS_CKPT_S3_ENDPOINT": "https://s3.example/path"},
        {"DS_CKPT_S3_PATH_STYLE": "maybe"},
        {"DS_CKPT_S3_CA_BUNDLE": "/no/such/file"},
    ],
)
def test_a_setting_that_cannot_work_is_named(environ: dict[str, str]) -> None:
    (name,) = environ
    with pytest.raises(SettingsError, match=name):
        open_store("s3://bkt/run", environ)


@pytest.mark.parametrize("url", ["s3:///prefix", "s3://key:secret@bkt/run", "s3://bkt/run?x=1"])
def test_a_url_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(SettingsError):
        open_store(url, {})


@pytest.mark.parametrize(
    ("url", "shown"),
    [("s3://bkt/a/b/", "s3://bkt/a/b"), ("s3://bkt", "s3://bkt"), ("s3://bkt/", "s3://bkt")],
)
def test_a_url_is_shown_as_it_is_meant(url: str, shown: str) -> None:
    assert open_store(url, {}).url == shown


def test_a_store_without_a_prefix_has_the_whole_bucket(seaweed: S3) -> None:
    store = S3Store.from_url(f"s3://{seaweed.bucket()}", S3Options(endpoint_url=seaweed.endpoint))
    store.put("a/b", BytesSource(b"x"))
    assert [info.key for info in store.list("")] == ["a/b"]


@pytest.mark.parametrize(
    ("code", "status", "write", "kind"),
    [
        ("SlowDown", 503, True, ThrottledError),
        ("429", 429, True, ThrottledError),
        ("503", 503, True, AmbiguousError),
        ("503", 503, False, TransientError),
        ("InternalError", 500, True, AmbiguousError),
        ("ConditionalRequestConflict", 409, True, AmbiguousError),
        ("RequestTimeout", 400, True, TransientError),
        ("BadDigest", 400, True, CorruptionError),
        ("ExpiredToken", 400, True, ExpiredError),
        ("ExpiredTokenException", 400, False, ExpiredError),
        ("TokenRefreshRequired", 400, True, ExpiredError),
        ("RequestExpired", 403, True, ExpiredError),
        ("InvalidToken", 400, True, IdentityError),
        ("InvalidAccessKeyId", 403, True, IdentityError),
        ("RequestTimeTooSkewed", 403, True, SkewedClockError),
        ("InvalidObjectState", 403, False, RefusedError),
        ("403", 403, False, AccessError),
        ("404", 404, False, NotFoundError),
        ("412", 412, True, PreconditionError),
        ("NotImplemented", 501, True, RefusedError),
        ("MalformedXML", 400, True, RefusedError),
    ],
)
def test_answers_that_no_server_gives_on_demand(
    code: str, status: int, write: bool, kind: type[CkptError]
) -> None:
    assert kind_of(code, status, write) is kind
