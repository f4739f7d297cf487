"""The index of a set of sub-checkpoints: what there is, who wrote it, and which ranks need it.

DeepSpeed names a file by what is in it, and says nowhere which ranks will read it. Both follow from
where the rank that wrote it stands among the others, so the index keeps that for each rank. It is
written last: without one, a set is not complete. It may be read in another training by mistake,
so it names all that must be the same for DeepSpeed to load what was saved.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import IO, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ds_ckpt_store.contract.manifest import Crc, Document, Natural

Role = Literal["model", "optimizer", "layer", "expert", "index"]
Precision = Literal["fp32", "fp16", "bf16"]
_OPTIMIZER_OF_EXPERTS = "expp_rank_"
_NAMES: tuple[tuple[Role, str], ...] = (
    ("expert", r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_\d+_model_states\.pt"),
    ("layer", r"layer_(?P<layer>\d+)-([\w-]+-)?model_states\.pt"),
    ("optimizer", r"expp_rank_(?P<ep>\d+)_mp_rank_\d+_optim_states\.pt"),
    ("optimizer", r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt"),
    ("model", r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt"),
)


@dataclass(frozen=True)
class Ranks:
    """Where a process stands.

    Attributes:
        dp: among those that share the work of data parallelism, and the states that ZeRO divides.
        tp: among those that share each layer (tensor parallelism).
        pp: stage of the pipeline.
        ep: among those that share the experts; one for each size of expert parallelism.
    """

    dp: int = 0
    tp: int = 0
    pp: int = 0
    ep: tuple[int, ...] = ()


@dataclass(frozen=True)
class Topology:
    """What must be the same for DeepSpeed to load what was saved.

    Attributes:
        world_size: number of processes.
        dp_size, tp_size, pp_size: of data, tensor and pipeline parallelism.
        ep_sizes: sizes of expert parallelism in use.
        stages: first layer of each stage of the pipeline, and the number of layers.
        zero_stage: 0 to 3.
        precision: that the model is trained in.
    """

    world_size: int
    dp_size: int
    tp_size: int
    pp_size: int
    ep_sizes: tuple[int, ...]
    stages: tuple[int, ...]
    zero_stage: int
    precision: Precision

    def differences(self, other: Topology) -> list[str]:
        """What ``other`` has otherwise, e.g. ``zero_stage 1 instead of 3``."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return [
            f"{name} {theirs[name]} instead of {mine[name]}"
            for name in mine
            if mine[name] != theirs[name]
        ]


@dataclass(frozen=True)
class Subcheckpoint:
    """One piece of a checkpoint, as a writer or a reader is asked for it.

    A reader sees what the writer saw, but for ``client_state``.

    Attributes:
        key: names it within its checkpoint, in letters, digits and ``-``.
        role: ``model``, ``optimizer``, ``layer`` (of a pipeline), ``expert``, or ``index``.
        tag: of the checkpoint; None for an index that is loaded without a tag.
        step: global step; None for the index.
        ranks: where the rank that writes it stands; all 0 for the index.
        topology: world sizes, ZeRO stage and precision of the engine.
        client_state: what the user gave to :func:`ds_ckpt_hook.subcheckpoints.save`; empty on load.
    """

    key: str
    role: Role
    tag: str | None
    step: int | None
    ranks: Ranks
    topology: Topology
    client_state: Mapping[str, Any] = field(default_factory=dict)


Opener: TypeAlias = Callable[[Subcheckpoint], AbstractContextManager[IO[bytes]]]
"""A writer or a reader: a context manager that gives a binary stream."""


