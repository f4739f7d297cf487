"""What the agent says by HTTP: probes, the preStop notice, and documents for people and programs.

Whoever reaches the port may say anything to it, and slowly: a connection that says nothing for
some seconds is closed, and of many at a time the oldest is, so that a probe always gets through.
All of it runs in threads that the process does not wait for.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

from ds_ckpt_sidecar.observe.address import split
from ds_ckpt_store.errors import SettingsError

SILENT_SECONDS = 5.0
MOST_CONNECTIONS = 32

Answer = Callable[[], str]
"""Empty: all is well (200). Else why it is not (503)."""

Document = Callable[[str], tuple[str, bytes]]
"""Content type and body, as the request's ``Accept`` wants it."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Connection": "close",
}


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection is closed after it."""

    timeout = SILENT_SECONDS
    server: _Server
    server_version, sys_version = "ds-ckpt", ""

    def do_GET(self) -> None:
        """Answer."""
        path = self.path.partition("?")[0]
        if path in self.server.documents:
            self._show(path)
        elif path in self.server.answers:
            reason = self.server.answers[path]()
            self._say(503 if reason else 200, reason or "ok")
        else:
            known = " ".join([*self.server.documents, *self.server.answers])
            self._say(404, f"not here: {known}")

    def do_HEAD(self) -> None:
        """The same without its text."""
        self.do_GET()

    def _show(self, path: str) -> None:
        try:
            kind, body = self.server.documents[path](self.headers.get("Accept", ""))
        except Exception as error:  # noqa: BLE001 - a probe must go on being answered
            self.server.broken(path, error)
            self._say(500, f"{path} cannot be shown ({type(error).__name__}); the log says more")
            return
        self._send(200, kind, body)

    def _say(self, code: int, text: str) -> None:
        self._send(code, "text/plain; charset=utf-8", f"{text}\n".encode(errors="replace"))

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Probes come every few seconds."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        bound: socket.socket,
        answers: Mapping[str, Answer],
        documents: Mapping[str, Document],
        broken: Callable[[str, Exception], None],
    ) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.answers = answers
        self.documents = documents
        self.broken = broken
        self._open: dict[int, socket.socket] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Make room first."""
        with self._lock:
            while len(self._open) >= MOST_CONNECTIONS:
                oldest = self._open.pop(next(iter(self._open)))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread notices, and closes it
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """It is over."""
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up, or is too slow, is nobody's business."""


class Page:
    """Listens from the start to the end of the process.

    Args:
        listen: ``host:port`` or ``:port``, as the settings have it.
        answers: path to what is said there.
        documents: path to what is shown there.
        broken: told of a document that raised, and of what; from any thread.

    Attributes:
        address: that it listens on.

    Raises:
        SettingsError: nothing can listen there.
    """

    def __init__(
        self,
        listen: str,
        answers: Mapping[str, Answer],
        documents: Mapping[str, Document] = MappingProxyType({}),
        broken: Callable[[str, Exception], None] = lambda *_: None,
    ) -> None:
        host, port = split(listen)
        try:
            if not host and socket.has_dualstack_ipv6():
                bound = socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128
                )
            else:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                bound = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            number = error.errno or 0  # below 0: of a name that is no address
            plain = os.strerror(number) if number > 0 else error.strerror or error
            raise SettingsError(
                f"--listen (or DS_CKPT_LISTEN) {listen}: {plain}: choose another port, or stop "
                "what listens there"
            ) from None
        name = bound.getsockname()
        self.address = f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
        self._server = _Server(bound, answers, documents, broken)
        threading.Thread(target=self._server.serve_forever, name="page", daemon=True).start()
