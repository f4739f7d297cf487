"""Attempts and runs: who owns the prefix, what an agent does that may not, and retention."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.manifest import TrainerStatus
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import AccessError
from ds_ckpt_store.stores.memory import MemoryStore
from ds_ckpt_store.stores.port import BytesSource
from tests.sidecar.handoff import START_MS, Trainer, save_together
from tests.sidecar.world import Lines, World, status, until

OWNER = r"owner\.json"


def other_run(world: World) -> Catalog:
    catalog = Catalog(MemoryStore(world.bucket), random.Random(5))
    catalog.own("other", "attempt", "f" * 32)
    return catalog


def test_a_second_run_on_a_live_prefix_is_refused_and_touches_nothing(
    world: World, trainer: Trainer
) -> None:
    other_run(world)
    manifest = trainer.save("t", {"x": 10})
    before = set(world.keys())
    assert world.once(trainer.volume.path) == 1
    assert {key for key in set(world.keys()) - before if "/clock/" not in key} == set()
    sidecar = trainer.volume.sidecar_status()
    assert sidecar is not None
    assert sidecar.state == "refused"
    assert "'other'" in sidecar.last_error
    assert "use another prefix" in world.log.of("pass.failed")[0]["error"]
    assert manifest.file_name in os.listdir(trainer.volume.outbox)


def test_a_run_that_was_refused_goes_on_when_the_other_has_finished(
    world: World, trainer: Trainer
) -> None:
    other = other_run(world)
    trainer.save("t", {"x": 10})
    with world.running(trainer.volume.path):
        until(lambda: world.log.of("pass.failed"))
        other.own("other", "attempt", "f" * 32, finished=True)
        until(lambda: world.states() == {"t": "committed"})
    assert world.log.of("lease.took_over")[0]["from_run"] == "other"


@pytest.mark.parametrize("why", ["refused", "no access"])
def test_an_agent_that_cannot_go_on_does_not_hammer_the_store(
    world: World, trainer: Trainer, why: str
) -> None:
    trainer.save("t", {"x": 10})
    if why == "refused":
        other_run(world)
    else:
        world.fault("get", "fail-before", OWNER, count=None, error=AccessError)
    with world.running(trainer.volume.path, rescan_seconds=0.5, drain_seconds=0):
        until(lambda: world.log.of("pass.failed"))
        before = len(world.store.asked("get", OWNER))
        time.sleep(1.2)
        assert len(world.store.asked("get", OWNER)) - before <= 8


def test_an_agent_that_is_refused_stops_at_once_when_told(world: World, trainer: Trainer) -> None:
    other_run(world)
    trainer.save("t", {"x": 10})
    with world.running(trainer.volume.path, drain_seconds=3600):
        until(lambda: world.log.of("pass.failed"))
    assert world.log.of("save.left")


# ---- attempts


def test_a_new_attempt_raises_the_epoch_and_old_saves_do_not_outrank_its_own(
    world: World, trainer: Trainer
) -> None:
    trainer.save("first", {"x": 10})
    world.once(trainer.volume.path)
    late = trainer.save("late", {"x": 10}, time_ms=START_MS + 999_000)
    again = Trainer(trainer.volume.path, time_ms=START_MS + 500_000, seed=3)
    again.say()
    again.save("resumed", {"x": 10})
    world.once(trainer.volume.path)
    assert set(world.states()) == {"first", "late", "resumed"}
    epochs = {record.tag: record.epoch for record in world.catalog.records()}
    assert epochs == {"first": 2, "late": 2, "resumed": 4}
    assert world.latest() == "resumed"
    assert late.time_ms > again.time_ms - 1000


def test_what_an_attempt_saved_that_no_agent_saw_sorts_between_those_before_and_after_it(
    world: World, tmp_path: Path
) -> None:
    """The store was away for the whole of it, and its pods' clock is behind that of the first."""
    now = time.time()
    first = Trainer(tmp_path / "old", time_ms=START_MS + 999_000, seed=3, started=now - 900)
    first.say()
    first.save("before", {"x": 10})
    world.once(first.volume.path)
    unseen = Trainer(tmp_path / "new", time_ms=START_MS, seed=4, started=now - 300)
    unseen.save("unseen", {"x": 10})
    after = Trainer(tmp_path / "new", time_ms=START_MS + 5000, seed=5, started=now - 10)
    after.say()
    after.save("after", {"x": 10})
    world.once(after.volume.path)
    records = sorted(world.catalog.records(), key=lambda record: record.order)
    assert [record.tag for record in records] == ["before", "unseen", "after"]
    assert world.latest() == "after"


