"""Shards at the limits of a provider, with limits scaled down: planned before the first byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_ckpt_store.stores.memory import MemoryStore
from ds_ckpt_store.stores.port import Capabilities, Limits
from tests import servers
from tests.sidecar.handoff import Trainer
from tests.sidecar.test_agent_memory import MOST, TELL_PEAK, peak
from tests.sidecar.world import PATIENCE, World, agent_process, status

MIB = 1 << 20
# As of a provider of 5 GiB for one request and 10,000 parts, a thousand times smaller.
SCALED = Limits(
    min_part=5 * MIB, max_part=6 * MIB, max_parts=4, max_object=24 * MIB, max_put=6 * MIB
)


@pytest.mark.parametrize("size", [6 * MIB - 1, 6 * MIB, 6 * MIB + 1, 20 * MIB + 1, 24 * MIB])
def test_a_shard_at_a_limit_is_sent_within_it(
    world: World, trainer: Trainer, tmp_path: Path, size: int
) -> None:
    """The store refuses what is too large for one request, and a part too many."""
    trainer.save("t", {"x": size})
    before = (Path(trainer.volume.path) / "t/x").read_bytes()
    limited = MemoryStore(world.bucket, Capabilities(limits=SCALED))
    world.store.store = limited
    assert world.once(trainer.volume.path, part_mib=6) == 0, world.log.text()
    parts = world.store.asked("put_part", "^t@")
    assert len(parts) == (0 if size <= 6 * MIB else -(-size // (6 * MIB)))
    assert len(world.store.asked("begin", "^t@")) == (1 if parts else 0), "never begun twice"
    assert world.restored(tmp_path / "new") == {"x": before}


def test_a_preferred_part_that_would_need_too_many_is_not_tried(
    world: World, trainer: Trainer
) -> None:
    """20 MiB in parts of 5 are four, and one byte more are five: found out before, not after."""
    world.store.store = MemoryStore(world.bucket, Capabilities(limits=SCALED))
    trainer.save("fits", {"x": 20 * MIB})
    trainer.save("grows", {"x": 20 * MIB + 1})
    assert world.once(trainer.volume.path, part_mib=5) == 0, world.log.text()
    for tag in ("fits", "grows"):
        assert len(world.store.asked("put_part", f"^{tag}@")) == 4
    world.check_whole()


def test_a_shard_that_no_plan_fits_is_named_before_a_byte_of_it_is_sent(
    world: World, trainer: Trainer
) -> None:
    world.store.store = MemoryStore(world.bucket, Capabilities(limits=SCALED))
    huge = trainer.save("huge", {"small.pt": 10, "x": 24 * MIB + 1}, latest=False)
    trainer.save("good", {"x": 10})
    assert world.once(trainer.volume.path, part_mib=6) == 1
    assert world.states() == {"good": "committed"}
    assert world.store.asked("begin", "^huge@") == world.store.asked("put_part", "^huge@") == []
    said = status(trainer.volume.path, huge.save_id)
    assert f"{huge.folder}/x: an object of {24 * MIB + 1} bytes" in said.reason
    assert f"at most {24 * MIB}" in said.reason
    assert huge.file_name in [path.name for path in Path(trainer.volume.outbox).iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("part_mib", ["5", "64", "1024"])
def test_memory_does_not_grow_with_the_size_of_a_part(
    tmp_path: Path, seaweed: servers.S3, part_mib: str
) -> None:
    trainer = Trainer(tmp_path / "volume", seed=1)
    trainer.save("t", {"x": 160 * MIB})
    url = f"s3://{seaweed.bucket()}/run"
    with agent_process(
        tmp_path / "log",
        trainer.volume.path,
        url,
        "--once",
        "--part-mib",
        part_mib,
        environ=seaweed.environ,
        program=TELL_PEAK,
    ) as agent:
        assert agent.process.wait(PATIENCE * 2) == 0, agent.output()
    assert peak(agent.output()) <= MOST
