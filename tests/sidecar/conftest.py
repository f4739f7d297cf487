from __future__ import annotations

from pathlib import Path

import pytest

from tests.sidecar.handoff import Trainer
from tests.sidecar.world import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "volume", seed=1)
