"""The agent as a process of its own: signals, users, and a real S3 server."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import system_random
from ds_ckpt_store.stores.file import FileStore
from tests import servers
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import Process, agent_process, check_whole, until

MIB = 1 << 20
NOBODY = 65534


def committed(url: str) -> list[str]:
    store = FileStore.from_url(url)
    records = Catalog(store, system_random()).committed()
    for record in records:
        for key, entry in record.objects():
            assert store.head(key).size == entry.size
    store.close()
    return [record.tag for record in records]


def test_it_works_until_sigterm_and_then_says_that_all_is_done(
    trainer: Trainer, tmp_path: Path
) -> None:
    url = (tmp_path / "store").as_uri()
    with agent_process(tmp_path / "log", trainer.volume.path, url) as agent:
        agent.wait_for("store.probed")
        for tag in ("a", "b"):
            trainer.save(tag, {"x": 100})
        agent.wait_for("save.committed", 2)
        assert agent.end(signal.SIGTERM) == 0
        assert agent.of("agent.stopped")[0]["left"] == 0
    assert committed(url) == ["a", "b"]
    sidecar = trainer.volume.sidecar_status()
    assert sidecar is not None
    assert (sidecar.state, sidecar.backlog_saves) == ("stopped", 0)


LATE = """
import atexit
atexit.register(print, "the interpreter is taken apart", flush=True)
"""


def test_it_ends_when_all_is_closed_without_taking_its_interpreter_apart(
    trainer: Trainer, tmp_path: Path
) -> None:
    """That takes a quarter of a second, and the kubelet may leave it two."""
    url = (tmp_path / "store").as_uri()
    trainer.save("a", {"x": 100})
    with agent_process(tmp_path / "log", trainer.volume.path, url, program=LATE) as agent:
        agent.wait_for("save.committed")
        assert agent.end(signal.SIGTERM) == 0
        assert len(agent.of("agent.stopped")) == 1
        assert "taken apart" not in agent.output()


def test_sigint_ends_it_too(trainer: Trainer, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    with agent_process(tmp_path / "log", trainer.volume.path, url) as agent:
        agent.wait_for("store.probed")
        assert agent.end(signal.SIGINT) == 0


SLOW = """
import time
from ds_ckpt_store.stores.file import FileStore
fast = FileStore.put_part
def slow(self, *arguments):
    time.sleep(0.5)
    return fast(self, *arguments)
