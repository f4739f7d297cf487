from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.store.transfer.support import Scene


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ThreadPoolExecutor(4) as executor:
        yield Scene(tmp_path, executor)