def test_a_node_that_was_away_learns_that_its_attempt_is_passed(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    lingering = Trainer(tmp_path / "lingering", time_ms=START_MS + 10_000_000, seed=4)
    lingering.save("theirs", {"x": 10})
    trainer.attempt = f"{START_MS + 20_000_000:012x}-{1:016x}"
    trainer.save("ours", {"x": 10}, time_ms=START_MS + 20_000_001)
    world.once(trainer.volume.path)
    for tag in ("a", "b", "c"):
        lingering.save(tag, {"x": 10})
    world.once(tmp_path / "lingering", keep_last=1, retention_pause=0)
    assert set(world.states().values()) == {"committed"}, "an old attempt deletes nothing"
    assert world.latest() == "ours"


# ---- a volume that another run has used


@pytest.mark.parametrize("finished", [True, False])
def test_a_reused_volume_does_not_tie_the_agent_to_the_run_before(
    world: World, trainer: Trainer, finished: bool
) -> None:
    trainer.volume.write_trainer_status(
        TrainerStatus(
            run_id="before",
            attempt=f"{START_MS - 10**7:012x}-{1:016x}",
            time=SystemClock().time() - 10**6,
            finished=finished,
        )
    )
    with world.running(trainer.volume.path):
        until(lambda: world.log.of("store.probed"))
        time.sleep(0.3)
        trainer.say()  # the new run begins
        trainer.save("t", {"x": 10})
        until(lambda: world.states() == {"t": "committed"})
    assert world.catalog.committed()[0].run_id == trainer.run_id


def test_an_agent_with_nothing_to_do_and_no_trainer_takes_no_lease(
    world: World, trainer: Trainer
) -> None:
    assert world.once(trainer.volume.path) == 0
    assert world.keys(".ds_ckpt/owner") == []


def test_the_lease_is_given_back_when_the_trainer_has_finished(
    world: World, trainer: Trainer
) -> None:
    trainer.save("t", {"x": 10})
    trainer.say(finished=True)
    world.once(trainer.volume.path)
    owner = world.catalog.owner()
    assert owner is not None
    assert owner.unfinished == []
    other_run(world)


class OnceLooked(Filesystem):
    """The trainer goes on as soon as an agent that has nothing to do has looked for more."""

    def __init__(self, log: Lines, then: Callable[[], object]) -> None:
        self._log = log
        self._then: Callable[[], object] | None = then

    def names(self, path: str) -> list[str]:
        found = super().names(path)
        if path.endswith("/outbox") and self._log.of("save.committed") and self._then is not None:
            then, self._then = self._then, None
            then()
        return found


def test_the_lease_is_not_given_back_before_a_last_save_that_was_missed_is_stored(
    world: World, trainer: Trainer
) -> None:
    trainer.save("t", {"x": 10})
    trainer.say()

    def go_on() -> None:
        trainer.save("u", {"x": 10})
        trainer.say(finished=True)

    with world.running(trainer.volume.path, fs=OnceLooked(world.log, go_on)):
        until(lambda: world.log.of("lease.released"))
        assert world.states() == {"t": "committed", "u": "committed"}


def test_retention_does_not_take_back_a_lease_that_was_given_back(
    world: World, trainer: Trainer
) -> None:
    trainer.save("t", {"x": 10})
    trainer.say(finished=True)

    def touched() -> float:
        own = (world.bucket.objects.get(f".ds_ckpt/{name}") for name in ("owner.json", clock))
        return max(item.modified for item in own if item is not None)

    clock = f"clock/{trainer.node}"
    with world.running(trainer.volume.path, keep_last=1, retention_pause=0):
        until(lambda: world.log.of("lease.released"))
        for _ in range(2):  # retention comes back, again and again
            before = touched()
            until(lambda: touched() > before)  # noqa: B023
        owner = world.catalog.owner()
        assert owner is not None
        assert owner.unfinished == []
        other_run(world)


# ---- what lies in the store


def test_garbage_under_our_own_names_does_not_stop_the_agent(
    world: World, trainer: Trainer
) -> None:
    store = MemoryStore(world.bucket)
    for key in (
        ".ds_ckpt/saves/018bcfe56800-0000000000000001.json",
        ".ds_ckpt/checkpoints/018bcfe56800-0000000000000002.json",
        ".ds_ckpt/holds/x.json",
        "latest",
    ):
        store.put(key, BytesSource(b"\x00garbage"))
    trainer.save("t", {"x": 10})
    assert world.once(trainer.volume.path, keep_last=1) == 0
    assert world.states() == {"t": "committed"}
    assert world.latest() == "t"
    assert len(world.log.of("record.damaged")) == 2


def test_a_save_that_cannot_be_decided_does_not_hold_up_the_others(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    """Two nodes that name one path break a rule: nobody may commit that save, ever."""
    other = Trainer(tmp_path / "other", seed=8)
    save_together([trainer, other], "clash", [{"same.pt": 10}, {"same.pt": 10}], latest=False)
    world.once(other.volume.path)
    for tag in ("first", "second"):
        trainer.save(tag, {"x": 10})
        assert world.once(trainer.volume.path) == 1
        assert world.states()[tag] == "committed"
        assert world.latest() == tag
    assert "same path" in json.dumps(world.log.of("save.delayed"))
    assert "same path" in json.dumps(world.log.of("save.undecided"))


def test_a_start_commits_what_others_have_stored_and_points_to_the_newest(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    first, second = (Trainer(tmp_path / name, seed=n) for n, name in enumerate("ab"))
    save_together([first, second], "both", [{"0": 10}, {"1": 10}])
    world.once(first.volume.path)
    world.fault("put", "fail-before", "checkpoints/", count=None, error=AccessError)
    world.once(second.volume.path)
    world.store.script.clear()
    trainer.attempt = first.attempt
    trainer.say()
    world.once(trainer.volume.path)  # a third node of the run, with nothing of its own
    assert world.states() == {"both": "committed"}
    assert world.latest() == "both"


def test_a_new_attempt_commits_what_was_completed_after_the_start(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    """The last receipt of a save whose pods are gone was on its way for long."""
    gone = Trainer(tmp_path / "gone", attempt=trainer.attempt, seed=5)
    gone.save("old", {"x": 10})
    world.once(tmp_path / "gone")
    objects = world.bucket.objects
    late = {key: objects.pop(key) for key in list(objects) if "/receipts/" in key}
    for key in list(objects):
        if "/checkpoints/" in key or key == "latest":
            del objects[key]
    trainer.say()
    with world.running(trainer.volume.path):
        until(lambda: Volume(trainer.volume.path).sidecar_status())
        until(lambda: len(world.log.of("lease.taken")) > 1)
        assert world.states() == {}
        objects.update(late)
        again = Trainer(trainer.volume.path, time_ms=START_MS + 900_000, seed=6)
        again.say()
        again.save("new", {"x": 10})
        until(lambda: world.states() == {"old": "committed", "new": "committed"})


def test_a_record_whose_pointer_was_not_moved_is_pointed_to_at_the_next_start(
    world: World, trainer: Trainer
) -> None:
    trainer.save("t", {"x": 10})
    world.fault("put", "fail-before", "^latest$", count=None, error=AccessError)
    assert world.once(trainer.volume.path) == 1
    assert world.states() == {"t": "committed"}
    assert world.latest() is None
    world.store.script.clear()
    assert world.once(trainer.volume.path) == 0
    assert world.latest() == "t"


# ---- retention


def test_the_last_n_stay_in_the_store(world: World, trainer: Trainer) -> None:
    manifests = [trainer.save(f"t{number}", {"x": 10}, pin=number == 0) for number in range(5)]
    world.once(trainer.volume.path, keep_last=2, retention_pause=0)
    world.once(trainer.volume.path, keep_last=2, retention_pause=0)
    assert world.states() == {
        "t0": "committed",
        "t1": "deleted",
        "t2": "deleted",
        "t3": "committed",
        "t4": "committed",
    }
    assert [bool(world.keys(manifest.folder)) for manifest in manifests] == [
        True,
        False,
        False,
        True,
        True,
    ]
    world.check_whole()
    given_up = [line["given_up"] for line in world.log.of("retention.applied")]
    assert sum(map(len, given_up)) == 2


def test_what_a_live_attempt_resumed_from_stays(world: World, trainer: Trainer) -> None:
    source = trainer.save("source", {"x": 10})
    world.once(trainer.volume.path)
    again = Trainer(trainer.volume.path, time_ms=trainer.time_ms, seed=3)
    again.say(resumed_from=source.save_id)
    for number in range(3):
        again.save(f"t{number}", {"x": 10})
    world.once(trainer.volume.path, keep_last=1, retention_pause=0)
    assert world.states() == {
        "source": "committed",
        "t0": "deleted",
        "t1": "deleted",
        "t2": "committed",
    }


def test_without_the_setting_nothing_is_given_up(world: World, trainer: Trainer) -> None:
    for number in range(3):
        trainer.save(f"t{number}", {"x": 10})
    world.once(trainer.volume.path)
    assert set(world.states().values()) == {"committed"}


def test_a_save_that_retention_gave_up_leaves_the_volume(world: World, trainer: Trainer) -> None:
    old = trainer.save("old", {"x": 10})
    world.once(trainer.volume.path)
    record = world.catalog.find("old")
    world.catalog.replace(record, state="deleted")
    trainer.save("new", {"x": 10})
    world.once(trainer.volume.path)
    assert not Path(trainer.folder(old)).exists()
    assert status(trainer.volume.path, old.save_id).state == "cleaned"


def test_an_agent_on_an_empty_volume_tells_at_once_what_the_store_holds(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.save("t", {"x": 10})
    assert world.once(trainer.volume.path) == 0
    fresh = Trainer(tmp_path / "fresh")
    assert world.once(fresh.volume.path) == 0
    sidecar = fresh.volume.sidecar_status()
    assert sidecar is not None
    assert sidecar.newest_committed_tag == "t"
    assert sidecar.run_id == trainer.run_id


def test_without_the_right_to_delete_nothing_more_is_given_up(
    world: World, trainer: Trainer
) -> None:
    world.fault("delete", "fail-before", error=AccessError, count=None)
    settings = {"keep_last": 1, "retention_pause": 0}
    with world.running(trainer.volume.path, **settings) as agent:
        for tag in ("a", "b", "c", "d"):
            trainer.save(tag, {"x": 10})
            until(lambda tag=tag: tag in world.states())
        until(lambda: world.log.of("retention.failed") != [])
        assert agent.look().unready == ""
    states = world.states()
    assert states["d"] == "committed"
    assert list(states.values()).count("deleted") <= 1
    assert len(world.log.of("retention.failed")) == 1
    assert world.log.of("pass.failed") == []
