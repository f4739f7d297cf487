"""A store that fails by script, for tests and simulation. Nothing that ships builds one.

It wraps a real store and applies rules to chosen calls: an error before the call, an answer lost
after it, a write that lands later, a byte flipped on its way in or out, a read that breaks off.
It also records every call, so that a story can say what was, and was not, asked of the store.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal, TypeVar

from ds_ckpt_store.errors import AmbiguousError, StoreError, TransientError
from ds_ckpt_store.stores.forwarding import Forwarding
from ds_ckpt_store.stores.port import (
    BytesSource,
    Condition,
    ObjectInfo,
    Part,
    Proof,
    Sink,
    Source,
    Store,
    Upload,
)

Fault = Literal["fail-before", "fail-after", "late", "corrupt", "truncate", "call"]
ResultT = TypeVar("ResultT")


@dataclass
class Rule:
    """One fault.

    Attributes:
        operation: the port's method, or ``*``.
        what: ``fail-before`` raises without applying; ``fail-after`` applies, then loses the
            answer; ``late`` loses the answer and applies at :meth:`FaultyStore.apply_late`;
            ``corrupt`` flips a byte of a body sent, or of data read; ``truncate`` breaks a
            ``read`` off in its middle; ``call`` runs ``action`` first, then goes on.
        key: regular expression, searched in the key.
        error: made from (operation, key, answer) for ``fail-before`` and ``fail-after``; None
            for :class:`TransientError` and :class:`AmbiguousError`.
        action: for ``call``.
        skip: matching calls to leave alone first.
        count: matching calls to strike after those; None for all.
    """

    operation: str
    what: Fault
    key: str = ""
    error: Callable[[str, str, str], Exception] | None = None
    action: Callable[[], None] | None = None
    skip: int = 0
    count: int | None = 1

    def strikes(self, operation: str, key: str) -> bool:
        """Whether this call is struck; counts it if it matches."""
        if self.operation not in ("*", operation) or not re.search(self.key, key):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.count is None:
            return True
        self.count -= 1
        return self.count >= 0


@dataclass(frozen=True)
class Call:
    """One call as it was made; ``number`` is the part's, else 0."""

    operation: str
    key: str
    number: int = 0


def _flip(data: bytes | memoryview) -> bytes:
    """The same with another last byte; nothing stays nothing."""
    return bytes(data[:-1]) + bytes(byte ^ 1 for byte in data[-1:])


class _FlippedSource:
    """Announces the right checksum and sends one wrong byte."""

    def __init__(self, source: Source) -> None:
        self.size = source.size
        self.crc32c = source.crc32c
        self._source = source

    def open(self) -> BinaryIO:
        return BytesSource(_flip(_body(self._source))).open()


class _Captured(BytesSource):
    """A body kept for later, with the checksum that was announced."""

    def __init__(self, source: Source) -> None:
        super().__init__(_body(source))
        self.crc32c = source.crc32c


def _body(source: Source) -> bytes:
    with source.open() as reader:
        return b"".join(iter(lambda: bytes(reader.read(1 << 20)), b""))