FileStore.put_part = slow
"""


def test_sigterm_in_a_backlog_leaves_the_newest_stored_and_the_rest_to_a_later_start(
    trainer: Trainer, tmp_path: Path
) -> None:
    url = (tmp_path / "store").as_uri()
    tags = ("a", "b", "c")
    for tag in tags:
        trainer.save(tag, {"x": 11 * MIB})
    options = ("--part-mib", "5", "--streams", "1")
    with agent_process(tmp_path / "log", trainer.volume.path, url, *options, program=SLOW) as agent:
        agent.wait_for("save.uploading")
        agent.end(signal.SIGTERM)
        first = [line["tag"] for line in agent.of("save.committed")]
    assert first[0] == "c", "the newest goes first after the signal"
    assert committed(url)[-1] == "c"
    with agent_process(tmp_path / "log2", trainer.volume.path, url, "--once") as agent:
        assert agent.process.wait(60) == 0
    assert committed(url) == list(tags)


def test_a_kill_costs_only_a_repetition(trainer: Trainer, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    trainer.save("t", {"x": 21 * MIB})
    options = ("--part-mib", "5", "--streams", "1")
    with agent_process(tmp_path / "log", trainer.volume.path, url, *options, program=SLOW) as agent:
        agent.wait_for("save.uploading")
        agent.end(signal.SIGKILL)
    assert committed(url) == []
    with agent_process(tmp_path / "log2", trainer.volume.path, url, "--once") as agent:
        assert agent.process.wait(60) == 0
    assert committed(url) == ["t"]


# ---- in a pod


def test_at_start_the_doctor_names_what_is_wrong_with_the_store_and_its_remedy(
    trainer: Trainer, tmp_path: Path
) -> None:
    url = (tmp_path / "store").as_uri()
    trainer.say()
    with agent_process(tmp_path / "log", trainer.volume.path, url) as agent:
        agent.wait_for("lease.taken")
        other = Trainer(tmp_path / "other", run_id="other")
        options = ("--run-id", "other")
        with agent_process(tmp_path / "log2", other.volume.path, url, *options) as second:
            second.wait_for("doctor.found")
            until(lambda: any("has the prefix" in x["reason"] for x in second.of("doctor.found")))
            (said,) = [x for x in second.of("doctor.found") if "has the prefix" in x["reason"]]
    assert (said["severity"], said["what"]) == ("error", url)
    assert "use one prefix for each run (DS_CKPT_DESTINATION)" in said["remedy"]


def durable(text: str) -> str:
    return text.partition("\n")[0]


def page_of(agent: Process) -> Callable[[str], tuple[int, str]]:
    address = agent.wait_for("page.listening")["address"]

    def ask(path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(address, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    return ask


def test_a_pods_life_probes_notice_drain_and_termination_message(
    trainer: Trainer, tmp_path: Path
) -> None:
    url, message = (tmp_path / "store").as_uri(), tmp_path / "message"
    options = ("--part-mib", "5", "--streams", "1", "--listen", "127.0.0.1:0")
    options = (*options, "--termination-log", str(message))
    with agent_process(tmp_path / "log", trainer.volume.path, url, *options, program=SLOW) as agent:
        ask = page_of(agent)
        agent.wait_for("store.probed")
        until(lambda: ask("/readyz") == (200, "ok\n"))
        assert ask("/startedz") == (200, "ok\n")
        nothing = "durable: nothing\nnothing to do: every save that was handed over is durable\n"
        until(lambda: message.read_text() == nothing)
        for tag in ("a", "b"):
            trainer.save(tag, {"x": 11 * MIB})
        agent.wait_for("save.uploading")
        assert ask("/prestop") == (200, "ok\n")
        agent.wait_for("agent.noticed")
        assert agent.process.poll() is None
        agent.process.send_signal(signal.SIGTERM)
        agent.wait_for("agent.draining")
        assert ask("/healthz") == (200, "ok\n"), "alive while it drains"
        assert agent.process.wait(60) == 0
        assert [line["tag"] for line in agent.of("save.committed")] == ["b", "a"]
    assert durable(message.read_text()).startswith("durable: b (b@")
    assert "not durable" not in message.read_text()


def test_a_kill_leaves_the_truth_in_the_termination_message(
    trainer: Trainer, tmp_path: Path
) -> None:
    url, message = (tmp_path / "store").as_uri(), tmp_path / "message"
    trainer.save("a", {"x": 100})
    options = ("--part-mib", "5", "--streams", "1", "--termination-log", str(message))
    with agent_process(tmp_path / "log", trainer.volume.path, url, *options, program=SLOW) as agent:
        agent.wait_for("save.committed")
        trainer.save("b", {"x": 26 * MIB})
        until(lambda: "not durable: b: uploading" in message.read_text())
        agent.end(signal.SIGKILL)
    first, second, advice = message.read_text().splitlines()
    assert first.startswith("durable: a (a@")
    assert second.startswith("not durable: b: uploading, ")
    assert advice.startswith("what to do: start the agent on this volume again")


def test_sigterm_twice_is_one_and_a_second_interrupt_ends_it(
    trainer: Trainer, tmp_path: Path
) -> None:
    url, message = (tmp_path / "store").as_uri(), tmp_path / "message"
    trainer.save("a", {"x": 26 * MIB})
    options = ("--part-mib", "5", "--streams", "1", "--termination-log", str(message))
    with agent_process(tmp_path / "log", trainer.volume.path, url, *options, program=SLOW) as agent:
        agent.wait_for("save.uploading")
        agent.process.send_signal(signal.SIGTERM)
        agent.wait_for("agent.draining")
        assert agent.end(signal.SIGTERM) == 0
    assert committed(url) == ["a"]
    trainer.save("b", {"x": 26 * MIB})
    with agent_process(
        tmp_path / "log2", trainer.volume.path, url, *options, program=SLOW
    ) as agent:
        agent.wait_for("save.uploading")
        agent.process.send_signal(signal.SIGINT)
        agent.wait_for("agent.draining")
        assert agent.end(signal.SIGINT) == 1
        assert "interrupted again" in agent.output()
    assert "not durable: b: " in message.read_text()


EARLY = """
import os, signal, ds_ckpt_sidecar.running as running
real = running.open_store
def early(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    return real(*arguments, **options)
running.open_store = early
"""


def test_sigterm_while_it_starts_is_heeded_once_it_can_be(trainer: Trainer, tmp_path: Path) -> None:
    """As the first process of a container it would lose the signal, and be killed much later."""
    url = (tmp_path / "store").as_uri()
    trainer.save("a", {"x": 100})
    with agent_process(tmp_path / "log", trainer.volume.path, url, program=EARLY) as agent:
        assert agent.process.wait(60) == 0
        assert len(agent.of("agent.draining")) == 1
    assert committed(url) == ["a"]


def test_a_plain_container_ends_with_the_training(trainer: Trainer, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    trainer.say(finished=True)  # of an attempt before
    options = ("--exit-when-finished",)
    with agent_process(tmp_path / "log", trainer.volume.path, url, *options) as agent:
        agent.wait_for("store.probed")
        trainer.say()
        trainer.save("a", {"x": 100})
        agent.wait_for("save.committed")
        assert agent.process.poll() is None
        trainer.say(finished=True)
        assert agent.process.wait(60) == 0
        assert agent.of("trainer.over")[0]["how"] == "finished"
    assert committed(url) == ["a"]


def test_a_wrong_setting_stands_in_the_termination_message(
    trainer: Trainer, tmp_path: Path
) -> None:
    message = tmp_path / "message"
    environ = {"DS_CKPT_TERMINATION_LOG": str(message), "DS_CKPT_STREAMS": "many"}
    url = (tmp_path / "store").as_uri()
    with agent_process(tmp_path / "log", trainer.volume.path, url, environ=environ) as agent:
        assert agent.process.wait(60) == 2
    first, advice = message.read_text().splitlines()
    assert first == "durable: unknown, the agent has not begun"
    assert advice.startswith("what to do: ")
    assert "DS_CKPT_STREAMS" in advice


def test_a_port_that_is_taken_stands_in_the_termination_message(
    trainer: Trainer, tmp_path: Path
) -> None:
    message, url = tmp_path / "message", (tmp_path / "store").as_uri()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ("--listen", listen, "--termination-log", str(message))
        with agent_process(tmp_path / "log", trainer.volume.path, url, *options) as agent:
            assert agent.process.wait(60) == 2
    assert f"{listen}: Address already in use" in message.read_text()


# ---- another user


def as_nobody() -> str:
    """Become another user once all is imported: the interpreter may lie where only root reads."""
    needed = "ds_ckpt_sidecar.commands, ds_ckpt_store.stores.file, watchdog.observers"
    become = f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})"
    return f"import os, {needed}, watchdog.events\n{become}"


def for_everybody(tmp_path: Path, trainer: Trainer) -> str:
    """Let another user reach the folders, write ours, and make the store; the store's URL."""
    for path in [*reversed(tmp_path.parents), tmp_path]:
        if path.stat().st_mode & stat.S_IXOTH == 0:
            path.chmod(path.stat().st_mode | stat.S_IXOTH)
    os.chmod(trainer.volume.path, 0o777)
    for folder, _, files in os.walk(trainer.volume.own):
        os.chmod(folder, 0o777)
        for file in files:
            os.chmod(f"{folder}/{file}", 0o666)
    (tmp_path / "store").mkdir()
    os.chmod(tmp_path / "store", 0o777)
    return (tmp_path / "store").as_uri()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_shard_of_another_user_is_named_with_the_remedy_and_healed_by_chmod(
    trainer: Trainer, tmp_path: Path
) -> None:
    manifest = trainer.save("t", {"x": 100, "y": 100})
    shard = Path(trainer.folder(manifest)) / "x"
    url = for_everybody(tmp_path, trainer)
    shard.chmod(0o600)
    with agent_process(tmp_path / "log", trainer.volume.path, url, program=as_nobody()) as agent:
        said = agent.wait_for("save.delayed")
        assert said["kind"] == "ShardUnreadableError"
        assert f"links/{manifest.save_id}/x" in said["error"]
        for fact in ("mode 0600 of uid 0", f"uid {NOBODY}", "group-readable", "same user"):
            assert fact in said["error"]
        assert "next_try_seconds" in said
        until(lambda: "mode 0600" in trainer.volume.save_status(manifest.save_id).reason)
        good = trainer.save("good", {"z": 10}, latest=False)
        for path in (Path(trainer.volume.outbox) / good.file_name,):
            path.chmod(0o644)
        agent.wait_for("save.committed")
        assert committed(url) == ["good"], "it holds up no other"
        shard.chmod(0o644)
        agent.wait_for("save.committed", 2)
    assert committed(url) == ["t", "good"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_volume_that_may_not_be_written_is_named_with_user_and_remedy(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.save("t", {"x": 100})
    url = for_everybody(tmp_path, trainer)
    os.chmod(trainer.volume.own, 0o755)
    Path(trainer.volume.lock).unlink(missing_ok=True)
    with agent_process(
        tmp_path / "log", trainer.volume.path, url, "--once", program=as_nobody()
    ) as agent:
        assert agent.process.wait(60) == 2
        text = agent.output()
    assert trainer.volume.own in text
    assert f"uid {NOBODY}" in text
    assert "same user" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_at_start_it_says_which_paths_it_cannot_clean(trainer: Trainer, tmp_path: Path) -> None:
    url = for_everybody(tmp_path, trainer)
    os.chmod(trainer.volume.links, 0o755)
    with agent_process(tmp_path / "log", trainer.volume.path, url, program=as_nobody()) as agent:
        agent.wait_for("doctor.found")
        until(lambda: trainer.volume.links in [line["what"] for line in agent.of("doctor.found")])
        (said,) = [
            line for line in agent.of("doctor.found") if line["what"] == trainer.volume.links
        ]
        assert f"uid {NOBODY}" in said["reason"]
        assert said["remedy"]


# ---- S3


def s3_agent(
    log: Path, trainer: Trainer, server: servers.S3, url: str, *options: str, **environ: str
):
    return agent_process(
        log, trainer.volume.path, url, *options, environ={**server.environ, **environ}
    )


def check_s3(server: servers.S3, bucket: str, tags: list[str]) -> None:
    store = server.store(bucket)
    records = Catalog(store, system_random()).committed()
    assert [record.tag for record in records] == tags
    for record in records:
        check_whole(store, record)
    store.close()


def said_unavailable(agent: Process) -> str:
    line = agent.wait_for("store.unavailable")
    assert "next_try_seconds" in line
    return str(line["error"])


def test_a_bucket_that_does_not_exist_is_named_and_waited_for(
    trainer: Trainer, seaweed: servers.S3, tmp_path: Path
) -> None:
    trainer.save("t", {"x": 6 * MIB, "y": 10})
    name = f"late-{os.urandom(6).hex()}"
    with s3_agent(tmp_path / "log", trainer, seaweed, f"s3://{name}/run") as agent:
        assert name in said_unavailable(agent)
        seaweed.client().create_bucket(Bucket=name)
        agent.wait_for("save.committed")
        assert agent.end() == 0
    check_s3(seaweed, name, ["t"])


def test_wrong_credentials_are_named_with_the_remedy(
    trainer: Trainer, seaweed: servers.S3, tmp_path: Path
) -> None:
    trainer.save("t", {"x": 10})
    bucket = seaweed.bucket()
    wrong = {"AWS_SECRET_ACCESS_KEY": "not the key"}
    with s3_agent(tmp_path / "log", trainer, seaweed, f"s3://{bucket}/run", **wrong) as agent:
        text = said_unavailable(agent)
        assert bucket in text
        assert "check AWS_SECRET_ACCESS_KEY" in text
        assert agent.end() == 1


class Door:
    """An address where nobody answers until it is opened; then it leads to a server."""

    def __init__(self, endpoint: str) -> None:
        self._target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))  # and nobody listens
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def open(self) -> None:
        self._socket.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, outer = self._socket.accept()[0], socket.create_connection(self._target)
                for pair in ((inner, outer), (outer, inner)):
                    threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_a_server_that_is_down_at_start_is_named_and_waited_for(
    trainer: Trainer, seaweed: servers.S3, tmp_path: Path
) -> None:
    trainer.save("t", {"x": 10})
    bucket = seaweed.bucket()
    door = Door(seaweed.endpoint)
    behind = servers.S3(f"http://{door.address}", seaweed.access_key, seaweed.secret_key)
    with s3_agent(tmp_path / "log", trainer, behind, f"s3://{bucket}/run") as agent:
        assert door.address in said_unavailable(agent)
        door.open()
        agent.wait_for("save.committed")
        assert agent.end() == 0
    door.close()
    check_s3(seaweed, bucket, ["t"])


def test_a_store_that_answers_nothing_does_not_keep_it_from_ending(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.save("t", {"x": 100})
    message = tmp_path / "message"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        environ = {
            "DS_CKPT_S3_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with agent_process(
            tmp_path / "log",
            trainer.volume.path,
            "s3://bucket/run",
            "--drain-seconds",
            "0.5",
            "--termination-log",
            str(message),
            environ=environ,
        ) as agent:
            agent.wait_for("agent.started")
            connection, _ = silent.accept()
            with connection:
                # One request alone would be waited for longer than this.
                assert agent.end(signal.SIGTERM) == 1
            assert "A later start continues" in agent.output()
    assert message.read_text().splitlines()[0] == "durable: unknown: the store has not answered yet"
