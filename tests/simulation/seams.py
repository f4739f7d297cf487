"""All that is swapped in the real modules. What is not named here runs as it does in production.

* threads, events, locks, conditions and queues: greenlets of the simulated process;
* executors: a job runs within ``submit``;
* ids that the system's randomness makes: the run's own;
* the journal's database: in memory, as long as its volume lives;
* the probe of the store, whose many calls would be most of each run: its findings;
* notifications of the outbox, and the URL by which the hook opens a store: the world's;
* reading a document: one that was read before is remembered;
* how often hook and agent look and beat: seldom, since each look costs a moment of the real world.
"""

from __future__ import annotations

import contextlib
import queue as real_queue
import random
import sqlite3
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any
from unittest import mock

import ds_ckpt_hook.feedback
import ds_ckpt_hook.local
import ds_ckpt_hook.publishing
import ds_ckpt_hook.remote
import ds_ckpt_hook.session
import ds_ckpt_sidecar.agent
import ds_ckpt_sidecar.limits
import ds_ckpt_sidecar.observe.report
import ds_ckpt_store.catalog
import ds_ckpt_store.contract.volume
from ds_ckpt_sidecar.journal import Journal
from ds_ckpt_store.contract import manifest
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.probe import Findings
from tests.simulation.kernel import Kernel, Process, Task


def here() -> Process:
    """The process that is running."""
    task = Kernel.current.running
    if task is None or task.process is None:
        raise AssertionError("no process is running")
    return task.process


# ---- threads


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            Kernel.current.wake(task)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        process = here()
        process.step("wait")
        if not self._set:
            task = process.kernel.running
            if task is None:
                raise AssertionError("only a thread can wait")
            self._waiting.append(task)
            process.kernel.park(timeout)
            if task in self._waiting:
                self._waiting.remove(task)
            process.step("woken")
        return self._set


class Lock:
    def __init__(self) -> None:
        self._holder: Task | None = None
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        kernel = Kernel.current
        task = kernel.running
        if task is None:
            raise AssertionError("only a thread can lock")
        while self._holder is not None and not self._holder.ended:
            self._waiting.append(task)
            kernel.park(None)
        self._holder = task
        return True

    def __exit__(self, *_: object) -> None:
        self._holder = None
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            if not task.ended:
                Kernel.current.wake(task)


class Condition(Lock):
    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        process = here()
        kernel = process.kernel
        until = None if timeout is None else kernel.now + timeout
        while not predicate():
            left = None if until is None else until - kernel.now
            if left is not None and left <= 0:
                return False
            self.__exit__()
            process.step("wait")
            process.wait(min(1.0, left) if left is not None else 1.0)
            self.__enter__()
        return True

    def notify_all(self) -> None:
        """Who waits looks by itself."""


class Thread:
    def __init__(self, target: Callable[[], None], name: str = "", daemon: bool = False) -> None:
        self._target = target
        self._task: Task | None = None

    def start(self) -> None:
        self._task = here().spawn(self._target)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        process = here()
        while self.is_alive():
            process.step("join")
            process.wait(0.1)


class Queue:
    def __init__(self) -> None:
        self._items: list[Any] = []
        self._filled = Event()

    def __class_getitem__(cls, _: object) -> type[Queue]:
        return cls

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._filled.set()

    def get(self, timeout: float | None = None) -> Any:
        while not self._items:
            self._filled.clear()
            if not self._filled.wait(timeout) and timeout is not None:
                raise real_queue.Empty
        return self._items.pop(0)


THREADING = types.SimpleNamespace(Event=Event, Lock=Lock, Condition=Condition, Thread=Thread)
QUEUE = types.SimpleNamespace(Queue=Queue, Empty=real_queue.Empty)
ATEXIT = types.SimpleNamespace(register=lambda *_: None)


