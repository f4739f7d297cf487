"""The agent's HTTP page: what it answers, and that no client keeps a probe from it."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from ds_ckpt_sidecar.observe import page
from ds_ckpt_sidecar.observe.address import split
from ds_ckpt_sidecar.observe.page import MOST_CONNECTIONS, Page
from ds_ckpt_store.errors import SettingsError

SOON = 10.0


def ask(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    host, port = split(address)
    connection = http.client.HTTPConnection(host, port, timeout=SOON)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@contextlib.contextmanager
def sockets(address: str, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(split(address), timeout=SOON))
            for _ in range(count)
        ]


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def address(calls: list[str]) -> str:
    def answer(name: str, why: str) -> Callable[[], str]:
        return lambda: calls.append(name) or why

    answers = {"/healthz": answer("health", ""), "/readyz": answer("ready", "the store is away")}
    return Page("127.0.0.1:0", answers).address


def test_what_is_well_is_ok_and_what_is_not_says_why(address: str) -> None:
    assert ask(address, "/healthz") == (200, "ok\n")
    assert ask(address, "/readyz") == (503, "the store is away\n")


def test_a_query_changes_nothing_and_head_has_no_body(address: str) -> None:
    assert ask(address, "/healthz?verbose=1") == (200, "ok\n")
    assert ask(address, "/readyz", "HEAD") == (503, "")


def test_any_other_path_names_those_that_there_are_and_calls_none(
    address: str, calls: list[str]
) -> None:
    for path in ("/", "/etc/passwd", "/healthz/", "/../healthz"):
        assert ask(address, path) == (404, "not here: /healthz /readyz\n")
    assert calls == []


def test_nothing_can_be_sent_to_it(address: str, calls: list[str]) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert ask(address, "/healthz", method)[0] == 501
    assert calls == []


@pytest.mark.parametrize(
    "request_",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"A: b\r\n" * 500 + b"\r\n",
        b"GET /\xff\xfe\x00 HTTP/1.1\r\n\r\n",
    ],
    ids=["empty", "short", "version", "tls", "long path", "many headers", "bytes"],
)
def test_what_is_no_request_is_refused_and_the_next_one_is_answered(
    address: str, request_: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with sockets(address, 1) as (one,), contextlib.suppress(OSError):
        one.sendall(request_)
        one.shutdown(socket.SHUT_WR)
        while one.recv(4096):
            pass
    assert ask(address, "/healthz") == (200, "ok\n")
    assert capfd.readouterr().err == ""


def test_clients_that_say_nothing_do_not_keep_a_probe_out(address: str) -> None:
    """More than are served at a time: the oldest have to go."""
    with sockets(address, 3 * MOST_CONNECTIONS) as silent:
        assert ask(address, "/healthz") == (200, "ok\n")
        assert silent[0].recv(1) == b"", "the oldest was hung up on"


def test_many_probes_at_a_time_are_all_answered(address: str) -> None:
    found: list[object] = []

    def probe() -> None:
        for _ in range(20):
            try:
                found.append(ask(address, "/healthz"))
            except OSError as error:
                found.append(error)

    threads = [threading.Thread(target=probe) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(200, "ok\n")] * 160


def test_a_client_that_falls_silent_in_mid_request_is_given_up(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(page._Handler, "timeout", 0.2)
    with sockets(address, 1) as (slow,):
        slow.sendall(b"GET /hea")
        assert slow.recv(100) == b"", "hung up on, without an answer"
    assert ask(address, "/healthz") == (200, "ok\n")


def test_its_threads_do_not_pile_up(address: str) -> None:
    before = threading.active_count()
    for _ in range(100):
        ask(address, "/healthz")
    with sockets(address, 3 * MOST_CONNECTIONS):
        ask(address, "/healthz")
        assert threading.active_count() <= before + MOST_CONNECTIONS + 2


# ---- where it listens


def test_all_addresses_are_both_families_where_the_machine_has_both() -> None:
    found = Page(":0", {"/healthz": str}).address
    _, port = split(found)
    assert ask(f"127.0.0.1:{port}", "/healthz") == (200, "ok\n")
    if socket.has_dualstack_ipv6():
        assert found.startswith("[::]:")
        assert ask(f"[::1]:{port}", "/healthz") == (200, "ok\n")


def test_a_port_that_is_taken_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError) as caught:
            Page(f"127.0.0.1:{port}", {})
    assert str(caught.value) == (
        f"--listen (or DS_CKPT_LISTEN) 127.0.0.1:{port}: Address already in use: choose another "
        "port, or stop what listens there"
    )


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (":8484", "", 8484),
        ("127.0.0.1:8484", "127.0.0.1", 8484),
        ("[::1]:0", "::1", 0),
        ("[0:0::1]:1", "::1", 1),
        ("localhost:80", "localhost", 80),
    ],
)
def test_an_address_is_written_as_people_write_it(text: str, host: str, port: int) -> None:
    assert split(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["8484", "::1:8484", ":", ":x", ":65536", ":-1", "a:", ":²", "", "[::1]8484"]
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no address to listen on: write :8484 or"):
        split(text)


def test_a_document_is_shown_and_one_that_breaks_hides_nothing_else() -> None:
    broken: list[tuple[str, Exception]] = []

    def breaks(_: str) -> tuple[str, bytes]:
        raise KeyError("boom")

    documents = {"/metrics": lambda accept: (f"text/plain; as={accept}", b"m 1\n"), "/": breaks}
    page = Page(
        "127.0.0.1:0",
        {"/healthz": lambda: ""},
        documents,
        lambda path, error: broken.append((path, error)),
    )
    host, port = page.address.split(":")

    def ask(path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        connection.request(method, path, headers={"Accept": "x"})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()

    status, headers, body = ask("/metrics?now")
    assert (status, headers["Content-Type"], body) == (200, "text/plain; as=x", b"m 1\n")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert ask("/metrics", "HEAD")[1]["Content-Length"] == "4"
    assert ask("/metrics", "HEAD")[2] == b""
    status, _, body = ask("/")
    assert status == 500
    assert b"boom" not in body
    assert [path for path, _ in broken] == ["/"]
    assert ask("/healthz")[0] == 200
    assert ask("/metrics", "POST")[0] == 501
