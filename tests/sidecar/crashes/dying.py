"""Parts of an agent that die: decorators that count calls and kill the process at a chosen one.

A call is one use of the store, of the volume's filesystem (where it changes something), or of the
journal. It can be survived before it, after it, and *in* it: between any two system calls that
change a folder or a file, in the middle of a write, and in the middle of a body on its way to a
store. ``SIGKILL`` gives no chance to clean up, so what is left is what a node's crash leaves.

Calls are counted in one thread, so the same run makes the same calls each time.
"""

from __future__ import annotations

import functools
import io
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, BinaryIO

from ds_ckpt_sidecar.journal import Journal
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.stores.port import ObjectInfo, Source, Store

_CHANGES_OF_FOLDERS = ("mkdir", "rmdir", "link", "rename", "replace", "unlink", "utime")
_WRITES = ("write", "pwrite")


@dataclass(frozen=True)
class Point:
    """Where to die: at call ``number``, with ``step`` changes of it made (None: after it)."""

    number: int
    step: int | None


@dataclass
class Call:
    """One call of a run that nobody killed: its kind, its subject, and changes made within it."""

    kind: str
    subject: str
    changes: int = 0

    @property
    def ways(self) -> list[int | None]:
        """To die in it: before each change, the first of which is before the call, and after."""
        return [*range(max(self.changes, 1)), None]


class Fate:
    """Counts calls, and kills the process when its time has come.

    Args:
        point: where to die; None: live, and only count.
    """

    def __init__(self, point: Point | None = None) -> None:
        self.calls: list[Call] = []
        self._point = point
        self.inside = False

    def call(self, kind: str, subject: str, run: Callable[[], Any]) -> Any:
        """Make a call, unless it is the last moment."""
        if self.inside:  # one call that is made of others is one call
            return run()
        self.calls.append(Call(kind, subject))
        if self._point == Point(len(self.calls) - 1, 0):
            die()
        self.inside = True
        try:
            return run()
        finally:
            self.inside = False
            if self._point == Point(len(self.calls) - 1, None):
                die()

    def change(self) -> bool:
        """Called before each change within a call; True if this one is to be cut in the middle."""
        if not self.inside:
            return False
        call = self.calls[-1]
        call.changes += 1
        return self._point == Point(len(self.calls) - 1, call.changes - 1)


