"""The live run, once for all tests that look at it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from tests.observability.expressions import RULES
from tests.observability.live.lab import lab
from tests.observability.live.scaling import at_pace
from tests.observability.live.story import Story, tell


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A run that has ended, with Prometheus and all others still there."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {line}", file=sys.stderr, flush=True)

    with lab(tmp_path_factory.mktemp("live"), at_pace(RULES.read_text())) as made:
        yield tell(made, say)
