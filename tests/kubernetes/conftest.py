"""Images and podman for tests that run containers."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.kubernetes.tools import machine

Podman = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def podman() -> Podman:
    """Runs podman with the project's settings: ``podman("run", ..., check=True, timeout=120)``."""
    return machine.podman


def _once(build: Callable[[], str], factory: pytest.TempPathFactory) -> str:
    """Of the processes of a run one builds, and all use what it has built."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all processes
    built = folder / f"{build.__name__}.image"
    with (machine.TOOLS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            name = build()
            built.write_text(name)
        return built.read_text()


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of the sidecar's image, built from the ``Dockerfile``; the same for all of a run."""
    return _once(machine.build_sidecar, tmp_path_factory)


@pytest.fixture(scope="session")
def trainer_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of an image that trains with ``trainer_mounts`` and ``trainer_python``."""
    return _once(machine.build_trainer, tmp_path_factory)


@pytest.fixture(scope="session")
def trainer_mounts() -> list[str]:
    """Arguments of podman that lend a container torch, DeepSpeed and this project, read-only."""
    return machine.trainer_mounts()


@pytest.fixture(scope="session")
def trainer_python() -> str:
    """The interpreter to run in such a container."""
    return sys.executable
