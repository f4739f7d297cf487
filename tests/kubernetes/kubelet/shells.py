"""Containers of a few words of shell."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.tools import machine

PATIENT = {"periodSeconds": 1, "timeoutSeconds": 30, "failureThreshold": 120}
"""A probe for which a busy machine is fast enough."""
HEEDS = "trap 'exit 0' TERM; sleep 1000 & wait"
"""Runs until SIGTERM, and ends at once with 0."""
UP = "trap 'exit 0' TERM; touch /up; sleep 1000 & wait"
"""The same, and says by a file that it is so far that it heeds."""
IGNORES = "trap : TERM; while :; do sleep 1000 & wait; done"
"""Runs until SIGKILL, once it is so far that it has a handler for SIGTERM."""


def waits(path: str) -> str:
    """Goes on when a test has made a file in the container."""
    return f"until test -e {path}; do sleep 0.1; done"


def lasts(seconds: float, code: int = 0) -> str:
    """Takes so long to end after SIGTERM."""
    return f"trap 'sleep {seconds}; exit {code}' TERM; sleep 1000 & wait"


def shell(name: str, script: str, **fields: Any) -> dict[str, Any]:
    """A container of a pod that runs a script."""
    (image,) = (line for line in (machine.TOOLS / "base").read_text().split() if line)
    return {"name": name, "image": image, "command": ["/bin/sh", "-c", script], **fields}


def sidecar(name: str, script: str, **fields: Any) -> dict[str, Any]:
    """A native sidecar of a pod that runs a script."""
    return shell(name, script, restartPolicy="Always", **fields)


def exists(path: str, **fields: Any) -> dict[str, Any]:
    """A probe, once a second, that passes when a file is there; patient, unless told otherwise."""
    return {"exec": {"command": ["test", "-e", path]}, **PATIENT, **fields}


def answers(path: str, **fields: Any) -> dict[str, Any]:
    """A probe of :func:`server`, once a second; patient, unless told otherwise."""
    return {"httpGet": {"path": path, "port": "page"}, **PATIENT, **fields}


def server(port: int, *, ready_after: float = 0, **fields: Any) -> dict[str, Any]:
    """A container that answers each GET with its path's first word as the status."""
    script = (
        "import http.server as h, signal, sys, time\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "  def do_GET(self):\n"
        "    print(self.path, flush=True)\n"
        "    self.send_response(int(self.path.split('/')[1])); self.end_headers()\n"
        "  log_message = lambda *a: None\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))\n"
        f"time.sleep({ready_after})\n"
        f"h.ThreadingHTTPServer(('', {port}), H).serve_forever()\n"
    )
    made = shell("server", "", **fields)
    ports = [{"name": "page", "containerPort": port}]
    return {**made, "command": ["python3", "-c", script], "ports": ports}
