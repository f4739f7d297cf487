"""Bytes change on their way: sent again if it passes, never a checkpoint if it does not.

A proxy flips a bit of chosen bytes of real requests and answers, under each proof that a store can
give. What the tests compare is read past the proxy.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ds_ckpt_store.errors import CkptError, DamagedError
from tests.faultproxy import Fault
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import contents
from tests.stories.places import MIB, Place, Stage

PART = 5 * MIB
SMALL = 300_000
LARGE = 2 * PART + 777
PROOFS = [
    "seaweed",  # stored-checksum
    "seaweed:content-md5",
    "seaweed:signed-payload",
    "seaweed:read-back",
    "swift",  # signed-payload
    "azure",  # content-crc64
    "azure:content-md5",
    "gcs",  # read-back
    "juicefs",  # an older S3: signed-payload
]
FILES = {
    "first.pt": random.Random(1).randbytes(SMALL),
    "middle.pt": random.Random(2).randbytes(SMALL),
    "last.pt": random.Random(3).randbytes(SMALL),
    "large.pt": random.Random(4).randbytes(LARGE),
    "empty.pt": b"",
}
AT = {"first.pt": 0, "middle.pt": SMALL // 2, "last.pt": SMALL - 1}


def upward(place: Place, times: int | None = 1) -> list[Fault]:
    """A bit of the first, a middle and the last byte: of small shards, and of three parts."""
    _, wire = place.network
    small = [Fault(place.putting(name), "flip", after, times) for name, after in AT.items()]
    parts = [
        # Each part that is refused is sent again before the next one goes.
        Fault(wire.part, "flip", after, 1, skip=skip)
        for skip, after in ((0, 0), (1, PART // 2), (2, 776))
    ]
    return small + parts


@pytest.mark.parametrize("place", PROOFS, indirect=True)
def test_a_bit_that_is_changed_once_costs_a_repetition(
    stage: Stage, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.save("t", FILES)
    faults = upward(stage.place)
    stage.at("save.uploading", *faults)
    assert stage.once(trainer.volume.path, part_mib=5) == 0, stage.log.text()
    proxy, _ = stage.place.network
    assert [proxy.hits(fault) for fault in faults[:3]] == [1, 1, 1]
    assert sum(proxy.hits(fault) for fault in faults[3:]) >= 1
    assert stage.states() == {"t": "committed"}
    stage.check_whole()
    assert stage.restored(tmp_path / "new") == FILES
    assert stage.unfinished() == []


@pytest.mark.parametrize(
    ("place", "size"),
    [
        *((place, "small") for place in PROOFS if "signed" not in place and "azure:" not in place),
        *((place, "large") for place in ("seaweed", "seaweed:read-back", "azure")),
    ],
    indirect=["place"],
)
@pytest.mark.usefixtures("one_try")
def test_a_bit_that_is_always_changed_makes_no_checkpoint_and_names_the_object(
    stage: Stage, trainer: Trainer, size: str
) -> None:
    proxy, wire = stage.place.network
    name = "large.pt" if size == "large" else "middle.pt"
    bad = trainer.save("bad", {name: FILES[name]}, latest=False)
    good = trainer.save("good", {"x.pt": 50})
    pattern = wire.part if size == "large" else stage.place.putting(name)
    fault = Fault(pattern, "flip", 1000, times=None)
    stage.at("save.uploading", fault)
    assert stage.once(trainer.volume.path, part_mib=5) == 1
    assert proxy.hits(fault) >= 2
    assert stage.states() == {"good": "committed"}
    assert stage.latest() == "good"
    (said,) = stage.log.of("save.delayed")
    assert (said["kind"], said["tag"]) == ("CorruptionError", "bad")
    assert f"{bad.folder}/{name}" in said["error"]
    stage.check_whole()
    # It was the network: nothing of the save is lost, and the next start makes it a checkpoint.
    proxy.clear()
    assert stage.once(trainer.volume.path, part_mib=5) == 0
    assert stage.states() == {"bad": "committed", "good": "committed"}
    assert stage.latest() == good.tag
    stage.check_whole()


# ---- on the way back


@pytest.mark.parametrize("place", ["seaweed", "azure", "gcs"], indirect=True)
def test_a_bit_changed_on_the_way_back_is_fetched_again(
    stage: Stage, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.save("t", FILES)
    assert stage.once(trainer.volume.path, part_mib=5) == 0
    proxy, _ = stage.place.network
    at = {**AT, "large.pt": LARGE - 1}
    faults = [
        proxy.add(Fault(stage.place.reading(name), "flip_response", after))
        for name, after in at.items()
    ]
    assert stage.restored(tmp_path / "new") == FILES
    assert [proxy.hits(fault) for fault in faults] == [1] * len(faults)


@pytest.mark.parametrize("place", ["seaweed", "azure", "gcs"], indirect=True)
def test_bits_that_are_always_changed_on_the_way_back_are_named_and_nothing_gets_its_name(
    stage: Stage, trainer: Trainer, tmp_path: Path
) -> None:
    manifest = trainer.save("t", FILES, companions={"zero_to_fp32.py": b"# converts"})
    assert stage.once(trainer.volume.path, part_mib=5) == 0
    proxy, _ = stage.place.network
    at = {**AT, "large.pt": LARGE - 1}
    for name, after in at.items():
        proxy.add(Fault(stage.place.reading(name), "flip_response", after, times=None))
    with pytest.raises(DamagedError) as caught:
        stage.restored(tmp_path / "new")
    assert set(caught.value.objects) == {f"{manifest.folder}/{name}" for name in at}
    assert all(key in str(caught.value) for key in caught.value.objects)
    assert contents(tmp_path / "new") == {}
    proxy.clear()
    assert stage.restored(tmp_path / "new") == FILES, "it was the network"


def test_whatever_is_changed_in_a_record_on_its_way_back_restores_nothing_wrong(
    stage: Stage, trainer: Trainer, tmp_path: Path
) -> None:
    """Every part of the record in turn: names, sizes, checksums, tag, state."""
    files = {"a.pt": b"1" * 100, "b.pt": b"2" * 200}
    trainer.save("t", files)
    assert stage.once(trainer.volume.path) == 0
    proxy, _ = stage.place.network
    (key,) = stage.keys(".ds_ckpt/checkpoints/")
    size = stage.looked.head(key).size
    for number, after in enumerate(range(0, size, 23)):
        proxy.clear()
        fault = proxy.add(
            Fault(
                stage.place.reading(r"checkpoints[^?]*\.json"), "flip_response", after, times=None
            )
        )
        target = tmp_path / f"new{number}"
        with pytest.raises(CkptError):
            stage.restored(target)
        assert proxy.hits(fault) >= 1
        assert not target.exists() or contents(target) == {}
