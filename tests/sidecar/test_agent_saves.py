"""Saves of one node become durable, and leave the volume only by the local rule."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ds_ckpt_store.contract.manifest import Restored, RestoredFile
from ds_ckpt_store.errors import RefusedError
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import World, contents, left_of_saves, status

MIB = 1 << 20


def test_a_save_is_stored_committed_and_pointed_to(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    files = {"mp_rank_00_model_states.pt": 6 * MIB, "zero/rank0.pt": 1000, "empty.pt": 0}
    manifest = trainer.save("a/ü 1%", files, companions={"zero_to_fp32.py": b"#!"}, step=7)
    before = contents(Path(trainer.folder(manifest)))
    assert world.once(trainer.volume.path) == 0
    assert world.states() == {"a/ü 1%": "committed"}
    assert world.latest() == "a/ü 1%"
    assert status(trainer.volume.path, manifest.save_id).state == "committed"
    world.check_whole()
    assert world.restored(tmp_path / "new") == before
    assert (tmp_path / "new/zero_to_fp32.py").read_bytes() == b"#!"
    assert world.bucket.unfinished == {}


def test_every_step_of_a_save_is_one_line_of_the_log(world: World, trainer: Trainer) -> None:
    manifest = trainer.save("t", {"x": 100})
    world.once(trainer.volume.path)
    events = [
        name
        for _, name, values in world.log.lines
        if name.startswith("save.") and values["save_id"] == manifest.save_id
    ]
    assert events == [
        "save.discovered",
        "save.uploading",
        "save.uploaded",
        "save.stored",
        "save.committed",
    ]


def test_a_second_start_sends_nothing_again(world: World, trainer: Trainer) -> None:
    trainer.save("t", {"x": 6 * MIB, "y": 10})
    world.once(trainer.volume.path)
    before = len(world.store.asked("put", "@")), len(world.store.asked("put_part", "@"))
    assert world.once(trainer.volume.path) == 0
    assert (len(world.store.asked("put", "@")), len(world.store.asked("put_part", "@"))) == before


def test_losing_the_journal_costs_nothing_but_a_look(world: World, trainer: Trainer) -> None:
    trainer.save("t", {"x": 100})
    world.fault("put", "fail-before", "checkpoints/", count=None, error=RefusedError)
    assert world.once(trainer.volume.path, drain_seconds=0) == 1
    world.store.script.clear()
    os.unlink(trainer.volume.journal)
    assert world.once(trainer.volume.path) == 0
    assert world.states() == {"t": "committed"}
    assert len(world.store.asked("put", "@.*/x$")) == 1


# ---- the same tag again


def test_a_tag_that_is_saved_again_with_other_bytes_tears_nothing_and_both_come_back(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    first = trainer.save("t", {"x": b"first" * 100})
    world.once(trainer.volume.path)
    second = trainer.save("t", {"x": b"second" * 100})
    world.once(trainer.volume.path)
    world.check_whole()
    assert world.restored(tmp_path / "1", save_id=first.save_id) == {"x": b"first" * 100}
    assert world.restored(tmp_path / "2", save_id=second.save_id) == {"x": b"second" * 100}
    assert world.restored(tmp_path / "3", tag="t") == {"x": b"second" * 100}


def test_a_tag_saved_again_before_the_first_was_sent_loses_neither(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    first = trainer.save("t", {"x": b"first"})
    second = trainer.save("t", {"x": b"second"})  # on new inodes: the links keep the first
    assert world.once(trainer.volume.path) == 0
    assert world.restored(tmp_path / "1", save_id=first.save_id) == {"x": b"first"}
    assert world.restored(tmp_path / "2", save_id=second.save_id) == {"x": b"second"}


def test_a_trainer_that_uses_one_tag_for_ever_does_not_fill_the_volume(
    world: World, trainer: Trainer
) -> None:
    for _ in range(4):
        last = trainer.save("best", {"x": 100})
        assert world.once(trainer.volume.path) == 0
    assert left_of_saves(trainer.volume.path) == [
        f"outbox/{last.file_name}",
        f"links/{last.save_id}",
    ]
    assert list(contents(Path(trainer.folder(last)))) == ["x"]


@pytest.mark.parametrize("size", [100, 11 * MIB])
def test_a_shard_written_over_in_place_while_it_is_uploaded_is_superseded(
    world: World, trainer: Trainer, size: int, tmp_path: Path
) -> None:
    torn = trainer.save("torn", {"a.pt": 50, "x": size}, latest=False)
    good = trainer.save("good", {"x": b"fine"})
    wrong = random.Random(5).randbytes(size)
    world.fault(
        "put" if size < 5 * MIB else "put_part",
        "call",
        "torn@.*/x$",
        action=lambda: trainer.rewrite(torn, "x", wrong),
    )
    world.once(trainer.volume.path)
    assert world.states() == {"torn": "abandoned", "good": "committed"}
    assert world.keys(torn.folder) == [], "its objects are withdrawn"
    assert world.bucket.unfinished == {}
    assert status(trainer.volume.path, torn.save_id).state == "superseded"
    assert "x" in status(trainer.volume.path, torn.save_id).reason
    assert left_of_saves(trainer.volume.path) == [
        f"outbox/{good.file_name}",
        f"links/{good.save_id}",
    ]
    left = contents(Path(trainer.volume.path) / "torn")
    assert left == {"x": wrong}, "what the trainer wrote since is its own"
    world.check_whole()


@pytest.mark.parametrize("data", [b"", b"shorter", b"x" * 101])
def test_a_shard_written_over_before_it_was_read_is_superseded(
    world: World, trainer: Trainer, data: bytes
) -> None:
    torn = trainer.save("torn", {"x": 100})
    trainer.rewrite(torn, "x", data)
    assert world.once(trainer.volume.path) == 1
    assert world.states() == {"torn": "abandoned"}
    assert status(trainer.volume.path, torn.save_id).state == "superseded"
    assert [torn.save_id in line["reason"] for line in world.log.of("save.not_stored")] == [True]
    reason = status(trainer.volume.path, torn.save_id).reason
    world.once(trainer.volume.path)
    again = status(trainer.volume.path, torn.save_id)
    assert (again.state, again.reason) == ("superseded", reason), "a later start knows why"


def test_the_folder_that_latest_names_is_not_touched_even_if_its_save_is_over(
    world: World, trainer: Trainer
) -> None:
    torn = trainer.save("t", {"x": 100, "y": 50})
    trainer.rewrite(torn, "x", b"in the middle of the next save")
    world.once(trainer.volume.path)
    assert sorted(contents(Path(trainer.folder(torn)))) == ["x", "y"]
    again = trainer.save("t", {"x": 100, "y": 50}, in_place=True)
    assert world.once(trainer.volume.path) == 1, "one of the two is not stored"
    assert world.once(trainer.volume.path) == 0
    assert world.latest() == "t"
    assert sorted(contents(Path(trainer.folder(again)))) == ["x", "y"]
    assert left_of_saves(trainer.volume.path) == [
        f"outbox/{again.file_name}",
        f"links/{again.save_id}",
    ]


def test_a_rotation_by_the_trainer_does_not_stop_an_upload(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    manifest = trainer.save("t", {"x": b"kept by its link"})
    os.unlink(f"{trainer.folder(manifest)}/x")
    os.rmdir(trainer.folder(manifest))
    assert world.once(trainer.volume.path) == 0
    assert world.restored(tmp_path / "new") == {"x": b"kept by its link"}


def test_without_links_the_trainers_own_files_are_sent(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.save("t", {"x": b"1"}, companions={"c.py": b"2"}, protection="none", root="deep/er")
    assert world.once(trainer.volume.path) == 0
    assert world.restored(tmp_path / "new") == {"x": b"1"}
    assert (tmp_path / "new/c.py").read_bytes() == b"2"


# ---- order


@pytest.mark.parametrize(("order", "expected"), [("oldest", "abc"), ("newest", "cba")])
def test_the_order_of_uploads_is_a_setting(
    world: World, trainer: Trainer, order: str, expected: str
) -> None:
    for tag in "abc":
        trainer.save(tag, {"x": 10})
    world.once(trainer.volume.path, order=order)
    puts = [call.key[0] for call in world.store.asked("put", "@.*/x$")]
    assert "".join(puts) == expected
    assert world.latest() == "c", "latest never goes back"


# ---- off the volume


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_the_newest_committed_saves_stay_on_the_volume(
    world: World, trainer: Trainer, keep: int
) -> None:
    for tag in ("a", "b", "c"):
        trainer.save(tag, {"x": 10}, companions={"zero_to_fp32.py": b"#!"})
    (Path(trainer.volume.path) / "latest").write_text("elsewhere")
    world.once(trainer.volume.path, keep_local=keep)
    kept = ["a", "b", "c"][3 - keep :]
    assert sorted(contents(Path(trainer.volume.path))) == sorted(
        [*(f"{tag}/x" for tag in kept), "latest", "zero_to_fp32.py"]
    )
    assert len(os.listdir(trainer.volume.links)) == keep
    assert set(world.states().values()) == {"committed"}


def test_what_the_local_latest_names_stays_until_it_moves_on(
    world: World, trainer: Trainer
) -> None:
    old = trainer.save("old", {"x": 10})
    trainer.save("new", {"x": 10}, latest=False)
    world.once(trainer.volume.path)
    assert list(contents(Path(trainer.folder(old)))) == ["x"]
    (Path(trainer.volume.path) / "latest").write_text("new")
    world.once(trainer.volume.path)
    assert not Path(trainer.folder(old)).exists()
    assert status(trainer.volume.path, old.save_id).state == "cleaned"


def test_nothing_goes_before_it_is_committed(world: World, trainer: Trainer) -> None:
    for tag in ("a", "b"):
        trainer.save(tag, {"x": 10})
    world.fault("put", "fail-before", "checkpoints/", count=None, error=RefusedError)
    assert world.once(trainer.volume.path, keep_local=0) == 1
    assert len(os.listdir(trainer.volume.links)) == 2
    assert sorted(contents(Path(trainer.volume.path))) == ["a/x", "b/x", "latest"]


def test_files_that_changed_since_are_not_deleted(world: World, trainer: Trainer) -> None:
    old = trainer.save("old", {"same": 10, "touched": 10, "replaced": 10})
    folder = Path(trainer.folder(old))
    trainer.save("new", {"x": 10})
    (folder / "by hand").write_bytes(b"note")
    os.utime(folder / "touched", ns=(1, 1))  # no more the file that was stored, as far as we know
    (folder / "replaced").unlink()
    (folder / "replaced").write_bytes(b"0123456789")
    link = Path(trainer.volume.link_folder(old.save_id)) / "touched"
    link.unlink()
    link.write_bytes(b"")
    world.store.script.clear()
    world.once(trainer.volume.path)
    assert sorted(contents(folder)) == ["by hand", "replaced", "touched"]


def test_replicas_go_with_the_save_and_companions_stay(world: World, trainer: Trainer) -> None:
    old = trainer.save("old", {"x": 10}, replicas={"shared.pt": 10}, companions={"c.py": b"#"})
    trainer.save("new", {"x": 10})
    world.once(trainer.volume.path)
    assert not Path(trainer.folder(old)).exists()
    assert (Path(trainer.volume.path) / "c.py").exists()
    assert world.keys(f"{old.folder}/shared.pt") == []


def test_save_dir_itself_is_not_removed_with_its_last_checkpoint(
    world: World, trainer: Trainer
) -> None:
    trainer.save("old", {"x": 10}, root="out/ckpt", latest=False)
    (Path(trainer.volume.path) / "keep").mkdir()
    world.once(trainer.volume.path, keep_local=0)
    assert (Path(trainer.volume.path) / "out/ckpt").is_dir()
    assert not (Path(trainer.volume.path) / "out/ckpt/old").exists()
    assert (Path(trainer.volume.path) / "keep").is_dir()


def test_a_restored_checkpoint_goes_once_a_later_one_is_committed(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.save("old", {"x": 100})
    world.once(trainer.volume.path)
    world.restored(tmp_path / "second")
    second = Trainer(tmp_path / "second", time_ms=trainer.time_ms, seed=2)
    world.once(tmp_path / "second")
    assert sorted(contents(tmp_path / "second")) == ["latest", "old/x"]
    second.save("new", {"x": 10})
    world.fault("put", "fail-before", "checkpoints/", count=None, error=RefusedError)
    world.once(tmp_path / "second")
    assert (tmp_path / "second/old/x").exists(), "the new one is not durable yet"
    world.store.script.clear()
    world.once(tmp_path / "second")
    assert sorted(contents(tmp_path / "second")) == ["latest", "new/x"]
    assert second.volume.restored_from() is None


def test_a_restored_file_that_was_changed_stays(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.save("old", {"x": 100, "y": 100})
    world.once(trainer.volume.path)
    world.restored(tmp_path / "second")
    (tmp_path / "second/old/x").write_bytes(b"patched by hand")
    Trainer(tmp_path / "second", time_ms=trainer.time_ms, seed=2).save("new", {"x": 10})
    world.once(tmp_path / "second")
    assert sorted(contents(tmp_path / "second")) == ["latest", "new/x", "old/x"]


def test_a_forged_note_of_what_was_restored_leads_nowhere_else(
    world: World, trainer: Trainer, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"precious")
    state = (outside / "file").stat()
    (Path(trainer.volume.path) / "out").symlink_to(outside)
    trainer.save("new", {"x": 10})
    for path in ("../outside/file", "out/file", str(outside / "file"), ".ds_ckpt/node.json"):
        note = Restored(
            source="s",
            run_id="run",
            save_id="018bcfe56800-0000000000000001",
            tag="old",
            time_ms=1,
            epoch=1,
            files=[
                RestoredFile(
                    path=path,
                    size=state.st_size,
                    crc32c="00000000",
                    device=state.st_dev,
                    inode=state.st_ino,
                    mtime_ns=state.st_mtime_ns,
                )
            ],
        )
        trainer.volume.fs.write_atomic(trainer.volume.restored, note.to_bytes())
        world.once(trainer.volume.path)
        assert (outside / "file").read_bytes() == b"precious"
    assert world.states() == {"new": "committed"}
