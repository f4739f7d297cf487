"""A committed checkpoint, stored in parts by a real agent, and what its readers ask the store."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ds_ckpt_hook
from ds_ckpt_hook import remote
from ds_ckpt_store.contract import names
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.faulty import FaultyStore, Rule
from tests.sidecar.handoff import Trainer
from tests.sidecar.test_cli import run

MIB = 1 << 20
PART = 5 * MIB  # the smallest that an agent can be set to


class Watched(FaultyStore):
    """A store that notes which ranges are read of it."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.ranges: list[tuple[str, int, int]] = []

    def read(self, key: str, offset: int, length: int, sink: Any) -> None:
        self.ranges.append((names_in(key), offset, length))
        super().read(key, offset, length, sink)


def url_of(run: str, tag: str) -> str:
    """The URL of the one checkpoint with a tag."""
    (found,) = (each.url for each in ds_ckpt_hook.history(run) if each.tag == tag)
    return found


def names_in(key: str) -> str:
    """The path in the folder of a key."""
    return key.partition("/")[2]


class Shelf:
    """A run in a store of files, and every reader's way to it.

    Attributes:
        url: of the run.
        ranges: read of data since :meth:`forget`, over all readers: path, offset, length.
        script: faults of the store, for all readers that come.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, url: str = "") -> None:
        self.folder = folder
        self.url = url or (folder / "store").as_uri()
        self.script: list[Rule] = []
        self._stores: list[Watched] = []
        self._trainer = Trainer(folder / "volume", seed=1)
        patch.setenv("DS_CKPT_CACHE", str(folder / "cache"))
        patch.setattr(remote, "open_store", self._open)

    def _open(self, url: str) -> Watched:
        store = Watched(open_store(url))
        store.script = self.script
        self._stores.append(store)
        return store

    def save(self, tag: str, files: Mapping[str, bytes], *options: str) -> str:
        """Have it committed by an agent; its URL."""
        self._trainer.save(tag, files)
        options = ("--once", "--part-mib", str(PART // MIB), *options)
        volume = ("--volume", self._trainer.volume.path)
        result = run("agent", *volume, "--destination", self.url, *options)
        assert result.exit_code == 0, result.output
        return url_of(self.url, tag)

    @property
    def ranges(self) -> list[tuple[str, int, int]]:
        return [each for store in self._stores for each in store.ranges]

    def forget(self) -> None:
        self._stores.clear()

    def empty_cache(self) -> None:
        for path in (self.folder / "cache").glob("*-*"):
            path.unlink()

    def object(self, url: str, path: str) -> Path:
        """The file of an object, in a store of files."""
        return self.folder / "store" / url.rpartition("/")[2] / path

    def flip(self, url: str, path: str, offset: int) -> None:
        """Change a bit where it is stored."""
        with self.object(url, path).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))

    def record(self, url: str) -> Path:
        """The file of a checkpoint's record, in a store of files."""
        _, save_id = names.tag_of(url.rpartition("/")[2])
        return self.folder / f"store/.ds_ckpt/checkpoints/{save_id}.json"


def some(size: int, seed: int = 1) -> bytes:
    """Bytes that are nothing in particular."""
    return random.Random(seed).randbytes(size)
