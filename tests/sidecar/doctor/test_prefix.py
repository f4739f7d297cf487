"""Whose the prefix is."""

from __future__ import annotations

import re

import pytest

from ds_ckpt_sidecar.doctor import check_store
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from tests.sidecar.doctor.support import (
    only,
    own,
)


class Clock(SystemClock):
    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


@pytest.mark.parametrize(
    ("run_id", "unfinished", "later", "severity"),
    [
        ("mine", True, 0, "ok"),
        ("", True, 0, "ok"),
        ("other", True, 0, "error"),
        ("other", True, 7000, "warning"),
        ("other", False, 0, "warning"),
    ],
)
def test_the_run_that_has_the_prefix_is_told_and_whether_it_is_at_work(
    run_id: str, unfinished: bool, later: float, severity: str
) -> None:
    clock = Clock()
    store = MemoryStore(MemoryBucket(clock))
    own(store, "mine", unfinished=unfinished)
    clock.ahead = later
    found = check_store(store, run_id=run_id)
    (lease,) = (each for each in found if "has the prefix" in each.sentence)
    assert lease.severity == severity
    assert "'mine'" in lease.sentence


def test_a_lease_that_is_damaged_is_an_error_that_names_the_object() -> None:
    from ds_ckpt_store.stores.port import BytesSource

    store = MemoryStore(MemoryBucket(SystemClock()))
    store.put(".ds_ckpt/owner.json", BytesSource(b"{"))
    errors = [each for each in check_store(store) if each.severity == "error"]
    assert any(".ds_ckpt/owner.json" in each.remedy for each in errors)


def test_a_clock_that_differs_from_the_stores_is_told() -> None:
    clock = Clock()
    clock.ahead = -500
    found = check_store(MemoryStore(MemoryBucket(clock)))
    assert re.search(r"(500|501) s behind", only(found, "warning").sentence)
