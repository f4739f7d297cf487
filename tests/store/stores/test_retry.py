"""What is tried again, how long, and what is left to the caller; on a clock of its own."""

from __future__ import annotations

import random

import pytest

from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    CorruptionError,
    ExpiredError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    ThrottledError,
    TransientError,
)
from ds_ckpt_store.stores.faulty import FaultyStore, Rule
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import BytesSource, IfAbsent, ObjectInfo
from ds_ckpt_store.stores.retry import Retry, RetryPolicy, RetryStore

MIB = 1 << 20


class FakeClock:
    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.slept: list[float] = []

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def faulty(clock: FakeClock) -> FaultyStore:
    return FaultyStore(MemoryStore(MemoryBucket(clock)))


@pytest.fixture
def reports() -> list[Retry]:
    return []


@pytest.fixture
def store(faulty: FaultyStore, clock: FakeClock, reports: list[Retry]) -> RetryStore:
    return RetryStore(faulty, clock, random.Random(1), on_retry=reports.append)


CALLS = {
    "put": lambda store: store.put("k", BytesSource(b"new")),
    "get": lambda store: store.get("k"),
    "head": lambda store: store.head("k"),
    "read": lambda store: store.read("k", 0, 3, bytearray().extend),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete("k"),
    "begin": lambda store: store.begin("k", 3, {}),
    "uploads": lambda store: list(store.uploads("")),
}
UPLOAD_CALLS = {
    "put_part": lambda store, upload: store.put_part(upload, 1, BytesSource(b"new")),
    "parts": lambda store, upload: store.parts(upload),
    "abort": lambda store, upload: store.abort(upload),
}


@pytest.mark.parametrize("error", [TransientError, ThrottledError, AmbiguousError])
@pytest.mark.parametrize("operation", CALLS)
def test_a_call_that_may_be_repeated_is_repeated(store, faulty, clock, operation, error) -> None:
    store.put("k", BytesSource(b"old"))
    faulty.script.append(Rule(operation, "fail-before", error=error, count=2))
    CALLS[operation](store)
    assert len(clock.slept) == 2


@pytest.mark.parametrize("operation", UPLOAD_CALLS)
def test_a_call_on_an_upload_is_repeated(store, faulty, clock, operation) -> None:
    upload = store.begin("k", 3, {})
    faulty.script.append(Rule(operation, "fail-before", count=2))
    UPLOAD_CALLS[operation](store, upload)
    assert len(clock.slept) == 2


@pytest.mark.parametrize(
    "error", [AccessError, RefusedError, CorruptionError, NotFoundError, PreconditionError]
)
def test_what_cannot_heal_is_raised_at_once(store, faulty, clock, error) -> None:
    faulty.script.append(Rule("put", "fail-before", error=error))
    with pytest.raises(error):
        store.put("k", BytesSource(b"new"))
    assert clock.slept == []


def test_a_conditional_put_whose_answer_was_lost_is_left_to_the_caller(store, faulty) -> None:
    faulty.script.append(Rule("put", "fail-after"))
    with pytest.raises(AmbiguousError):
        store.put("k", BytesSource(b"mine"), condition=IfAbsent())
    assert len(faulty.asked("put")) == 1
    assert store.get("k")[0] == b"mine"


def test_a_completion_whose_answer_was_lost_is_left_to_the_caller(store, faulty) -> None:
    upload = store.begin("k", 3, {})
    part = store.put_part(upload, 1, BytesSource(b"new"))
    faulty.script.append(Rule("complete", "fail-after"))
    with pytest.raises(AmbiguousError):
        store.complete(upload, [part])
    assert len(faulty.asked("complete")) == 1


def test_a_conditional_put_that_was_not_applied_is_repeated(store, faulty) -> None:
    faulty.script.append(Rule("put", "fail-before", error=ThrottledError, count=2))
    store.put("k", BytesSource(b"mine"), condition=IfAbsent())
    assert len(faulty.asked("put")) == 3


def test_a_read_that_breaks_off_goes_on_at_that_byte(store, faulty) -> None:
    data = random.Random(1).randbytes(5 * MIB)
    store.put("k", BytesSource(data))
    faulty.script.append(Rule("read", "truncate", count=3))
    found = bytearray()
    store.read("k", 7, 4 * MIB, found.extend)
    assert bytes(found) == data[7 : 7 + 4 * MIB]
    assert len(faulty.asked("read")) == 4


class BreaksWhileListing(MemoryStore):
    """Raises in the middle of its first listings."""

    breaks = 3

    def list(self, prefix):
        for number, info in enumerate(super().list(prefix)):
            if number == 2 * (4 - self.breaks) and self.breaks:
                self.breaks -= 1
                raise TransientError("list", prefix, "cut")
            yield info


def test_a_listing_that_breaks_off_shows_each_key_once(clock) -> None:
    inner = BreaksWhileListing(MemoryBucket(clock))
    names = [f"k{number}" for number in range(9)]
    for name in names:
        inner.put(name, BytesSource(b""))
    store = RetryStore(inner, clock, random.Random(1))
    assert [info.key for info in store.list("")] == names
    assert inner.breaks == 0


