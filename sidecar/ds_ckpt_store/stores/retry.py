"""Retries: what may heal by itself is tried again, and nothing else.

A decorator around any store. It knows which calls may be repeated without harm:

- Reads, listings and deletes may always be repeated; so may writes without a condition, because a
  key that is written so gets the same bytes each time.
- A put with a condition, and the completion of an upload, are repeated only if the store said that
  it did *not* apply them. After an :class:`AmbiguousError` a repetition might lose to itself, so
  the error goes to the caller, who reads and decides.

A read goes on at the byte where it broke, and hands no byte over twice. How long to go on depends
on the kind of error, and on whether anything still works:

- All waits grow, with full jitter, so that many sidecars do not return at once.
- What is transient or ambiguous is tried a number of times.
- A store that throttles is asked more slowly, and credentials that have expired are waited for,
  without a number of tries.
- Nothing is tried for longer than a deadline in which *nothing* went well: each call that succeeds,
  in whatever thread, begins it anew. So a large upload survives an hour in which the store is slow
  or refuses every other call, and a store that is dead ends all calls within one deadline.
- Everything else (no access, no bucket, wrong bytes, a lost condition) is raised at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tenacity

from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.errors import (
    AmbiguousError,
    ExpiredError,
    ThrottledError,
    TransientError,
)
from ds_ckpt_store.stores.forwarding import Forwarding
from ds_ckpt_store.stores.port import (
    Condition,
    ObjectInfo,
    Part,
    Proof,
    Sink,
    Source,
    Store,
    Upload,
)

T = TypeVar("T")
_INSTANT = 0.001  # seconds
BATCH = 1000  # keys of a listing that are taken under one guard


@dataclass(frozen=True)
class RetryPolicy:
    """How long to go on; times in seconds.

    Attributes:
        tries: calls in all, the first one counted; does not bound those that the store throttles
            or that wait for credentials.
        deadline: no new call is made later than this after the first failure, or after the last
            success of any call through the same store.
        base: bound of the first wait; each further bound is twice the one before.
        longest: bound of any wait.
        throttled: factor on all bounds while the store throttles or credentials have expired.
    """

    tries: int = 8
    deadline: float = 120.0
    base: float = 0.2
    longest: float = 20.0
    throttled: float = 4.0


@dataclass(frozen=True)
class Retry:
    """One call that will be made again.

    Attributes:
        error: why; it names operation and key.
        tries: calls made so far.
        elapsed: seconds since the first failure.
        wait: seconds until the next.
    """

    error: TransientError
    tries: int
    elapsed: float
    wait: float


class RetryStore(Forwarding):
    """A store that tries again.

    Args:
        store: the store that may fail.
        clock: for waiting and for the deadline.
        rng: for jitter.
        policy: how long to go on.
        on_retry: called before each wait, from whatever thread; for logs and limits. Must not
            raise.
        on_call: called before each call, those made again included, from whatever thread; a sign
            of life. Must not raise.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        rng: random.Random,
        *,
        policy: RetryPolicy | None = None,
        on_retry: Callable[[Retry], None] | None = None,
        on_call: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(store)
        self._clock = clock
        self._rng = rng
        self._policy = policy or RetryPolicy()
        self._on_retry = on_retry
        self._on_call = on_call
        self._went_well = float("-inf")  # when any call succeeded last

    @property
    def went_well(self) -> float:
        """When, on the monotonic clock, a call succeeded last; minus infinity before that."""
        return self._went_well

    # ---- may always be repeated

    def refuses_corruption(self, proof: Proof, key: str) -> bool:
        """Repeated as a whole."""
        return self._retry(lambda: self.store.refuses_corruption(proof, key))

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Repeated."""
        return self._retry(lambda: self.store.get(key))

    def head(self, key: str) -> ObjectInfo:
        """Repeated."""
        return self._retry(lambda: self.store.head(key))

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """Continued at the byte where it broke; the count of tries starts anew with progress."""
        done = 0

        def counting(view: memoryview) -> None:
            nonlocal done
            size = len(view)
            sink(view)
            done += size

        def attempt() -> bool:
            before = done
            try:
                self.store.read(key, offset + done, length - done, counting)
            except TransientError:
                if done == before:
                    raise
                return False
            return True

        while not self._retry(attempt):
            pass

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Begun anew after a failure, and continued after the last key that was handed over."""
        last: bytes | None = None
        source: Iterator[ObjectInfo] | None = None

        def attempt() -> Sequence[ObjectInfo]:
            nonlocal source
            found = []
            try:
                source = self.store.list(prefix) if source is None else source
                for info in source:
                    if last is None or info.key.encode() > last:
                        found.append(info)
                        if len(found) == BATCH:
                            break
            except TransientError:
                source = None
                if not found:
                    raise
            return found

        while batch := self._retry(attempt):
            last = batch[-1].key.encode()
            yield from batch

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Taken whole, because uploads come in no order that could be continued."""
        yield from self._retry(lambda: tuple(self.store.uploads(prefix)))

    def delete(self, key: str) -> None:
        """Repeated."""
        self._retry(lambda: self.store.delete(key))

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """Repeated; an upload whose answer was lost is found by :meth:`uploads` and collected."""
        return self._retry(lambda: self.store.begin(key, size, metadata))

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        """Repeated: a part sent again replaces itself."""
        return self._retry(lambda: self.store.put_part(upload, number, source))

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """Repeated."""
        return self._retry(lambda: self.store.parts(upload))

    def abort(self, upload: Upload) -> None:
        """Repeated."""
        self._retry(lambda: self.store.abort(upload))

    # ---- repeated only if the store did not apply them

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Repeated; with a condition, not after an answer that was lost."""
        return self._retry(
            lambda: self.store.put(key, source, condition=condition),
            ambiguous=condition is None,
        )

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """Repeated, but not after an answer that was lost."""
        return self._retry(lambda: self.store.complete(upload, parts), ambiguous=False)

    # ---- how

    def _retry(self, call: Callable[[], T], *, ambiguous: bool = True) -> T:
        def begun() -> T:
            self._on_call()
            return call()

        try:
            result = begun()
        except TransientError as error:
            result = self._retry_after(error, begun, ambiguous=ambiguous)
        self._went_well = self._clock.monotonic()
        return result

    def _retry_after(self, first: TransientError, call: Callable[[], T], *, ambiguous: bool) -> T:
        """Go on after the first try has failed."""
        failed: float | None = None  # when this call failed first
        pending = [first]

        def attempt() -> T:
            if pending:
                raise pending.pop()
            return call()

        def may_heal(error: BaseException) -> bool:
            nonlocal failed
            if failed is None:
                failed = self._clock.monotonic()
            return isinstance(error, TransientError) and (
                ambiguous or not isinstance(error, AmbiguousError)
            )

        def left() -> float:
            alive = max(failed or 0.0, self._went_well)
            return alive + self._policy.deadline - self._clock.monotonic()

        def is_over(state: tenacity.RetryCallState) -> bool:
            tried = state.attempt_number >= self._policy.tries and not _is_patient(state)
            return tried or left() < _INSTANT

        def report(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            if self._on_retry is not None and isinstance(error, TransientError):
                elapsed = self._clock.monotonic() - (failed or 0.0)
                self._on_retry(Retry(error, state.attempt_number, elapsed, state.upcoming_sleep))

        def give_up(state: tenacity.RetryCallState) -> T:
            error = state.outcome.exception() if state.outcome else None
            if not isinstance(error, TransientError):
                raise AssertionError("only what may heal is tried again")  # noqa: TRY004
            seconds = self._clock.monotonic() - (failed or 0.0)
            told = f"given up after {state.attempt_number} tries in {seconds:.0f} s"
            if isinstance(error, ExpiredError):
                told += "; renew the credentials"
            raise type(error)(error.operation, error.key, f"{error.answer} ({told})") from error

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(may_heal),
            stop=is_over,
            wait=lambda state: min(self._wait(state), max(left(), 0.0)),
            before_sleep=report,
            sleep=self._clock.sleep,
            retry_error_callback=give_up,
        )
        return retrying(attempt)

    def _wait(self, state: tenacity.RetryCallState) -> float:
        policy = self._policy
        bound = min(policy.longest, policy.base * 2.0 ** min(state.attempt_number - 1, 32))
        if _is_patient(state):
            bound *= policy.throttled
        return self._rng.uniform(0, bound)


def _is_patient(state: tenacity.RetryCallState) -> bool:
    """Whether the last error is one that only time, or somebody else, heals."""
    error = state.outcome.exception() if state.outcome is not None else None
    return isinstance(error, (ThrottledError, ExpiredError))
