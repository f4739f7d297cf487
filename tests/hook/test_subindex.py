"""Which rank needs what, and what is refused, without processes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

import ds_ckpt_hook
from ds_ckpt_hook import subcheckpoints
from ds_ckpt_hook.core import Hook
from ds_ckpt_hook.errors import SubcheckpointError
from ds_ckpt_hook.settings import Settings
from ds_ckpt_hook.subindex import Entry, Index, Ranks, Topology, identify
from ds_ckpt_store.contract.manifest import parse
from ds_ckpt_store.errors import ManifestError

ALONE = Topology(
    world_size=1,
    dp_size=1,
    tp_size=1,
    pp_size=1,
    ep_sizes=(),
    stages=(),
    zero_stage=0,
    precision="fp32",
)


def index_of(topology: Topology, ranks: list[Ranks], files: Callable[[Ranks], list[str]]) -> Index:
    """What such a job writes; each file by the first rank that has it."""
    entries: dict[str, Entry] = {}
    for rank, own in enumerate(ranks):
        for file in files(own):
            role, key = identify(file, own, topology)
            made = Entry(key=key, role=role, file=file, rank=rank, size=1, crc32c="0" * 8)
            entries.setdefault(file, made)
    topology = dataclasses.replace(topology, world_size=len(ranks))
    return Index(
        tag="t", step=1, topology=topology, ranks=tuple(ranks), entries=tuple(entries.values())
    )


def needed(index: Index, rank: int) -> set[str]:
    return {entry.file for entry in index.needed_by(rank)}


def test_three_dimensions_of_parallelism_share_as_little_as_deepspeed_reads() -> None:
    ranks = [Ranks(dp, tp, pp) for pp, dp, tp in product(range(2), range(2), range(2))]

    def files(own: Ranks) -> list[str]:
        part = f"mp_rank_{2 * own.pp + own.tp:02}"
        return [
            f"layer_{own.pp:02}-model_{own.tp:02}-model_states.pt",
            f"{part}_model_states.pt",
            f"zero_pp_rank_{own.dp}_{part}_optim_states.pt",
        ]

    index = index_of(dataclasses.replace(ALONE, zero_stage=1), ranks, files)
    assert len({entry.key for entry in index.entries}) == 4 + 4 + 8
    assert needed(index, ranks.index(Ranks(1, 1, 1))) == {
        "layer_01-model_00-model_states.pt",
        "layer_01-model_01-model_states.pt",
        "mp_rank_00_model_states.pt",
        "mp_rank_03_model_states.pt",
        "zero_pp_rank_1_mp_rank_03_optim_states.pt",
    }
    assert needed(index, 0) == set(files(ranks[0]))


def test_of_zero_3_no_rank_reads_what_is_anothers() -> None:
    ranks = [Ranks(dp, tp) for dp, tp in product(range(3), range(2))]

    def files(own: Ranks) -> list[str]:
        name = f"zero_pp_rank_{own.dp}_mp_rank_{own.tp:02}"
        return [f"{name}_model_states.pt", f"{name}_optim_states.pt"]

    index = index_of(dataclasses.replace(ALONE, zero_stage=3), ranks, files)
    for rank, own in enumerate(ranks):
        of_the_first = f"zero_pp_rank_{own.dp}_mp_rank_00_model_states.pt"
        assert needed(index, rank) == {*files(own), of_the_first}


def test_ranks_that_share_experts_read_what_the_first_of_them_wrote() -> None:
    ranks = [Ranks(dp=rank, ep=(rank % 2,)) for rank in range(4)]

    def files(own: Ranks) -> list[str]:
        expert = f"layer_0_expert_{own.ep[0]}_mp_rank_00_model_states.pt"
        optimizer = f"expp_rank_{own.ep[0]}_mp_rank_00_optim_states.pt"
        return ["mp_rank_00_model_states.pt", expert, optimizer]

    index = index_of(dataclasses.replace(ALONE, ep_sizes=(2,)), ranks, files)
    for rank, own in enumerate(ranks):
        assert needed(index, rank) == set(files(own))


def test_with_two_sizes_of_expert_parallelism_no_expert_is_left_out() -> None:
    ranks = [Ranks(dp=rank, ep=(rank % 2, rank)) for rank in range(4)]

    def files(own: Ranks) -> list[str]:
        layers = [f"layer_{n}_expert_{e}_mp_rank_00_model_states.pt" for n, e in enumerate(own.ep)]
        return ["mp_rank_00_model_states.pt", *layers]

    topology = dataclasses.replace(ALONE, ep_sizes=(2, 4))
    index = index_of(topology, ranks, files)
    for rank, own in enumerate(ranks):
        assert needed(index, rank) >= set(files(own))


def test_a_rank_whose_optimizer_nobody_wrote_cannot_be_loaded() -> None:
    ranks = [Ranks(0), Ranks(1)]
    topology = dataclasses.replace(ALONE, zero_stage=1)

    def files(own: Ranks) -> list[str]:
        optimizer = ["zero_pp_rank_0_mp_rank_00_optim_states.pt"] if own.dp == 0 else []
        return ["mp_rank_00_model_states.pt", *optimizer]

    index = index_of(topology, ranks, files)
    assert len(index.needed_by(0)) == 2
    with pytest.raises(ValueError, match="nobody wrote the optimizer of this rank"):
        index.needed_by(1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ranks": ({"dp": 0}, {"dp": 1})}, "2 ranks of 1 are listed"),
        ({"entries": ("a", "a")}, "more than one rank wrote"),
        ({"entries": ("../a",)}, "pattern"),
        ({"entries": ("a/b",)}, "pattern"),
    ],
)
def test_an_index_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    facts = {"role": "model", "rank": 0, "size": 1, "crc32c": "0" * 8}
    fields: dict[str, Any] = {"ranks": ({"dp": 0},), "entries": ("a",), **changes}
    fields["entries"] = [{**facts, "key": file, "file": file} for file in fields["entries"]]
    fields |= {"schema": 1, "tag": "t", "step": 1, "topology": dataclasses.asdict(ALONE)}
    with pytest.raises(ManifestError, match=reason):
        parse(Index, json.dumps(fields).encode())


def test_a_file_of_no_known_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'quantizer\.pt', and what that is is not known"):
        identify("quantizer.pt", Ranks(), ALONE)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ds_ckpt_hook, "_process", {"hook": Hook(Settings())})


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("is_decoupled", "writes after the save has returned"),
        ("load_universal_checkpoint", "universal checkpoints"),
        ("zero_nvme_offload_optimizer", "NVMe"),
        ("zero_elastic_checkpoint", "elastic_checkpoint"),
    ],
)
@pytest.mark.parametrize("call", [subcheckpoints.save, subcheckpoints.load])
def test_what_does_not_go_through_the_checkpoint_engine_is_refused(
    asked: str, reason: str, call: Callable[[Any, Any], object]
) -> None:
    def never(_: object) -> Any:
        raise AssertionError("asked for a stream")

    names = ("load_universal_checkpoint", "zero_nvme_offload_optimizer", "zero_elastic_checkpoint")
    engine = SimpleNamespace(**{name: lambda name=name: name == asked for name in names})
    engine.checkpoint_engine = SimpleNamespace(is_decoupled=lambda: asked == "is_decoupled")
    with pytest.raises(SubcheckpointError, match=reason):
        call(engine, never)
