"""What the kubelet does to a container from outside: probes and preStop hooks."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.kubelet.runtime import Run
from tests.kubernetes.kubelet.spec import NotEmulated


def handle(
    handler: Mapping[str, Any], container: Mapping[str, Any], run: Run, address: str, seconds: float
) -> str:
    """Do it once; empty if it went well, else what went wrong.

    Args:
        handler: ``httpGet``, ``exec``, ``tcpSocket`` or ``sleep``.
        container: its spec, for the names of its ports.
        run: the container that it is meant for.
        address: of the pod.
        seconds: that it may take.
    """
    if "exec" in handler:
        ran = run.execute(handler["exec"]["command"], seconds)
        if ran is None:
            return "timed out"
        return f"exit code {ran.returncode}" if ran.returncode else ""
    if "sleep" in handler:
        time.sleep(min(float(handler["sleep"]["seconds"]), seconds))
        return ""
    if "tcpSocket" in handler:
        port = _port(handler["tcpSocket"]["port"], container)
        try:
            with socket.create_connection((address, port), timeout=seconds):
                return ""
        except OSError as error:
            return str(error)
    if "httpGet" in handler:
        return _get(handler["httpGet"], container, address, seconds)
    raise NotEmulated(f"a handler with {', '.join(handler)}")


def _port(port: int | str, container: Mapping[str, Any]) -> int:
    """A port by its number, or by its name in this container."""
    if isinstance(port, int):
        return port
    named = {each.get("name"): each["containerPort"] for each in container.get("ports", [])}
    if port not in named:
        raise NotEmulated(f"{container['name']} has no port {port!r}")
    return int(named[port])


def _get(
    given: Mapping[str, Any], container: Mapping[str, Any], address: str, seconds: float
) -> str:
    """From the node to the pod's address, as the kubelet does; 200 to 399 is well."""
    host, port = given.get("host") or address, _port(given["port"], container)
    connection: http.client.HTTPConnection
    if given.get("scheme", "HTTP") == "HTTPS":
        unchecked = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=unchecked)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=seconds)
    headers = {each["name"]: each["value"] for each in given.get("httpHeaders", [])}
    try:
        connection.request("GET", given.get("path", "/"), headers=headers)
        answer = connection.getresponse()
        body = answer.read(1024).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    return "" if 200 <= answer.status < 400 else f"status {answer.status}: {body}"


@dataclass(frozen=True)
class Probe:
    """One probe of a container, with the defaults of Kubernetes; times in seconds."""

    handler: Mapping[str, Any]
    delay: float
    period: float
    timeout: float
    failures: int
    successes: int

    @classmethod
    def of(cls, container: Mapping[str, Any], kind: str) -> Probe | None:
        """``startupProbe``, ``livenessProbe`` or ``readinessProbe``, if the container has it."""
        given = container.get(kind)
        if given is None:
            return None
        handler = {k: v for k, v in given.items() if k in ("httpGet", "exec", "tcpSocket")}
        return cls(
            handler,
            given.get("initialDelaySeconds", 0),
            given.get("periodSeconds", 10),
            given.get("timeoutSeconds", 1),
            given.get("failureThreshold", 3),
            given.get("successThreshold", 1),
        )

    def watch(
        self,
        once: Callable[[float], str],
        stop: threading.Event,
        say: Callable[[bool, str], bool],
    ) -> None:
        """Probe until told to stop, or until ``say`` wants no more.

        Args:
            once: does it once within the given seconds; empty if it went well.
            stop: ends it.
            say: told whenever enough successes or failures have come in a row; returns whether
                to go on.
        """
        row, last = 0, None
        wait = self.delay
        while not stop.wait(wait):
            trouble = once(self.timeout)
            if stop.is_set():
                return
            row = row + 1 if last == (not trouble) else 1
            last = not trouble
            if row >= (self.failures if trouble else self.successes) and not say(last, trouble):
                return
            wait = self.period