class FaultyStore(Forwarding):
    """A store with scripted faults.

    Args:
        store: the store underneath.
        script: rules; the first that strikes a call decides, and rules may be added later.
    """

    def __init__(self, store: Store, script: Iterable[Rule] = ()) -> None:
        super().__init__(store)
        self.script = list(script)
        self.calls: list[Call] = []
        self._late: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def asked(self, operation: str, key: str = "") -> list[Call]:
        """The calls of one operation whose key matches a regular expression."""
        with self._lock:
            return [
                call
                for call in self.calls
                if call.operation == operation and re.search(key, call.key)
            ]

    def apply_late(self) -> int:
        """Let the writes land whose answers were lost; how many. Their errors are nobody's."""
        with self._lock:
            pending, self._late = self._late, []
        for apply in pending:
            with contextlib.suppress(StoreError):
                apply()
        return len(pending)

    def _strike(self, operation: str, key: str, number: int = 0) -> Rule | None:
        with self._lock:
            self.calls.append(Call(operation, key, number))
            for rule in self.script:
                if rule.strikes(operation, key):
                    return rule
        return None

    def _run(
        self, operation: str, key: str, rule: Rule | None, apply: Callable[[], ResultT]
    ) -> ResultT:
        if rule is None:
            return apply()
        if rule.what == "fail-before":
            raise (rule.error or TransientError)(operation, key, "scripted fault, not applied")
        if rule.what == "late":
            with self._lock:
                self._late.append(apply)
            raise AmbiguousError(operation, key, "scripted fault, applied later")
        if rule.what == "call" and rule.action is not None:
            rule.action()
        result = apply()
        if rule.what == "fail-after":
            raise (rule.error or AmbiguousError)(operation, key, "scripted fault, answer lost")
        return result

    def _source(self, rule: Rule | None, source: Source) -> Source:
        if rule is not None and rule.what == "corrupt":
            return _FlippedSource(source)
        if rule is not None and rule.what == "late":
            return _Captured(source)
        return source

    # ---- the port

    def refuses_corruption(self, proof: Proof, key: str) -> bool:
        """Passed on."""
        rule = self._strike("refuses_corruption", key)
        return self._run(
            "refuses_corruption", key, rule, lambda: self.store.refuses_corruption(proof, key)
        )

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Passed on, unless struck."""
        rule = self._strike("put", key)
        body = self._source(rule, source)
        return self._run("put", key, rule, lambda: self.store.put(key, body, condition=condition))

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Passed on, unless struck."""
        rule = self._strike("get", key)
        data, info = self._run("get", key, rule, lambda: self.store.get(key))
        if rule is not None and rule.what == "corrupt":
            data = _flip(data)
        return data, info

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """Passed on, unless struck."""
        rule = self._strike("read", key)
        if rule is not None and rule.what == "truncate":
            self.store.read(key, offset, length // 2, sink)
            raise TransientError("read", key, f"scripted fault: {length // 2} of {length} bytes")

        def flipped(view: memoryview) -> None:
            sink(memoryview(_flip(view)))

        target = flipped if rule is not None and rule.what == "corrupt" else sink
        self._run("read", key, rule, lambda: self.store.read(key, offset, length, target))

    def head(self, key: str) -> ObjectInfo:
        """Passed on, unless struck."""
        rule = self._strike("head", key)
        return self._run("head", key, rule, lambda: self.store.head(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Passed on, unless struck."""
        rule = self._strike("list", prefix)
        return self._run("list", prefix, rule, lambda: self.store.list(prefix))

    def delete(self, key: str) -> None:
        """Passed on, unless struck."""
        rule = self._strike("delete", key)
        self._run("delete", key, rule, lambda: self.store.delete(key))

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """Passed on, unless struck."""
        rule = self._strike("begin", key)
        return self._run("begin", key, rule, lambda: self.store.begin(key, size, metadata))

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        """Passed on, unless struck."""
        rule = self._strike("put_part", upload.key, number)
        body = self._source(rule, source)
        return self._run(
            "put_part", upload.key, rule, lambda: self.store.put_part(upload, number, body)
        )

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """Passed on, unless struck."""
        rule = self._strike("parts", upload.key)
        return self._run("parts", upload.key, rule, lambda: self.store.parts(upload))

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """Passed on, unless struck."""
        rule = self._strike("complete", upload.key)
        return self._run("complete", upload.key, rule, lambda: self.store.complete(upload, parts))

    def abort(self, upload: Upload) -> None:
        """Passed on, unless struck."""
        rule = self._strike("abort", upload.key)
        self._run("abort", upload.key, rule, lambda: self.store.abort(upload))

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Passed on, unless struck."""
        rule = self._strike("uploads", prefix)
        return self._run("uploads", prefix, rule, lambda: self.store.uploads(prefix))
