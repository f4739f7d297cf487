"""A failure that repeats is said at growing intervals."""

from __future__ import annotations

from ds_ckpt_sidecar.observe.log import Growing
from tests.sidecar.world import Lines


class Clock:
    """Time that goes on by hand."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_failing_upload_is_said_at_growing_intervals_whatever_its_words() -> None:
    log, clock = Lines(), Clock()
    failures = Growing(log, clock)
    said = []
    for second in range(4_000):
        clock.now = float(second)
        failures.error("s1", "save.delayed", error=f"request {second}: no", kind="TransientError")
        if len(log.of("save.delayed")) > len(said):
            said.append(second)
    assert said == [0, 60, 180, 420, 900, 1860, 3780]
    assert log.of("save.delayed")[1]["repeated"] == 59


def test_another_kind_of_failure_and_one_after_success_are_said_at_once() -> None:
    log = Lines()
    failures = Growing(log, Clock())
    failures.error("s1", "save.delayed", error="a", kind="TransientError")
    failures.error("s1", "save.delayed", error="b", kind="AccessError")
    failures.error("s2", "save.delayed", error="b", kind="AccessError")
    failures.clear("s1")
    failures.error("s1", "save.delayed", error="b", kind="AccessError")
    failures.error("x", "clean.failed", error="one")
    failures.error("x", "clean.failed", error="two")
    assert len(log.of("save.delayed")) == 4
    assert len(log.of("clean.failed")) == 2
