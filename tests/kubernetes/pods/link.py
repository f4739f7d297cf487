"""The way from the pods' network to a server on this machine's loopback, as slow as a test wants.

The server itself is not opened to any network. Like a link to an object store, it delays and never
reorders or loses; slow in the direction of the uploads only.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

PIECE = 1 << 14
TICK = 0.02


class Link:
    """Exists from ``__enter__`` to ``__exit__``; safe to use from any thread.

    Args:
        address: to listen on.
        target: host and port of the server.

    Attributes:
        port: that it listens on.
        sent: bytes that were sent to the server.
    """

    def __init__(self, address: str, target: tuple[str, int]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._rate: float | None = None
        self._due = 0.0
        self._closing = threading.Event()
        self.sent = 0
        self._listener = socket.socket()
        # What waits in a socket's buffer counts as sent for its sender: little may.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
        self._listener.bind((address, 0))
        self._listener.listen(128)
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Link:
        threading.Thread(target=self._accept, name="link", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def limit(self, bytes_per_second: float | None) -> None:
        """Of all connections together, from now on; None: no limit, 0: nothing at all."""
        with self._lock:
            self._rate = bytes_per_second
            self._due = time.monotonic()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                continue
            for one, other, slow in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._carry, args=(one, other, slow), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE if slow else 1 << 18):
                if slow:
                    self._wait_for(len(data))
                target.sendall(data)
                if slow:
                    with self._lock:
                        self.sent += len(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        if not slow:  # the last of the two to end, as a rule; both sockets are then of no use
            source.close()
            target.close()

    def _wait_for(self, count: int) -> None:
        """Until it is the turn of so many bytes; headers alone pass at any rate."""
        if count < 4096:
            return
        while not self._closing.is_set():
            with self._lock:
                now = time.monotonic()
                if self._rate is None:
                    return
                if self._rate and now >= self._due:
                    self._due = max(self._due, now - TICK) + count / self._rate
                    return
            time.sleep(TICK)