def die() -> None:
    """As the kernel's out-of-memory killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def watch_system_calls(fate: Fate) -> None:
    """Count the system calls of this process that change something, and die in the chosen one.

    A folder's change is made or not; a write is made by half.
    """

    def within(name: str, change: Callable[[], Any]) -> Any:
        """A change that no call of a part made is a call of its own."""
        return change() if fate.inside else fate.call(f"os.{name}", "", change)

    def changing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            if fate.change():
                die()
            return function(*args, **kwargs)

        return lambda *args, **kwargs: within(name, lambda: make(*args, **kwargs))

    def writing(name: str, function: Callable[..., int]) -> Callable[..., int]:
        def make(fd: int, data: Any, *rest: int) -> int:
            if fate.change():
                view = memoryview(data)
                function(fd, view[: len(view) // 2], *rest)
                die()
            return function(fd, data, *rest)

        return lambda *args: int(within(name, lambda: make(*args)))

    def copying(function: Callable[..., int]) -> Callable[..., int]:
        def make(source: int, target: int, count: int, *rest: int) -> int:
            if fate.change():
                function(source, target, count // 2, *rest)
                die()
            return function(source, target, count, *rest)

        return lambda *args: int(within("copy_file_range", lambda: make(*args)))

    create = changing("open", os.open)
    system_open = os.open

    def opening(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        return (create if flags & os.O_CREAT else system_open)(path, flags, *args, **kwargs)

    os.open = opening
    for name in _CHANGES_OF_FOLDERS:
        setattr(os, name, changing(name, getattr(os, name)))
    for name in _WRITES:
        setattr(os, name, writing(name, getattr(os, name)))
    os.copy_file_range = copying(os.copy_file_range)


def without_fsync() -> None:
    """Leave out fsync: the kernel survives a kill, so it makes no difference here but in time."""
    os.fsync = os.fdatasync = lambda fd: None  # type: ignore[assignment]


def share_clients() -> None:
    """Let clients of S3 share what boto3 reads from its files: a third of a second each time."""
    import boto3.session

    session = boto3.session.Session()
    session.client("s3", region_name="us-east-1")
    boto3.session.Session = lambda: session  # type: ignore[assignment, misc]


def watch_requests(fate: Fate) -> None:
    """Die in a call of an S3 before any of the requests that it sends."""
    import boto3.session

    def before_send(**_: Any) -> None:
        if fate.change():
            die()

    boto3.session.Session().events.register("before-send.s3", before_send)


class DyingFilesystem(Filesystem):
    """A filesystem whose changes are calls. Reading changes nothing, so it is not counted."""

    def __init__(self, fate: Fate) -> None:
        self._fate = fate


def _counted(name: str) -> Callable[..., Any]:
    function = getattr(Filesystem, name)

    @functools.wraps(function)
    def call(self: DyingFilesystem, *args: Any, **kwargs: Any) -> Any:
        subject = str(args[0]) if args else ""
        return self._fate.call(f"fs.{name}", subject, lambda: function(self, *args, **kwargs))

    return call


for _name in (
    "make_folder",
    "write_atomic",
    "create_exclusive",
    "open_write",
    "link",
    "rename",
    "take_beneath",
    "unlink",
    "remove_folder",
    "remove_tree",
    "sync_folder",
):
    setattr(DyingFilesystem, _name, _counted(_name))


class DyingJournal(Journal):
    """A journal whose writes are calls; SQLite answers for what is within one."""

    fate: Fate

    @classmethod
    def with_fate(cls, fate: Fate) -> type[DyingJournal]:
        """A class whose journals have this fate, as the agent wants to open one itself."""
        return type("Doomed", (cls,), {"fate": fate})

    def _write(self, statement: str, *values: object) -> None:
        self.fate.call(
            "journal.write", statement, lambda: super(DyingJournal, self)._write(statement, *values)
        )


class DyingStore:
    """A store whose every call is counted.

    Args:
        store: the store within.
        fate: counts.
        remote: the store is a server: the body that is sent is what can be cut.
    """

    def __init__(self, store: Store, fate: Fate, *, remote: bool) -> None:
        self._store = store
        self._fate = fate
        self._remote = remote

    def __getattr__(self, name: str) -> Any:
        within = getattr(self._store, name)
        if not callable(within) or name in ("use_proof", "close"):
            return within

        def call(*args: Any, **kwargs: Any) -> Any:
            subject = str(getattr(args[0], "key", args[0])) if args else ""
            if self._remote:
                args = tuple(_CutSource(a, self._fate) if _is_source(a) else a for a in args)
            return self._fate.call(f"store.{name}", subject, lambda: within(*args, **kwargs))

        return call

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._fate.call("store.list", prefix, lambda: tuple(self._store.list(prefix))))

    def uploads(self, prefix: str) -> Iterator[Any]:
        return iter(
            self._fate.call("store.uploads", prefix, lambda: tuple(self._store.uploads(prefix)))
        )


def _is_source(value: object) -> bool:
    return hasattr(value, "crc32c") and hasattr(value, "open")


class _CutSource:
    """A body whose sending can be the last thing that happens: half of it is sent."""

    def __init__(self, source: Source, fate: Fate) -> None:
        self._source = source
        self._fate = fate
        self.size = source.size
        self.crc32c = source.crc32c

    def open(self) -> BinaryIO:
        reader = self._source.open()
        self._fate.change()  # before the first byte: that is before the call
        if self._fate.change():
            return _HalfReader(reader, self.size)  # type: ignore[return-value]
        return reader


class _HalfReader(io.RawIOBase):
    """Gives half of a body; whoever asks for more has asked too much."""

    def __init__(self, reader: BinaryIO, size: int) -> None:
        super().__init__()
        self._reader = reader
        self._half = size // 2
        self._size = size

    def __len__(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._reader.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._reader.seek(offset, whence)

    def read(self, size: int = -1) -> Any:
        if self._reader.tell() >= self._half:
            die()
        return self._reader.read(size)


class Inline(Executor):
    """Runs a job within ``submit``, so that calls come in one order."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class StillClock:
    """A clock that moves only when it is read: a thousandth of a second each time."""

    def __init__(self, start: float) -> None:
        self._now = start

    def time(self) -> float:
        return self.monotonic()

    def monotonic(self) -> float:
        self._now += 0.001
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
