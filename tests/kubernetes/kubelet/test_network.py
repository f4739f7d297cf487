"""Pods with addresses, ports and names of their own; and that nothing of them is left."""

from __future__ import annotations

import http.server
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.kubelet.cluster import Cluster, find
from tests.kubernetes.kubelet.pod import Meta
from tests.kubernetes.kubelet.runtime import Podman
from tests.kubernetes.kubelet.shells import HEEDS, IGNORES, answers, exists, server, shell, sidecar

SERVICE = {
    "kind": "Service",
    "metadata": {"name": "nodes"},
    "spec": {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": "train"},
    },
}


def job(main: dict[str, Any], *inits: dict[str, Any], **fields: Any) -> dict[str, Any]:
    spec = {"containers": [main], "initContainers": [*inits], "restartPolicy": "Never", **fields}
    return {
        "kind": "Job",
        "metadata": {"name": "train"},
        "spec": {
            "completionMode": "Indexed",
            "completions": 2,
            "template": {"metadata": {"labels": {"app": "it"}}, "spec": spec},
        },
    }


def fetch(url: str) -> str:
    return (
        "import sys,time,urllib.request as u\n"
        "for _ in range(600):\n"
        f"  try: print(u.urlopen({url}, timeout=2).status, flush=True); break\n"
        "  except OSError as e: print(e, flush=True); time.sleep(.1)\n"
        "else: sys.exit(1)"
    )


@pytest.fixture
def node_server(cluster: Cluster) -> Iterator[http.server.HTTPServer]:
    """A server on the node, as the object store of the scenarios is."""
    address = cluster.network.address, 0
    with http.server.ThreadingHTTPServer(address, http.server.SimpleHTTPRequestHandler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def test_two_pods_of_an_indexed_job_have_the_same_port_and_find_each_other_and_the_node(
    cluster: Cluster, node_server: http.server.HTTPServer
) -> None:
    cluster.names["store.test"] = cluster.network.address
    listens = {**server(8080, startupProbe=answers("/200")), "restartPolicy": "Always"}
    asks = shell("asks", "")
    other = "f'http://train-{1 - int(o.environ[\"JOB_COMPLETION_INDEX\"])}.nodes:8080/200'"
    store = f"'http://store.test:{node_server.server_port}/'"
    asks["command"] = ["python3", "-c", f"import os as o\n{fetch(other)}\ntime.sleep(1000)"]
    node = {**shell("node", ""), "command": ["python3", "-c", fetch(store)]}
    document = job(asks, listens, node, subdomain="nodes")
    cluster.apply([SERVICE, document])
    pods = [cluster.job(find([document], "Job"), index) for index in range(2)]
    for pod in pods:
        pod.until(lambda: "200" in pod.output("asks"), what="an answer of the other")  # noqa: B023
    assert pods[0].address != pods[1].address
    for number, pod in enumerate(pods):
        assert pod.name.startswith(f"train-{number}-")
        assert pod.meta.hostname == f"train-{number}"
        assert pod.field("metadata.annotations['batch.kubernetes.io/job-completion-index']") == str(
            number
        )


def test_a_pod_that_replaces_another_takes_over_its_name_and_starts_with_new_volumes(
    cluster: Cluster,
) -> None:
    mounts = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    document = job(
        shell("main", f"ls /v; touch /v/there; {HEEDS}", **mounts),
        subdomain="nodes",
        volumes=[{"name": "v", "emptyDir": {}}],
    )
    cluster.apply([SERVICE, document])
    other = cluster.job(document, 0)
    first = cluster.job(document, 1)
    first.until(lambda: first.ready, what="the first pod runs")
    other.until(lambda: other.ready, what="the other pod runs")
    other.execute("main", "sh", "-c", f"getent hosts train-1.nodes | grep -w {first.address}")
    first.delete()
    first.wait()
    second = cluster.job(document, 1)
    second.until(lambda: second.ready, what="the second pod runs")
    full = "train-1.nodes.default.svc.cluster.local"
    other.execute("main", "sh", "-c", f"getent hosts {full} | grep -w {second.address}")
    assert second.address != first.address
    assert second.name != first.name
    assert second.output("main") == ""


def test_a_name_is_published_when_its_pod_is_ready_unless_the_service_says_otherwise(
    cluster: Cluster,
) -> None:
    late = {**SERVICE, "metadata": {"name": "late"}}
    late["spec"] = {"clusterIP": "None", "selector": {"app": "it"}}
    cluster.apply([SERVICE, late])
    side = sidecar("side", HEEDS, startupProbe=exists("/up"))
    document = job(shell("main", HEEDS), side, subdomain="nodes")
    pod = cluster.job(document, 0)
    pod.until(lambda: pod.containers["side"].running, what="the sidecar runs")
    names = pod.hosts.read_text()
    assert f"{pod.address} train-0.nodes\n" in names
    assert " late" not in names
    pod.execute("side", "touch", "/up")
    pod.until(lambda: pod.ready, what="all run")
    pod.until(lambda: f"{pod.address} late\n" in pod.hosts.read_text(), what="published")


def left(cluster: Cluster, folder: Path) -> list[str]:
    """Containers, mounts, networks and namespaces of a cluster's pods on this machine."""
    names = cluster.podman("ps", "--all", "--format", "{{.Names}}").split()
    found = [name for name in names if name.split("-")[0] in ("gone", "goes")]
    for command in (["ip", "-o", "link"], ["ip", "netns"], ["cat", "/proc/mounts"]):
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        words = (cluster.network.name, str(folder))
        found += [line for line in lines.splitlines() if any(word in line for word in words)]
    return found


class Oh(Exception):  # noqa: N818
    """A test that fails."""


def fails(cluster: Cluster, folder: Path) -> None:
    """A test that fails in the middle of a deletion."""
    mounts = {"volumeMounts": [{"name": "m", "mountPath": "/m"}]}
    hook = {"preStop": {"exec": {"command": ["sleep", "1000"]}}}
    for name in ("gone-with-all", "goes-with-it"):
        spec = {
            "containers": [shell("main", IGNORES, lifecycle=hook, **mounts)],
            "initContainers": [sidecar("side", IGNORES)],
            "terminationGracePeriodSeconds": 3600,
            "volumes": [{"name": "m", "emptyDir": {"medium": "Memory"}}],
        }
        pod = cluster.pod(Meta(name), spec)
        pod.until(lambda: pod.ready, what="all run")  # noqa: B023
    assert len(left(cluster, folder)) >= 11, "containers, links and namespaces, mounts"
    pod.delete()
    pod.until(lambda: pod.timeline.of("preStop"), what="the deletion has begun")
    raise Oh


def test_nothing_is_left_of_pods_when_a_test_fails_in_the_middle(
    runtime: Podman, tmp_path: Path
) -> None:
    cluster = Cluster(runtime, tmp_path)
    with pytest.raises(Oh), cluster:
        fails(cluster, tmp_path)
    assert left(cluster, tmp_path) == []
    assert not list(tmp_path.glob("*/volumes"))
