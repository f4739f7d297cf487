"""What the live run is made of: two nodes of one run, their store, and who watches them.

Everything is real: DeepSpeed trains with one rank on each node, SeaweedFS stores, Prometheus
scrapes each agent with the labels that a PodMonitor gives, and Alertmanager tells a webhook.
Between agents and store stands a proxy, so that faults can be made.
"""

from __future__ import annotations

import datetime
import http.server
import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ds_ckpt_sidecar.demo.processes import Process, clean_environment
from ds_ckpt_sidecar.demo.s3_server import HOST
from tests.faultproxy import FaultProxy
from tests.observability.live.monitoring import (
    Alertmanager,
    Prometheus,
    Receiver,
    Target,
    port_to_listen_on,
    wait_until,
)
from tests.soak.commands import Commands
from tests.soak.nodes import Agent, Disk, Server, may_mount

NAMESPACE = "training"
RUN = "live"
BUCKET = "live"
URL = f"s3://{BUCKET}/{RUN}"
SAVE_SECONDS = 3.0
KEEP_LAST = 2


class Identity:
    """Gives credentials that expire, as EKS Pod Identity does; when is up to the test."""

    def __init__(self, access_key: str, secret_key: str) -> None:
        self.seconds = 3600.0
        identity = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                now = datetime.datetime.now(datetime.timezone.utc)
                expiry = now + datetime.timedelta(seconds=identity.seconds)
                answer = {
                    "AccessKeyId": access_key,
                    "SecretAccessKey": secret_key,
                    "Token": "",
                    "Expiration": expiry.isoformat(),
                }
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer((HOST, 0), Handler)
        self.url = f"http://{HOST}:{self._server.server_port}/"

    def __enter__(self) -> Identity:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class Node:
    """A volume, its agent, and where that listens."""

    def __init__(self, number: int, disk: Disk, environ: dict[str, str], logs: Path) -> None:
        self.name = f"live-{number}"
        self.disk = disk
        self.port = port_to_listen_on()
        self.agent = Agent(
            self.name,
            [
                *("--volume", str(disk.path), "--destination", URL, "--run-id", RUN),
                *("--rescan-seconds", "0.5", "--part-mib", "5", "--streams", "4"),
                *("--keep-last", str(KEEP_LAST), "--retention-pause", "1"),
                *("--abandon-seconds", "5", "--drain-seconds", "5", "--stall-seconds", "12"),
                *("--listen", f"{HOST}:{self.port}", "--log-format", "json"),
            ],
            environ,
            logs,
        )

    @property
    def labels(self) -> dict[str, str]:
        """Of all that is scraped here."""
        return {"namespace": NAMESPACE, "pod": self.name, "container": "ds-ckpt-sidecar"}

    def page(self, path: str, accept: str = "*/*") -> bytes:
        """What the agent answers."""
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}{path}", headers={"Accept": accept}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read()


class Lab:
    """The whole; made by :func:`lab`."""

    def __init__(self, folder: Path, rules: str, stack: ExitStack) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.gate = folder / "gate"
        for each in (self.logs, self.gate, folder / "server", folder / "volumes"):
            each.mkdir()
        self.server = stack.enter_context(Server(folder / "server"))
        self.server.create_bucket(BUCKET)
        self.proxy = stack.enter_context(FaultProxy(*self.server.address))
        keys = self.server.access_key, self.server.secret_key
        self.identity = stack.enter_context(Identity(*keys))
        self.environ = {
            "DS_CKPT_S3_ENDPOINT": self.proxy.url,
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": self.identity.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
            "OMP_NUM_THREADS": "1",
        }
        small = not may_mount(folder / "volumes")
        self.nodes = []
        for number in range(2):
            disk = Disk(folder / "volumes" / f"live-{number}", small=small)
            disk.make()
            stack.callback(disk.remove)
            node = Node(number, disk, self.environ, self.logs)
            stack.callback(node.agent.leave)
            self.nodes.append(node)
        self.commands = Commands(URL, self.environ, self.logs)
        stack.callback(self.commands.close)
        self._attempt = 0
        self._ranks: list[Process] = []
        stack.callback(self.kill_trainers)
        self.receiver = stack.enter_context(Receiver())
        self.alertmanager = stack.enter_context(
            Alertmanager(folder / "alertmanager", self.receiver.url)
        )
        targets = [Target(f"{HOST}:{node.port}", node.labels) for node in self.nodes]
        self.prometheus = stack.enter_context(
            Prometheus(folder / "prometheus", targets, rules, self.alertmanager)
        )

    def save_every(self, seconds: float) -> None:
        """How often the trainers save, from now on."""
        part = self.gate / ".interval"
        part.write_text(str(seconds))
        part.rename(self.gate / "interval")

    def train(self) -> None:
        """Begin an attempt."""
        self._attempt += 1
        common = {
            **self.environ,
            "DS_CKPT_RUN_ID": RUN,
            "DS_CKPT_DESTINATION": URL,
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(port_to_listen_on()),
            "WORLD_SIZE": str(len(self.nodes)),
            "LOCAL_RANK": "0",
        }
        for rank, node in enumerate(self.nodes):
            arguments = ["-m", "tests.observability.live.trainer", "--gate", str(self.gate)]
            arguments += ["--save-dir", str(node.disk.path)]
            environ = clean_environment({**common, "RANK": str(rank)})
            name = f"trainer-{self._attempt}-{rank}"
            self._ranks.append(Process(name, arguments, environ, self.logs))

    def kill_trainers(self) -> None:
        """SIGKILL to all ranks."""
        for each in self._ranks:
            each.kill()
        self._ranks.clear()

    def check(self) -> None:
        """Raise if a trainer has failed, or an agent that nobody killed."""
        for each in self._ranks:
            each.check()
        for node in self.nodes:
            program = node.agent.program
            if program is not None and program.exit_code() != -signal.SIGKILL:
                program.check()

    def until(self, expression: str, seconds: float, what: str) -> None:
        """Return when Prometheus finds anything by an expression."""

        def found() -> bool:
            self.check()
            return bool(self.prometheus.now(expression))

        wait_until(found, seconds, f"{what} ({expression})")

    def finish_training(self, seconds: float) -> None:
        """Let the trainers end well."""
        (self.gate / "end").touch()

        def ended() -> bool:
            self.check()
            return all(each.exit_code() == 0 for each in self._ranks)

        wait_until(ended, seconds, "the end of the training")


@contextmanager
def lab(folder: Path, rules: str) -> Iterator[Lab]:
    """Set it up in an empty folder, with these rules of alerts; agents and trainers not begun."""
    with ExitStack() as stack:
        yield Lab(folder, rules, stack)
