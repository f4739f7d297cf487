from __future__ import annotations

from pathlib import Path

import pytest

from tests.hook.reading.stored import Shelf


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """A run that is stored, with an empty cache on this node."""
    return Shelf(tmp_path, monkeypatch)
