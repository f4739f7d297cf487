"""Counts of what happened, and where a save's time went."""

from __future__ import annotations

import threading

import pytest

from ds_ckpt_sidecar.observe.tally import PHASES, SECONDS, Histogram, Tally, Timing


def test_the_phases_of_a_save_add_up_to_the_whole() -> None:
    timing = Timing(saved=10, published=12, begun=15, sent=25, stored=26, committed=40)
    assert timing.phases() == {
        "hashing": 2,
        "waiting": 3,
        "uploading": 10,
        "verifying": 1,
        "nodes": 14,
    }
    assert timing.seconds == 30


@pytest.mark.parametrize(
    "seen",
    [
        {},
        {"begun": 15.0},
        {"stored": 26.0},
        {"begun": 15.0, "stored": 26.0},
        {"begun": 5.0, "sent": 99.0, "stored": 26.0},
    ],
)
def test_what_was_not_seen_counts_to_the_phase_after_it(seen: dict[str, float]) -> None:
    timing = Timing(saved=10, published=12, committed=40, **seen)
    phases = timing.phases()
    assert tuple(phases) == PHASES
    assert sum(phases.values()) == pytest.approx(30)
    assert all(seconds >= 0 for seconds in phases.values())


def test_a_clock_ahead_makes_nothing_negative() -> None:
    timing = Timing(saved=50, published=12, begun=15, sent=25, stored=26, committed=40)
    assert timing.seconds == 0
    assert all(seconds == 0 for seconds in timing.phases().values())


def test_a_histogram_counts_each_once_and_the_longest_too() -> None:
    histogram = Histogram()
    for seconds in (0.0, 1.0, 1.1, 1e9):
        histogram.observe(seconds)
    assert sum(histogram.counts) == 4
    assert (histogram.counts[0], histogram.counts[1], histogram.counts[-1]) == (2, 1, 1)
    assert len(histogram.counts) == len(SECONDS) + 1


def test_threads_lose_no_count() -> None:
    tally = Tally()

    def work() -> None:
        for _ in range(2_000):
            tally.failed("put_part", "TransientError")
            tally.unlike()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.errors["put_part", "TransientError"] == 8_000
    assert tally.parts["retried"] == 8_000
    assert tally.verify_failures == 8_000
