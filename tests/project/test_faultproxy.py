"""The proxy makes the faults that it says it makes, and no others."""

from __future__ import annotations

import http.client
import http.server
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import certificates
from tests.faultproxy import HOST, Fault, FaultProxy

BODY = bytes(range(256)) * 4000  # more than socket buffers hold at once


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers with the body that it got; keeps count of what it did."""

    protocol_version = "HTTP/1.1"
    applied: list[bytes]

    def do_PUT(self) -> None:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if len(body) < int(self.headers["Content-Length"]):
                self.close_connection = True
                return
        self.applied.append(body)
        self.do_GET(body)

    def do_GET(self, body: bytes = BODY) -> None:
        self.send_response(200)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (body[:1000], body[1000:]):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
            return
        if self.path == "/close":
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Location", f"http://{HOST}:{self.server.server_address[1]}/next")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def applied() -> list[bytes]:
    return []


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A request that breaks off is what these tests are for."""


@pytest.fixture
def server(applied: list[bytes]) -> Iterator[Server]:
    handler = type("Handler", (Echo,), {"applied": applied})
    with Server((HOST, 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(HOST, server.server_address[1]) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(HOST, proxy.port, timeout=1)
    yield connection
    connection.close()


def call(client, method: str, path: str, body=None, **headers: str) -> tuple[int, bytes]:
    client.request(method, path, body, headers)
    answer = client.getresponse()
    return answer.status, answer.read()


def pieces() -> Iterator[bytes]:
    yield BODY[:100]
    yield BODY[100:]


@pytest.mark.parametrize("path", ["/sized", "/chunked", "/close"])
def test_without_faults_all_is_forwarded(proxy, client, applied, path: str) -> None:
    for _ in range(2):
        assert call(client, "PUT", path, BODY) == (200, BODY)
        assert call(client, "PUT", path, pieces()) == (200, BODY)
        assert call(client, "GET", path) == (200, BODY)
        assert call(client, "HEAD", path) == (200, b"")
    assert applied == [BODY] * 4
    assert proxy.hits() == 0
    assert proxy.lines("^PUT") == [f"PUT {path}"] * 4


def test_a_client_may_wait_to_be_told_to_go_on(proxy, client, applied) -> None:
    """``Expect: 100-continue``; this server says so when it has read the head."""
    head = f"PUT /a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(BODY)}"
    client.connect()
    client.sock.sendall(head.encode() + b"\r\n\r\n")
    assert client.sock.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sock.sendall(BODY)
    answer = client.sock.makefile("rb")
    assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
    assert applied == [BODY]


def test_a_client_that_waits_may_be_refused_at_once(proxy, client, applied) -> None:
    fault = proxy.add(Fault("PUT", "status", status=403, body="no"))
    head = "PUT /a HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    client.connect()
    client.sock.sendall(head.encode())
    answer = client.sock.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 403")
    assert answer.endswith(b"no")
    assert proxy.hits(fault) == 1
    assert applied == []


@pytest.mark.parametrize("body", [BODY, pieces])
def test_an_answer_of_its_own(proxy, client, applied, body) -> None:
    proxy.add(Fault("PUT /x", "status", times=2, status=429, body="<E/>", headers={"A": "b"}))
    for _ in range(2):
        client.request("PUT", "/x", body if body is BODY else body())
        answer = client.getresponse()
        assert (answer.status, answer.headers["A"], answer.read()) == (429, "b", b"<E/>")
    assert applied == []
    assert call(client, "PUT", "/x", BODY) == (200, BODY)
    assert proxy.hits("/x") == 2


@pytest.mark.parametrize("waits", [{}, {"Expect": "100-continue"}])
def test_a_request_that_was_answered_with_an_error_is_applied_when_told(
    proxy, client, applied, waits: dict[str, str]
) -> None:
    fault = proxy.add(Fault("PUT", "late", header="^x-kind: odd$"))
    assert call(client, "PUT", "/a", BODY, **waits)[0] == 200, "it has no such header"
    applied.clear()
    assert call(client, "PUT", "/a", BODY, **waits, **{"X-Kind": "odd"})[0] == 503
    assert (proxy.hits(fault), applied) == (1, [])
    assert proxy.apply_late() == [200]
    assert applied == [BODY]
    assert proxy.apply_late() == []


@pytest.mark.parametrize("after", [0, 1000, len(BODY) - 1, 10 * len(BODY)])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_reset_request_never_reaches_the_server_whole(
    proxy, client, applied, after: int, chunked: bool
) -> None:
    fault = proxy.add(Fault("PUT", "reset", after=after))
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        call(client, "PUT", "/x", pieces() if chunked else BODY)
    client.close()
    assert call(client, "PUT", "/x", BODY) == (200, BODY)
    assert applied == [BODY]
    assert proxy.hits(fault) == 1


@pytest.mark.parametrize("after", [0, 1000])
def test_a_stalled_request_hears_nothing(proxy, client, applied, after: int) -> None:
    proxy.add(Fault("PUT", "stall", after=after))
    with pytest.raises(TimeoutError):
        call(client, "PUT", "/x", BODY)
    assert applied == []
    assert proxy.hits() == 1


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("after", [0, 99, 100, len(BODY) - 1])
def test_one_bit_of_a_request_is_changed(proxy, client, applied, after, chunked) -> None:
    proxy.add(Fault("PUT", "flip", after=after))
    call(client, "PUT", "/x", pieces() if chunked else BODY)
    changed = bytearray(BODY)
    changed[after] ^= 1
    assert applied == [bytes(changed)]
    assert proxy.hits() == 1


def test_a_byte_that_is_not_there_is_no_hit(proxy, client, applied) -> None:
    proxy.add(Fault("PUT", "flip", after=len(BODY)))
    call(client, "PUT", "/x", BODY)
    assert applied == [BODY]
    assert proxy.hits() == 0


@pytest.mark.parametrize("do", ["drop_response", "stall_response", "swap_response"])
def test_what_the_server_did_is_not_heard_of(proxy, client, applied, do: str) -> None:
    proxy.add(Fault("PUT", do, status=500))
    if do == "swap_response":
        assert call(client, "PUT", "/x", BODY)[0] == 500
    else:
        with pytest.raises((ConnectionResetError, TimeoutError)):
            call(client, "PUT", "/x", BODY)
    assert applied == [BODY]
    assert proxy.hits() == 1


@pytest.mark.parametrize("path", ["/sized", "/chunked"])
def test_an_answer_that_is_cut(proxy, client, path: str) -> None:
    proxy.add(Fault("GET", "cut_response", after=2000))
    with pytest.raises(http.client.IncompleteRead) as raised:
        call(client, "GET", path)
    assert BODY.startswith(raised.value.partial)
    assert proxy.hits() == 1


@pytest.mark.parametrize("path", ["/sized", "/chunked", "/close"])
def test_one_bit_of_an_answer_is_changed(proxy, client, path: str) -> None:
    proxy.add(Fault("GET", "flip_response", after=1500))
    _, got = call(client, "GET", path)
    assert [i for i in range(len(BODY)) if got[i] != BODY[i]] == [1500]
    assert got[1500] == BODY[1500] ^ 1


def test_a_delay_and_what_is_called_when_it_happened(proxy, client, applied) -> None:
    called = threading.Event()
    proxy.add(Fault("PUT", "delay", after=0.01, then=called.set))
    assert call(client, "PUT", "/x", BODY) == (200, BODY)
    assert called.is_set()
    assert applied == [BODY]


def test_some_requests_may_be_let_through_first(proxy, client) -> None:
    proxy.add(Fault("GET", "status", skip=1, times=2, status=503))
    proxy.add(Fault("GET /b", "status", times=None, status=404))
    found = [call(client, "GET", path)[0] for path in ("/a", "/a", "/b", "/a", "/b", "/b")]
    assert found == [200, 503, 503, 200, 404, 404]


def test_what_names_the_server_leads_through_the_proxy(proxy, client) -> None:
    client.request("HEAD", "/x")
    answer = client.getresponse()
    assert answer.headers["Location"] == f"{proxy.url}/next"
    assert proxy.seen[0].headers["host"] == f"{HOST}:{proxy.port}"


def test_clients_may_speak_tls_and_meet_the_same_faults(server, applied, tmp_path) -> None:
    files = certificates.make(tmp_path)
    with FaultProxy(HOST, server.server_address[1], tls=files.context()) as proxy:
        context = ssl.create_default_context(cafile=str(files.authority))
        client = http.client.HTTPSConnection(HOST, proxy.port, timeout=1, context=context)
        assert proxy.url.startswith("https://")
        assert call(client, "PUT", "/x", BODY) == (200, BODY)
        proxy.add(Fault("PUT", "reset", after=1000))
        with pytest.raises(OSError):  # noqa: PT011
            call(client, "PUT", "/x", BODY)
        client.close()
        assert call(client, "PUT", "/chunked", pieces()) == (200, BODY)
        client.close()
        with pytest.raises(ssl.SSLCertVerificationError):
            http.client.HTTPSConnection(HOST, proxy.port).connect()
    assert applied == [BODY, BODY]
    assert proxy.hits() == 1


def test_many_clients_at_once(proxy, applied) -> None:
    def one(number: int) -> bool:
        connection = http.client.HTTPConnection(HOST, proxy.port, timeout=10)
        body = bytes([number]) * 100_000
        same = all(call(connection, "PUT", "/x", body) == (200, body) for _ in range(3))
        connection.close()
        return same

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(16)))
    assert len(applied) == 48


def test_a_rule_that_was_dropped_strikes_no_more(proxy, client) -> None:
    fault = proxy.add(Fault("/", "status", times=None))
    assert call(client, "GET", "/x")[0] == 503
    for _ in range(2):
        proxy.drop(fault)
    assert call(client, "GET", "/x")[0] == 200
    assert proxy.hits(fault) == 1


def test_it_leads_to_the_server_that_was_named_last(proxy, client, applied) -> None:
    assert call(client, "PUT", "/x", b"to the first")[0] == 200
    elsewhere: list[bytes] = []
    with Server((HOST, 0), type("Handler", (Echo,), {"applied": elsewhere})) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        proxy.lead_to(HOST, other.server_address[1])
        assert call(client, "PUT", "/x", b"to the other")[0] == 200
        other.shutdown()
    assert (applied, elsewhere) == ([b"to the first"], [b"to the other"])
