"""An SFTP server in this process, with a key that is made for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from ds_ckpt_sidecar.demo.s3_server import HOST

USER = "trainer"


@dataclass(frozen=True)
class Sftp:
    """A running server.

    Attributes:
        port: where it listens.
        folder: where there is room; the server shows the whole machine.
        password: of :data:`USER`.
    """

    port: int
    folder: Path
    password: str

    @property
    def environ(self) -> dict[str, str]:
        """With this, a process of ours may use it."""
        options = {"password": self.password, "look_for_keys": False, "allow_agent": False}
        return {"DS_CKPT_FSSPEC_OPTIONS": json.dumps(options)}

    def url(self) -> str:
        """Of a new folder, which is not there yet."""
        return f"sftp://{USER}@{HOST}:{self.port}{self.folder}/{uuid.uuid4().hex}"


@contextlib.contextmanager
def sftp_server(folder: Path) -> Iterator[Sftp]:
    password = uuid.uuid4().hex
    loop = asyncio.new_event_loop()

    class Server(asyncssh.SSHServer):
        def begin_auth(self, username: str) -> bool:
            return True

        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, given: str) -> bool:
            return (username, given) == (USER, password)

    async def listen() -> asyncssh.SSHAcceptor:
        key = asyncssh.generate_private_key("ssh-ed25519")
        return await asyncssh.listen(
            HOST, 0, server_host_keys=[key], server_factory=Server, sftp_factory=True
        )

    async def end(acceptor: asyncssh.SSHAcceptor) -> None:
        acceptor.close()
        await acceptor.wait_closed()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    acceptor = loop.run_until_complete(listen())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield Sftp(acceptor.get_port(), folder, password)
    finally:
        asyncio.run_coroutine_threadsafe(end(acceptor), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