class Inline(Executor):
    """Runs a job within ``submit``, so that everything happens in one order."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Iterator[Any]:
        return iter([fn(*each) for each in zip(*iterables, strict=False)])

    def shutdown(self, *_: object, **__: object) -> None:
        pass


# ---- ids


class _Uuid:
    def __init__(self, rng: random.Random) -> None:
        self.hex = f"{rng.getrandbits(128):032x}"


UUID = types.SimpleNamespace(uuid4=lambda: _Uuid(here().stream.rng))


# ---- the journal


class SimJournal(Journal):
    """The real journal over a database that lives as long as its volume.

    A process that is killed leaves what it had committed, and nothing else.
    """

    def __init__(
        self, path: str, warn: Callable[[str], None], clock: Clock, process: Process, database: str
    ) -> None:
        self._process = process
        self._database = database
        super().__init__(path, warn, clock)
        process.on_death.append(self._drop)

    def _drop(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _connect(self, path: str) -> sqlite3.Connection:  # type: ignore[override]
        if path == ":memory:":
            return Journal._connect(path)
        real = sqlite3.connect

        def connect(_: str, **options: Any) -> sqlite3.Connection:
            return real(f"file:{self._database}?mode=memory&cache=shared", uri=True, **options)

        with mock.patch.object(sqlite3, "connect", connect):
            return Journal._connect(path)

    def _execute(self, statement: str, values: tuple[object, ...]) -> None:
        self._process.step("journal")
        super()._execute(statement, values)

    def write_all(self) -> None:
        self._process.step("journal")
        super().write_all()
        self._process.step("journal written")

    def close(self) -> None:
        if not self._process.dead:
            super().close()


def remembering(parse: Callable[[Any, bytes], Any]) -> Callable[[Any, bytes], Any]:
    """The same, which reads each document once: it is frozen, and all nodes read the same ones."""
    known: dict[tuple[Any, bytes], Any] = {}

    def read(kind: Any, data: bytes) -> Any:
        key = (kind, data)
        if key not in known:
            known[key] = parse(kind, data)
        return known[key]

    return read


def _findings(store: Store, *_: object) -> Findings:
    """What a probe would find; the cloud keeps its promises."""
    return Findings(store.proof, conditional_create=True, swap=True)


def keep_database(name: str) -> sqlite3.Connection:
    """As long as this is open, a database in memory stays."""
    return sqlite3.connect(f"file:{name}?mode=memory&cache=shared", uri=True)


# ---- all of it


@contextlib.contextmanager
def swapped(
    open_store: Callable[[str], Any], watch: Callable[..., Callable[[], None]]
) -> Iterator[None]:
    """The real modules in the simulated world.

    Args:
        open_store: by which the hook opens a destination.
        watch: by which an agent hears of a new manifest.
    """
    with contextlib.ExitStack() as stack:

        def swap(module: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        hook = ds_ckpt_hook
        for module in (ds_ckpt_sidecar.agent, hook.session, hook.publishing):
            swap(module, "threading", THREADING)
        swap(hook.publishing, "queue", QUEUE)
        for module in (hook.session, hook.publishing):
            swap(module, "atexit", ATEXIT)
        swap(ds_ckpt_store.contract.volume, "uuid", UUID)
        parse = remembering(manifest.parse)
        for module in (ds_ckpt_store.contract.volume, ds_ckpt_store.catalog):
            swap(module, "parse", parse)
        for module in (hook.local, hook.remote):
            swap(module, "ThreadPoolExecutor", Inline)
        swap(hook.remote, "open_store", open_store)
        swap(ds_ckpt_sidecar.agent, "watch", watch)
        swap(ds_ckpt_sidecar.agent, "probe", _findings)
        swap(hook.session, "process_started", lambda clock: clock.time())
        swap(hook.session, "HEARTBEAT_SECONDS", 30.0)
        swap(ds_ckpt_sidecar.observe.report, "HEARTBEAT_SECONDS", 20.0)
        swap(ds_ckpt_sidecar.limits, "LOOK_SECONDS", 30.0)
        swap(hook.publishing, "_LONGEST_POLL", 5.0)
        swap(hook.feedback, "_POLL", 5.0)
        yield
