"""Prometheus, Alertmanager, and whoever Alertmanager tells: each on a free port of loopback."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ds_ckpt_sidecar.demo.s3_server import HOST, free_ports
from ds_ckpt_store.contract.clock import system_random
from tests.observability.tools.install import BIN

START_SECONDS = 30.0
SCRAPE_SECONDS = 1
POLL_SECONDS = 0.1


def program(name: str) -> str:
    """Path of a program that ``make observability-tools`` has installed."""
    found = BIN / name
    assert found.exists(), f"{found} is missing: run `make observability-tools` first"
    return str(found)


_given: set[int] = set()  # ports, of which nobody may listen yet


def port_to_listen_on() -> int:
    """A free port that nobody else here, nor a connection going out, is given meanwhile."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while (port := free_ports(1, system_random())[0]) >= first or port in _given:
        pass
    _given.add(port)
    return port


def wait_until(done: Callable[[], bool], seconds: float, what: str) -> None:
    """Return when something is so; fail with what it was if it does not come."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what}"
        time.sleep(POLL_SECONDS)


class Service:
    """A program that answers HTTP, from ``__enter__`` to ``__exit__``."""

    def __init__(self, name: str, folder: Path) -> None:
        folder.mkdir()
        self.name = name
        self.folder = folder
        self.port = port_to_listen_on()
        self.url = f"http://{HOST}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def arguments(self) -> list[str]:
        """Its command line, the program left out."""
        raise NotImplementedError

    def __enter__(self):
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [program(self.name), *self.arguments()],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self._is_ready, START_SECONDS, f"{self.name} to answer")
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()  # its data is thrown away
            self._process.wait()

    def _is_ready(self) -> bool:
        assert self._process is not None
        log = self.folder / "log"
        assert self._process.poll() is None, f"{self.name} ended: {log.read_text()[-2000:]}"
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False


class Alertmanager(Service):
    """Tells of each alert at once, and at once when it is over."""

    def __init__(self, folder: Path, webhook: str) -> None:
        super().__init__("alertmanager", folder)
        settings = {
            "route": {
                "receiver": "test",
                "group_by": ["..."],
                "group_wait": "0s",
                "group_interval": "1s",
                "repeat_interval": "1h",
            },
            "receivers": [
                {"name": "test", "webhook_configs": [{"url": webhook, "send_resolved": True}]}
            ],
        }
        (folder / "alertmanager.yml").write_text(json.dumps(settings))  # JSON is YAML too

    def arguments(self) -> list[str]:
        return [
            "--config.file=alertmanager.yml",
            "--storage.path=data",
            f"--web.listen-address={HOST}:{self.port}",
            "--cluster.listen-address=",
        ]


@dataclass(frozen=True)
class Target:
    """What is scraped, with the labels that a PodMonitor gives it."""

    address: str
    labels: Mapping[str, str]


Series = dict[tuple[tuple[str, str], ...], list[tuple[float, float]]]
"""Labels to (seconds since the epoch, value)."""


class Prometheus(Service):
    """Scrapes and judges once a second."""

    def __init__(
        self, folder: Path, targets: Sequence[Target], rules: str, alertmanager: Alertmanager
    ) -> None:
        super().__init__("prometheus", folder)
        settings = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
            },
            "rule_files": ["rules.yaml"],
            "alerting": {
                "alertmanagers": [
                    {"static_configs": [{"targets": [alertmanager.url.removeprefix("http://")]}]}
                ]
            },
            "scrape_configs": [
                {
                    "job_name": "live/ds-ckpt",
                    "static_configs": [
                        {"targets": [each.address], "labels": dict(each.labels)} for each in targets
                    ],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(settings))
        (folder / "rules.yaml").write_text(rules)

    def arguments(self) -> list[str]:
        return [
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address={HOST}:{self.port}",
        ]

    def ask(self, path: str, **parameters: object) -> Any:
        """The data of an API's answer.

        Raises:
            ValueError: Prometheus refuses the question; says why.
        """
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            said = json.load(error)
            raise ValueError(f"{said['errorType']}: {said['error']}") from None

    def now(self, expression: str) -> list[float]:
        """The values of an instant query."""
        return [float(each["value"][1]) for each in self.ask("query", query=expression)["result"]]

    def over(self, expression: str, start: float, end: float, step: float = 1.0) -> Series:
        """The values of a range query."""
        answer = self.ask("query_range", query=expression, start=start, end=end, step=step)
        return {
            tuple(sorted(each["metric"].items())): [
                (when, float(value)) for when, value in each["values"]
            ]
            for each in answer["result"]
        }

    def firing(self, alert: str) -> bool:
        """Whether an alert fires now."""
        return bool(self.now(f'ALERTS{{alertname="{alert}",alertstate="firing"}}'))


@dataclass(frozen=True)
class Told:
    """What the receiver was told of one alert: ``firing`` or ``resolved``, and when that came."""

    when: float
    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


class Receiver:
    """A webhook that remembers, from ``__enter__`` to ``__exit__``."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                for alert in body["alerts"]:
                    receiver.told.append(
                        Told(time.time(), alert["status"], alert["labels"], alert["annotations"])
                    )
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self.url = f"http://{HOST}:{self._server.server_port}/"

    def __enter__(self) -> Receiver:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def heard(self, alert: str, status: str, since: float = 0.0) -> list[Told]:
        """What was told of an alert."""
        return [
            each
            for each in self.told
            if each.labels["alertname"] == alert and each.status == status and each.when >= since
        ]
