"""Hook and sidecar of neighbouring versions: each takes over from the other, and both at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compat.story import HALF, PART, content
from tests.compat.versions import OTHERS, OURS, PAIRS, end, run, start

pytestmark = pytest.mark.slow
either_way = pytest.mark.parametrize(
    ("first", "then"), PAIRS, ids=lambda version: version.replace(".", "_")
)

SENT = 2  # parts, before the change of version
DECIDED = {"given-up": "abandoned", "old1": "deleted", "old2": "deleted", "old3": "committed"}


def test_there_is_a_neighbour() -> None:
    assert OTHERS


class Left:
    """What one version left, in a folder."""

    def __init__(self, root: Path, version: str) -> None:
        self.url = (root / "store").as_uri()
        self.nodes = [root / "node0", root / "node1"]
        self.restored = root / "restored"
        self.fresh = root / "fresh"
        run(version, "leave", root)

    def files(self, tag: str) -> dict[str, str]:
        return content([f"{node}/{tag}" for node in self.nodes])

    def sync(self, version: str, times: int = 2) -> list[dict[str, Any]]:
        return [run(version, "sync", self.url, *self.nodes) for _ in range(times)]


@pytest.fixture
def left(tmp_path: Path, first: str) -> Left:
    return Left(tmp_path, first)


@either_way
def test_a_sidecar_of_the_other_version_stores_what_was_handed_over_and_half_stored(
    left: Left, first: str, then: str
) -> None:
    assert run(then, "look", left.url) == DECIDED
    files = left.files(HALF)
    assert len(files) == 3
    passes = left.sync(then)
    assert passes[-1] == {"codes": [0, 0], "parts": 0, "said": []}
    stands = {**DECIDED, "waits": "committed", HALF: "committed"}
    for version in (then, first):
        assert run(version, "look", left.url) == stands
        volume = left.fresh.with_name(f"fresh-{version}")
        assert run(version, "restore", left.url, volume) == [HALF, files]


@either_way
def test_parts_that_one_version_has_stored_are_not_sent_again_by_the_other(
    left: Left, first: str, then: str
) -> None:
    sizes = {name: len(text) for name, text in left.files(HALF).items()}
    parts = sum(-(-size // PART) for size in sizes.values() if size > PART)
    assert sum(done["parts"] for done in left.sync(then)) == parts - SENT


@either_way
def test_a_trainer_is_told_by_a_sidecar_of_the_other_version_that_its_save_is_durable(
    left: Left, first: str, then: str
) -> None:
    left.sync(then)
    trainer = start(first, "train", "step", *left.nodes)
    while trainer.poll() is None:
        run(then, "sync", left.url, *left.nodes)
    assert end(trainer) == [["committed", ""], ["committed", ""]]
    assert run(first, "look", left.url)["step"] == "committed"


@either_way
def test_a_trainer_resumes_from_what_the_other_version_committed_or_restored(
    left: Left, first: str, then: str
) -> None:
    tag, files = run(then, "resume", left.url, *left.nodes)
    assert (tag, len(files)) == ("old3", 3)
    assert run(then, "resume", "", left.restored, left.restored) == [tag, files]
    left.sync(then)
    tag, files = run(first, "restore", left.url, left.fresh)
    assert (tag, len(files)) == (HALF, 3)
    assert run(then, "resume", left.url, left.fresh, left.fresh) == [tag, files]


@either_way
def test_after_a_change_of_version_training_goes_on_and_back_again(
    left: Left, first: str, then: str
) -> None:
    """An upgrade, a save, a rollback, a save: nothing that was committed is lost on the way."""
    for hook, sidecar, tag in ((then, first, "a"), (first, first, "b"), (then, then, "c")):
        run(hook, "resume", left.url, *left.nodes)
        trainer = start(hook, "train", tag, *left.nodes)
        while trainer.poll() is None:
            run(sidecar, "sync", left.url, *left.nodes)
        assert end(trainer) == [["committed", ""], ["committed", ""]]
    stands = run(then, "look", left.url)
    assert {tag: stands[tag] for tag in "abc"} == dict.fromkeys("abc", "committed")
    assert stands["old3"] == "committed"


@either_way
def test_commands_of_the_other_version_read_verify_and_collect(
    left: Left, first: str, then: str
) -> None:
    for command in (["ls", "--all"], ["verify", "--all"], ["gc", "--dry-run", "--run-id", "run"]):
        assert run(then, "command", *command, left.url) == [0], command
    assert run(first, "look", left.url) == DECIDED
    assert len(run(first, "restore", left.url, left.fresh)[1]) == 3


def test_this_version_tells_itself_apart(tmp_path: Path) -> None:
    """The other version's processes run its own code, not ours."""
    process = start(OTHERS[-1], "command", "doctor")
    _, said = process.communicate(timeout=60)
    assert "No such command 'doctor'" in said
    assert run(OURS, "command", "doctor", "--help") == [0]
