"""What an upload remembers over restarts: a hint, never the truth.

The sidecar's journal implements :class:`UploadLog`; :class:`MemoryUploadLog` serves one process.
Whatever a log forgets or gets wrong costs repeated work, and nothing else.
"""

from __future__ import annotations

from typing import Protocol

from ds_ckpt_store.stores.port import Part, Upload


class UploadLog(Protocol):
    """What is remembered of uploads over restarts. See the module."""

    def upload(self, key: str) -> tuple[Upload, int] | None:
        """The unfinished upload of a key, and its part size in bytes."""

    def begin(self, key: str, upload: Upload, part_size: int) -> None:
        """An upload was begun; it takes the place of an earlier one and of its parts."""

    def parts(self, key: str) -> list[Part]:
        """The parts sent of the unfinished upload."""

    def add_part(self, key: str, part: Part) -> None:
        """A part was sent; it takes the place of an earlier one of that number."""

    def forget(self, key: str) -> None:
        """The upload is over, and nothing of it counts any more."""

    def stored(self, key: str) -> str | None:
        """The version of the object, if it was verified before."""

    def add_stored(self, key: str, version: str) -> None:
        """The object was verified in this version; its upload is over."""


class MemoryUploadLog:
    """A log that lasts as long as the process."""

    def __init__(self) -> None:
        self._uploads: dict[str, tuple[Upload, int]] = {}
        self._parts: dict[str, dict[int, Part]] = {}
        self._stored: dict[str, str] = {}

    def upload(self, key: str) -> tuple[Upload, int] | None:
        """The unfinished upload of a key, and its part size in bytes."""
        return self._uploads.get(key)

    def begin(self, key: str, upload: Upload, part_size: int) -> None:
        """An upload was begun."""
        self._uploads[key] = (upload, part_size)
        self._parts[key] = {}

    def parts(self, key: str) -> list[Part]:
        """The parts sent of the unfinished upload."""
        return list(self._parts.get(key, {}).values())

    def add_part(self, key: str, part: Part) -> None:
        """A part was sent."""
        self._parts.setdefault(key, {})[part.number] = part

    def forget(self, key: str) -> None:
        """The upload is over, and nothing of it counts any more."""
        self._uploads.pop(key, None)
        self._parts.pop(key, None)
        self._stored.pop(key, None)

    def stored(self, key: str) -> str | None:
        """The version of the object, if it was verified before."""
        return self._stored.get(key)

    def add_stored(self, key: str, version: str) -> None:
        """The object was verified in this version; its upload is over."""
        self.forget(key)
        self._stored[key] = version
