"""Compare-and-swap for a store that can only create: versions as objects of their own.

The protocol swaps a few small objects: lease, pointer, records. Some S3s (Ceph before 19, Swift)
honour If-None-Match but not If-Match. Here every object that is written with a condition is a row
of objects ``.ds_ckpt/versions/<key>/<number>``, each created if absent; the highest number is what
the object holds, and its number is the version token.

Why this is a swap:

- A writer that read version n writes by creating n + 1. Of all who read n, the store lets exactly
  one create it. So a version follows the one that its writer read, without gaps.
- Nothing is ever written over, so what was read under a number stays what it was.
- Old versions are removed only when they are more than :data:`KEPT` below the highest. Whoever
  would create such a number again (a very late request) creates something that is not the highest:
  nobody reads it. The writer is told that it lost, because after its create it lists once more.
- A create whose answer was lost is as ambiguous as any conditional put: the caller reads the
  object, and sees its own nonce or another's.

After a swap the plain key is refreshed, so that any tool finds ``latest`` where it looks. That copy
may be one swap behind if the writer dies in between; here it is read only if there are no versions
(an object that was put without a condition), and then a swap checks its version before it creates
the first number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
from collections.abc import Iterator, Sequence

from ds_ckpt_store.errors import NotFoundError, PreconditionError, StoreError
from ds_ckpt_store.stores.forwarding import Forwarding
from ds_ckpt_store.stores.port import (
    BytesSource,
    Capabilities,
    Condition,
    IfAbsent,
    IfVersion,
    ObjectInfo,
    Part,
    Sink,
    Source,
    Store,
    Upload,
)

VERSIONS = ".ds_ckpt/versions/"
KEPT = 1000
DIGITS = 12


class SwapByCreate(Forwarding):
    """A store with swap, made of one with conditional create.

    Args:
        store: a store that honours :class:`IfAbsent`.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Of the store within, and swap."""
        return dataclasses.replace(self.store.capabilities, swap=True)

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """Passed on."""
        return _plain(self.store.complete(upload, parts))

    # ---- writing

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Create the next version if the condition holds; plain if the key has no versions."""
        numbers = self._numbers(key)
        highest = max(numbers, default=0)
        if condition is None:
            if highest == 0:
                return _plain(self.store.put(key, source))
            return self._put_over(key, source)
        current = str(highest) if highest else self._plain_version(key)
        if isinstance(condition, IfAbsent) and current:
            raise PreconditionError("put", key, "exists")
        if isinstance(condition, IfVersion) and current != condition.version:
            raise PreconditionError(
                "put", key, f"has version {current!r}, not {condition.version!r}"
            )
        info = self._create(key, highest + 1, source)
        with contextlib.suppress(StoreError):  # the next swap prunes what is left
            for number in numbers:
                if number <= highest + 1 - KEPT:
                    self.store.delete(_name(key, number))
        return info

    def _create(self, key: str, number: int, source: Source) -> ObjectInfo:
        try:
            info = self.store.put(_name(key, number), source, condition=IfAbsent())
        except PreconditionError as error:
            raise PreconditionError("put", key, f"version {number} exists") from error
        if number <= self._highest(key) - KEPT:
            raise PreconditionError("put", key, f"version {number} came too late")
        with contextlib.suppress(StoreError):  # the swap is decided; the copy can wait for the next
            self._refresh(key)
        return _numbered(key, number, info)

    def _put_over(self, key: str, source: Source) -> ObjectInfo:
        """Write over whatever version there is."""
        while True:
            with contextlib.suppress(PreconditionError):
                return self._create(key, self._highest(key) + 1, source)

    def _refresh(self, key: str) -> None:
        """Copy the highest version to the plain key, until it is still the highest afterwards."""
        copied = 0
        while (highest := self._highest(key)) > copied:
            data, _ = self.store.get(_name(key, highest))
            self.store.put(key, BytesSource(data))
            copied = highest

    def delete(self, key: str) -> None:
        """Remove the plain copy, then the versions, the highest last, so that none older shows."""
        numbers = self._numbers(key)
        self.store.delete(key)
        for number in sorted(numbers):
            self.store.delete(_name(key, number))

    # ---- reading

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """The highest version."""
        highest = self._highest(key)
        if highest == 0:
            data, info = self.store.get(key)
            return data, _plain(info)
        data, info = self.store.get(_name(key, highest))
        return data, _numbered(key, highest, info)

    def head(self, key: str) -> ObjectInfo:
        """The highest version."""
        highest = self._highest(key)
        if highest == 0:
            return _plain(self.store.head(key))
        return _numbered(key, highest, self.store.head(_name(key, highest)))

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """A range of the highest version."""
        highest = self._highest(key)
        self.store.read(_name(key, highest) if highest else key, offset, length, sink)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects with versions, each once as its highest, and those without."""
        highest: dict[str, ObjectInfo] = {}
        for info in self.store.list(VERSIONS + prefix):
            key, _, number = info.key.removeprefix(VERSIONS).rpartition("/")
            if _is_number(number):
                highest[key] = _numbered(key, int(number), info)
        plain = (
            _plain(info)
            for info in self.store.list(prefix)
            if info.key not in highest and not info.key.startswith(VERSIONS)
        )
        versioned = sorted(highest.values(), key=_order)
        yield from heapq.merge(plain, versioned, key=_order)

    def _highest(self, key: str) -> int:
        return max(self._numbers(key), default=0)

    def _numbers(self, key: str) -> Sequence[int]:
        inside = f"{VERSIONS}{key}/"
        names = (info.key.removeprefix(inside) for info in self.store.list(inside))
        return [int(name) for name in names if _is_number(name)]

    def _plain_version(self, key: str) -> str:
        try:
            return _plain(self.store.head(key)).version
        except NotFoundError:
            return ""


def has_versions(store: Store) -> bool:
    """Whether somebody wrote to this store through :class:`SwapByCreate`: then read through it."""
    return next(store.list(VERSIONS), None) is not None


def _name(key: str, number: int) -> str:
    return f"{VERSIONS}{key}/{number:0{DIGITS}d}"


def _is_number(text: str) -> bool:
    return len(text) == DIGITS and text.isdecimal() and text.isascii()


def _numbered(key: str, number: int, info: ObjectInfo) -> ObjectInfo:
    return dataclasses.replace(info, key=key, version=str(number))


def _plain(info: ObjectInfo) -> ObjectInfo:
    return dataclasses.replace(info, version=f"plain-{info.version}")


def _order(info: ObjectInfo) -> bytes:
    return info.key.encode()
