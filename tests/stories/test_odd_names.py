"""Tags and shards of any name reach any store, through keys, signatures and listings, and come back
under that name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sidecar.handoff import Trainer
from tests.sidecar.world import contents
from tests.stories.places import EVERY, Stage

TAGS = ["a/b", "ü 1%+", "日本/語?x=1&y=2", "100%25", ".hidden@", "~'\"<>|*#:;,=$!", "x" * 200]
SHARDS = ["zero pp+rank%0?.pt", "dir/ü&=#.pt", "@.pt", "100%2F.pt", "x" * 200]


@pytest.mark.parametrize("place", EVERY, indirect=True)
def test_any_tag_and_any_shard_comes_back_under_its_own_name(
    stage: Stage, trainer: Trainer, tmp_path: Path
) -> None:
    saved = {}
    for number, tag in enumerate(TAGS):
        shards = SHARDS if number == 0 else [SHARDS[number % len(SHARDS)]]
        files = {name: f"{number} {name}".encode() for name in shards}
        saved[tag] = contents(Path(trainer.folder(trainer.save(tag, files))))
        assert saved[tag] == files
    assert stage.once(trainer.volume.path) == 0, stage.log.text()
    assert stage.states() == dict.fromkeys(TAGS, "committed")
    assert stage.latest() == TAGS[-1]
    stage.check_whole()
    for number, tag in enumerate(TAGS):
        target = tmp_path / f"new{number}"
        assert stage.restored(target, tag=tag) == saved[tag]
        assert (target / tag).is_dir()
        assert (target / "latest").read_text() == tag
