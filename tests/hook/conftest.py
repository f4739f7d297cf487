from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hook.standin import end_earlier_attempts


@pytest.fixture(autouse=True)
def _no_heartbeat_outlives_its_test() -> Iterator[None]:
    yield
    end_earlier_attempts()


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[int], list[Path]]:
    """Makes the folders of that many nodes."""

    def make(count: int) -> list[Path]:
        made = [tmp_path / f"node{number}" for number in range(count)]
        for folder in made:
            folder.mkdir(exist_ok=True)
        return made

    return make
