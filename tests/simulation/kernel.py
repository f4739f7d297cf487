"""Time, processes and threads of the simulated world.

A thread is a greenlet. It runs until it waits (for time, an event, an answer); then the next one in
time goes on. So a run depends on nothing but its seed. A process may die at any call that it makes
to the world: all its threads are unwound at once, and whatever cleaning up they try on their way
finds that the process is dead and does nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

from ds_ckpt_store.errors import CkptError
from tests.simulation.chance import Chance, Stream

EPOCH = 1_800_000_000.0
FOREVER = float("inf")


class Killed(BaseException):
    """Unwinds the threads of a process that is dead. No program may catch it."""


class StuckError(Exception):
    """The world cannot go on: too many steps, which is a loop without end."""


class Task:
    """One thread of a process, or a callback of the world's own."""

    __slots__ = ("green", "process", "result", "token", "waiters")

    def __init__(self, process: Process | None, green: greenlet | None) -> None:
        self.process = process
        self.green = green
        self.token = 0
        self.result: Any = None
        self.waiters: list[Task] = []

    @property
    def ended(self) -> bool:
        return self.green is None or self.green.dead


class Kernel:
    """One world's time. Only one at a time is at work: :data:`Kernel.current`."""

    current: Kernel

    def __init__(self, chance: Chance, *, most_steps: int = 2_000_000) -> None:
        self.now = 0.0
        self.chance = chance
        self.steps = 0
        self._most_steps = most_steps
        self._heap: list[tuple[float, int, Task | None, int, Callable[[], None] | None]] = []
        self._serial = itertools.count()
        self._hub = getcurrent()
        self.running: Task | None = None
        self.processes: list[Process] = []
        self.failures: list[tuple[Process, BaseException]] = []
        self.trace: Callable[[str], None] | None = None

    # ---- the world's side

    def at(self, when: float, callback: Callable[[], None]) -> None:
        """Call something at a time; it must not wait."""
        heapq.heappush(self._heap, (max(when, self.now), next(self._serial), None, 0, callback))

    def run(self, until: float) -> None:
        """Let the world go on to a time."""
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True

        self.at(until, stop)
        while not stopped:
            when, _, task, token, callback = heapq.heappop(self._heap)
            if callback is not None:
                self.now = when
                callback()
            elif task is not None and task.token == token and not task.ended:
                self.now = when
                self._resume(task)

    def _resume(self, task: Task) -> None:
        before, self.running = self.running, task
        green = task.green
        if green is None:
            raise AssertionError("a task without a thread does not wait")
        green.parent = getcurrent()
        green.switch()
        self.running = before

    def say(self, text: str) -> None:
        """For the trace of a run that is looked at."""
        if self.trace is not None:
            who = self.running.process.name if self.running and self.running.process else "world"
            self.trace(f"{self.now:9.3f} {who:<16} {text}")

    # ---- a thread's side

    def sleep(self, seconds: float) -> None:
        """Wait. Goes on at once if nobody else has anything to do in that time."""
        when = self.now + seconds
        task = self.running
        if task is None or task.process is None:
            raise AssertionError("only a thread can wait")
        self.steps += 1
        if self.steps > self._most_steps:
            raise StuckError(f"{self._most_steps} steps, now {task.process.name}")
        if not self._heap or self._heap[0][0] > when:
            self.now = when
            return
        task.token += 1
        heapq.heappush(self._heap, (when, next(self._serial), task, task.token, None))
        self._park(task)

    def park(self, timeout: float | None) -> bool:
        """Wait to be woken; False if the time was over first. Seconds."""
        task = self.running
        if task is None:
            raise AssertionError("only a thread can wait")
        task.token += 1
        task.result = False
        if timeout is not None:
            when = self.now + timeout
            heapq.heappush(self._heap, (when, next(self._serial), task, task.token, None))
        self._park(task)
        return bool(task.result)

    def _park(self, task: Task) -> None:
        if task.green is None:
            raise AssertionError("a thread has a greenlet")
        parent = task.green.parent
        if parent is None:
            raise AssertionError("a thread runs below the world")
        parent.switch()
        if task.process is not None and task.process.dead:
            raise Killed

    def wake(self, task: Task) -> None:
        """Let a thread that is parked go on, now."""
        task.result = True
        task.token += 1
        heapq.heappush(self._heap, (self.now, next(self._serial), task, task.token, None))


