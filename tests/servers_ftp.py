"""An FTP server in this process: one connection does one thing at a time, as with most of them."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.ioloop import IOLoop
from pyftpdlib.servers import FTPServer

from ds_ckpt_sidecar.demo.s3_server import HOST

USER = "trainer"
SECOND = 1.0


@dataclass(frozen=True)
class Ftp:
    """A running server.

    Attributes:
        port: where it listens.
        folder: what it serves.
        password: of :data:`USER`.
        handler: pyftpdlib's class for a connection, to be disturbed by tests.
    """

    port: int
    folder: Path
    password: str
    handler: type[FTPHandler]

    @property
    def environ(self) -> dict[str, str]:
        """With this, a process of ours may use it."""
        options = f'{{"password": "{self.password}"}}'
        return {"DS_CKPT_FSSPEC_OPTIONS": options}

    def url(self) -> str:
        """Of a new folder, which is not there yet."""
        return f"ftp://{USER}@{HOST}:{self.port}/{uuid.uuid4().hex}"


@contextlib.contextmanager
def ftp_server(folder: Path) -> Iterator[Ftp]:
    password = uuid.uuid4().hex
    authorizer = DummyAuthorizer()
    authorizer.add_user(USER, password, str(folder), perm="elradfmwMT")

    class Handler(FTPHandler):
        pass

    Handler.authorizer = authorizer
    loop = IOLoop()
    server = FTPServer((HOST, 0), Handler, ioloop=loop)
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            loop.loop(timeout=SECOND / 10, blocking=False)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Ftp(server.address[1], folder, password, Handler)
    finally:
        ended.set()
        thread.join()
        server.close_all()
