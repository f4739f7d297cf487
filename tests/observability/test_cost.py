"""What it costs the agent to be looked at: CPU time of its process, with 1,000 saves behind it."""

from __future__ import annotations

import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ds_ckpt_sidecar.demo.processes import Process, clean_environment
from ds_ckpt_sidecar.demo.s3_server import HOST
from tests.observability.live.monitoring import port_to_listen_on, wait_until
from tests.sidecar.handoff import Trainer

SAVES = 1000
AT_A_TIME = 50
REQUESTS = 100
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@dataclass(frozen=True)
class Watched:
    """An agent at rest, with much on its volume."""

    url: str
    process: psutil.Process

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers={"Accept": OPENMETRICS})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def milliseconds(self, path: str) -> float:
        """CPU time that one request takes, less what the agent uses while nobody asks."""
        self.get(path)  # imports
        before, began = self._used(), time.monotonic()
        for _ in range(REQUESTS):
            self.get(path)
        used, seconds = self._used() - before, time.monotonic() - began
        before = self._used()
        time.sleep(seconds)
        return 1000 * (used - (self._used() - before)) / REQUESTS

    def _used(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("cost")
    trainer = Trainer(folder / "volume", time_ms=int(time.time() * 1000) - SAVES * 1000)
    port = port_to_listen_on()
    (folder / "store").mkdir()
    agent = Process(
        "agent",
        [
            *("-m", "ds_ckpt_sidecar", "agent", "--volume", str(folder / "volume")),
            *("--destination", f"file://{folder}/store", "--keep-local", str(SAVES)),
            *("--listen", f"{HOST}:{port}", "--log-format", "json"),
        ],
        clean_environment({}),
        folder,
    )
    watched = Watched(f"http://{HOST}:{port}", psutil.Process(agent._process.pid))
    try:
        for step in range(SAVES):
            trainer.save(f"step{step}", {"a.pt": 100}, step=step, latest=False)
            if step % AT_A_TIME == AT_A_TIME - 1:
                trainer.say()
                commits_are(step + 1, agent.log)
        yield watched
    finally:
        agent.kill()


def commits_are(count: int, log: Path) -> None:
    """Return when so many saves are committed."""
    wait_until(lambda: log.read_bytes().count(b'"save.committed"') == count, 60, f"{count} commits")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("path", "most"), [("/metrics", 20), ("/status", 100), ("/", 100), ("/healthz", 10)]
)
def test_cpu_of_a_request(watched: Watched, path: str, most: float) -> None:
    taken = watched.milliseconds(path)
    print(f"{path}: {taken:.1f} ms of CPU, {len(watched.get(path))} bytes", file=sys.stderr)
    assert taken < most
