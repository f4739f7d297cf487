"""A proxy in front of an HTTP server that makes the faults that networks and servers make.

It stands in this process, on a free port of loopback, and forwards HTTP/1.1 unchanged, but for the
requests that a :class:`Fault` matches::

    with FaultProxy("127.0.0.1", 8333) as proxy:
        fault = proxy.add(Fault(r"PUT .*partNumber=2", "reset", after=100_000))
        ...  # a client of proxy.url
        assert proxy.hits(fault) == 1

What it does to a request (``do``; ``after`` counts bytes of a body, without its framing):

============== ====================================================================================
status         the server hears nothing; the client gets ``status``, ``body`` and ``headers``
late           the same, and the server gets the request at :meth:`FaultProxy.apply_late`
reset          the client is reset when ``after`` bytes were taken; the server gets them and no more
stall          the same, and then silence instead of a reset
flip           the lowest bit of byte ``after`` of the request's body is changed
delay          the request is forwarded ``after`` seconds later
drop_response  the server does it all, and the client is reset
stall_response the server does it all, and the client hears ``after`` bytes of it, and then nothing
swap_response  the server does it all, and the client gets ``status``, ``body`` and ``headers``
cut_response   the connection is closed when ``after`` bytes of the answer's body were given
flip_response  the lowest bit of byte ``after`` of the answer's body is changed
============== ====================================================================================

A reset or stalled request never reaches the server whole, whatever ``after`` says.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

HOST = "127.0.0.1"
PIECE = 1 << 18
SECONDS = 60.0  # that a peer may be silent before the proxy gives it up
KINDS = (
    "status",
    "late",
    "reset",
    "stall",
    "flip",
    "delay",
    "drop_response",
    "stall_response",
    "swap_response",
    "cut_response",
    "flip_response",
)

SLOW_DOWN = (
    "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


@dataclass(frozen=True, eq=False)
class Fault:
    """One rule. See the module.

    Attributes:
        match: a regular expression that is searched in ``METHOD target``.
        do: the kind.
        after: bytes, or seconds for a delay.
        times: how many requests it befalls; None: all.
        skip: how many requests that match are let through first.
        status: of the answer that the client gets instead.
        body: of that answer.
        headers: of that answer.
        then: called in the proxy's thread when the fault has happened.
        header: a regular expression that must be found in one of the request's headers as well,
            written as ``name: value`` with its name in lower case; empty: in none.
    """

    match: str
    do: str
    after: float = 0
    times: int | None = 1
    skip: int = 0
    status: int = 503
    body: str = SLOW_DOWN
    headers: Mapping[str, str] = field(default_factory=dict)
    then: Callable[[], None] | None = None
    header: str = ""

    def __post_init__(self) -> None:
        assert self.do in KINDS, f"{self.do!r} is none of {KINDS}"


@dataclass(frozen=True)
class Seen:
    """One request that came: ``METHOD target``, and its headers with names in lower case."""

    line: str
    headers: Mapping[str, str]


class _ClosedError(Exception):
    """A peer closed its connection, or the fault did."""


class FaultProxy:
    """Listens from ``__enter__`` to ``__exit__``; safe to use from any thread.

    Args:
        host: of the server behind it.
        port: of that server.
        tls: speak TLS with the clients; the server is always spoken to in the clear.

    Attributes:
        port: that it listens on.
        url: that clients use.
        seen: the requests that came, in order.
    """

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._target = host, port
        self._tls = tls
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._met: dict[Fault, int] = {}
        self._happened: list[tuple[Fault, str]] = []
        self._late: list[tuple[str, bytes]] = []
        self._open: set[socket.socket] = set()
        self._closing = threading.Event()
        self.seen: list[Seen] = []
        self._listener = socket.create_server((HOST, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://{HOST}:{self.port}"

    def add(self, fault: Fault) -> Fault:
        """Apply a rule from now on; of several that match a request, the first one applies."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def drop(self, fault: Fault) -> None:
        """End a rule; its hits stay."""
        with self._lock:
            if fault in self._faults:
                self._faults.remove(fault)

    def clear(self) -> None:
        """Drop all rules; hits stay."""
        with self._lock:
            self._faults.clear()

    def lead_to(self, host: str, port: int) -> None:
        """Forward to another server from now on: the one behind it was started anew."""
        self._target = host, port

    def hits(self, what: Fault | str = "") -> int:
        """How often this fault has happened, or any on a request line that matches a pattern."""
        with self._lock:
            return sum(
                fault is what if isinstance(what, Fault) else bool(re.search(what, line))
                for fault, line in self._happened
            )

    def lines(self, pattern: str = "") -> list[str]:
        """The request lines that came and match a pattern, in order."""
        with self._lock:
            return [seen.line for seen in self.seen if re.search(pattern, seen.line)]

    def apply_late(self) -> list[int]:
        """Let the server have what was kept back, in order; the statuses that it answers."""
        with self._lock:
            late, self._late = self._late, []
        return [self._apply(method, raw) for method, raw in late]

    def _apply(self, method: str, raw: bytes) -> int:
        with self._kept(socket.create_connection(self._target, timeout=SECONDS)) as server:
            server.sendall(raw)
            answer = _Message.read(_Reader(server), method=method)
            answer.drain()
            return answer.status

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self._accept, name="faultproxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    # ---- connections

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    @contextlib.contextmanager
    def _kept(self, connection: socket.socket) -> Iterator[socket.socket]:
        connection.settimeout(SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.add(connection)
        try:
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(_ClosedError, OSError):
            if self._tls is not None:
                client.settimeout(SECONDS)
                client = self._tls.wrap_socket(client, server_side=True)
            with self._kept(client):
                reader = _Reader(client)
                while not self._closing.is_set():
                    self._exchange(client, _Message.read(reader))

    def _exchange(self, client: socket.socket, request: _Message) -> None:
        method, target = request.first.split(" ")[:2]
        line = f"{method} {target}"
        with self._lock:
            self.seen.append(Seen(line, request.headers))
            fault = self._choose(line, request.headers)
        if fault is not None and fault.do == "delay":
            self._closing.wait(fault.after)
            self._hit(fault, line)
            fault = None
        if fault is not None and fault.do == "late":
            if request.expects:
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", request.head)
            raw = head + request.framed()
            with self._lock:
                self._late.append((method, raw))
            self._hit(fault, line)
            _answer(client, fault, method)
            return
        if fault is not None and fault.do == "status":
            if not request.expects:
                request.drain()
            self._hit(fault, line)
            _answer(client, fault, method, last=request.expects)
            if request.expects:  # whether a body comes after all is not known
                _linger(client)
            return
        with self._kept(socket.create_connection(self._target, timeout=SECONDS)) as server:
            self._forward(client, server, request, fault, line)

    def _choose(self, line: str, headers: Mapping[str, str]) -> Fault | None:
        for fault in self._faults:
            if not re.search(fault.match, line):
                continue
            if fault.header and not any(
                re.search(fault.header, f"{name}: {value}") for name, value in headers.items()
            ):
                continue
            met = self._met[fault] = self._met.get(fault, 0) + 1
            if met > fault.skip and (fault.times is None or met <= fault.skip + fault.times):
                return fault
        return None

    def _hit(self, fault: Fault, line: str) -> None:
        with self._lock:
            self._happened.append((fault, line))
        if fault.then is not None:
            fault.then()

    def _forward(
        self,
        client: socket.socket,
        server: socket.socket,
        request: _Message,
        fault: Fault | None,
        line: str,
    ) -> None:
        do = fault.do if fault is not None else ""
        after = int(fault.after) if fault is not None else 0
        answers = _Reader(server)
        if fault is not None and do in ("reset", "stall") and not after:
            self._break(client, fault, line)
        server.sendall(request.head)
        if request.expects and not self._continued(client, server, answers, request, line, fault):
            _linger(client)
        if fault is not None and do in ("reset", "stall"):
            request.pump(server, stop=after)
            self._break(client, fault, line)
        taken = False
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # A server may answer and close before it has read all.
            if request.pump(server, flip=after if do == "flip" else None) and fault is not None:
                self._hit(fault, line)
            taken = True
        answer = _Message.read(answers, method=request.first.split(" ")[0])
        while answer.status // 100 == 1:
            client.sendall(answer.head)
            answer = _Message.read(answers, method=request.first.split(" ")[0])
        self._give(client, answer, fault, line)
        if not taken:
            _linger(client)

    def _continued(
        self,
        client: socket.socket,
        server: socket.socket,
        answers: _Reader,
        request: _Message,
        line: str,
        fault: Fault | None,
    ) -> bool:
        """Whether the body will come: the server wants it, or the client does not wait for that."""
        while not request.reader.has_data():
            ready, _, _ = select.select([client, server], [], [], SECONDS)
            if server in ready:
                answer = _Message.read(answers, method=request.first.split(" ")[0])
                if answer.status == 100:
                    client.sendall(answer.head)
                    return True
                self._give(client, answer, fault, line)
                return False
            if not ready:
                raise _ClosedError
            if client in ready:
                return True
        return True

    def _give(
        self, client: socket.socket, answer: _Message, fault: Fault | None, line: str
    ) -> None:
        do = fault.do if fault is not None else ""
        after = int(fault.after) if fault is not None else 0
        if fault is None or not do.endswith("_response"):
            client.sendall(self._own(answer.head))
            answer.pump(client)
        elif do == "drop_response":
            answer.drain()
            self._hit(fault, line)
            _reset(client)
            raise _ClosedError
        elif do == "swap_response":
            answer.drain()
            self._hit(fault, line)
            _answer(client, fault, line.split(" ")[0])
        elif do == "flip_response":
            client.sendall(self._own(answer.head))
            if answer.pump(client, flip=after):
                self._hit(fault, line)
        else:
            if do == "cut_response" or after:
                client.sendall(self._own(answer.head))
                answer.pump(client, stop=after)
            if do == "stall_response":
                self._break(client, fault, line)
            self._hit(fault, line)
            raise _ClosedError
        if answer.until_close:
            raise _ClosedError

    def _own(self, head: bytes) -> bytes:
        """A redirect or session that names the server leads through the proxy as well."""
        theirs = "http://{}:{}".format(*self._target).encode()
        return re.sub(
            rb"(?i)(\r\nlocation: *)" + re.escape(theirs), rb"\1" + self.url.encode(), head
        )

    def _break(self, client: socket.socket, fault: Fault, line: str) -> NoReturn:
        """Reset the client, or be silent until it goes away."""
        self._hit(fault, line)
        if fault.do == "reset":
            _reset(client)
        else:
            poll = select.poll()
            poll.register(client, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
            while not self._closing.is_set() and not poll.poll(50):
                pass
        raise _ClosedError


class _Reader:
    """A buffered socket that can be closed at once, which ``makefile`` prevents."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def has_data(self) -> bool:
        if isinstance(self._connection, ssl.SSLSocket) and self._connection.pending():
            return True
        return bool(self._buffer)

    def some(self, most: int) -> bytes:
        """At least one byte; empty at the end."""
        if not self._buffer:
            return self._connection.recv(min(most, PIECE))
        taken, self._buffer = self._buffer[:most], self._buffer[most:]
        return taken

    def until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            more = self._connection.recv(PIECE)
            if not more:
                raise _ClosedError
            self._buffer += more
        cut = self._buffer.index(end) + len(end)
        taken, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return taken


@dataclass(frozen=True)
class _Message:
    """A request or an answer: its head, and how its body comes."""

    reader: _Reader
    head: bytes
    first: str
    headers: Mapping[str, str]
    method: str

    @classmethod
    def read(cls, reader: _Reader, method: str = "") -> _Message:
        head = reader.until(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return cls(reader, head, first, headers, method)

    @property
    def status(self) -> int:
        return int(self.first.split(" ")[1])

    @property
    def expects(self) -> bool:
        return self.headers.get("expect", "").lower() == "100-continue"

    @property
    def chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def has_body(self) -> bool:
        if not self.method:  # a request
            return self.chunked or "content-length" in self.headers
        return self.method != "HEAD" and self.status not in (204, 304) and self.status >= 200

    @property
    def until_close(self) -> bool:
        framed = self.chunked or "content-length" in self.headers
        return bool(self.method) and self.has_body and not framed

    def framed(self) -> bytes:
        """All of the body, as it comes with its framing."""
        return b"".join(piece for _, piece in self._pieces())

    def drain(self) -> None:
        for _ in self._pieces():
            pass

    def pump(self, to: socket.socket, *, stop: int | None = None, flip: int | None = None) -> bool:
        """Send the body on.

        Args:
            to: where.
            stop: bytes of it after which to stop; it is never sent to its end then.
            flip: position of the byte to change.

        Returns:
            Whether a byte was changed.
        """
        done = 0
        flipped = False
        if stop is not None and not self.chunked and "content-length" in self.headers:
            stop = max(0, min(stop, int(self.headers["content-length"]) - 1))
        for kind, piece in self._pieces():
            if stop is not None and (kind is _END or done >= stop):
                break
            if kind is not _DATA:
                to.sendall(piece)
                continue
            if stop is not None:
                piece = piece[: stop - done]
            if flip is not None and done <= flip < done + len(piece):
                changed = bytearray(piece)
                changed[flip - done] ^= 1
                piece, flipped = bytes(changed), True
            to.sendall(piece)
            done += len(piece)
        return flipped

    def _pieces(self) -> Iterator[tuple[object, bytes]]:
        """What follows the head, as it comes: data, the framing between it, and the end of that."""
        if not self.has_body:
            return
        if self.chunked:
            while True:
                size = self.reader.until(b"\r\n")
                count = int(size.split(b";")[0], 16)
                if count == 0:
                    trailers = b""
                    while not trailers.endswith(b"\r\n\r\n") and trailers != b"\r\n":
                        trailers += self.reader.until(b"\r\n")
                    yield _END, size + trailers
                    return
                yield _FRAMING, size
                yield from self._data(count)
                yield _FRAMING, self.reader.until(b"\r\n")
        elif "content-length" in self.headers:
            yield from self._data(int(self.headers["content-length"]))
        else:
            while piece := self.reader.some(PIECE):
                yield _DATA, piece

    def _data(self, count: int) -> Iterator[tuple[object, bytes]]:
        while count:
            piece = self.reader.some(count)
            if not piece:
                raise _ClosedError
            yield _DATA, piece
            count -= len(piece)


_DATA, _FRAMING, _END = object(), object(), object()


def _answer(client: socket.socket, fault: Fault, method: str, *, last: bool = False) -> None:
    body = fault.body.encode()
    headers = {"Content-Type": "application/xml", **fault.headers, "Content-Length": str(len(body))}
    if last:
        headers["Connection"] = "close"
    lines = [f"HTTP/1.1 {fault.status} Injected", *(f"{k}: {v}" for k, v in headers.items())]
    client.sendall("\r\n".join([*lines, "", ""]).encode() + (b"" if method == "HEAD" else body))


def _linger(client: socket.socket) -> NoReturn:
    """Close so that the client reads the answer, although what it sent was not read."""
    client.shutdown(socket.SHUT_WR)
    client.settimeout(1)
    with contextlib.suppress(OSError):
        while client.recv(PIECE):
            pass
    raise _ClosedError


def _reset(client: socket.socket) -> None:
    """Make the close that follows a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
