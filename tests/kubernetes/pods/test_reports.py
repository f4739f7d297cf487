"""What the cluster is told, with the rights and the token that the chart gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import apiserver
from tests.kubernetes.pods.link import Link
from tests.kubernetes.pods.scene import MIB, NAMESPACE, SIDECAR, TRAINER, Scene

COMMITTED, LEFT = "CheckpointCommitted", "CheckpointNotDurableAtExit"
LAST = "ds-ckpt.io/last-committed"


@pytest.fixture
def api(scene: Scene, tmp_path: Path) -> Iterator[apiserver.ApiServer]:
    """The API server of the scene's cluster."""
    assert apiserver.NAMESPACE == NAMESPACE
    node = scene.cluster.network.address
    with (
        apiserver.ApiServer(tmp_path / "api", [node]) as api,
        Link(node, (apiserver.HOST, api.port)) as link,
    ):
        scene.cluster.services |= {
            "KUBERNETES_SERVICE_HOST": node,
            "KUBERNETES_SERVICE_PORT": str(link.port),
        }
        scene.cluster.token = (api.account / "token").read_text()
        authority = {"ca.crt": (api.account / "ca.crt").read_text()}
        name = {"name": "kube-root-ca.crt"}
        scene.cluster.apply([{"kind": "ConfigMap", "metadata": name, "data": authority}])
        yield api


def test_the_cluster_is_told_what_is_durable_and_at_the_end_what_is_not(
    scene: Scene, api: apiserver.ApiServer
) -> None:
    scene.install(kubernetesReports={"enabled": True}, pod={"terminationGracePeriodSeconds": 15})
    pod = scene.pod()
    api.pods[pod.name], api.annotations[pod.name] = pod.meta.uid, {}
    scene.go(2)
    pod.until(lambda: api.notes(COMMITTED), what="an event")
    pod.until(lambda: LAST in api.annotations[pod.name], what="an annotation")
    assert api.notes(COMMITTED)[0].startswith("step2 is durable")
    assert api.annotations[pod.name][LAST].startswith("step2")

    scene.link.limit(MIB // 16)
    scene.go(4)
    scene.until_logged(pod, "save.uploading", tag="step4")
    pod.delete()
    pod.wait()
    assert pod.containers[SIDECAR].last.exit_code == 1
    assert pod.containers[TRAINER].last.exit_code == 143
    assert scene.check() == ["step2"]
    assert set(scene.check_last_message(pod).not_durable) == {"step4"}
    (note,) = api.notes(LEFT)
    assert "step4" in note