class Process:
    """One process: threads, a clock that may be wrong, and a death that may come at any call.

    Args:
        kernel: the world.
        name: that no other process of this run has.
        stream: its accidents.
        skew: seconds that its clock is ahead.
        mortal: it may die by chance.
    """

    def __init__(
        self, kernel: Kernel, name: str, stream: Stream, *, skew: float = 0.0, mortal: bool = True
    ) -> None:
        self.kernel = kernel
        self.name = name
        self.stream = stream
        self.skew = skew
        self.mortal = mortal
        self.life = stream.calls_until("death") if mortal else 1 << 60
        self.dead = False
        self.ended = False
        self.result: Any = None
        self.frozen_until = 0.0
        self.tasks: list[Task] = []
        self.on_death: list[Callable[[], None]] = []
        self.attempt: Callable[[], str] = lambda: ""  # for which an agent works now
        kernel.processes.append(self)

    def __repr__(self) -> str:
        return f"<{self.name}>"

    @property
    def alive(self) -> bool:
        """Neither killed nor at its end."""
        return not self.dead and not self.ended

    def start(self, main: Callable[[], Any]) -> None:
        """Begin; an exception that ends it is the world's failure, unless it is a sentence."""

        def run() -> None:
            try:
                self.result = main()
            except Killed:
                return
            except BaseException as error:
                self.result = error
                if not self.dead and not isinstance(error, CkptError):
                    self.kernel.failures.append((self, error))
            finally:
                self.ended = not self.dead
            self.end()

        self.spawn(run)

    def end(self) -> None:
        """It has come to its end: its other threads end with it."""
        if not self.dead:
            self._unwind()

    def spawn(self, target: Callable[[], None]) -> Task:
        """One more thread."""
        task = Task(self, None)

        def body() -> None:
            try:
                target()
            except Killed:
                pass
            except BaseException as error:
                self.kernel.failures.append((self, error))
            for waiter in task.waiters:
                self.kernel.wake(waiter)

        task.green = greenlet(body)
        self.tasks.append(task)
        task.token += 1
        kernel = self.kernel
        heapq.heappush(kernel._heap, (kernel.now, next(kernel._serial), task, task.token, None))
        return task

    def kill(self) -> None:
        """As SIGKILL: nothing of it runs any more."""
        if not self.alive:
            return
        self.kernel.say(f"{self.name} is killed")
        self.dead = True
        self._unwind()

    def _unwind(self) -> None:
        self.dead = True
        kernel = self.kernel
        for task in self.tasks:
            green = task.green
            task.token += 1
            if green is None or green.dead or green is getcurrent():
                continue
            if not green:  # never begun
                task.green = None
                continue
            before, kernel.running = kernel.running, task
            green.parent = getcurrent()
            green.throw(Killed)
            kernel.running = before
        for callback in self.on_death:
            callback()
        self.on_death.clear()

    def die(self) -> None:
        """Be killed by chance, in the middle of a call of one's own."""
        self.kill()
        raise Killed

    def step(self, what: str) -> None:
        """A call to the world begins, or its effect is there and its answer on the way."""
        if self.dead:
            raise Killed
        self.life -= 1
        if self.life < 0:
            self._come_near_death(what)
        if self.frozen_until > self.kernel.now:
            self.kernel.sleep(self.frozen_until - self.kernel.now)
            if self.dead:
                raise Killed

    def _come_near_death(self, what: str) -> None:
        self.life = self.stream.calls_until("death")
        if self.stream.happens("death"):
            self.kernel.say(f"dies at {what}")
            self.die()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        if self.dead:
            raise Killed
        self.kernel.sleep(seconds)
        if self.dead:
            raise Killed
        if self.frozen_until > self.kernel.now:
            self.kernel.sleep(self.frozen_until - self.kernel.now)
            if self.dead:
                raise Killed


class SimClock:
    """What one process takes for the time."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def time(self) -> float:
        return EPOCH + self._process.kernel.now + self._process.skew

    def monotonic(self) -> float:
        return 1000.0 + self._process.kernel.now

    def sleep(self, seconds: float) -> None:
        self._process.step("sleep")
        self._process.wait(seconds)


class WorldClock:
    """The store's own clock."""

    def __init__(self, kernel: Kernel, ahead: float) -> None:
        self._kernel = kernel
        self._ahead = ahead

    def time(self) -> float:
        return EPOCH + self._kernel.now + self._ahead

    def monotonic(self) -> float:
        return self._kernel.now

    def sleep(self, seconds: float) -> None:
        raise AssertionError("the store does not sleep")
