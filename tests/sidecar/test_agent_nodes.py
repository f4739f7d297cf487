"""Two nodes on two volumes with two agents: a record appears only when both have stored all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ds_ckpt_sidecar.lifecycle import LONGEST_LOOK
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.errors import AccessError, RefusedError
from tests.sidecar.handoff import Trainer, save_together
from tests.sidecar.world import World, contents, left_of_saves, status, until

MIB = 1 << 20


class LeapingClock(SystemClock):
    """A clock on which hours pass in a moment."""

    leaped = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.leaped


class Pair:
    """Two nodes and their saves."""

    def __init__(self, folder: Path, world: World) -> None:
        self.world = world
        self.nodes = [Trainer(folder / name, seed=number) for number, name in enumerate("ab")]
        self.paths = [trainer.volume.path for trainer in self.nodes]

    def save(self, tag: str = "t", size: int = 100) -> str:
        files = [{"rank0.pt": size}, {"rank1.pt": size}]
        return save_together(self.nodes, tag, files)[0].save_id

    def bytes(self, tag: str) -> dict[str, bytes]:
        return {**contents(Path(self.paths[0], tag)), **contents(Path(self.paths[1], tag))}


@pytest.fixture
def pair(tmp_path: Path, world: World) -> Pair:
    return Pair(tmp_path, world)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 0)])
def test_either_may_be_last(
    world: World, pair: Pair, tmp_path: Path, first: int, last: int
) -> None:
    save_id = pair.save()
    assert world.once(pair.paths[first]) == 0
    assert world.states() == {}
    assert world.latest() is None
    said = status(pair.paths[first], save_id)
    assert (said.state, said.waiting_for) == ("stored", [pair.nodes[last].node])
    assert world.log.of("save.left_waiting")
    assert world.once(pair.paths[last]) == 0
    assert world.states() == {"t": "committed"}
    world.check_whole()
    assert world.restored(tmp_path / "new") == pair.bytes("t")
    world.once(pair.paths[first])
    assert status(pair.paths[first], save_id).state == "committed"


def test_both_at_once_make_one_record(world: World, pair: Pair) -> None:
    with world.running(pair.paths[0]), world.running(pair.paths[1]):
        for number in range(5):
            pair.save(f"t{number}", 1000)
        until(lambda: list(world.states().values()) == ["committed"] * 5)
    world.check_whole()
    assert world.latest() == "t4"


def test_waiting_for_the_other_node_holds_up_nothing(world: World, pair: Pair) -> None:
    pair.save("both")
    alone = pair.nodes[0].save("alone", {"x": 10})
    with world.running(pair.paths[0]):
        until(lambda: world.states() == {"alone": "committed"})
        until(lambda: status(pair.paths[0], alone.save_id).state == "committed")
        assert world.latest() == "alone"
        world.once(pair.paths[1])
        until(lambda: world.states() == {"both": "committed", "alone": "committed"})
    assert world.latest() == "alone", "it was saved later"


def test_told_to_end_it_does_not_wait_for_the_other_half_of_a_save_that_is_outdated(
    world: World, pair: Pair
) -> None:
    pair.save("half")
    alone = pair.nodes[0].save("alone", {"x": 10})
    with world.running(pair.paths[0], drain_seconds=3600.0):
        until(lambda: world.states() == {"alone": "committed"})
        until(lambda: status(pair.paths[0], alone.save_id).state == "committed")
        until(lambda: world.log.of("save.waiting"))
    assert [line["tag"] for line in world.log.of("save.left_waiting")] == ["half"]
    world.once(pair.paths[1])
    assert world.states() == {"half": "committed", "alone": "committed"}, "the last one commits"


def test_told_to_end_it_waits_for_the_other_half_of_the_newest_save(
    world: World, pair: Pair
) -> None:
    save_id = pair.save()
    with world.running(pair.paths[0], drain_seconds=3600.0) as agent:
        until(lambda: world.log.of("save.waiting"))
        agent.stop()
        world.once(pair.paths[1])
        until(lambda: status(pair.paths[0], save_id).state in ("committed", "cleaned"))
    assert not world.log.of("save.left_waiting")


@pytest.mark.parametrize("operation", ["put_part", "complete"])
def test_one_that_dies_in_its_upload_comes_back_and_completes_the_save(
    world: World, pair: Pair, operation: str
) -> None:
    pair.save(size=11 * MIB)
    world.once(pair.paths[0])
    rule = world.fault(operation, "fail-before", "rank1", count=None, error=RefusedError)
    if operation == "put_part":
        rule.skip = 1
    assert world.once(pair.paths[1]) == 1
    assert world.states() == {}
    world.store.script.clear()
    sent = len(world.store.asked("put_part", "rank1"))
    assert world.once(pair.paths[1]) == 0
    assert world.states() == {"t": "committed"}
    assert len(world.store.asked("put_part", "rank1")) - sent <= (
        2 if operation == "put_part" else 0
    )
    world.check_whole()


def test_one_that_dies_between_receipt_and_commit_is_not_needed_any_more(
    world: World, pair: Pair
) -> None:
    pair.save()
    world.once(pair.paths[0])
    world.fault("put", "fail-before", "checkpoints/", count=None, error=RefusedError)
    assert world.once(pair.paths[1]) == 1  # and its volume is lost
    world.store.script.clear()
    assert world.once(pair.paths[0]) == 0
    assert world.states() == {"t": "committed"}


def test_a_node_without_a_shard_of_its_own_waits_for_the_others_record(
    world: World, pair: Pair, tmp_path: Path
) -> None:
    one, two = pair.nodes
    manifests = save_together(pair.nodes, "t", [{"x": 10}, {}])
    assert manifests[0].nodes == [one.node]
    world.once(two.volume.path)
    assert world.states() == {}
    world.once(one.volume.path)
    assert world.once(two.volume.path) == 0
    assert world.states() == {"t": "committed"}
    assert status(two.volume.path, manifests[1].save_id).state == "committed"


def test_a_save_that_one_node_lost_is_over_on_both_and_goes_when_a_later_one_is_committed(
    world: World, pair: Pair
) -> None:
    manifests = save_together(pair.nodes, "t", [{"rank0.pt": 50}, {"rank1.pt": 50}], latest=False)
    world.once(pair.paths[0])
    pair.nodes[1].rewrite(manifests[1], "rank1.pt", b"x" * 50)
    world.once(pair.paths[1])
    world.once(pair.paths[0])
    assert world.states() == {"t": "abandoned"}
    assert world.keys("t@") == []
    assert [status(path, manifests[0].save_id).state for path in pair.paths] == [
        "abandoned",
        "superseded",
    ]
    assert pair.nodes[1].node in status(pair.paths[0], manifests[0].save_id).reason
    lost = f"outbox/{manifests[1].file_name}", f"links/{manifests[1].save_id}"
    assert [left_of_saves(path) for path in pair.paths] == [[], [*lost]]
    later = save_together(pair.nodes, "u", [{"rank0.pt": 50}, {"rank1.pt": 50}])
    for path in (*pair.paths, *pair.paths):
        world.once(path)
    assert world.states() == {"t": "abandoned", "u": "committed"}
    assert not set(lost) & set(left_of_saves(pair.paths[1]))
    assert later[1].file_name in str(left_of_saves(pair.paths[1]))


def test_a_node_that_has_stored_its_part_does_not_lose_the_save_with_its_files(
    world: World, pair: Pair, tmp_path: Path
) -> None:
    manifests = save_together(pair.nodes, "t", [{"rank0.pt": 50}, {"rank1.pt": 50}])
    whole = pair.bytes("t")
    world.once(pair.paths[0])
    Path(pair.nodes[0].volume.journal).unlink()
    pair.nodes[0].rewrite(manifests[0], "rank0.pt", b"x" * 50)
    world.once(pair.paths[0])
    assert status(pair.paths[0], manifests[0].save_id).state == "stored"
    world.once(pair.paths[1])
    assert world.states() == {"t": "committed"}
    assert world.restored(tmp_path / "back") == whole


def test_a_node_that_has_stored_its_part_gives_the_save_up_if_that_is_lost_too(
    world: World, pair: Pair
) -> None:
    manifests = save_together(pair.nodes, "t", [{"rank0.pt": 50}, {"rank1.pt": 50}])
    world.once(pair.paths[0])
    Path(pair.nodes[0].volume.journal).unlink()
    pair.nodes[0].rewrite(manifests[0], "rank0.pt", b"x" * 50)
    world.catalog.delete_objects(world.keys("t@"))
    world.once(pair.paths[0])
    assert world.states() == {"t": "abandoned"}


def test_a_lease_that_another_run_took_is_no_word_of_a_missing_node(
    world: World, pair: Pair
) -> None:
    """Between the takeover and its own next renewal an agent does not know of it."""
    pair.save("slow")
    pair.nodes[0].say(nodes=[trainer.node for trainer in pair.nodes])
    with world.running(pair.paths[0], abandon_seconds=0):
        until(lambda: world.log.of("save.waiting"))
        assert world.catalog.own("other", "attempt", "f" * 32, stale_after=-1).took_over == "run"
        looked = len(world.store.asked("list", "receipts"))
        until(lambda: len(world.store.asked("list", "receipts")) > looked + 4)
        assert world.states() == {}


def test_time_in_which_the_store_is_down_is_no_waiting(world: World, pair: Pair) -> None:
    pair.save("slow")
    world.once(pair.paths[0])
    again = Trainer(pair.paths[0], time_ms=pair.nodes[0].time_ms + 60_000, seed=7)
    again.say()
    clock = LeapingClock()
    with world.running(pair.paths[0], clock=clock, abandon_seconds=3 * LONGEST_LOOK):
        until(lambda: world.log.of("save.waiting"))
        clock.leaped = 7 * 3600.0  # nobody answered for hours, and now it does
        looked = len(world.store.asked("list", "receipts"))
        until(lambda: len(world.store.asked("list", "receipts")) > looked + 4)
        assert world.states() == {}
        world.once(pair.paths[1])
        until(lambda: world.states() == {"slow": "committed"})


def test_a_node_that_never_comes_back_is_given_up_only_when_its_attempt_is_over(
    world: World, pair: Pair
) -> None:
    pair.save("lost")
    for _ in range(2):
        world.once(pair.paths[0], abandon_seconds=0)
        assert world.states() == {}, "a live attempt is waited for"
    again = Trainer(pair.paths[0], time_ms=pair.nodes[0].time_ms + 60_000, seed=7)
    again.say()
    again.save("next", {"x": 10})
    world.once(pair.paths[0], abandon_seconds=3600)
    assert world.states() == {"next": "committed"}
    world.once(pair.paths[0], abandon_seconds=0)
    assert world.states() == {"lost": "abandoned", "next": "committed"}
    assert world.keys("lost@") == []


def test_an_agent_that_saw_an_attempt_begin_gives_its_save_up_once_a_newer_one_has_begun(
    world: World, pair: Pair
) -> None:
    """Without being started again: what was the newest attempt is not so any more."""
    pair.save("lost")
    with world.running(pair.paths[0], abandon_seconds=0):
        until(lambda: world.log.of("save.waiting"))
        again = Trainer(pair.paths[0], time_ms=pair.nodes[0].time_ms + 60_000, seed=7)
        again.say()
        again.save("next", {"x": 10})
        until(lambda: world.states() == {"lost": "abandoned", "next": "committed"})


def test_nothing_leaves_a_volume_while_its_ranks_choose_what_to_resume_from(
    world: World, trainer: Trainer
) -> None:
    for tag in ("a", "b"):
        trainer.save(tag, {"x": 10})
    lock = trainer.volume.fs.try_lock(trainer.volume.cleaning_lock)
    assert lock is not None
    with world.running(trainer.volume.path, keep_local=0):
        until(lambda: world.states() == {"a": "committed", "b": "committed"})
        time.sleep(0.3)
        assert sorted(contents(Path(trainer.volume.path))) == ["a/x", "b/x", "latest"]
        os.close(lock)
        until(lambda: sorted(contents(Path(trainer.volume.path))) == ["b/x", "latest"])


def test_a_save_that_a_node_has_finished_without_is_given_up_though_its_attempt_is_the_newest(
    world: World, pair: Pair
) -> None:
    """The last save of a run, of which one node could never publish its part."""
    for node, trainer in enumerate(pair.nodes):
        trainer.attempt = pair.nodes[0].attempt
        trainer.say(nodes=[each.node for each in pair.nodes])
        world.once(pair.paths[node])
    pair.save("last")
    os.unlink(f"{pair.paths[1]}/.ds_ckpt/outbox/{pair.nodes[1].volume.manifests()[0]}")
    pair.nodes[0].say(finished=True, nodes=[each.node for each in pair.nodes])
    world.once(pair.paths[0], abandon_seconds=0)
    assert world.states() == {}, "the other node has not said that it is finished"
    pair.nodes[1].say(finished=True, nodes=[each.node for each in pair.nodes])
    world.once(pair.paths[1])
    world.once(pair.paths[0], abandon_seconds=3600)
    assert world.states() == {}, "it has not been waited for long enough"
    world.once(pair.paths[0], abandon_seconds=0)
    assert world.states() == {"last": "abandoned"}


def test_an_agent_without_the_right_to_delete_gives_up_a_save_all_the_same(
    world: World, pair: Pair
) -> None:
    pair.save("t", size=100)
    world.once(pair.paths[0])
    (Path(pair.paths[1]) / "t/rank1.pt").write_bytes(b"written again, in place")
    world.fault("delete", "fail-before", error=AccessError, count=None)
    world.once(pair.paths[1])
    assert world.states() == {"t": "abandoned"}
    assert world.log.of("save.superseded")
    world.once(pair.paths[0])
    assert world.log.of("objects.left")
    assert world.log.of("save.abandoned")
    assert world.keys("t@"), "left for whoever may"