class Entry(BaseModel):
    """One sub-checkpoint, and the rank that wrote it; ``file`` is DeepSpeed's name for it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    key: str
    role: Role
    file: Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=200)]
    rank: Natural
    size: Natural
    crc32c: Crc


class Index(Document):
    """All sub-checkpoints of one save; ``ranks`` tells where each process stood."""

    tag: str
    step: Natural
    topology: Topology
    ranks: tuple[Ranks, ...]
    entries: tuple[Entry, ...]

    @model_validator(mode="after")
    def _is_consistent(self) -> Index:
        if len(self.ranks) != self.topology.world_size:
            raise ValueError(f"{len(self.ranks)} ranks of {self.topology.world_size} are listed")
        if any(entry.rank >= len(self.ranks) for entry in self.entries):
            raise ValueError("a rank that is not listed wrote an entry")
        for what in ("key", "file"):
            counted = Counter(getattr(entry, what) for entry in self.entries)
            if twice := [name for name, count in counted.items() if count > 1]:
                raise ValueError(f"more than one rank wrote {twice[:4]}")
        return self

    def needed_by(self, rank: int) -> list[Entry]:
        """What DeepSpeed reads on a rank when it loads the checkpoint.

        Raises:
            ValueError: nobody wrote the model or the optimizer of this rank.
        """
        own = self.ranks[rank]
        needed = [entry for entry in self.entries if self._is_needed(entry, own)]
        roles = {"model"} | ({"optimizer"} & {entry.role for entry in self.entries})
        if lacking := roles - {entry.role for entry in needed}:
            raise ValueError(f"nobody wrote the {' and the '.join(sorted(lacking))} of this rank")
        return needed

    def _is_needed(self, entry: Entry, own: Ranks) -> bool:
        writer = self.ranks[entry.rank]
        same_part = (writer.tp, writer.pp) == (own.tp, own.pp)
        if entry.role == "layer":  # of the first part, DeepSpeed reads how many parts there are
            return writer.pp == own.pp and writer.tp in (own.tp, 0)
        if entry.role == "model":
            same_part = same_part or (writer.tp, writer.pp) == (0, 0)
            return same_part and (self.topology.zero_stage < 3 or writer.dp == own.dp)
        if entry.role == "expert" or entry.file.startswith(_OPTIMIZER_OF_EXPERTS):
            # Which size of expert parallelism a layer has is not known here: with several,
            # some that are not needed are read.
            return same_part and any(a == b for a, b in zip(writer.ep, own.ep, strict=True))
        return same_part and writer.dp == own.dp


def identify(file: str, ranks: Ranks, topology: Topology) -> tuple[Role, str]:
    """Role and key of what DeepSpeed writes to a file, on the process that stands at ``ranks``.

    Raises:
        ValueError: DeepSpeed has no such file, as far as is known.
    """
    for role, pattern in _NAMES:
        if found := re.fullmatch(pattern, file):
            return role, _key(role, found.groupdict(), ranks, topology)
    raise ValueError(f"DeepSpeed writes {file!r}, and what that is is not known")


def _key(role: Role, numbers: dict[str, str], ranks: Ranks, topology: Topology) -> str:
    words = [f"{name}{int(numbers[name])}" for name in ("layer", "expert") if name in numbers]
    words = [*(words or [role]), f"pp{ranks.pp}", f"tp{ranks.tp}"]
    if "ep" in numbers:
        words.append(f"ep{int(numbers['ep'])}")
    elif role == "optimizer" or (role == "model" and topology.zero_stage == 3):
        words.append(f"dp{ranks.dp}")
    return "-".join(words)


def locate(engine: Any) -> tuple[Ranks, Topology]:
    """Where this process stands in an engine, and among what."""
    import torch.distributed as dist

    group = getattr(engine.optimizer, "dp_process_group", None) or engine.seq_data_parallel_group
    experts = engine.expert_parallel_group if engine.has_moe_layers else {}
    names = sorted(experts)
    stages = getattr(engine, "num_stages", 1)
    is_pipeline = hasattr(engine, "num_stages")
    ranks = Ranks(
        dp=dist.get_rank(group),
        tp=engine.grid.get_slice_parallel_rank() if is_pipeline else engine.checkpoint_mp_rank,
        pp=engine.stage_id if is_pipeline else 0,
        ep=tuple(dist.get_rank(experts[name]) for name in names),
    )
    bf16, fp16 = engine.bfloat16_enabled(), engine.fp16_enabled()
    topology = Topology(
        world_size=dist.get_world_size(),
        dp_size=engine.seq_dp_world_size,
        tp_size=engine.mp_world_size // stages,
        pp_size=stages,
        ep_sizes=tuple(dist.get_world_size(experts[name]) for name in names),
        stages=tuple(map(int, engine.module.parts)) if is_pipeline else (),
        zero_stage=int(engine.zero_optimization_stage()),
        precision="bf16" if bf16 else "fp16" if fp16 else "fp32",
    )
    return ranks, topology
