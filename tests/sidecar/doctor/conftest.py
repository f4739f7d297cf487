from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sidecar.doctor.support import SIDECAR
from tests.sidecar.handoff import Trainer


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("DS_CKPT_") or name == "KUBERNETES_SERVICE_HOST":
            monkeypatch.delenv(name)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """One that every user reaches: each start of pytest closes its own to all others."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        path = Path(folder).resolve()
        path.chmod(0o755)
        yield path


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """As Kubernetes makes an emptyDir for a pod with the sidecar's group as its fsGroup."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user, and give files to one")
    path = tmp_path / "volume"
    path.mkdir()
    os.chown(path, 0, SIDECAR)
    path.chmod(0o2777)
    return path


@pytest.fixture
def trainer(volume: Path) -> Trainer:
    """Runs as root."""
    return Trainer(volume, seed=1)
