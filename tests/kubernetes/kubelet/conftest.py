"""Pods of tiny shell containers, for tests of the rules by which the scenarios are judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.kubelet.cluster import Cluster
from tests.kubernetes.kubelet.pod import Meta, Pod
from tests.kubernetes.kubelet.runtime import Podman
from tests.kubernetes.tools import machine


@pytest.fixture(scope="session")
def runtime() -> Podman:
    """podman over the project's images."""
    return Podman(environ=machine.environ())


@pytest.fixture
def cluster(runtime: Podman, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(runtime, tmp_path, backoff=0.2) as cluster:
        yield cluster
        print(cluster.timeline)


@pytest.fixture
def run(cluster: Cluster) -> Callable[..., Pod]:
    """Runs a pod: ``run(mains, inits, name="pod", **fields of its spec)``."""

    def run(
        mains: list[dict[str, Any]],
        inits: list[dict[str, Any]] | None = None,
        *,
        meta: Meta | None = None,
        **fields: Any,
    ) -> Pod:
        spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, **fields}
        spec |= {"containers": mains, "initContainers": inits or []}
        return cluster.pod(meta or Meta("pod"), spec)

    return run
