"""The HTTP page of the agent: is it alive, has it started, can it store; and the preStop notice.

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
from typing import Any

from ds_ckpt_sidecar.observe.address import split
from ds_ckpt_store.errors import SettingsError

SILENT_SECONDS = 5.0
MOST_CONNECTIONS = 32

Answer = Callable[[], str]
"""Empty: all is well (200). Else why it is not (503)."""


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection is closed after it."""

    timeout = SILENT_SECONDS
    server: _Server
    server_version, sys_version = "ds-ckpt", ""

    def do_GET(self) -> None:
        """Answer."""
        answer = self.server.answers.get(self.path.partition("?")[0])
        if answer is None:
            self._say(404, "not here: " + " ".join(self.server.answers))
            return
        reason = answer()
        self._say(503 if reason else 200, reason or "ok")

    def do_HEAD(self) -> None:
        """The same without its text."""
        self.do_GET()

    def _say(self, code: int, text: str) -> None:
        body = f"{text}\n".encode(errors="replace")
        self.send_response(code)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Probes come every few seconds."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, bound: socket.socket, answers: Mapping[str, Answer]) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.answers = answers
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

    Attributes:
        address: that it listens on.

    Raises:
        SettingsError: nothing can listen there.
    """

    def __init__(self, listen: str, answers: Mapping[str, Answer]) -> None:
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
        self._server = _Server(bound, answers)
        threading.Thread(target=self._server.serve_forever, name="page", daemon=True).start()
