"""Images and podman for tests that run containers."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.kubernetes.tools import machine

Podman = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def podman() -> Podman:
    """Runs podman with the project's settings: ``podman("run", ..., check=True, timeout=120)``."""
    return machine.podman


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Of several processes of tests one builds, and the others find it built."""
    with (machine.TOOLS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def image() -> str:
    """Name of the sidecar's image, built from the ``Dockerfile``."""
    with _alone():
        return machine.build_sidecar()


@pytest.fixture(scope="session")
def trainer_image() -> str:
    """Name of an image that trains with ``trainer_mounts`` and ``trainer_python``."""
    with _alone():
        return machine.build_trainer()


@pytest.fixture(scope="session")
def trainer_mounts() -> list[str]:
    """Arguments of podman that lend a container torch, DeepSpeed and this project, read-only."""
    return machine.trainer_mounts()


@pytest.fixture(scope="session")
def trainer_python() -> str:
    """The interpreter to run in such a container."""
    return sys.executable
