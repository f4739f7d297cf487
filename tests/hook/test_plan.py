from __future__ import annotations

import pytest

from ds_ckpt_hook.errors import NotPublishedError
from ds_ckpt_hook.plan import Report, make_plan

A, B = "a" * 32, "b" * 32
TOKEN = "0" * 16


def report(rank: int, node: str, **fields: object) -> Report:
    base: dict[str, object] = {"tag": "t", "token": TOKEN, "host": node, "now_ms": 1000}
    return Report(rank=rank, node=node, **(base | fields))  # type: ignore[arg-type]


def test_a_path_on_two_nodes_belongs_to_the_lowest_rank_that_wrote_it() -> None:
    plan = make_plan(
        [
            report(0, A, claims={"model": 5, "o0": 1}, listing={"model": 5, "o0": 1}),
            report(1, B, claims={"model": 5, "o1": 1}, listing={"model": 5, "o1": 1}),
        ]
    )
    assert plan.owners == {"model": A, "o0": A, "o1": B}
    assert plan.nodes == [A, B]
    assert plan.work_of(B, 1) == ["model", "o1"]
    assert plan.elsewhere(A) == ["o1"]
    assert plan.elsewhere(B) == ["o0"]


def test_a_rank_that_wrote_a_path_goes_before_a_node_that_only_holds_it() -> None:
    plan = make_plan(
        [report(0, A, listing={"model": 5}), report(1, B, claims={"model": 5})],
    )
    assert plan.owners == {"model": B}


def test_a_node_with_nothing_to_upload_is_not_among_the_nodes() -> None:
    plan = make_plan([report(0, A, claims={"model": 5}), report(1, B)])
    assert plan.nodes == [A]
    assert plan.elsewhere(B) == ["model"]


def test_files_that_nobody_claims_are_spread_over_the_ranks_of_one_machine() -> None:
    listing = {f"layer_{n:02d}-model_states.pt": 10 for n in range(6)} | {"o1": 1000}
    plan = make_plan(
        [
            report(0, A, host="x", listing=listing),
            report(1, A, host="x", claims={"o1": 20}),
            report(2, A, host="y"),
        ]
    )
    assert [len(plan.work_of(A, rank)) for rank in range(3)] == [4, 3, 0]


def test_the_time_is_later_than_any_that_a_rank_knows() -> None:
    plan = make_plan([report(0, A, claims={"m": 1}), report(1, A, newest_ms=5000)])
    assert plan.time_ms == 5001
    assert plan.save_id == f"{5001:012x}-{TOKEN}"


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"tag": "other"}, ["under different tags", "'t' on ranks [0]", "'other' on ranks [1]"]),
        ({"error": "disk full"}, ["rank 1: disk full"]),
        ({"root": "sub"}, ["different folders"]),
    ],
)
def test_without_agreement_there_is_no_plan(second: dict[str, str], words: list[str]) -> None:
    with pytest.raises(NotPublishedError) as caught:
        make_plan([report(0, A, claims={"m": 1}), report(1, A, **second)])
    assert all(word in str(caught.value) for word in words)


def test_a_save_without_a_file_is_refused_with_the_remedy() -> None:
    with pytest.raises(NotPublishedError, match="pass the save_dir"):
        make_plan([report(0, A), report(1, A)])
