"""Unfinished uploads: the store forgets one under our hands, or does not let go of one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ds_ckpt_store.errors import ThrottledError, TransientError
from ds_ckpt_store.stores.port import BytesSource
from tests.faultproxy import Fault
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import status
from tests.stories.places import MIB, NETWORKED, Stage

LARGE = random.Random(1).randbytes(11 * MIB)
PLACES = ["memory", "file", "seaweed", "azure", "gcs"]


@pytest.mark.parametrize("moment", ["before a part", "before the completion", "between two starts"])
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_an_upload_that_the_store_has_dropped_is_begun_anew_and_asked_for_no_more(
    stage: Stage, trainer: Trainer, tmp_path: Path, moment: str
) -> None:
    """A rule of the bucket, or somebody's clean-up, took it: whoever asks again asks in vain."""
    trainer.save("t", {"x": LARGE})

    def drop() -> None:
        for upload in list(stage.looked.uploads("")):
            if upload.key.startswith("t@"):
                stage.looked.abort(upload)

    if moment == "between two starts":
        agents = [stage.agent(trainer.volume.path, drain_seconds=0, part_mib=5)]
        stage.fault("put_part", "call", "^t@", skip=1, action=agents[0].stop)
        assert agents[0].run() == 1
        drop()
    else:
        operation, skip = ("put_part", 1) if moment == "before a part" else ("complete", 0)
        stage.fault(operation, "call", "^t@", skip=skip, action=drop)
    assert stage.once(trainer.volume.path, part_mib=5) == 0, stage.log.text()
    assert len(stage.store.asked("begin", "^t@")) == 2
    assert stage.states() == {"t": "committed"}
    stage.check_whole()
    assert stage.unfinished() == []
    assert stage.restored(tmp_path / "new") == {"x": LARGE}


@pytest.mark.parametrize(
    ("place", "error"),
    [("memory", ThrottledError), *((place, TransientError) for place in PLACES)],
    indirect=["place"],
)
def test_an_abort_that_fails_is_repeated_until_nothing_is_left_but_what_others_left(
    stage: Stage, trainer: Trainer, error: type[Exception]
) -> None:
    foreign = stage.looked.begin("other@018bcfe56800-0000000000000001/x", 5, {"part_size": "5"})
    stage.looked.put_part(foreign, 1, BytesSource(b"alien"))
    torn = trainer.save("torn", {"x": LARGE}, latest=False)
    trainer.save("good", {"y": 10})
    # Its last part has not been read yet when the trainer writes over it.
    stage.fault(
        "put_part",
        "call",
        "^torn@",
        skip=1,
        action=lambda: trainer.rewrite(torn, "x", random.Random(2).randbytes(len(LARGE))),
    )
    fails = stage.fault("abort", "fail-before", "^torn@", count=12, error=error)
    stage.once(trainer.volume.path, part_mib=5)
    if fails.count and fails.count > 0:
        stage.once(trainer.volume.path, part_mib=5)
    assert len(stage.store.asked("abort", "^torn@")) >= 3
    assert stage.states() == {"torn": "abandoned", "good": "committed"}
    assert status(trainer.volume.path, torn.save_id).state == "superseded"
    assert stage.keys("torn@") == []
    assert stage.unfinished() == [foreign.key]
    stage.looked.abort(foreign)


@pytest.mark.parametrize("place", NETWORKED, indirect=True)
def test_an_abort_whose_answers_are_lost_leaves_nothing(stage: Stage, trainer: Trainer) -> None:
    """It races with the network: done or not, it is made again until nothing is listed."""
    proxy, _ = stage.place.network
    torn = trainer.save("torn", {"x": LARGE}, latest=False)
    stage.fault(
        "put_part",
        "call",
        "^torn@",
        skip=1,
        action=lambda: trainer.rewrite(torn, "x", random.Random(2).randbytes(len(LARGE))),
    )
    lost = Fault("^(DELETE |PUT .*comp=blocklist)", "drop_response", times=3)
    stage.fault("abort", "call", "^torn@", action=lambda: proxy.add(lost) and None)
    stage.once(trainer.volume.path, part_mib=5)
    assert proxy.hits(lost) >= 1
    assert stage.states() == {"torn": "abandoned"}
    assert stage.unfinished() == []
    assert stage.keys("torn@") == []


@pytest.mark.parametrize("place", ["seaweed", "azure", "gcs"], indirect=True)
def test_two_sidecars_of_one_node_send_one_shard_at_once_and_mix_nothing(
    stage: Stage, trainer: Trainer, tmp_path: Path
) -> None:
    """A volume was cloned, and the old pod still runs: the same save, the same keys, two agents."""
    trainer.save("t", {"x": LARGE, "y": b"small"})
    shutil.copytree(trainer.volume.path, tmp_path / "clone", copy_function=shutil.copy2)
    second = stage.agent(tmp_path / "clone", part_mib=5)
    codes: list[int] = []
    # The other one does all of its work between two parts of the first.
    stage.fault(
        "put_part", "call", "^t@", skip=1, action=lambda: codes.append(second.run(once=True))
    )
    assert stage.once(trainer.volume.path, part_mib=5) == 0, stage.log.text()
    assert codes == [0]
    assert stage.states() == {"t": "committed"}
    stage.check_whole()
    assert stage.restored(tmp_path / "new") == {"x": LARGE, "y": b"small"}
    assert stage.unfinished() == []
