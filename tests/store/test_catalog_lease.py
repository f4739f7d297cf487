"""Who owns a prefix: by the store's clock, by attempts, never by our own clock."""

from __future__ import annotations

import pytest

from ds_ckpt_store.catalog import Lease
from ds_ckpt_store.errors import DamagedError, OwnershipError
from ds_ckpt_store.stores.port import BytesSource
from tests.store.prefix import NODE, OTHER, THIRD, Prefix

OWNER = ".ds_ckpt/owner.json"


@pytest.fixture
def prefix() -> Prefix:
    return Prefix()


def test_the_first_to_come_gets_epoch_two(prefix: Prefix) -> None:
    lease = prefix.catalog.own("run", prefix.attempt(), NODE, nodes=[NODE, OTHER])
    assert (lease.epoch, lease.newest, lease.took_over) == (2, True, "")
    owner = prefix.catalog.owner()
    assert owner is not None
    assert owner.unfinished == [NODE, OTHER]


def test_the_same_attempt_renews_and_keeps_its_epoch(prefix: Prefix) -> None:
    prefix.catalog.own("run", prefix.attempt(), NODE)
    before = prefix.store.head(OWNER)
    prefix.clock.sleep(60)
    assert prefix.catalog.own("run", prefix.attempt(), NODE).epoch == 2
    after = prefix.store.head(OWNER)
    assert after.modified == before.modified + 60
    assert after.version != before.version


def test_both_nodes_of_an_attempt_share_its_epoch(prefix: Prefix) -> None:
    prefix.catalog.own("run", prefix.attempt(), NODE)
    assert prefix.another().own("run", prefix.attempt(), OTHER).epoch == 2
    owner = prefix.catalog.owner()
    assert owner is not None
    assert owner.unfinished == [NODE, OTHER]


def test_a_new_attempt_raises_the_epoch_and_the_old_one_is_passed(prefix: Prefix) -> None:
    prefix.catalog.own("run", prefix.attempt(0), NODE)
    assert prefix.catalog.own("run", prefix.attempt(1), NODE).epoch == 4
    lingering = prefix.another().own("run", prefix.attempt(0), OTHER)
    assert (lingering.epoch, lingering.newest) == (2, False)
    owner = prefix.catalog.owner()
    assert owner is not None
    assert owner.attempt == prefix.attempt(1)


def test_an_attempt_on_a_slow_clock_is_the_newest_if_it_began_last(prefix: Prefix) -> None:
    """All pods were replaced, and rank 0's new machine is minutes behind."""
    prefix.catalog.own("run", prefix.attempt(9), NODE, age=lambda: 100.0)
    prefix.clock.sleep(50)
    slow = prefix.another().own("run", prefix.attempt(2), OTHER, age=lambda: 10.0)
    assert (slow.epoch, slow.newest) == (4, True)
    owner = prefix.catalog.owner()
    assert owner is not None
    assert owner.attempt == prefix.attempt(2)
    passed = prefix.catalog.own("run", prefix.attempt(9), NODE, age=lambda: 150.0)
    assert (passed.epoch, passed.newest) == (2, False)


@pytest.mark.parametrize("age", [8.0, 10.0, 12.0])
def test_attempts_that_began_at_nearly_the_same_time_are_told_apart_by_their_ids(
    prefix: Prefix, age: float
) -> None:
    """A store tells whole seconds: what lies nearer proves nothing."""
    first = prefix.catalog.own("run", prefix.attempt(1), NODE, age=lambda: 10.0)
    second = prefix.another().own("run", prefix.attempt(2), OTHER, age=lambda: age)
    assert second.epoch > first.epoch


def test_an_attempt_on_a_fast_clock_is_not_the_newest_if_it_began_before(prefix: Prefix) -> None:
    """Nobody could register it while it ran: its node had lost the store."""
    prefix.catalog.own("run", prefix.attempt(0), NODE, age=lambda: 900.0)
    prefix.clock.sleep(60)
    prefix.catalog.own("run", prefix.attempt(1), NODE, age=lambda: 10.0)
    fast = prefix.another().own("run", prefix.attempt(9), OTHER, age=lambda: 500.0)
    assert (fast.epoch, fast.newest) == (3, False)
    owner = prefix.catalog.owner()
    assert owner is not None
    assert owner.attempt == prefix.attempt(1)


def test_how_long_an_attempt_runs_is_measured_again_if_the_store_was_slow_to_tell_its_time(
    prefix: Prefix,
) -> None:
    prefix.catalog.own("run", prefix.attempt(0), NODE, age=lambda: 100.0)
    prefix.clock.sleep(50)
    began = prefix.clock.time() - 160.0  # before the other
    stall = prefix.fault("put", "call", key="/clock/", action=lambda: prefix.clock.sleep(300))
    late = prefix.catalog.own(
        "run", prefix.attempt(9), OTHER, age=lambda: prefix.clock.time() - began
    )
    assert stall.count is not None
    assert stall.count <= 0
    assert (late.epoch, late.newest) == (1, False)


