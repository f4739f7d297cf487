"""The budget on simulated networks: it settles where it should, and comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt_store.errors import (
    AmbiguousError,
    ExpiredError,
    OwnershipError,
    PausedError,
    SettingsError,
    ThrottledError,
    TransientError,
)
from ds_ckpt_store.stores.port import Capabilities
from ds_ckpt_store.transfer.bandwidth import Bandwidth
from ds_ckpt_store.transfer.budget import BUFFER, Budget, Stall, streams_within
from ds_ckpt_store.transfer.coordinator import Coordinator, Job, Story
from tests.store.transfer.support import PART, InlineExecutor, Scene, TickingClock, nothing

MIB = 1 << 20
TICK = 0.05


class Network:
    """Requests that move bytes at a rate that depends on how many there are.

    Args:
        each: bytes per second of one request alone: window over latency.
        together: bytes per second of all.
        takes: requests that the store takes at a time before it throttles.
    """

    def __init__(self, each: float, together: float, takes: int = 1000, most: int = 16) -> None:
        self.clock = TickingClock()
        self.budget = Budget(self.clock, streams=most)
        self.each, self.together, self.takes = each, together, takes
        self.limits: list[int] = []
        self.throttled = 0
        self._owed = 0.0

    def run(self, seconds: float) -> list[int]:
        """Keep all requests busy; the limits that held meanwhile."""
        before = len(self.limits)
        for _ in range(int(seconds / TICK)):
            running = self.budget.streams()
            self.limits.append(running)
            if running > self.takes:
                self.throttled += 1
                self.budget.throttled()
                running = self.takes
            self._owed += min(running * self.each, self.together) * TICK
            while self._owed >= BUFFER:
                self.budget.pace(BUFFER)
                self._owed -= BUFFER
            self.clock.sleep(TICK)
        return self.limits[before:]

    def settled(self, seconds: float = 10) -> float:
        """The limit in the long run: the mean of so many seconds."""
        values = self.run(seconds)
        return sum(values) / len(values)


def test_over_latency_it_climbs_to_the_maximum_within_seconds() -> None:
    network = Network(each=20 * MIB, together=10_000 * MIB)
    assert network.budget.streams() == 4
    network.run(4)
    assert network.budget.streams() == 16


def test_where_few_requests_fill_the_line_it_stays_with_few() -> None:
    network = Network(each=200 * MIB, together=500 * MIB)
    network.run(20)
    assert network.settled(60) < 5


@pytest.mark.parametrize("enough", [2, 4, 8, 12, 16, 24, 48, 64])
def test_it_settles_where_the_line_is_full(enough: int) -> None:
    network = Network(each=20 * MIB, together=enough * 20 * MIB, most=64)
    network.run(30)
    found = network.settled(60)
    moved = min(found, enough) / enough
    assert moved > 0.75, "most of the line is used"
    assert found < max(2.1 * enough, 5), "and not by many more requests than it takes"


def test_a_line_that_becomes_wider_is_found_out() -> None:
    network = Network(each=20 * MIB, together=80 * MIB, most=64)
    assert network.settled(60) < 8
    network.together = 2000 * MIB
    network.run(180)
    assert network.budget.streams() >= 32


def test_a_slow_line_is_measured_with_patience() -> None:
    network = Network(each=MIB, together=3 * MIB)
    network.run(60)
    assert network.settled(60) < 7


@pytest.mark.parametrize("takes", [1, 3, 6, 10])
def test_a_store_that_throttles_is_asked_for_about_what_it_takes(takes: int) -> None:
    network = Network(each=50 * MIB, together=10_000 * MIB, takes=takes)
    network.run(30)
    network.throttled = 0
    values = network.run(120)
    assert max(values) <= 1.5 * takes + 1
    assert takes / 2 <= sum(values) / len(values) <= takes + 0.5
    assert network.throttled <= 120 / 2, "it is not pushed all the time"


def test_once_the_throttling_ends_it_comes_back() -> None:
    network = Network(each=50 * MIB, together=10_000 * MIB)
    network.run(10)
    assert network.budget.streams() == 16
    network.takes = 2
    network.run(30)
    assert network.budget.streams() <= 3
    network.takes = 1000
    network.run(60)
    assert network.budget.streams() == 16


def test_it_halves_at_most_once_in_a_while_however_many_calls_were_throttled() -> None:
    network = Network(each=50 * MIB, together=10_000 * MIB)
    network.run(10)
    for _ in range(100):
        network.budget.throttled()
    assert network.budget.streams() == 8


def test_it_heeds_the_store_that_throttles_and_no_other_failure() -> None:
    budget = Budget(TickingClock(), streams=4)
    for failure in (TransientError, AmbiguousError, ExpiredError):
        budget.heed(failure("put", "k", "no answer"))
    assert budget.streams() == 4
    budget.heed(ThrottledError("put", "k", "503 SlowDown"))
    assert budget.streams() == 2


def test_what_is_measured_without_enough_work_changes_nothing() -> None:
    network = Network(each=20 * MIB, together=10_000 * MIB)
    for _ in range(200):
        network.run(TICK)
        network.budget.idle()
    assert network.budget.streams() == 4


def test_in_a_hurry_there_are_as_many_as_may_be_at_once_and_later_it_settles_again() -> None:
    network = Network(each=50e6, together=200e6)
    assert network.run(60)[-1] < 16
    network.budget.rush()
    assert network.budget.streams() == 16
    network.budget.set_streams(8)
    network.budget.rush()
    assert network.budget.streams() == 8


def test_in_a_hurry_a_store_that_throttles_is_heeded_all_the_same() -> None:
    network = Network(each=5e6, together=1e9)
    network.run(60)
    network.budget.throttled()
    network.budget.rush()
    assert network.budget.streams() == 16
    network.run(5)
    network.budget.throttled()
    assert network.budget.streams() == 8


def test_what_was_moved_is_counted_with_what_was_sent_again() -> None:
    network = Network(each=5e6, together=1e9)
    assert network.budget.moved == 0
    network.run(1)
    before = network.budget.moved
    assert before > 0
    network.budget.pace(BUFFER)
    assert network.budget.moved == before + BUFFER


def test_the_same_network_gives_the_same_run() -> None:
    def run() -> list[int]:
        network = Network(each=33 * MIB, together=333 * MIB, takes=11, most=40)
        return network.run(100)

    assert run() == run()


def test_the_maximum_may_be_changed_but_not_past_what_memory_holds() -> None:
    clock = TickingClock()
    budget = Budget(clock, streams=2, fit=10)
    assert budget.streams() == 2
    assert budget.set_streams(8) == 8
    assert budget.set_streams(99) == 10
    assert budget.set_streams(1) == 1
    assert budget.streams() == 1


@given(memory=st.integers(1, 1 << 34), holds=st.integers(0, 1 << 30))
def test_as_many_requests_as_fit_into_memory(memory: int, holds: int) -> None:
    store = Capabilities(request_memory=holds)
    each = BUFFER + holds
    if memory < each:
        with pytest.raises(SettingsError, match="DS_CKPT_MEMORY_MIB"):
            streams_within(memory, store)
    else:
        count = streams_within(memory, store)
        assert count >= 1
        assert count * each <= memory < (count + 1) * each


# ---- bandwidth


def simulate(bandwidth: Bandwidth, clock: TickingClock, size: int, pieces: int) -> float:
    """Seconds that so many pieces take."""
    started = clock.now
    for _ in range(pieces):
        bandwidth.pace(size)
    return clock.now - started


@given(
    rate=st.integers(64 << 10, 1 << 36),
    size=st.sampled_from([1, 1000, BUFFER, 1 << 20]),
    pieces=st.integers(20, 200),
)
def test_bytes_move_at_the_rate_that_was_set(rate: int, size: int, pieces: int) -> None:
    clock = TickingClock()
    seconds = simulate(Bandwidth(clock, rate), clock, size, pieces)
    wanted = size * pieces / rate
    assert seconds >= wanted - 0.1 - 1e-6, "a tenth of a second is the burst"
    assert seconds <= wanted + 0.002 * pieces, "the shortest sleep is a millisecond"


def test_without_a_bound_nothing_is_waited_for() -> None:
    clock = TickingClock()
    assert simulate(Bandwidth(clock), clock, 1 << 30, 100) == 0


def test_what_was_not_used_is_not_saved_up() -> None:
    clock = TickingClock()
    bandwidth = Bandwidth(clock, 10 * MIB)
    clock.sleep(3600)
    assert simulate(bandwidth, clock, MIB, 100) == pytest.approx(10, abs=0.2)


class ThreadClock(TickingClock):
    """A clock for many threads: a sleep waits until the test moves the time on."""

    def __init__(self) -> None:
        super().__init__()
        self._moved = threading.Condition()

    def sleep(self, seconds: float) -> None:
        with self._moved:
            until = self.now + seconds
            self._moved.wait_for(lambda: self.now >= until, timeout=20)

    def advance(self, seconds: float) -> None:
        with self._moved:
            self.now += seconds
            self._moved.notify_all()


def test_threads_take_turns_and_a_change_reaches_those_that_wait() -> None:
    clock = ThreadClock()
    bandwidth = Bandwidth(clock, 100_000)
    done = dict.fromkeys(range(4), 0)

    def work(name: int) -> None:
        for _ in range(5):
            bandwidth.pace(10_000)
            done[name] += 1

    threads = [threading.Thread(target=work, args=(name,)) for name in done]
    for thread in threads:
        thread.start()
    seconds = 0.0
    while sum(done.values()) < 12 and seconds < 30:
        clock.advance(0.01)
        seconds += 0.01
        threading.Event().wait(0.002)
    assert seconds >= 1.0
    assert max(done.values()) - min(done.values()) <= 2
    bandwidth.set(1)  # nobody would get on for hours
    threading.Event().wait(0.02)
    bandwidth.set(0)
    for _ in range(200):
        clock.advance(1)
        threading.Event().wait(0.002)
        if not any(thread.is_alive() for thread in threads):
            break
    assert list(done.values()) == [5] * 4
    for thread in threads:
        thread.join(10)


def test_with_little_bandwidth_there_are_fewer_requests_so_that_none_waits_long() -> None:
    clock = TickingClock()
    budget = Budget(clock, streams=16, bandwidth=64 << 10)
    assert budget.streams() == 1
    budget.set_bandwidth(BUFFER)
    assert budget.streams() == 4
    budget.set_bandwidth(0)
    assert budget.streams() == 4


def test_an_upload_and_a_download_keep_to_the_bandwidth(scene: Scene) -> None:
    scene.executor = InlineExecutor()
    scene.bandwidth = PART
    shards = [scene.shard("large.pt", 20 * PART), scene.shard("small.pt", PART)]
    started = scene.clock.now
    scene.upload(*shards)
    assert scene.clock.now - started == pytest.approx(21, abs=0.5)
    remote = scene.remote("object.pt", 20 * PART)
    started = scene.clock.now
    scene.fetch(remote)
    assert scene.clock.now - started == pytest.approx(20, abs=0.5)
    started = scene.clock.now
    assert scene.downloader().verify([remote], check=nothing, progress=nothing) == []
    assert scene.clock.now - started == pytest.approx(20, abs=0.5)


# ---- stalls


def test_a_store_that_never_answers_is_said_once() -> None:
    clock = TickingClock()
    stalls: list[Stall] = []
    budget = Budget(clock, streams=2, stall_seconds=60, on_stall=stalls.append)
    silent = threading.Event()

    def check() -> None:  # once a second while everything waits
        clock.sleep(25)
        if len(stalls) == 1 and clock.now > 1_000_400:
            raise PausedError("asked to stop")

    def story() -> Story:
        yield [Job(lambda: silent.wait(20)), Job(lambda: silent.wait(20))]

    def answer_at_last() -> None:
        while len(stalls) == 0:
            threading.Event().wait(0.05)
        threading.Event().wait(0.1)
        silent.set()

    with ThreadPoolExecutor(3) as executor:
        executor.submit(answer_at_last)
        Coordinator(executor, budget=budget, check=check).run([story()])
    assert [stall.requests for stall in stalls] == [2]
    assert stalls[0].seconds >= 60


def test_each_stall_is_told_and_work_of_any_kind_ends_one() -> None:
    clock = TickingClock()
    stalls: list[Stall] = []
    budget = Budget(clock, stall_seconds=60, on_stall=stalls.append)

    def after(seconds: float, act: Callable[[], None] = nothing, requests: int = 3) -> int:
        act()
        clock.sleep(seconds)
        budget.watch(requests)
        return len(stalls)

    assert after(59) == 0
    assert after(2) == 1
    assert after(1000) == 1
    assert after(59, lambda: budget.pace(1)) == 1
    assert after(61, lambda: budget.pace(0)) == 2
    assert after(59, budget.alive) == 2
    assert after(1000, requests=0) == 2


def test_what_the_kernel_takes_of_attempts_that_fail_is_no_movement() -> None:
    """A store that takes nothing: each attempt fills the sockets' buffers, and is given up."""
    clock = TickingClock()
    stalls: list[Stall] = []
    budget = Budget(clock, stall_seconds=60, on_stall=stalls.append)
    for _ in range(10):
        budget.pace(1 << 20)
        clock.sleep(7)
        budget.heed(AmbiguousError("put_part", "k", "timed out"))
        budget.watch(4)
    assert len(stalls) == 1
    budget.arrived()
    budget.pace(1)
    clock.sleep(59)
    budget.watch(4)
    assert len(stalls) == 1


