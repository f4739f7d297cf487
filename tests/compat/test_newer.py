"""A document of a version that is not written yet: kept, reported, never half understood."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ds_ckpt_hook.errors import AgreementError
from ds_ckpt_store.errors import UnknownSchemaError
from tests.compat.story import HALF, leave, look, resume, sync
from tests.compat.versions import OURS, run

pytestmark = pytest.mark.slow

ALL = {
    "given-up": "abandoned",
    "old1": "deleted",
    "old2": "deleted",
    "old3": "committed",
    "waits": "committed",
    HALF: "committed",
}
BEGUN = {tag: state for tag, state in ALL.items() if tag not in ("waits", HALF)}


class Place:
    """What this version left, and one document of a later version in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = (root / "store").as_uri()
        self.nodes = [str(root / "node0"), str(root / "node1")]
        leave(str(root))

    def find(self, pattern: str, tag: str = "") -> Path:
        """The one document of a kind; of the save with a tag, if one is given."""
        (found,) = (
            path
            for path in self.root.glob(pattern)
            if not tag or f'"{tag}"' in path.read_text() or self.save_id(tag) in str(path)
        )
        return found

    def save_id(self, tag: str) -> str:
        for path in self.root.glob("store/.ds_ckpt/saves/*.json"):
            if json.loads(path.read_text())["tag"] == tag:
                return path.stem
        (path,) = (self.root / "node0/.ds_ckpt/outbox").glob("*.json")
        return path.name.split(".")[0]

    def sync(self, *nodes: str) -> tuple[list[int], str]:
        """Two passes on each node: exit codes of the last ones, and what all of them said."""
        passes = [sync(self.url, *(nodes or self.nodes)) for _ in range(2)]
        return passes[-1]["codes"], "\n".join(line for done in passes for line in done["said"])

    def objects(self) -> dict[str, bytes]:
        """What is stored for good."""
        store = self.root / "store"
        return {
            str(path.relative_to(store)): path.read_bytes()
            for path in store.rglob("*")
            if path.is_file() and not re.search(r"\.ds_ckpt-tmp|/clock/|owner\.json", str(path))
        }


def later(path: Path) -> tuple[bytes, bytes]:
    """Make a document one of the next version, in a form of its own; as it was, and as it is."""
    before = path.read_bytes()
    document = {key: value for key, value in json.loads(before).items() if key != "checksum"}
    kept = {key: document[key] for key in ("tag", "save_id", "run_id") if key in document}
    path.write_text(json.dumps({"schema": document["schema"] + 1, "form": "another", **kept}))
    return before, path.read_bytes()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


SAVES = {
    "manifest of a save": ("node1/.ds_ckpt/outbox/*.json", "waits"),
    "manifest of a save that is half uploaded": ("node0/.ds_ckpt/outbox/*.json", HALF),
    "intent": ("store/.ds_ckpt/saves/*.json", "waits"),
    "intent of a save that is half uploaded": ("store/.ds_ckpt/saves/*.json", HALF),
}


@pytest.mark.parametrize(("pattern", "tag"), SAVES.values(), ids=SAVES)
def test_a_save_that_a_later_version_tells_of_waits_for_that_version_and_no_other_save_does(
    place: Place, pattern: str, tag: str
) -> None:
    stored = place.objects()
    document = place.find(pattern, tag)
    before, after = later(document)
    codes, said = place.sync()
    assert 1 in codes
    assert "newer than 1, which this version reads: upgrade" in said
    assert look(place.url) == {key: ALL[key] for key in ALL if key != tag}
    assert document.read_bytes() == after
    del stored["latest"]
    assert {key: place.objects().get(key, b"") for key in stored} == {
        **stored,
        **({str(document.relative_to(place.root / "store")): after} if "store" in pattern else {}),
    }

    document.write_bytes(before)  # the upgrade
    place.sync()
    assert look(place.url) == ALL


