"""A write is answered with an error, and the store applies it all the same, then or much later.

Each write of the protocol in turn meets this on real servers: a proxy answers for the server and
lets it have the request when the story says so. Nothing is ever cleaned up on such an answer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faultproxy import Fault
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import check_whole, status
from tests.stories.places import MIB, Place, Stage

CONDITIONS = ["seaweed", "azure", "gcs"]
FILES = {"small.pt": b"1" * 1000, "large.pt": b"2" * (6 * MIB)}


def writes(place: Place) -> dict[str, str]:
    """Patterns of the requests that write, in the order in which they come."""
    _, wire = place.network
    return {
        "lease": place.putting(r"owner\.json"),
        "intent": place.putting(r"saves[^?&]*\.json"),
        "small shard": place.putting(r"small\.pt"),
        "part": wire.part,
        "completion": wire.complete,
        "receipt": place.putting(r"receipts[^?&]*\.json"),
        "record": place.putting(r"checkpoints[^?&]*\.json"),
        "pointer": place.putting("run(/|%2F)latest"),
    }


@pytest.mark.parametrize("status", [503, 500])
@pytest.mark.parametrize("place", CONDITIONS, indirect=True)
def test_every_write_fails_once_and_is_applied_after_the_next_checkpoint(
    stage: Stage, trainer: Trainer, tmp_path: Path, status: int
) -> None:
    proxy, wire = stage.place.network
    more = wire.throttled if status == 503 else {"body": ""}
    faults = [
        Fault(pattern, "late", status=status, **more)  # type: ignore[arg-type]
        for pattern in writes(stage.place).values()
    ]
    # The lease is taken, and parts are sent, by the probe's side too: begin after it.
    stage.at("store.probed", *faults)
    trainer.save("one", FILES)
    assert stage.once(trainer.volume.path) == 0, stage.log.text()
    assert [proxy.hits(fault) for fault in faults] == [1] * len(faults)
    trainer.save("two", {**FILES, "small.pt": b"other"})
    assert stage.once(trainer.volume.path) == 0
    answers = proxy.apply_late()
    assert len(answers) == len(faults)
    assert stage.states() == {"one": "committed", "two": "committed"}
    stage.check_whole()
    assert stage.latest() == "two", "a pointer that lands late does not go back"
    trainer.save("three", {"x": 10})
    assert stage.once(trainer.volume.path) == 0
    assert stage.latest() == "three"
    stage.check_whole()
    assert stage.restored(tmp_path / "one", tag="one") == FILES


@pytest.mark.parametrize("place", CONDITIONS, indirect=True)
@pytest.mark.usefixtures("one_try")
def test_a_commit_that_seems_to_fail_and_is_applied_when_the_agent_is_gone(
    stage: Stage, trainer: Trainer
) -> None:
    """The marker appears after its writer gave up; what it vouches for must still be there."""
    proxy, _ = stage.place.network
    manifest = trainer.save("t", FILES)
    pattern = writes(stage.place)["record"]
    proxy.add(Fault(pattern, "late", status=500, body="", times=None))
    assert stage.once(trainer.volume.path) == 1
    assert stage.states() == {}
    assert [line["kind"] for line in stage.log.of("save.delayed")] == ["TransientError"]
    assert len(stage.keys(f"{manifest.folder}/")) == len(FILES), "nothing is cleaned up"
    proxy.clear()
    answers = proxy.apply_late()
    assert (answers[0] // 100, set(answers[1:])) == (
        2,
        {409 if "azure" in stage.place.name else 412},
    )
    (record,) = stage.catalog.committed()
    check_whole(stage.looked, record)
    assert stage.once(trainer.volume.path) == 0
    assert status(trainer.volume.path, manifest.save_id).state == "committed"
    assert stage.latest() == "t"
