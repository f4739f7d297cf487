"""The S3 server of the demo waits for what answers, and takes nothing else for an answer."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ds_ckpt_sidecar.demo.s3_server import HOST, S3Server, ServerError


def _echo(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(connection.recv(1 << 16))


def test_a_connection_that_ended_up_in_itself_is_no_answer_and_no_error(tmp_path: Path) -> None:
    """On loopback that happens while nobody listens on the port; what comes back was sent."""
    (tmp_path / "weed.log").write_text("its last words")
    server = S3Server(tmp_path)
    server.START_TIMEOUT = 0.3
    with socket.create_server((HOST, 0)) as listener:
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
        server.url = server._filer = f"http://{HOST}:{listener.getsockname()[1]}"
        sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
        with subprocess.Popen(sleeps) as server._process:
            with pytest.raises(ServerError, match=r"did not answer.*its last words"):
                server._wait_until_ready()
            server._process.kill()
