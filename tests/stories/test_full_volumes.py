"""The volume fills: in the middle of a save, or because saves come faster than they go.

On a volume of 16 MiB of its own, with the hook's real code between the saves and the agent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_hook.errors import AgreementError
from ds_ckpt_store.contract.filesystem import Filesystem
from tests.hook.standin import Job, end_earlier_attempts, manifests
from tests.sidecar.handoff import Trainer
from tests.sidecar.test_agent_trouble import small
from tests.sidecar.world import World, contents, until

__all__ = ["small"]  # a fixture: a volume of 16 MiB

MIB = 1 << 20
MODEL = "mp_rank_00_model_states.pt"
KEEP_ONE = {"keep_local": 1, "keep_last": 1, "retention_pause": 0}


@pytest.fixture(autouse=True)
def _no_heartbeat_outlives_its_test() -> Iterator[None]:
    yield
    end_earlier_attempts()


def test_a_save_that_found_no_room_leaves_the_one_before_and_is_never_uploaded(
    world: World, small: Path, tmp_path: Path
) -> None:
    """Two ranks of one node; the second one's shard does not fit, and the trainer ends."""
    job = Job([small, small])
    job.save("global_step1", "x" * (3 * MIB))
    assert world.once(small, **KEEP_ONE) == 0
    first = contents(small / "global_step1")
    with pytest.raises(OSError, match="No space left"):
        job.save("global_step2", "y" * (4 * MIB))
    torn = contents(small / "global_step2")
    assert MODEL in torn, "half of it is there"
    for _ in range(2):  # a restart of the agent too
        assert world.once(small, **KEEP_ONE) == 0
    assert world.states() == {"global_step1": "committed"}
    assert world.keys("global_step2") == []
    assert contents(small / "global_step1") == first
    world.check_whole()

    # With no byte free nothing can be written down: that is said, and a hand has to make room.
    with pytest.raises(AgreementError, match="No space left"):
        Job([small, small]).resume()
    assert contents(small / "global_step2") == torn, "nothing was moved"
    (small / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    again = Job([small, small])
    assert again.resume() == ["global_step1", "global_step1"]
    assert (small / "latest").read_text() == "global_step1"
    assert not (small / "global_step2").exists(), "reported, and out of the way"
    assert list((small / ".ds_ckpt/aside").rglob(MODEL)), "for people to look at"
    again.save("global_step3", "z" * 1000)
    assert world.once(small, **KEEP_ONE) == 0
    # The one that it resumed from stays, whatever the rule says.
    assert set(world.states().items()) == {
        ("global_step1", "committed"),
        ("global_step3", "committed"),
    }
    assert world.restored(tmp_path / "new").keys() == first.keys()


def test_saves_that_come_faster_than_they_go_are_told_in_time_and_none_is_lost(
    world: World, small: Path
) -> None:
    """Who looks at the heartbeat sees the backlog grow and the room shrink before it is full."""
    trainer = Trainer(small, seed=1)
    gate = threading.Event()
    world.fault("put", "call", "@", count=None, action=lambda: gate.wait(60) and None)
    tags = []
    with world.running(small, keep_local=1):
        rooms = []
        while True:
            tag = f"global_step{len(tags)}"
            room = Filesystem().space(str(small)).free
            if room < 4 * MIB:
                break
            trainer.save(tag, {"x": 3 * MIB})
            tags.append(tag)

            def told(most: int = room - 3 * MIB) -> bool:
                said = trainer.volume.sidecar_status()
                return said is not None and said.free_bytes <= most and said.backlog_saves > 0

            until(told)
            said = trainer.volume.sidecar_status()
            assert said is not None
            rooms.append(said.free_bytes)
            assert said.total_bytes == 16 * MIB
            assert said.backlog_bytes >= 3 * MIB
        assert len(tags) >= 3
        assert rooms == sorted(rooms, reverse=True)
        assert world.states() == {}, "nothing went before it was stored"
        gate.set()
        until(lambda: list(world.states().values()) == ["committed"] * len(tags))
        until(lambda: Filesystem().space(str(small)).free > 12 * MIB)
    assert sorted(contents(small)) == [f"{tags[-1]}/x", "latest"]
    world.check_whole()


def test_half_written_files_beside_good_ones_are_no_part_of_a_save(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    """A failed save has left ``.tmp`` files and shards of no bytes in the folder of a tag."""
    folder = Path(trainer.volume.path) / "t"
    folder.mkdir()
    for name in ("rank0.pt.tmp", "rank7.pt", "rank0.pt.part"):
        (folder / name).write_bytes(b"" if name == "rank7.pt" else b"half")
    files = {"rank0.pt": b"1" * 580, "legitimately empty.pt": b""}
    manifest = trainer.save("t", files)
    assert world.once(trainer.volume.path) == 0
    assert world.keys(manifest.folder) == [f"{manifest.folder}/{name}" for name in sorted(files)]
    assert world.restored(tmp_path / "new") == files


def test_a_hook_lists_no_file_that_an_earlier_attempt_left_half_written(tmp_path: Path) -> None:
    before = Job([tmp_path, tmp_path])
    before.save("earlier")
    for engine in before.engines:
        engine.save_checkpoint(tmp_path, "t")
    (tmp_path / "t" / "zero_pp_rank_7_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "t" / f"{MODEL}.tmp").write_text("half")
    job = Job([tmp_path, tmp_path])
    assert job.resume() == ["earlier", "earlier"]
    job.save("t", "again")
    (_, manifest) = manifests(tmp_path)
    assert sorted(shard.path for shard in manifest.shards) == [
        MODEL,
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ]