def test_a_save_whose_other_node_is_of_a_later_version_waits_with_all_its_shards(
    place: Place,
) -> None:
    mine, other = place.nodes
    place.sync(other)
    document = place.find("store/.ds_ckpt/receipts/*/*.json", HALF)
    before, after = later(document)
    codes, said = place.sync(mine)
    assert codes == [1]
    assert "Receipt has schema 2, newer than 1, which this version reads: upgrade" in said
    assert look(place.url) == {**BEGUN, "waits": "committed"}
    assert document.read_bytes() == after
    assert len(list(place.root.glob(f"node*/{HALF}/*"))) == 3

    document.write_bytes(before)
    place.sync()
    assert look(place.url) == ALL


RECORDS = {
    "record of a checkpoint": ("store/.ds_ckpt/checkpoints/*.json", "old3"),
    "record of a save that was given up": ("store/.ds_ckpt/checkpoints/*.json", "given-up"),
    "hold of a reader": ("store/.ds_ckpt/holds/*.json", ""),
    "intent": ("store/.ds_ckpt/saves/*.json", "waits"),
}


@pytest.mark.parametrize(("pattern", "tag"), RECORDS.values(), ids=RECORDS)
def test_what_a_later_version_has_stored_is_neither_collected_nor_written_over(
    place: Place, pattern: str, tag: str
) -> None:
    document = place.find(pattern, tag)
    _, after = later(document)
    stored = place.objects()
    run(OURS, "command", "gc", "--run-id", "run", "--older-than", "1s", place.url)
    place.sync()
    assert document.read_bytes() == after
    kept = place.objects()
    folder = f"{tag}@" if tag else "old3@"
    assert {key for key in stored if key.startswith(folder)} <= set(kept)


OURS_ON_THE_VOLUME = {
    "limits.json": "limits.json",
    "what the trainer says": "status/trainer.json",
}


@pytest.mark.parametrize("name", OURS_ON_THE_VOLUME.values(), ids=OURS_ON_THE_VOLUME)
def test_a_hint_of_a_later_version_is_left_alone_and_saves_are_stored_all_the_same(
    place: Place, name: str
) -> None:
    document = place.root / f"node0/.ds_ckpt/{name}"
    _, after = later(document)
    place.sync()
    assert document.read_bytes() == after
    assert look(place.url) == ALL


def test_a_volume_of_a_later_version_is_refused_whole(place: Place) -> None:
    document = place.root / "node0/.ds_ckpt/node.json"
    before, after = later(document)
    outbox = sorted((place.root / "node0/.ds_ckpt/outbox").iterdir())
    with pytest.raises(UnknownSchemaError, match="upgrade"):
        place.sync(place.nodes[0])
    assert document.read_bytes() == after
    assert sorted((place.root / "node0/.ds_ckpt/outbox").iterdir()) == outbox
    document.write_bytes(before)
    place.sync()
    assert look(place.url) == ALL


def test_a_prefix_whose_lease_is_of_a_later_version_is_left_to_that_version(place: Place) -> None:
    document = place.root / "store/.ds_ckpt/owner.json"
    stored = place.objects()
    before, after = later(document)
    codes, said = place.sync()
    assert 0 not in codes
    assert "upgrade" in said
    assert document.read_bytes() == after
    assert place.objects() == stored
    document.write_bytes(before)
    place.sync()
    assert look(place.url) == ALL


def test_a_trainer_does_not_resume_from_what_a_later_version_restored_and_says_so(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    document = place.root / "restored/.ds_ckpt/restored.json"
    _, after = later(document)
    with pytest.raises(AgreementError, match="nothing tells whether they are whole"):
        resume("", str(place.root / "restored"), str(place.root / "restored"))
    assert "Restored has schema 2, newer than 1" in caplog.text
    assert document.read_bytes() == after
    assert len(list((place.root / "restored/old3").iterdir())) == 3
