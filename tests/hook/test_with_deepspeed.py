"""The hook with real DeepSpeed, real processes and gloo.

Starting DeepSpeed takes seconds, so each worker goes through many cases and each test looks at
one of them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.manifest import NodeManifest, Shard
from ds_ckpt_store.contract.volume import Volume
from tests.hook.processes import lines_of, run_ranks
from tests.hook.standin import manifests

pytestmark = pytest.mark.slow

TIMEOUT = 8
MODEL = "mp_rank_00_model_states.pt"
MODEL_0, MODEL_1 = (f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1))
OPTIMIZER_0, OPTIMIZER_1 = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
FILES = {
    0: {MODEL: 0},
    1: {MODEL: 0, OPTIMIZER_0: 0, OPTIMIZER_1: 1},
    2: {MODEL: 0, OPTIMIZER_0: 0, OPTIMIZER_1: 1},
    3: {MODEL_0: 0, MODEL_1: 1, OPTIMIZER_0: 0, OPTIMIZER_1: 1},
}


class Outcome:
    """What the ranks of one worker reported, by label."""

    def __init__(self, folder: Path, outputs: list[str]) -> None:
        self.folder = folder
        self.outputs = outputs
        self.lines = [lines_of(folder / f"rank{rank}.jsonl") for rank in range(len(outputs))]

    def of(self, label: str, rank: int = 0) -> dict[str, Any]:
        return next(line for line in self.lines[rank] if line["label"] == label)


def run(worker: str, folder: Path, **environ: str) -> Outcome:
    outputs = run_ranks(
        lambda _rank: ["-m", f"tests.hook.workers.{worker}", str(folder)],
        environ=lambda _rank: {"DS_CKPT_TIMEOUT": str(TIMEOUT), **environ},
    )
    return Outcome(folder, outputs)


def is_right(folder: Path, shard: Shard) -> bool:
    data = (folder / shard.path).read_bytes()
    return (shard.size, shard.crc32c) == (len(data), digest.to_hex(digest.crc32c(data)))


@pytest.fixture(scope="module", params=["", "1"], ids=["read", "attached"])
def one_node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run("one_node", tmp_path_factory.mktemp("one"), ATTACHED=request.param)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run("two_nodes", tmp_path_factory.mktemp("two"), LOCAL_RANK="0")


def manifest_of(outcome: Outcome, label: str) -> NodeManifest | None:
    save_id = outcome.of(label)["save_id"]
    assert all(line["save_id"] == save_id for line in (outcome.of(label, 1),))
    found = [m for m in manifests(outcome.folder / "tags") if m.save_id == save_id]
    return found[0] if found else None


@pytest.mark.parametrize("stage", range(4))
def test_the_manifest_of_each_zero_stage_lists_exactly_its_files(
    one_node: Outcome, stage: int
) -> None:
    save_dir = one_node.folder / f"zero{stage}"
    (manifest,) = manifests(save_dir)
    assert manifest.save_id == one_node.of(f"zero{stage}")["save_id"]
    assert {shard.path: shard.rank for shard in manifest.shards} == FILES[stage]
    assert {path.name for path in (save_dir / "global_step1").iterdir()} == set(FILES[stage])
    assert all(is_right(save_dir / "global_step1", shard) for shard in manifest.shards)
    scripts = {path.name for path in save_dir.glob("*.py")}
    assert {entry.path for entry in manifest.companions} == scripts
    assert (manifest.tag, manifest.step, manifest.world_size) == ("global_step1", 1, 2)
    assert manifest.protection == "hardlink"


@pytest.mark.parametrize(
    ("label", "tag"),
    [("int", "7"), ("slash", "run/a/step1"), ("unicode", "ü 1%+"), ("float", "1.5")],
)
def test_tags_become_the_folders_that_deepspeed_makes_of_them(
    one_node: Outcome, label: str, tag: str
) -> None:
    manifest = manifest_of(one_node, label)
    assert manifest is not None
    assert manifest.tag == tag
    assert {shard.path for shard in manifest.shards} == set(FILES[1])
    assert all(is_right(one_node.folder / "tags" / tag, shard) for shard in manifest.shards)


def test_ranks_that_saved_under_their_own_tags_publish_nothing(one_node: Outcome) -> None:
    for rank in (0, 1):
        line = one_node.of("per rank", rank)
        assert line["save_id"] is None
        assert "'rank0' on ranks [0], 'rank1' on ranks [1]" in line["reason"]


def test_a_rank_that_lost_its_shard_stops_all_and_training_goes_on(one_node: Outcome) -> None:
    for rank in (0, 1):
        line = one_node.of("short", rank)
        assert line["save_id"] is None
        assert re.search(rf"rank 1: .*{OPTIMIZER_1} is missing", line["reason"])
    losses = [line["value"] for line in one_node.lines[0] if line["label"] == "loss"]
    assert len(losses) == 2
    assert manifest_of(one_node, "after") is not None


def test_a_rank_that_never_calls_costs_one_timeout_and_no_more(one_node: Outcome) -> None:
    alone, again = one_node.of("alone"), one_node.of("again")
    assert TIMEOUT <= alone["seconds"] < 4 * TIMEOUT
    assert again["seconds"] < TIMEOUT
    assert "no longer talk" in again["reason"]
    assert "does without exchanges" in one_node.outputs[0]
    assert one_node.of("late", 1)["reason"]


def test_the_trainers_status_ends_as_finished_with_its_skipped_saves(one_node: Outcome) -> None:
    status = Volume(str(one_node.folder / "zero2")).trainer_status()
    assert status is not None
    assert status.finished
    assert status.held_seconds > 0
    tags = Volume(str(one_node.folder / "tags")).trainer_status()
    assert tags is not None
    assert tags.attempt == status.attempt
    assert tags.skipped_saves >= 2


def test_two_nodes_with_one_path_agree_on_who_uploads_it(two_nodes: Outcome) -> None:
    first, second = (two_nodes.folder / "zero1" / f"node{rank}" for rank in (0, 1))
    (one,), (two,) = manifests(first), manifests(second)
    assert one.save_id == two.save_id
    assert one.node != two.node
    assert one.nodes == two.nodes == sorted([one.node, two.node])
    assert {shard.path: shard.rank for shard in one.shards} == {MODEL: 0, OPTIMIZER_0: 0}
    assert {shard.path: shard.rank for shard in two.shards} == {OPTIMIZER_1: 1}
    assert {shard.path: shard.rank for shard in two.replicas} == {MODEL: 1}
    assert (one.elsewhere, two.elsewhere) == ([OPTIMIZER_1], [OPTIMIZER_0])
    assert all(is_right(first / one.tag, shard) for shard in one.shards)
    assert all(is_right(second / two.tag, shard) for shard in (*two.shards, *two.replicas))


def test_two_nodes_of_zero_3_hold_their_own_shards_only(two_nodes: Outcome) -> None:
    (two,) = manifests(two_nodes.folder / "zero3" / "node1")
    assert {shard.path for shard in two.shards} == {MODEL_1, OPTIMIZER_1}
    assert two.replicas == []
    assert two.elsewhere == [MODEL_0, OPTIMIZER_0]


def test_a_decoupled_engines_saves_are_taken_when_their_files_are_there(tmp_path: Path) -> None:
    outcome = run("decoupled", tmp_path, CROSS_SIZE="1", CROSS_RANK="0", LOCAL_SIZE="2")
    assert [outcome.of("saved", rank)["save_id"] for rank in (0, 1)] == [None, None]
    one, two = manifests(tmp_path / "volume")
    assert [(m.tag, m.step) for m in (one, two)] == [("global_step1", 1), ("global_step2", 2)]
    for manifest in (one, two):
        assert [shard.path for shard in manifest.shards] == [MODEL]
        assert is_right(tmp_path / "volume" / manifest.tag, manifest.shards[0])
    last = outcome.of("final")["not_durable"]
    assert "engine.destroy()" in last["global_step4"]


def test_a_killed_run_resumes_with_the_losses_of_one_that_was_not(tmp_path: Path) -> None:
    def train(save_dir: str, out: str, *more: str, expect: int = 0) -> list[dict[str, Any]]:
        arguments = ["-m", "ds_ckpt_hook.example", "--save-dir", str(tmp_path / save_dir)]
        arguments += ["--out", str(tmp_path / out), "--zero-stage", "2", "--hidden", "16"]
        run_ranks(lambda _rank: [*arguments, *more], expect=expect)
        return lines_of(tmp_path / out)

    whole = train("reference", "reference.jsonl", "--steps", "6", "--no-hook")
    train("volume", "first.jsonl", "--steps", "6", "--kill-after", "5", "--resume", expect=137)
    second = train("volume", "second.jsonl", "--steps", "6", "--resume", "--finalize-timeout", "3")
    loaded = second[0]
    step = loaded["global_steps"]
    assert step in (2, 4)  # 2, if it was killed before the save at 4 was handed over
    assert loaded["loaded"].startswith(str(tmp_path / "volume" / f"global_step{step}"))
    expected = {line["step"]: line["loss_hex"] for line in whole if "step" in line}
    resumed = {line["step"]: line["loss_hex"] for line in second if "step" in line}
    assert resumed == {later: expected[later] for later in range(step + 1, 7)}
    saved = {manifest.tag: manifest for manifest in manifests(tmp_path / "volume")}
    assert saved["global_step6"].parent == saved[f"global_step{step}"].save_id
