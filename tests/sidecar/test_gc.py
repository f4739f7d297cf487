"""``ds-ckpt gc`` as people run it: against a real S3 server and a folder, after real kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ds_ckpt_sidecar.commands import app
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import system_random
from ds_ckpt_store.stores import open_store
from tests import servers
from tests.sidecar.handoff import START_MS, Trainer
from tests.sidecar.test_agent_process import as_nobody
from tests.sidecar.world import agent_process, check_whole, until

MIB = 1 << 20
# Silence in seconds that is short enough for a test, and longer than a store's second.
BRIEF = ("--older-than", "2s", "--lease-stale-seconds", "2")


@dataclass
class Destination:
    """A store under test, and how a process of ours finds it."""

    url: str
    environ: dict[str, str]
    provider: str
    uploads: Callable[[], list[str]]

    def gc(self, *options: str) -> subprocess.CompletedProcess[str]:
        """The real command in a process of its own."""
        code = "from ds_ckpt_sidecar.cli import main\nmain()"
        return subprocess.run(
            [sys.executable, "-c", code, "gc", self.url, *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, **self.environ},
            timeout=120,
        )

    def collected(self, *options: str) -> dict[str, Any]:
        """What one gc says in JSON; in this process, as starting one takes longer than gc does."""
        result = run("gc", self.url, *options, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def until_found(self, kind: str, *options: str) -> dict[str, Any]:
        """Dry runs until one finds something of a kind; what it says."""
        said: list[dict[str, Any]] = []

        def come() -> bool:
            time.sleep(0.5)  # each try costs a client
            said.append(self.collected("--dry-run", *options))
            return said[-1]["counts"][kind] > 0

        until(come)
        return said[-1]

    def agent(self, log: Path, trainer: Trainer, *options: str, program: str = ""):
        settings = ("--part-mib", "5", "--streams", "2", "--lease-stale-seconds", "2", *options)
        return agent_process(
            log, trainer.volume.path, self.url, *settings, environ=self.environ, program=program
        )

    def once(self, trainer: Trainer) -> None:
        """All that a volume holds, stored by an agent in this process."""
        result = run("agent", "--volume", trainer.volume.path, "--destination", self.url, "--once")
        assert result.exit_code == 0, result.output

    def program(self, gate: Path) -> str:
        """Python code that sends three parts, and the rest when a file is there."""
        name = {"s3": "S3Store", "file": "FileStore"}[self.provider]
        return f"""
