"""The sidecar's image under the rights that the chart gives it, as podman has them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ds_ckpt_sidecar.demo.s3_server import free_ports
from ds_ckpt_store.contract.clock import system_random
from tests.kubernetes.tools import machine
from tests.sidecar.world import until

CHART = machine.ROOT / "helm" / "ds-ckpt-sidecar"
VOLUME = "/checkpoints"
PATIENCE = 60.0


def of_chart(name: str) -> dict[str, Any]:
    """A container of the chart's pod, by name, with the chart's own values."""
    told = ("destination=s3://bucket/run", "trainer.image=trainer", "trainer.command={train}")
    command = [machine.tool("helm4"), "template", "train", CHART]
    rendered = subprocess.run(
        [*command, *(f"--set={each}" for each in told)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    (job,) = [each for each in yaml.safe_load_all(rendered) if each and each["kind"] == "Job"]
    pod = job["spec"]["template"]["spec"]
    (found,) = [each for each in pod["initContainers"] if each["name"] == name]
    return dict(found)


def rights(container: Mapping[str, Any], uid: int | None = None) -> list[str]:
    """A container's ``securityContext`` and memory limit as arguments of ``podman run``.

    What is not known here fails: nothing of it must be left out without notice.

    Args:
        container: as the chart has it.
        uid: another user than the chart's, as OpenShift would put in.
    """
    left = dict(container["securityContext"])
    assert left.pop("readOnlyRootFilesystem") is True
    assert left.pop("allowPrivilegeEscalation") is False
    assert left.pop("privileged") is False
    assert left.pop("runAsNonRoot") is True
    assert left.pop("capabilities") == {"drop": ["ALL"]}
    assert left.pop("seccompProfile") == {"type": "RuntimeDefault"}  # podman's own default too
    user, group = left.pop("runAsUser"), left.pop("runAsGroup")
    assert left == {}
    limit = container["resources"]["limits"]["memory"]
    assert limit.endswith("Mi")
    return [
        "--read-only",
        "--read-only-tmpfs=false",
        "--security-opt=no-new-privileges",
        "--cap-drop=ALL",
        f"--user={user if uid is None else uid}:{group if uid is None else uid}",
        f"--memory={limit.removesuffix('Mi')}m",
    ]


def settings(volume: Path | None, environ: Mapping[str, str]) -> list[str]:
    """The volume and what the agent is told, as arguments of ``podman run``."""
    mounts = [f"--volume={volume}:{VOLUME}"] if volume else []
    told = {"DS_CKPT_VOLUME": VOLUME, "DS_CKPT_LOG_FORMAT": "json", **environ}
    return ["--network=host", *mounts, *(f"--env={key}={value}" for key, value in told.items())]


def own(folder: Path, uid: int) -> None:
    """Give a folder to a user, as the kubelet and a trainer of that user would have made it."""
    for path, _, files in os.walk(folder):
        for name in (".", *files):
            os.lchown(os.path.join(path, name), uid, uid)


class Agent:
    """A container that runs ``ds-ckpt agent`` until it is stopped.

    Attributes:
        pid: of the agent, on this machine.
        asked: when podman was asked to run it, in seconds since boot.
        begun: when the agent's process began, in seconds since boot, to 10 ms.
    """

    def __init__(self, name: str, page: int, folder: Path, arguments: list[str]) -> None:
        self._name = name
        self._page = page
        self._log = folder / f"{name}.log"
        number = folder / f"{name}.pid"
        mine = [f"--name={name}", f"--pidfile={number}", "--pull=never", "--log-driver=none"]
        self.asked = time.clock_gettime(time.CLOCK_BOOTTIME)
        with self._log.open("wb") as log:
            self._podman = subprocess.Popen(
                ["podman", "run", "--sig-proxy=false", *mine, *arguments],
                env=machine.environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,  # conmon leaves a file "oom" there, if it comes to that
            )
        until(lambda: self._alive() and number.exists() and number.read_text(), PATIENCE)
        self.pid = int(number.read_text())
        self.begun = int(self.stat()[19]) / os.sysconf("SC_CLK_TCK")

    def _alive(self) -> bool:
        assert self._podman.poll() is None, f"it ended:\n{self.said()}"
        return True

    def said(self) -> str:
        """All that it has written."""
        return self._log.read_text()

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Its log lines of an event."""
        whole = [json.loads(line) for line in self.said().split("\n")[:-1] if line[:1] == "{"]
        return [line for line in whole if line["event"] == event]

    def wait_for(self, event: str) -> dict[str, Any]:
        """Wait for a log line, the first of an event."""
        until(lambda: self.lines(event) or not self._alive(), PATIENCE)
        return self.lines(event)[0]

    def page(self, path: str) -> tuple[int, str]:
        """What its page answers; 0 if it does not listen yet."""
        address = f"http://127.0.0.1:{self._page}{path}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except urllib.error.URLError:
            return 0, ""

    def until_ready(self) -> float:
        """Wait until it can store; the time then, in seconds since boot."""
        until(lambda: self._alive() and self.page("/readyz")[0] == 200, PATIENCE)
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def stat(self) -> list[str]:
        """Fields of ``/proc/PID/stat`` from the third on."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()

    def status(self, key: str) -> str:
        """A line of ``/proc/PID/status``."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        (value,) = [line.partition(":")[2].strip() for line in lines if line.startswith(f"{key}:")]
        return value

    def mapped(self) -> set[str]:
        """Files that are mapped into its memory."""
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return {line.split(maxsplit=5)[5] for line in lines if " /" in line}

    def stop(self) -> int:
        """Send SIGTERM and wait; the exit code."""
        machine.podman("kill", "--signal=TERM", self._name)
        return self._podman.wait(PATIENCE)

    def remove(self) -> None:
        """Leave nothing of it."""
        machine.podman("rm", "--force", "--time=0", self._name, check=False)
        self._podman.wait(PATIENCE)


@contextlib.contextmanager
def agent(
    image: str,
    volume: Path,
    environ: Mapping[str, str],
    folder: Path,
    wrap: Callable[[list[str]], list[str]] = list,
) -> Iterator[Agent]:
    """A container as the chart's sidecar, with a page on a free port.

    Args:
        image: its name.
        volume: that it guards.
        environ: what it is told beyond.
        folder: for its log.
        wrap: changes the arguments of ``podman run`` that come before the image.
    """
    (port,) = free_ports(1, system_random())
    told = {**environ, "DS_CKPT_LISTEN": f"127.0.0.1:{port}"}
    arguments = wrap([*rights(of_chart("ds-ckpt-sidecar")), *settings(volume, told)])
    name = f"ds-ckpt-image-{uuid.uuid4().hex[:8]}"
    running = Agent(name, port, folder, [*arguments, image, "agent"])
    try:
        yield running
    finally:
        running.remove()