def test_it_gives_up_after_so_many_tries_with_the_last_error(faulty, clock) -> None:
    store = RetryStore(faulty, clock, random.Random(1), policy=RetryPolicy(tries=3))
    faulty.script.append(Rule("head", "fail-before", count=None))
    with pytest.raises(TransientError):
        store.head("k")
    assert len(faulty.asked("head")) == 3


def test_it_gives_up_before_the_deadline(faulty, clock) -> None:
    policy = RetryPolicy(tries=1000, deadline=60)
    store = RetryStore(faulty, clock, random.Random(1), policy=policy)
    faulty.script.append(Rule("head", "fail-before", count=None))
    started = clock.now
    with pytest.raises(TransientError):
        store.head("k")
    assert 0 < clock.now - started <= 60


def test_waits_are_jittered_and_bounded_and_longer_for_a_store_that_throttles(clock) -> None:
    policy = RetryPolicy(tries=200, deadline=4000, base=1, longest=8, throttled=4)
    longest: dict[type[TransientError], float] = {}
    for error in (TransientError, ThrottledError, ExpiredError):
        faulty = FaultyStore(MemoryStore(MemoryBucket(clock)))
        faulty.script.append(Rule("head", "fail-before", error=error, count=None))
        clock.slept.clear()
        with pytest.raises(error):
            RetryStore(faulty, clock, random.Random(1), policy=policy).head("k")
        longest[error] = max(clock.slept)
        assert len(set(clock.slept)) > 100
        assert clock.slept[0] <= policy.base * policy.throttled
    assert 4 < longest[TransientError] <= 8
    assert 16 < longest[ThrottledError] <= 32
    assert 16 < longest[ExpiredError] <= 32


@pytest.mark.parametrize("error", [ThrottledError, ExpiredError])
def test_what_only_time_heals_is_bounded_by_the_deadline_alone(faulty, clock, error) -> None:
    policy = RetryPolicy(tries=3, deadline=600)
    store = RetryStore(faulty, clock, random.Random(1), policy=policy)
    faulty.script.append(Rule("head", "fail-before", error=error, count=None))
    started = clock.now
    with pytest.raises(error):
        store.head("k")
    assert len(faulty.asked("head")) > 10
    assert clock.now - started == pytest.approx(600, abs=0.01)


def test_a_store_that_throttles_for_a_while_is_waited_for(store, faulty) -> None:
    faulty.script.append(Rule("delete", "fail-before", error=ThrottledError, count=9))
    store.delete("k")
    assert len(faulty.asked("delete")) == 10


def test_progress_anywhere_renews_the_deadline(faulty, clock) -> None:
    """Two calls take turns on one clock: one fails for an hour, while others go well."""
    started = clock.now

    class Refusing(FaultyStore):
        def put(self, *args: object, **options: object) -> ObjectInfo:
            if clock.now - started < 3600:
                store.list("")
                list(store.uploads(""))
            raise ThrottledError("put", "k", "503 SlowDown")

    policy = RetryPolicy(deadline=100)
    store = RetryStore(Refusing(faulty.store), clock, random.Random(1), policy=policy)
    with pytest.raises(ThrottledError):
        store.put("k", BytesSource(b"x"))
    assert 3600 + 50 < clock.now - started < 3600 + 200


def test_a_dead_store_ends_all_calls_within_one_deadline(faulty, clock) -> None:
    policy = RetryPolicy(tries=10_000, deadline=100)
    store = RetryStore(faulty, clock, random.Random(1), policy=policy)
    store.list("")
    faulty.script.append(Rule("*", "fail-before", count=None))
    for call in (CALLS["head"], CALLS["get"], CALLS["begin"]):
        started = clock.now
        with pytest.raises(TransientError):
            call(store)
        assert clock.now - started <= 100.01


def test_who_gives_up_says_what_and_after_how_long(faulty, clock) -> None:
    store = RetryStore(faulty, clock, random.Random(1), policy=RetryPolicy(tries=3))
    faulty.script.append(Rule("head", "fail-before", count=None))
    with pytest.raises(TransientError, match=r"^head 'k': .*given up after 3 tries in \d+ s"):
        store.head("k")
    faulty.script[:] = [Rule("get", "fail-before", error=ExpiredError, count=None)]
    with pytest.raises(ExpiredError, match="renew the credentials"):
        store.get("k")


def test_a_caller_hears_of_each_retry(store, faulty, reports, clock) -> None:
    faulty.script.append(Rule("get", "fail-before", count=2))
    with pytest.raises(NotFoundError):
        store.get("k")
    assert [(report.tries, report.error.operation) for report in reports] == [
        (1, "get"),
        (2, "get"),
    ]
    assert [report.wait for report in reports] == clock.slept
    assert reports[1].elapsed == pytest.approx(clock.slept[0])