import os, sys, time
GATE = {os.fspath(gate)!r}
from ds_ckpt_store.stores.{self.provider} import {name}
send = {name}.put_part
sent = []
def put_part(self, *arguments):
    if "probe/" not in arguments[0].key:
        sent.append(arguments)
        {HELD}
    return send(self, *arguments)
{name}.put_part = put_part
"""

    def store(self):
        return open_store(self.url)

    def committed(self) -> list[str]:
        """Tags of all that is committed, each whole."""
        store = self.store()
        records = Catalog(store, system_random()).committed()
        for record in records:
            check_whole(store, record)
        store.close()
        return [record.tag for record in records]


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DS_CKPT_")]:
        monkeypatch.delenv(name)


@pytest.fixture(params=["s3", "file"])
def destination(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Destination:
    if request.param == "file":

        def in_folder() -> list[str]:
            return [path.name for path in (tmp_path / "store/.ds_ckpt-tmp").glob("*.parts")]

        return Destination((tmp_path / "store").as_uri(), {}, "file", in_folder)
    server: servers.S3 = request.getfixturevalue("seaweed")
    monkeypatch.setenv("DS_CKPT_S3_ENDPOINT", server.endpoint)
    bucket, client = server.bucket(), server.client()

    def in_bucket() -> list[str]:
        answer = client.list_multipart_uploads(Bucket=bucket)
        return [upload["Key"] for upload in answer.get("Uploads", ())]

    return Destination(f"s3://{bucket}/run", server.environ, "s3", in_bucket)


HELD = """if len(sent) > 3:
            if len(sent) == 4:
                print('{"event": "held"}', file=sys.stderr, flush=True)
            while not os.path.exists(GATE):
                time.sleep(0.02)"""


NO_DOCTOR = """
import ds_ckpt_sidecar.running
ds_ckpt_sidecar.running.Examiner.store = lambda self: None
"""


def killed_in_mid_upload(destination: Destination, trainer: Trainer, log: Path) -> str:
    """An agent that is killed when some parts are stored, and whose volume is lost; the folder.

    Its doctor, which makes an upload of its own at start, has nothing under way meanwhile.
    """
    manifest = trainer.save("torn", {"large": 21 * MIB, "small": 1000})
    program = NO_DOCTOR + destination.program(log.with_suffix(".gate"))
    with destination.agent(log, trainer, program=program) as agent:
        agent.wait_for("held")
        assert agent.end(signal.SIGKILL) == -signal.SIGKILL
    shutil.rmtree(trainer.volume.path)
    return manifest.folder


def next_attempt(folder: Path, run_id: str = "run") -> Trainer:
    return Trainer(folder, run_id=run_id, time_ms=START_MS + 3_600_000, seed=2)


def test_what_a_kill_in_mid_upload_left_is_found_and_removed_and_the_rest_stays(
    destination: Destination, tmp_path: Path
) -> None:
    folder = killed_in_mid_upload(destination, Trainer(tmp_path / "v1", seed=1), tmp_path / "log1")
    trainer = next_attempt(tmp_path / "v2")
    trainer.save("good", {"large": 11 * MIB, "small": 10})
    trainer.say(finished=True)
    destination.once(trainer)
    assert len(destination.uploads()) == 1

    early = destination.collected("--older-than", "24h")
    assert early["findings"] == []
    assert folder in early["summary"]
    foreseen = destination.until_found("save", *BRIEF)
    assert foreseen["counts"]["upload"] == 1
    assert foreseen["bytes"]["upload"] >= 5 * MIB
    assert len(destination.uploads()) == 1, "a dry run removes nothing"

    result = destination.gc(*BRIEF)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert any(line.startswith(f"gave up save {folder} ") for line in lines)
    assert any(line.startswith(f"aborted unfinished upload {folder}/large ") for line in lines)
    assert "gave up 1 save" in lines[-1]
    assert "aborted 1 unfinished upload" in lines[-1]
    assert "run 'run', which has the lease" in result.stderr
    assert destination.uploads() == []
    store = destination.store()
    assert list(store.list(f"{folder}/")) == []
    store.close()
    assert destination.committed() == ["good"]
    assert destination.collected(*BRIEF)["findings"] == []


def test_of_two_runs_under_one_prefix_each_is_collected_by_itself(
    destination: Destination, tmp_path: Path
) -> None:
    first, second = "of one run", "of the other"
    one = killed_in_mid_upload(
        destination, Trainer(tmp_path / "v1", run_id=first, seed=1), tmp_path / "log1"
    )
    two = killed_in_mid_upload(destination, next_attempt(tmp_path / "v2", second), tmp_path / "log")
    assert len(destination.uploads()) == 2
    destination.until_found("save", *BRIEF)
    mine = destination.collected(*BRIEF)
    assert mine["run_id"] == second, "the lease is that of the run that came last"
    folders = {finding["key"] for finding in mine["findings"] if finding["kind"] == "save"}
    assert folders == {two}
    assert len(destination.uploads()) == 1
    theirs = destination.collected("--run-id", first, *BRIEF)
    folders = {finding["key"] for finding in theirs["findings"] if finding["kind"] == "save"}
    assert folders == {one}
    assert destination.uploads() == []


def test_an_agent_at_work_is_not_disturbed_however_slow_and_however_impatient_gc(
    destination: Destination, tmp_path: Path
) -> None:
    """Also not when a newer attempt has taken over and the lease is no longer renewed by it."""
    trainer, gate = Trainer(tmp_path / "v1", seed=1), tmp_path / "gate"
    slow = trainer.save("slow", {"large": 21 * MIB, "small": 1000})
    later = next_attempt(tmp_path / "v2")
    later.save("later", {"x": 10})
    later.say(finished=True)
    impatient = ("--older-than", "0")
    with destination.agent(tmp_path / "log", trainer, program=destination.program(gate)) as agent:
        agent.wait_for("held")
        said = [destination.collected(*impatient)]
        destination.once(later)
        said += [destination.collected(*impatient), destination.collected(*impatient)]
        gate.touch()
        agent.wait_for("save.committed")
        assert agent.end() == 0
    for each in said:
        assert each["findings"] == []
        assert [left["key"] for left in each["left"]] == [slow.folder]
    assert "newest" in said[0]["left"][0]["reason"]
    assert trainer.node in said[1]["left"][0]["reason"]
    assert sorted(destination.committed()) == ["later", "slow"]
    assert not agent.of("save.delayed")
    assert not agent.of("store.retried")


# ---- the command line


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=environ)


@pytest.fixture
def filled(tmp_path: Path) -> str:
    """A folder with one committed checkpoint of a run that is finished."""
    trainer = Trainer(tmp_path / "volume", seed=1)
    trainer.save("t", {"x": 100})
    trainer.say(finished=True)
    url = (tmp_path / "store").as_uri()
    assert (
        run("agent", "--volume", trainer.volume.path, "--destination", url, "--once").exit_code == 0
    )
    return url


def test_the_url_and_the_run_may_come_from_the_agents_environment(filled: str) -> None:
    result = run("gc", DS_CKPT_DESTINATION=f"{filled}/", DS_CKPT_RUN_ID="run")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert result.stdout == f"gc of run 'run' under {filled}: nothing to collect\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--older-than", "soon"], "--older-than (or DS_CKPT_OLDER_THAN)"),
        (["--older-than=-1"], "--older-than"),
        (["--lease-stale-seconds", "0"], "--lease-stale-seconds"),
        (["--lease-stale-seconds", "nan"], "--lease-stale-seconds"),
    ],
)
def test_wrong_use_is_named_and_nothing_is_done(
    filled: str, arguments: list[str], says: str
) -> None:
    result = run("gc", filled, *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""


def test_a_prefix_that_no_agent_has_used_is_wrong_use_and_is_not_made(tmp_path: Path) -> None:
    for run_id in ((), ("--run-id", "run")):
        result = run("gc", (tmp_path / "typo").as_uri(), *run_id)
        assert result.exit_code == 2
        assert "no lease" in result.stderr
    assert list(tmp_path.iterdir()) == []
    assert run("gc").exit_code == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("2d", 172800), ("24 H", 86400), ("1.5", 1.5), ("3s", 3)]
)
def test_a_time_is_written_as_people_do(
    filled: str, text: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Spy:
        def __init__(self, *_: object, older_than: float, **__: object) -> None:
            seen.append(older_than)
            raise KeyboardInterrupt

    monkeypatch.setattr("ds_ckpt_sidecar.collecting.Collector", Spy)
    result = run("gc", filled, "--older-than", text, "--dry-run")
    assert seen == [seconds]
    assert "interrupted; run it again to continue" in result.stderr


def test_what_nothing_explains_is_reported_and_is_no_failure(filled: str, tmp_path: Path) -> None:
    (tmp_path / "store/notes.txt").write_text("by hand")
    result = run("gc", filled)
    assert result.exit_code == 0
    assert "did not touch notes.txt (1 object, 7 bytes)" in result.stdout
    assert (tmp_path / "store/notes.txt").exists()
    document = json.loads(run("gc", filled, "--json").stdout)
    assert document["counts"]["unexplained"] == 1
    assert document["findings"][0]["bytes"] == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_may_not_be_removed_is_named_and_is_a_failure(filled: str, tmp_path: Path) -> None:
    store = open_store(filled)
    catalog = Catalog(store, system_random())
    (record,) = catalog.committed()
    assert catalog.replace(record, state="deleted", purged=True) is not None
    store.close()
    folder = tmp_path / "store" / record.folder
    for path in tmp_path.parents:
        path.chmod(path.stat().st_mode | stat.S_IXOTH)
    for path in (tmp_path, *tmp_path.rglob("*")):
        path.chmod(0o777)
    folder.chmod(0o755)
    code = f"{as_nobody()}\nfrom ds_ckpt_sidecar.cli import main\nmain()"
    result = subprocess.run(
        [sys.executable, "-c", code, "gc", filled],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1, result.stderr
    assert f"left {record.folder}/x: it could not be removed" in result.stdout
    assert "1 could not be removed" in result.stdout.splitlines()[-1]
    assert (folder / "x").exists()


def test_a_store_that_cannot_decide_is_refused_and_with_leave_only_without_an_agent(
    tmp_path: Path,
) -> None:
    url = f"memory://{tmp_path.name}/run"  # of this process, by fsspec: it has no conditions
    trainer = Trainer(tmp_path / "volume", seed=1)
    trainer.save("t", {"x": 100})
    agent = ("agent", "--volume", trainer.volume.path, "--destination", url, "--once")
    assert run(*agent, "--allow-weak-store").exit_code == 0
    refused = run("gc", url)
    assert refused.exit_code == 1
    assert "--allow-weak-store" in refused.stderr
    at_work = run("gc", url, "--allow-weak-store")
    assert at_work.exit_code == 1
    assert "an agent was at work" in at_work.stderr
    trainer.say(finished=True)
    assert run(*agent, "--allow-weak-store").exit_code == 0
    alone = run("gc", url, "--allow-weak-store")
    assert alone.exit_code == 0, alone.output
    assert "nothing to collect" in alone.stdout
    assert run("gc", url, "--dry-run").exit_code == 0
