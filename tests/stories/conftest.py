from __future__ import annotations

from collections.abc import Iterator

import pytest

from ds_ckpt_sidecar import agent as agents
from tests.sidecar.conftest import trainer, world
from tests.stories.places import Place, Stage, open_place

__all__ = ["trainer", "world"]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The place that a test names by an indirect parameter; else SeaweedFS."""
    with open_place(request, getattr(request, "param", "seaweed")) as place:
        yield place


@pytest.fixture
def stage(place: Place) -> Iterator[Stage]:
    stage = Stage(place)
    yield stage
    stage.close()


@pytest.fixture
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--once`` makes one pass: what fails in it fails in each."""
    monkeypatch.setattr(agents, "ONCE_TRIES", 1)