def test_waiting_for_bandwidth_is_no_stall(scene: Scene) -> None:
    stalls: list[Stall] = []
    budget = Budget(
        scene.clock, bandwidth=64 << 10, stall_seconds=5, on_stall=stalls.append, streams=1
    )

    def watch() -> None:
        budget.watch(1)

    for _ in range(10):
        budget.pace(MIB)  # 16 seconds each
        watch()
    assert stalls == []


# ---- the end


def test_a_piece_that_waits_for_bandwidth_goes_soon_after_the_bound_is_lifted() -> None:
    clock = TickingClock()
    budget = Budget(clock, bandwidth=64 << 10)
    lifted: list[float] = []
    sleep = clock.sleep

    def lift_in_between(seconds: float) -> None:
        sleep(seconds)
        if not lifted and clock.now > 3:
            lifted.append(clock.now)
            budget.set_bandwidth(0)

    clock.sleep = lift_in_between  # type: ignore[method-assign]
    budget.pace(MIB)  # 16 seconds
    assert clock.now == lifted[0]


def test_a_piece_that_waits_for_bandwidth_does_not_move_once_the_end_has_come() -> None:
    clock = TickingClock()
    budget = Budget(clock, bandwidth=64 << 10)
    sleep = clock.sleep

    def cut_in_between(seconds: float) -> None:
        assert seconds <= 0.1
        sleep(seconds)
        budget.cut()

    clock.sleep = cut_in_between  # type: ignore[method-assign]
    with pytest.raises(PausedError):
        budget.pace(MIB)
    with pytest.raises(PausedError):
        budget.pace(0)
    assert budget.moved == 0


