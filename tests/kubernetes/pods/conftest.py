"""The rendered pod with a real trainer, the real sidecar and a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import servers
from tests.kubernetes.kubelet.cluster import Cluster
from tests.kubernetes.kubelet.runtime import Podman
from tests.kubernetes.pods.link import Link
from tests.kubernetes.pods.scene import NAMESPACE, Parts, Scene, lent
from tests.kubernetes.tools import machine

TIMELINES = machine.TOOLS / "timelines"


@pytest.fixture(scope="session")
def parts(image: str, trainer_image: str, trainer_mounts: list[str], trainer_python: str) -> Parts:
    return Parts(image, trainer_image, lent(trainer_mounts), trainer_python)


@pytest.fixture
def scene(
    parts: Parts, seaweed: servers.S3, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Scene]:
    """A release that is not installed yet; its timeline is kept for people."""
    runtime = Podman(environ=machine.environ())
    target = urlsplit(seaweed.endpoint)
    address = str(target.hostname), int(target.port or 0)
    with (
        Cluster(runtime, tmp_path / "cluster", namespace=NAMESPACE) as cluster,
        Link(cluster.network.address, address) as link,
    ):
        scene = Scene(cluster, link, seaweed, parts, tmp_path)
        yield scene
        scene.note_what_was_said()
        story = f"{request.node.name.removeprefix('test_')}\n\n{scene.timeline}\n"
        TIMELINES.mkdir(exist_ok=True)
        (TIMELINES / f"{request.node.name}.txt").write_text(story)
        print(story)
