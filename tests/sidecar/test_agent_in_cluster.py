"""The agent as a process of its own that reports to a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apiserver import POD, ApiServer
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import agent_process, until

COMMITTED, FAILING, LEFT = (
    "CheckpointCommitted",
    "CheckpointUploadFailing",
    "CheckpointNotDurableAtExit",
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path / "cluster") as server:
        yield server


def test_whoever_does_not_ask_for_reports_does_not_pay_for_the_client() -> None:
    code = (
        "import sys, json\n"
        "import ds_ckpt_sidecar.cli, ds_ckpt_sidecar.running\n"
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] == 'kubernetes']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert json.loads(run.stdout) == []


def in_pod(cluster: ApiServer) -> str:
    """Code that lets a process find its service account elsewhere than in a pod."""
    module = "ds_ckpt_sidecar.observe.kubernetes.reporter"
    return f"import {module} as r\nr.ACCOUNT = {os.fspath(cluster.account)!r}"


def test_an_agent_tells_the_cluster_what_is_durable(
    cluster: ApiServer, trainer: Trainer, tmp_path: Path
) -> None:
    environ = {**cluster.environ, "DS_CKPT_KUBERNETES": "1"}
    url = (tmp_path / "store").as_uri()
    with agent_process(
        tmp_path / "log", trainer.volume.path, url, environ=environ, program=in_pod(cluster)
    ) as agent:
        manifest = trainer.save("global_step10", {"x": 100})
        until(
            lambda: (
                cluster.annotations[POD].get("ds-ckpt.io/last-committed") == "global_step10"
                and cluster.events
            )
        )
        assert agent.end(signal.SIGTERM) == 0
    assert cluster.notes(COMMITTED) == [
        f"global_step10 is durable as {manifest.folder}, saved 2023-11-14T22:13:20Z"
    ]
    assert cluster.reasons() == [COMMITTED]


def test_an_agent_tells_the_cluster_what_it_could_not_store(
    cluster: ApiServer, trainer: Trainer, tmp_path: Path
) -> None:
    environ = {**cluster.environ, "DS_CKPT_KUBERNETES": "1", "DS_CKPT_DRAIN_SECONDS": "1"}
    blocked = tmp_path / "store"
    blocked.write_text("a file where the store's folder should be")
    trainer.save("global_step10", {"x": 100})
    with agent_process(
        tmp_path / "log",
        trainer.volume.path,
        blocked.as_uri(),
        environ=environ,
        program=in_pod(cluster),
    ) as agent:
        agent.wait_for("kubernetes.reports")
        until(lambda: FAILING in cluster.reasons() or agent.process.poll() is not None)
        agent.process.send_signal(signal.SIGTERM)
        agent.process.wait(60)
    (note,) = cluster.notes(LEFT)
    assert ": discovered, " in note
    assert "Not a directory" in note


def test_an_agent_outside_of_a_cluster_says_what_to_do(trainer: Trainer, tmp_path: Path) -> None:
    environ = {"DS_CKPT_KUBERNETES": "1", "KUBERNETES_SERVICE_HOST": ""}
    url = (tmp_path / "store").as_uri()
    with agent_process(tmp_path / "log", trainer.volume.path, url, environ=environ) as agent:
        assert agent.process.wait(60) == 2
    assert "this is no pod of a cluster: leave the setting out here" in agent.output()