def test_what_a_later_attempt_on_the_same_node_left_behind_is_never_the_newest(
    prefix: Prefix,
) -> None:
    prefix.catalog.own("run", prefix.attempt(3), NODE, age=lambda: 1.0)
    left = prefix.catalog.own("run", prefix.attempt(8), NODE, left_over=True)
    assert (left.epoch, left.newest) == (1, False)


def test_what_a_later_attempt_left_behind_sorts_after_what_was_saved_before_it(
    prefix: Prefix,
) -> None:
    """All pods were replaced, by such whose clock is behind, while the store was away."""
    before = prefix.catalog.own("run", prefix.attempt(9), NODE, age=lambda: 900.0)
    now = prefix.another().own("run", prefix.attempt(3), OTHER, age=lambda: 10.0)
    left = prefix.another().own("run", prefix.attempt(2), OTHER, age=lambda: 300.0, left_over=True)
    assert not left.newest
    assert before.epoch < left.epoch < now.epoch


def test_an_earlier_attempt_gets_its_predecessors_epoch_where_none_is_free(prefix: Prefix) -> None:
    """An agent of before gave epochs in a row."""
    prefix.catalog.own("run", prefix.attempt(0), NODE)
    prefix.catalog.own("run", prefix.attempt(5), NODE)
    owner = prefix.catalog.owner()
    assert owner is not None
    in_a_row = {prefix.attempt(0): 3, prefix.attempt(5): 4}
    changed = owner.model_copy(update={"attempts": in_a_row, "epoch": 4})
    prefix.catalog.store.put(".ds_ckpt/owner.json", BytesSource(changed.to_bytes()))
    late = prefix.another().own("run", prefix.attempt(3), OTHER)
    assert (late.epoch, late.newest) == (3, False)


def test_an_earlier_attempt_that_nobody_registered_does_not_outrank_a_later_one(
    prefix: Prefix,
) -> None:
    prefix.catalog.own("run", prefix.attempt(0), NODE)
    prefix.catalog.own("run", prefix.attempt(5), NODE)
    late = prefix.another().own("run", prefix.attempt(3), OTHER)
    assert not late.newest
    assert late.epoch == 3
    first_of_all = prefix.another().own("run", "0" * 12 + "-" + "0" * 16, OTHER)
    assert not first_of_all.newest
    assert first_of_all.epoch < 2


def test_an_owner_that_was_lost_does_not_set_epochs_back(prefix: Prefix) -> None:
    prefix.commit(epoch=7)
    prefix.store.delete(OWNER)
    assert prefix.catalog.own("run", prefix.attempt(1), NODE).epoch == 9


# ---- two runs


def test_a_foreign_live_run_is_refused_by_name_and_nothing_of_it_is_touched(
    prefix: Prefix,
) -> None:
    prefix.catalog.own("run", prefix.attempt(), NODE)
    prefix.commit()

    def all_but_clocks() -> dict[str, object]:
        keys = [key for key in prefix.stored_keys() if "/clock/" not in key]
        return {key: prefix.store.head(key) for key in keys}

    before = all_but_clocks()
    prefix.clock.sleep(599)
    with pytest.raises(OwnershipError, match=r"belongs to run 'run'.*'intruder'.*another prefix"):
        prefix.another().own("intruder", prefix.attempt(9), OTHER)
    assert all_but_clocks() == before


def test_a_silent_foreign_run_is_taken_over_by_the_stores_clock_alone(prefix: Prefix) -> None:
    prefix.catalog.own("run", prefix.attempt(), NODE)
    prefix.clock.sleep(601)  # the store's clock: no other is asked
    lease = prefix.another().own("second", prefix.attempt(9), OTHER)
    assert (lease.epoch, lease.newest, lease.took_over) == (4, True, "run")


def test_how_long_silence_lasts_is_a_setting(prefix: Prefix) -> None:
    prefix.catalog.own("run", prefix.attempt(), NODE)
    prefix.clock.sleep(31)
    assert prefix.another().own("second", "x", OTHER, stale_after=30).took_over == "run"


def test_a_foreign_run_that_is_finished_on_all_nodes_is_taken_over_at_once(prefix: Prefix) -> None:
    prefix.catalog.own("run", prefix.attempt(), NODE, nodes=[NODE, OTHER])
    prefix.catalog.own("run", prefix.attempt(), NODE, finished=True)
    with pytest.raises(OwnershipError):
        prefix.another().own("second", "x", OTHER)
    prefix.catalog.own("run", prefix.attempt(), OTHER, finished=True)
    assert prefix.another().own("second", "x", OTHER).epoch == 4


