"""Many transfers over one executor: the state that upload and download share.

A transfer of one shard is a *story*: a generator that yields batches of jobs and is given their
results. Its code runs in the calling thread only, so that journal, progress and callbacks need no
locks; jobs run on the executor and touch nothing but what they were given. What holds:

* At most as many jobs are on the executor as the budget allows at that time, over all stories.
* A story begins only when no story before it has a job ready. So no more stories are begun and
  unfinished than jobs may run, and neither one huge shard nor thousands of tiny ones leaves a
  request unused.
* Everything happens in an order that depends only on the order in which jobs end: with an
  executor that runs a job within ``submit``, a run repeats exactly.
* ``check`` is called before each job and at least once a second. When it raises, no job is
  submitted any more; those that run are awaited and their results handed over, then it is raised:
  a PausedError only if anything is left to do.
* A KeyboardInterrupt ends what is under way at its next piece: it waits for no bandwidth.
* When nothing moves for a while although jobs run, the budget says so.
* A story that fails stops itself; those already begun are carried to their end, and no further
  one begins. After an error in ``fatal`` (the whole save is over) nothing more is submitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ds_ckpt_store.errors import CkptError, PausedError
from ds_ckpt_store.transfer.budget import Budget

_CHECK_SECONDS = 0.25  # a signal may leave no more than 2 s


@dataclass(frozen=True)
class Job:
    """Work for the executor; ``done`` gets the result, in the calling thread."""

    run: Callable[[], Any]
    done: Callable[[Any], None] | None = None


ResultT = TypeVar("ResultT")
Steps = Generator[Sequence[Job], list[Any], ResultT]
"""Yields batches of at least one job; each yield gives the results in order, or raises the first
error, once no job of the batch runs any more."""

Story = Steps[None]
"""All steps of one shard; a story is made of steps by ``yield from``."""


@dataclass(eq=False)
class _Begun:
    """A story under way, and its current batch."""

    story: Story
    waiting: deque[tuple[int, Job]] = field(default_factory=deque)
    results: list[Any] = field(default_factory=list)
    running: int = 0
    error: BaseException | None = None

    def load(self, batch: Sequence[Job]) -> None:
        self.results = [None] * len(batch)
        self.waiting.extend(enumerate(batch))
        self.error = None


class Coordinator:
    """Runs stories to their end.

    Args:
        executor: runs the jobs; it may be shared, and may run a job within ``submit``.
        budget: how many jobs may run at a time.
        check: may raise a :class:`CkptError` to stop in good order.
        fatal: errors of a story after which nothing more is submitted, and which are raised
            rather than others.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        budget: Budget,
        check: Callable[[], None],
        fatal: tuple[type[CkptError], ...] = (),
    ) -> None:
        self._executor = executor
        self._budget = budget
        self._check = check
        self._fatal = fatal
        self._begun: list[_Begun] = []
        self._running: dict[Future[Any], tuple[_Begun, int, Job]] = {}
        self._errors: list[CkptError] = []
        self._stop: CkptError | None = None

    def run(self, stories: Iterable[Story]) -> None:
        """Run all stories.

        Raises:
            CkptError: what ``check`` raised, if it has kept anything from being done; else the
                first error in ``fatal``; else the first error of a story.
        """
        upcoming = iter(stories)
        self._budget.arrived()
        try:
            while True:
                self._fill(upcoming)
                if not self._running:
                    break
                wait(self._running, timeout=_CHECK_SECONDS, return_when=FIRST_COMPLETED)
                self._ask()
                ended = [future for future in self._running if future.done()]
                if any(future.exception() is None for future in ended):
                    self._budget.arrived()
                self._budget.watch(len(self._running))
                for future in ended:
                    self._hand_over(future)
        except KeyboardInterrupt:
            self._budget.cut()
            raise
        finally:
            wait(self._running)
            for begun in self._begun:
                begun.story.close()
        is_done = not self._begun and next(upcoming, None) is None
        if is_done and isinstance(self._stop, PausedError):
            self._stop = None  # it has come too late to keep anything from being done
        self._raise()

    def _fill(self, upcoming: Iterator[Story]) -> None:
        while len(self._running) < self._budget.streams():
            if not self._may_submit():
                return
            ready = next((begun for begun in self._begun if begun.waiting), None)
            if ready is not None:
                index, job = ready.waiting.popleft()
                ready.running += 1
                self._running[self._executor.submit(job.run)] = (ready, index, job)
                continue
            story = None if self._errors else next(upcoming, None)
            if story is None:
                self._budget.idle()
                return
            begun = _Begun(story)
            self._begun.append(begun)
            self._advance(begun)

    def _may_submit(self) -> bool:
        if self._stop is None:
            self._ask()
        return self._stop is None and not any(
            isinstance(error, self._fatal) for error in self._errors
        )

    def _ask(self) -> None:
        if self._stop is not None:
            return
        try:
            self._check()
        except CkptError as stop:
            self._stop = stop

    def _hand_over(self, future: Future[Any]) -> None:
        begun, index, job = self._running.pop(future)
        begun.running -= 1
        error = future.exception()
        if error is None:
            begun.results[index] = future.result()
            if job.done is not None:
                job.done(begun.results[index])
        elif begun.error is None:
            begun.error = error
            begun.waiting.clear()
        if begun.running == 0 and not begun.waiting:
            self._advance(begun)

    def _advance(self, begun: _Begun) -> None:
        """Let a story go on to its next batch; its end or its error takes it off the list."""
        try:
            if begun.error is not None:
                batch = begun.story.throw(begun.error)
            elif begun.results:
                batch = begun.story.send(begun.results)
            else:
                batch = next(begun.story)
        except StopIteration:
            self._begun.remove(begun)
        except CkptError as error:
            self._begun.remove(begun)
            self._errors.append(error)
        else:
            begun.load(batch)

    def _raise(self) -> None:
        if self._stop is not None:
            raise self._stop
        for error in self._errors:
            if isinstance(error, self._fatal):
                raise error
        if self._errors:
            raise self._errors[0]