def test_an_interrupt_waits_for_no_bandwidth() -> None:
    clock = TickingClock()
    budget = Budget(clock, bandwidth=64 << 10)
    came = threading.Event()
    clock.sleep = lambda _: came.set() or threading.Event().wait(0.001)  # type: ignore[assignment]

    def check() -> None:
        if came.is_set():
            raise KeyboardInterrupt

    def story() -> Story:
        yield [Job(lambda: budget.pace(MIB))]  # for ever: this clock stands still

    with ThreadPoolExecutor(1) as executor, pytest.raises(KeyboardInterrupt):
        Coordinator(executor, budget=budget, check=check).run([story()])
    assert budget.moved == 0


@pytest.mark.parametrize(("stories", "raised"), [(1, False), (2, True)])
def test_a_pause_that_comes_when_all_is_done_is_none(stories: int, raised: bool) -> None:
    going, asked = threading.Event(), threading.Event()

    def check() -> None:
        if going.is_set():
            asked.set()
            raise PausedError("another goes first")

    def work() -> None:
        going.set()
        asked.wait(20)

    def story() -> Story:
        yield [Job(work)]

    budget = Budget(TickingClock(), streams=1)
    with ThreadPoolExecutor(1) as executor:
        coordinator = Coordinator(executor, budget=budget, check=check)
        if raised:
            with pytest.raises(PausedError):
                coordinator.run(story() for _ in range(stories))
        else:
            coordinator.run(story() for _ in range(stories))


def test_a_prefix_that_is_lost_is_said_even_when_all_is_done() -> None:
    going, asked = threading.Event(), threading.Event()

    def check() -> None:
        if going.is_set():
            asked.set()
            raise OwnershipError("another run has it")

    def work() -> None:
        going.set()
        asked.wait(20)

    def story() -> Story:
        yield [Job(work)]

    budget = Budget(TickingClock(), streams=1)
    with ThreadPoolExecutor(1) as executor, pytest.raises(OwnershipError):
        Coordinator(executor, budget=budget, check=check).run([story()])