def test_a_run_that_comes_back_is_refused_only_while_the_one_that_took_over_lives(
    prefix: Prefix,
) -> None:
    prefix.catalog.own("run", prefix.attempt(0), NODE)
    prefix.clock.sleep(601)
    prefix.another().own("second", prefix.attempt(1), OTHER)
    with pytest.raises(OwnershipError, match="'second'"):
        prefix.catalog.own("run", prefix.attempt(0), NODE)
    prefix.clock.sleep(601)
    back = prefix.catalog.own("run", prefix.attempt(0), NODE)
    assert (back.epoch, back.took_over) == (6, "second")


# ---- races and lost answers


def test_two_that_create_at_once_agree_on_one_owner(prefix: Prefix) -> None:
    rival: list[Lease] = []
    prefix.fault(
        "put",
        "call",
        OWNER,
        action=lambda: rival.append(prefix.another().own("run", prefix.attempt(), OTHER)),
    )
    lease = prefix.catalog.own("run", prefix.attempt(), NODE)
    assert (lease.epoch, rival[0].epoch) == (2, 2)
    owner = prefix.catalog.owner()
    assert owner is not None
    assert owner.unfinished == [NODE, OTHER]


def test_a_renewal_that_races_with_a_newer_attempt_does_not_undo_it(prefix: Prefix) -> None:
    prefix.catalog.own("run", prefix.attempt(0), NODE)
    prefix.fault(
        "put", "call", OWNER, action=lambda: prefix.another().own("run", prefix.attempt(1), OTHER)
    )
    lease = prefix.catalog.own("run", prefix.attempt(0), NODE)
    assert (lease.epoch, lease.newest) == (2, False)
    owner = prefix.catalog.owner()
    assert owner is not None
    assert (owner.attempt, owner.epoch) == (prefix.attempt(1), 4)


@pytest.mark.parametrize("fault", ["fail-after", "late"])
@pytest.mark.parametrize("renewal", [False, True])
def test_an_answer_that_was_lost_gives_no_second_epoch(
    prefix: Prefix, fault: str, renewal: bool
) -> None:
    if renewal:
        prefix.catalog.own("run", prefix.attempt(0), NODE)
    prefix.fault("put", fault, OWNER)
    lease = prefix.catalog.own("run", prefix.attempt(1), NODE)
    prefix.store.apply_late()
    owner = prefix.catalog.owner()
    assert owner is not None
    assert lease.epoch == owner.epoch == (4 if renewal else 2)
    assert owner.attempt == prefix.attempt(1)


def test_an_owner_that_cannot_be_read_is_named_and_not_overwritten(prefix: Prefix) -> None:
    prefix.put(OWNER, b"garbage")
    with pytest.raises(DamagedError, match=r"owner\.json"):
        prefix.catalog.own("run", prefix.attempt(), NODE)
    assert prefix.text(OWNER) == "garbage"


def test_whoever_comes_for_the_lease_leaves_a_sign_of_life(prefix: Prefix) -> None:
    """Also who does not get it: gc must not take a slow save of an older attempt for dead."""
    assert prefix.catalog.last_seen(NODE) == 0
    for number, node in ((0, NODE), (1, OTHER), (0, NODE)):
        prefix.clock.sleep(100)
        prefix.catalog.own("run", prefix.attempt(number), node)
        assert prefix.catalog.last_seen(node) == prefix.clock.now
    with pytest.raises(OwnershipError):
        prefix.catalog.own("intruder", prefix.attempt(9), THIRD)
    assert prefix.catalog.last_seen(THIRD) == prefix.clock.now


@pytest.mark.parametrize("dated", [True, False])
def test_a_run_that_comes_back_is_led_by_its_last_attempt_whoever_of_it_comes_first(
    prefix: Prefix, dated: bool
) -> None:
    """Another run has used the prefix; first comes a node that was away since the first attempt."""
    begins = [prefix.clock.time() + number * 100 for number in range(2)]

    def own(number: int, node: str) -> Lease:
        begun = begins[number]
        age = (lambda: prefix.clock.time() - begun) if dated else None
        return prefix.another().own("run", prefix.attempt(number), node, age=age)

    prefix.clock.sleep(1)
    own(0, NODE)
    prefix.commit("step1", epoch=2, attempt=prefix.attempt(0))
    prefix.clock.sleep(100)
    own(1, OTHER)
    newest = prefix.commit("step9", epoch=4, attempt=prefix.attempt(1))
    prefix.clock.sleep(1000)
    assert prefix.another().own("other", "x", THIRD).epoch == 6
    prefix.another().own("other", "x", THIRD, finished=True)
    away = own(0, NODE)
    assert (away.epoch, away.newest, away.took_over) == (2, False, "other")
    owner = prefix.catalog.owner()
    assert owner is not None
    assert (owner.run_id, owner.attempt) == ("run", prefix.attempt(1))
    late = prefix.commit("step2", epoch=away.epoch, attempt=prefix.attempt(0))
    prefix.catalog.point(late)
    prefix.catalog.point(newest)
    assert prefix.catalog.latest() == newest
    back = own(1, OTHER)
    assert (back.epoch, back.newest) == (8, True)
    assert own(0, NODE).newest is False
