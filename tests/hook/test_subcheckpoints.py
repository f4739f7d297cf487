"""Sub-checkpoints with real DeepSpeed, of all kinds of state that it saves.

Starting DeepSpeed takes seconds, so one pair of processes goes through all cases, and each test
looks at one of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hook.processes import lines_of, run_ranks

pytestmark = pytest.mark.slow

MODEL = "model-pp0-tp0"
OPTIMIZERS = ["optimizer-pp0-tp0-dp0", "optimizer-pp0-tp0-dp1"]
# What each rank writes, and what it reads beyond that.
KEYS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "zero0": ([MODEL], [], [MODEL]),
    "zero1": ([MODEL, OPTIMIZERS[0]], [OPTIMIZERS[1]], [MODEL]),
    "zero2": ([MODEL, OPTIMIZERS[0]], [OPTIMIZERS[1]], [MODEL]),
    "zero3": ([f"{MODEL}-dp0", OPTIMIZERS[0]], [f"{MODEL}-dp1", OPTIMIZERS[1]], []),
    "moe zero0": (
        ["layer0-expert0-pp0-tp0", "layer0-expert1-pp0-tp0", "optimizer-pp0-tp0-ep0", MODEL],
        ["layer0-expert2-pp0-tp0", "layer0-expert3-pp0-tp0", "optimizer-pp0-tp0-ep1"],
        [MODEL],
    ),
    "moe zero1": (
        ["layer0-expert0-pp0-tp0", "layer0-expert1-pp0-tp0", MODEL, OPTIMIZERS[0]],
        ["layer0-expert2-pp0-tp0", "layer0-expert3-pp0-tp0", OPTIMIZERS[1]],
        [MODEL],
    ),
    "pipeline zero0": (
        ["layer0-pp0-tp0", "layer1-pp0-tp0", MODEL],
        ["layer2-pp1-tp0", "layer3-pp1-tp0", "model-pp1-tp0"],
        [MODEL],
    ),
    "pipeline zero1": (
        ["layer0-pp0-tp0", "layer1-pp0-tp0", MODEL, "optimizer-pp0-tp0-dp0"],
        ["layer2-pp1-tp0", "layer3-pp1-tp0", "model-pp1-tp0", "optimizer-pp1-tp0-dp0"],
        [MODEL],
    ),
}
KEYS |= {f"bf16 {of}": KEYS[of] for of in ("zero0", "zero1", "zero3")}
KEYS["fast zero1"] = KEYS["zero1"]  # DeepSpeed's fast engine, which all ranks write a model with
INCOMPLETE = "SubcheckpointError: checkpoint 'faults' has no index, and is not complete: "
NOT_SAVED = "SubcheckpointError: nothing was saved: "
AS_IT_WAS = "nothing was loaded, and the engine is as it was: "
NOT_LOADED = f"SubcheckpointError: {AS_IT_WAS}"


class Outcome:
    """What the two ranks reported, by label."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines = [lines_of(folder / f"rank{rank}.jsonl") for rank in (0, 1)]

    def of(self, label: str) -> list[dict[str, Any]]:
        """One report a rank; a rank that is gone has none."""
        return [line for lines in self._lines for line in lines if line["label"] == label]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("pieces")
    temporary = folder / "tmp"
    temporary.mkdir()
    environ = {
        "TMPDIR": str(temporary),
        # So that what is freed is given back, and the peak tells what a call needs.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    }
    run_ranks(
        lambda _rank: ["-m", "tests.hook.workers.pieces", str(folder)],
        environ=lambda _rank: environ,
    )
    return Outcome(folder)


@pytest.mark.parametrize("label", KEYS)
def test_another_engine_goes_on_with_the_same_losses(outcome: Outcome, label: str) -> None:
    for rank, report in enumerate(outcome.of(label)):
        assert len(set(report["losses"])) == 2
        assert report["resumed"] == report["losses"]
        # The state of the first of the ranks that have a model in common is kept.
        has_its_own = "zero3" in label or "pipeline" in label
        state = {"of": label, "rank": rank if has_its_own else 0, "tensor": [0, 1, 2]}
        assert report["client_state"] == state


@pytest.mark.parametrize("label", KEYS)
def test_each_rank_writes_its_part_and_reads_no_more_than_it_needs(
    outcome: Outcome, label: str
) -> None:
    first, second = outcome.of(label)
    of_first, of_second, of_both = KEYS[label]
    assert first["written"] == [*of_first, "index"]
    assert second["written"] == of_second
    assert sorted(first["read"]) == sorted([*of_first, "index"])
    assert sorted(second["read"]) == sorted([*of_second, *of_both, "index"])


def test_no_file_of_deepspeeds_is_made(outcome: Outcome) -> None:
    for label in KEYS:
        for report in outcome.of(label):
            assert report["beside"] == report["left"] == []
            assert report["is_back"]
    names = [path.name for path in (outcome.folder / "pieces").iterdir()]
    assert len(names) > 30
    assert not [name for name in names if "rank" in name or "states" in name]


def test_deepspeeds_own_way_goes_on_beside_it_and_the_example_works(outcome: Outcome) -> None:
    for report in outcome.of("example"):
        assert report["client_state"] == {"epoch": 3}
        assert report["resumed"] == report["losses"]
    assert (outcome.folder / "own/own/mp_rank_00_model_states.pt").exists()
    written = sorted(path.name for path in (outcome.folder / "example/step1000").iterdir())
    assert written == sorted(f"{key}.piece" for key in ["index", MODEL, *OPTIMIZERS])


def test_a_rank_never_holds_a_second_copy_of_its_part(outcome: Outcome) -> None:
    for report in outcome.of("memory"):
        assert report["saving"] < 0.25
        assert report["loading"] < 2  # DeepSpeed holds what it has loaded until it is copied


@pytest.mark.parametrize(
    ("label", "error"),
    [
        (
            "a writer raises",
            f"{INCOMPLETE}rank 1: {OPTIMIZERS[1]} could not be written: OSError: [Errno 28] No "
            "space left on the device of the test",
        ),
        (
            "a writer keeps its error",
            f"{INCOMPLETE}rank 1: {OPTIMIZERS[1]} could not be written: the writer kept an error ",
        ),
        (
            "the index cannot be written",
            f"{INCOMPLETE}rank 0: OSError: [Errno 28] No space left on the device of the test",
        ),
        ("a client state cannot be pickled", f"{INCOMPLETE}rank 0: {MODEL} could not be "),
        (
            "nobody writes an optimizer",
            f"{INCOMPLETE}rank 1: ValueError: nobody wrote the optimizer of this rank",
        ),
        ("a client state is none", f"{NOT_SAVED}rank 1: TypeError: "),
        (
            "tags differ",
            f"{NOT_SAVED}the ranks differ in tag: 'rank0' on rank 0, 'rank1' on rank 1",
        ),
        ("one rank is refused", f"{NOT_SAVED}rank 1: TorchCheckpointEngine writes after the save"),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_on_both(
    outcome: Outcome, label: str, error: str
) -> None:
    for report in outcome.of(label):
        assert report["error"].startswith(error)
        assert "; rank" not in report["error"]
        assert report["untouched"]


def test_after_a_writer_that_fails_no_index_is_written(outcome: Outcome) -> None:
    for label in (
        "a writer raises",
        "a client state cannot be pickled",
        "nobody writes an optimizer",
    ):
        reports = outcome.of(f"{label}: asked")
        assert len(reports) == 2
        assert not [report for report in reports if "index" in report["keys"]]
    for label in ("tags differ: asked", "one rank is refused: asked"):
        assert [report["keys"] for report in outcome.of(label)] == [[], []]


@pytest.mark.parametrize(
    ("label", "error"),
    [
        (
            "a bit is flipped",
            f"{NOT_LOADED}rank 1: {OPTIMIZERS[1]} could not be read: it is damaged: ",
        ),
        ("bytes are missing", f"{NOT_LOADED}rank 1: {MODEL} could not be read: 3"),
        ("there are more bytes", f"{NOT_LOADED}rank 1: {MODEL} could not be read: 3"),
        ("a reader raises", f"{NOT_LOADED}rank 0: {OPTIMIZERS[0]} could not be read: GoneError: "),
        ("there is no index", f"{NOT_LOADED}rank 0: the index, without which a save is not "),
        ("the index is damaged", f"{NOT_LOADED}rank 1: Index was changed after it was written"),
        ("indexes differ", f"AgreementError: {AS_IT_WAS}the ranks read different indexes: "),
        ("it is another checkpoint", f"{NOT_LOADED}rank 0: the index is that of checkpoint 'x'"),
        (
            "the topology is another",
            f"{NOT_LOADED}rank 0: checkpoint 'faults' was saved with another topology: "
            "zero_stage 2 instead of 1",
        ),
        ("ranks have changed places", f"{NOT_LOADED}rank 1: this rank is Ranks(dp=1, "),
        ("a name leads elsewhere", f"{NOT_LOADED}rank 0: Index: entries.0.file: "),
    ],
)
def test_a_load_that_fails_on_one_rank_fails_on_both_and_touches_no_engine(
    outcome: Outcome, label: str, error: str
) -> None:
    reports = outcome.of(label)
    assert len(reports) == 2
    for report in reports:
        assert report["error"].startswith(error)
        assert report["untouched"]


def test_training_goes_on_after_failed_saves_as_if_there_had_been_none(outcome: Outcome) -> None:
    assert outcome.of("after all that") == [
        report | {"label": "after all that"} for report in outcome.of("reference")
    ]


def test_a_model_of_another_shape_is_told_on_all_ranks(outcome: Outcome) -> None:
    for report in outcome.of("another model"):
        assert "the engine may be loaded in part: start all ranks anew" in report["error"]
        assert "size mismatch" in report["error"]


def test_a_rank_that_dies_while_it_writes_leaves_no_index_and_no_rank_waiting(
    outcome: Outcome,
) -> None:
    (report,) = outcome.of("death")
    assert "checkpoint 'death' has no index, and is not complete" in report["error"]
    assert "index" not in report["asked"]
