from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_ckpt_store.errors import SettingsError
from ds_ckpt_store.stores.port import Capabilities, Limits
from ds_ckpt_store.transfer.plan import (
    MIB,
    MOST_PARTS,
    PREFERRED_PART,
    PartPlan,
    check_preferred,
    plan_parts,
    sent_whole,
)

GIB = 1 << 30
TIB = 1 << 40
S3 = Limits()
PROVIDERS = {
    "s3": S3,
    "gcs": Limits(),
    "azure": Limits(
        min_part=1, max_part=4000 * MIB, max_parts=50_000, max_object=190 * TIB, max_put=5000 * MIB
    ),
    "file": Limits(
        min_part=1, max_part=1 << 62, max_parts=1_000_000, max_object=1 << 62, max_put=1 << 62
    ),
}
SIZES = st.one_of(
    st.integers(0, 5 * TIB),
    st.integers(-2, 2).map(lambda step: 5 * GIB + step),
    st.integers(-2, 2).map(lambda step: 10_000 * PREFERRED_PART + step),
    st.integers(-2, 0).map(lambda step: 5 * TIB + step),
)


@given(size=SIZES, preferred=st.integers(1, 6 * GIB))
def test_every_size_that_s3_takes_has_a_plan_within_its_limits(size: int, preferred: int) -> None:
    plan = plan_parts(size, S3, preferred)
    assert plan.count <= S3.max_parts
    assert plan.part_size <= S3.max_part
    assert plan.count == 1 or plan.part_size >= S3.min_part
    assert plan.fits(S3)


@given(size=st.integers(0, 10_000), part_size=st.integers(1, 700))
def test_parts_cover_the_object_without_gap_or_overlap(size: int, part_size: int) -> None:
    position = 0
    numbers = []
    for number, offset, length in PartPlan(size, part_size):
        assert offset == position
        assert 0 < length <= part_size or size == 0
        numbers.append(number)
        position += length
    assert position == size
    assert numbers == list(range(1, PartPlan(size, part_size).count + 1))


@given(size=st.integers(0, 10_000 * PREFERRED_PART))
def test_the_preferred_size_is_kept_while_its_parts_suffice(size: int) -> None:
    assert plan_parts(size, S3).part_size == PREFERRED_PART


def test_one_byte_past_ten_thousand_preferred_parts_grows_all_parts_by_a_mib() -> None:
    plan = plan_parts(10_000 * PREFERRED_PART + 1, S3)
    assert plan.part_size == PREFERRED_PART + MIB
    assert plan.count <= 10_000


def test_five_tib_goes_in_parts_of_525_mib() -> None:
    assert plan_parts(5 * TIB, S3).part_size == 525 * MIB


def test_parts_at_the_provider_s_largest_are_used_before_giving_up() -> None:
    # Growing in whole MiB would pass the largest part; the largest part itself still does.
    limits = Limits(min_part=1, max_part=3 * MIB + 17, max_parts=4, max_object=TIB)
    plan = plan_parts(4 * (3 * MIB + 17), limits, 1)
    assert (plan.part_size, plan.count) == (3 * MIB + 17, 4)


def test_an_object_too_large_is_refused_with_the_limit_named() -> None:
    with pytest.raises(SettingsError, match=str(5 * TIB)):
        plan_parts(5 * TIB + 1, S3)
    with pytest.raises(SettingsError, match="4 parts"):
        plan_parts(101, Limits(min_part=1, max_part=25, max_parts=4))


def test_small_objects_are_sent_whole_unless_the_provider_takes_less() -> None:
    assert sent_whole(PREFERRED_PART, Capabilities())
    assert not sent_whole(PREFERRED_PART + 1, Capabilities())
    assert not sent_whole(5 * GIB + 1, Capabilities(), 6 * GIB)
    assert sent_whole(0, Capabilities())
    assert not sent_whole(100, Capabilities(limits=Limits(max_put=99)))


@given(size=SIZES, preferred=st.integers(1, 6 * GIB), most=st.integers(0, 6 * TIB))
def test_a_store_without_parts_gets_all_whole_or_refuses(
    size: int, preferred: int, most: int
) -> None:
    store = Capabilities(parts=False, limits=Limits(max_put=most))
    if size <= most:
        assert sent_whole(size, store, preferred)
    else:
        with pytest.raises(SettingsError, match=str(most)):
            sent_whole(size, store, preferred)


@given(size=SIZES, preferred=st.integers(1, 5 * GIB))
def test_whole_or_in_parts_no_request_is_larger_than_a_provider_takes(
    size: int, preferred: int
) -> None:
    for limits in PROVIDERS.values():
        if size > limits.max_object:
            continue
        if sent_whole(size, Capabilities(limits=limits), preferred):
            assert size <= limits.max_put
            continue
        plan = plan_parts(size, limits, preferred)
        assert plan.fits(limits)
        assert plan.part_size <= limits.max_part
        assert plan.count <= max(MOST_PARTS, -(-size // limits.max_part))


@pytest.mark.parametrize("provider", ["s3", "gcs", "azure", "file"])
@pytest.mark.parametrize(
    ("size", "preferred"),
    [
        (5 * GIB - 1, 5 * GIB),
        (5 * GIB, 5 * GIB),
        (5 * GIB + 1, 5 * GIB),
        (57 * 10**9, 5 * MIB),  # one part of 57 GB was sent once, and refused
        (60 * GIB, 5 * MIB),
        (230 * 10**9, 5 * MIB),  # the 10,000th part came after 50 GB
        (200 * GIB, 4 * MIB),  # the 50,000th block
        (5 * TIB, 16 * MIB),
    ],
)
def test_sizes_that_others_found_out_about_too_late(
    provider: str, size: int, preferred: int
) -> None:
    limits = PROVIDERS[provider]
    if size > limits.max_object:
        with pytest.raises(SettingsError):
            plan_parts(size, limits, preferred)
        return
    plan = plan_parts(size, limits, preferred)
    assert plan.fits(limits)
    assert plan.count <= MOST_PARTS
    last = size - (plan.count - 1) * plan.part_size
    assert 0 < last <= plan.part_size


def test_more_parts_than_ten_thousand_are_for_those_that_would_be_too_large() -> None:
    limits = Limits(min_part=1, max_part=100, max_parts=50_000, max_object=TIB)
    assert plan_parts(10_000 * 100, limits, 1).count == 10_000
    assert plan_parts(50_000 * 100, limits, 1).count == 50_000


def test_a_preferred_size_that_the_store_never_takes_is_refused_with_what_to_set() -> None:
    azure = Capabilities(limits=PROVIDERS["azure"])
    check_preferred(4000 * MIB, azure)
    with pytest.raises(SettingsError, match=r"DS_CKPT_PART_MIB.*at most 4000 MiB"):
        check_preferred(4001 * MIB, azure)
    check_preferred(4001 * MIB, Capabilities(parts=False, limits=PROVIDERS["azure"]))


def test_a_remembered_part_size_that_no_longer_fits_is_seen() -> None:
    assert not PartPlan(10_001, 1).fits(S3)
    assert not PartPlan(12 * MIB, 4 * MIB).fits(S3)
    assert PartPlan(4 * MIB, 4 * MIB).fits(S3)
