"""Files that we may not read and names that we may not change: each is named, and healed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ckpt_sidecar import doctor
from tests.sidecar.doctor.support import (
    SIDECAR,
    STATES,
    carry_out,
    matter,
    only,
    seen,
    share,
    umask,
)
from tests.sidecar.handoff import Trainer

# ---- all is well


@pytest.mark.parametrize("uid", [0, SIDECAR])
def test_a_volume_that_both_may_use_has_no_warning(trainer: Trainer, uid: int) -> None:
    with umask(0o002):
        manifest = trainer.save("step1", {STATES: 100, "deep/zero.pt": 50})
    trainer.say()
    share(trainer)
    found = seen(trainer.volume.path, uid)
    assert matter(found) == []
    told = " ".join(each.sentence for each in found)
    assert "1 save handed over, 2 files of checkpoints can be read" in told
    assert "the newest save takes 150 bytes" in told
    assert sorted(os.listdir(trainer.volume.own)) == [
        "links",
        "node.json",
        "outbox",
        "pieces",
        "status",
    ]
    assert os.listdir(trainer.volume.link_folder(manifest.save_id)) == [STATES, "deep"]


def test_a_volume_that_nobody_has_used_yet_is_well_and_stays_as_it_is(volume: Path) -> None:
    assert matter(seen(volume)) == []
    assert list(volume.iterdir()) == []


# ---- files that we may not read: each is named, and the remedy heals it


def test_a_trainer_that_is_root_with_umask_077_is_told_and_healed(trainer: Trainer) -> None:
    with umask(0o077):
        manifest = trainer.save("step1", {STATES: 100, "zero.pt": 50})
    share(trainer)
    found = seen(trainer.volume.path)
    error = only(found, "error")
    first = f"{trainer.volume.link_folder(manifest.save_id)}/{STATES}"
    assert error.what == first
    for fact in (
        "uid 0",
        "mode 0600",
        f"uid {SIDECAR}, groups {SIDECAR}",
        "root with umask 077",
        "1 more is like it",
    ):
        assert fact in error.sentence
    assert "runAsUser: 0" in error.remedy
    assert "fsGroup" in error.remedy
    for each in doctor.that_matter(found):
        carry_out(each.remedy)
    assert matter(seen(trainer.volume.path)) == []


Break = Callable[[Trainer, Path], Path]


def _mode_without_group(trainer: Trainer, shard: Path) -> Path:
    os.chown(shard, 1000, SIDECAR)
    shard.chmod(0o600)
    return shard


def _group_that_we_are_not_in(trainer: Trainer, shard: Path) -> Path:
    os.chown(shard, 1000, 1000)
    shard.chmod(0o600)
    return shard


def _our_own_without_a_right(trainer: Trainer, shard: Path) -> Path:
    os.chown(shard, SIDECAR, 1000)
    shard.chmod(0o000)
    return shard


def _many_files(trainer: Trainer, shard: Path) -> Path:
    for path in sorted(shard.parent.iterdir()):
        path.chmod(0o600)
        os.chown(path, 1000, 1000)
    return shard


def _folder_that_may_not_be_searched(trainer: Trainer, shard: Path) -> Path:
    folder = shard.parent
    os.chown(folder, 0, 0)
    folder.chmod(0o700)
    return folder


@pytest.mark.parametrize(
    "make",
    [
        _mode_without_group,
        _group_that_we_are_not_in,
        _our_own_without_a_right,
        _many_files,
        _folder_that_may_not_be_searched,
    ],
)
def test_whatever_keeps_us_from_a_shard_is_named_and_healed_by_its_remedy(
    trainer: Trainer, make: Break
) -> None:
    with umask(0o002):
        manifest = trainer.save("step1", {f"{n}.pt": 100 for n in range(7)})
    share(trainer)
    shard = Path(trainer.volume.link_folder(manifest.save_id)) / "0.pt"
    blamed = make(trainer, shard)
    found = seen(trainer.volume.path)
    error = only(found, "error")
    assert error.what == str(blamed)
    state = blamed.stat()
    assert f"uid {state.st_uid}, gid {state.st_gid}, mode {state.st_mode & 0o7777:04o}" in (
        error.sentence
    )
    carry_out(error.remedy)
    assert not [each for each in seen(trainer.volume.path) if each.severity == "error"]


def test_a_group_that_may_read_is_asked_for_by_its_number(trainer: Trainer) -> None:
    with umask(0o002):
        manifest = trainer.save("step1", {"0.pt": 100})
    share(trainer)
    shard = f"{trainer.volume.link_folder(manifest.save_id)}/0.pt"
    os.chown(shard, 1000, 4321)
    os.chmod(shard, 0o640)
    error = only(seen(trainer.volume.path), "error")
    assert "supplementalGroups: [4321]" in error.remedy
    assert "runAsUser: 1000" in error.remedy
    assert matter(seen(trainer.volume.path, groups=(SIDECAR, 4321))) == []
    assert not [e for e in seen(trainer.volume.path, uid=1000) if e.severity == "error"]


def test_a_save_that_is_decided_needs_no_reading(trainer: Trainer) -> None:
    from ds_ckpt_store.contract.manifest import SaveStatus

    with umask(0o002):
        manifest = trainer.save("step1", {"0.pt": 100})
    os.chmod(f"{trainer.volume.link_folder(manifest.save_id)}/0.pt", 0o600)
    trainer.volume.write_save_status(
        SaveStatus(save_id=manifest.save_id, state="committed", time=0)
    )
    share(trainer)
    assert matter(seen(trainer.volume.path)) == []


def test_a_checkpoint_that_was_not_handed_over_yet_is_looked_at_too(volume: Path) -> None:
    folder = volume / "runs" / "a" / "step1"
    folder.mkdir(parents=True, mode=0o777)
    for path in (volume / "runs", volume / "runs" / "a", folder):
        path.chmod(0o777)
    (folder / STATES).write_bytes(b"x")
    (folder / STATES).chmod(0o600)
    found = seen(volume)
    assert ("warning", str(folder / STATES)) in matter(found)
    assert "error" not in {each.severity for each in found}


def test_a_folder_that_we_may_not_look_into_may_hold_a_save_dir(trainer: Trainer) -> None:
    """A hook without DS_CKPT_DIR takes save_dir for the volume; umask 077 hides that from us."""
    share(trainer)
    (Path(trainer.volume.path) / "lost+found").mkdir(mode=0o700)
    run = Path(trainer.volume.path) / "run"
    run.mkdir()
    with umask(0o077):
        Trainer(run).save("step1", {STATES: 10})
    run.chmod(0o700)
    state = run.stat()
    warning = only(seen(trainer.volume.path), "warning")
    assert warning.what == str(run)
    assert f"uid {state.st_uid}, gid {state.st_gid}, mode 0700" in warning.sentence
    assert f"DS_CKPT_DIR={trainer.volume.path}" in warning.remedy


def test_folders_that_hold_no_checkpoints_are_the_trainers_own_business(trainer: Trainer) -> None:
    with umask(0o002):
        trainer.save("step1", {"0.pt": 100})
    share(trainer)
    for name in ("wandb", "logs"):
        folder = Path(trainer.volume.path) / name
        folder.mkdir()
        (folder / "secret").write_bytes(b"x")
        (folder / "secret").chmod(0o600)
        folder.chmod(0o755)
    assert matter(seen(trainer.volume.path)) == []


# ---- names that we may not change


def test_a_tag_folder_that_cannot_be_emptied_is_a_warning_with_its_remedy(
    trainer: Trainer,
) -> None:
    with umask(0o022):
        manifest = trainer.save("step1", {"0.pt": 100})
    share(trainer)
    warning = only(seen(trainer.volume.path), "warning")
    assert warning.what == trainer.folder(manifest)
    assert "fills up" in warning.sentence
    carry_out(warning.remedy)
    assert matter(seen(trainer.volume.path)) == []


@pytest.mark.parametrize("name", ["", "outbox", "links", "status"])
def test_our_own_folders_that_may_not_be_written_are_an_error(trainer: Trainer, name: str) -> None:
    share(trainer)
    folder = Path(trainer.volume.own) / name
    os.chown(folder, 0, 0)
    folder.chmod(0o755)
    errors = [each for each in seen(trainer.volume.path) if each.severity == "error"]
    assert {each.what for each in errors} == {str(folder)}
    for each in errors:
        carry_out(each.remedy)
    assert matter(seen(trainer.volume.path)) == []


@pytest.mark.parametrize(
    ("name", "severity"),
    [
        ("agent.lock", "error"),
        ("cleaning.lock", "error"),
        ("restore.lock", "error"),
        ("node.json", "error"),
        ("status/trainer.json", "error"),
        ("journal.db", "warning"),
        ("limits.json", "warning"),
    ],
)
def test_our_own_files_that_another_user_keeps_to_itself_are_named(
    trainer: Trainer, name: str, severity: str
) -> None:
    trainer.say()
    share(trainer)
    path = Path(trainer.volume.own) / name
    path.touch()
    path.chmod(0o600)
    found = seen(trainer.volume.path)
    assert (severity, str(path)) in matter(found)
    carry_out(next(each.remedy for each in found if each.what == str(path)))
    assert matter(seen(trainer.volume.path)) == []


@pytest.mark.parametrize("ending", ["", "-wal", "-shm"])
def test_a_journal_of_another_agent_is_opened_to_the_group_and_to_nobody_else(
    trainer: Trainer, ending: str
) -> None:
    """As versions made it that left its mode to SQLite."""
    trainer.say()
    share(trainer)
    path = Path(trainer.volume.journal + ending)
    path.touch()
    os.chown(path, 0, SIDECAR)
    path.chmod(0o644)
    warning = only(seen(trainer.volume.path), "warning")
    assert warning.what == str(path)
    assert warning.remedy.startswith(f"now, as uid 0: chmod g+rw {path}. For good, one of: ")
    assert "remove it while no agent runs, which loses nothing" in warning.remedy
    assert "trainer" not in warning.remedy
    carry_out(warning.remedy)
    assert stat.S_IMODE(path.stat().st_mode) == 0o664
    assert matter(seen(trainer.volume.path)) == []


def test_a_sticky_volume_is_told_from_one_that_is_not(trainer: Trainer) -> None:
    share(trainer)
    os.chmod(trainer.volume.path, 0o1777)
    warning = only(seen(trainer.volume.path), "warning")
    assert "sticky" in warning.sentence
    assert warning.remedy == f"chmod -t {trainer.volume.path}, as uid 0"
    assert matter(seen(trainer.volume.path, uid=0)) == []


def test_a_node_id_that_is_damaged_is_a_warning_and_the_agent_is_the_remedy(
    trainer: Trainer,
) -> None:
    Path(trainer.volume.own, "node.json").write_bytes(b"{")
    (found,) = matter(seen(trainer.volume.path))
    assert found == ("warning", trainer.volume.path)
    (told,) = (each for each in seen(trainer.volume.path) if each.severity == "warning")
    assert "the id of this node cannot be read" in told.sentence
    assert "start the agent" in told.remedy


@pytest.mark.parametrize("name", ["node.json", "outbox/{manifest}"])
def test_a_link_in_place_of_our_file_is_called_a_link(trainer: Trainer, name: str) -> None:
    manifest = trainer.save("a", {STATES: 100})
    path = Path(trainer.volume.own, name.format(manifest=manifest.file_name))
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")
    told = [each for each in seen(trainer.volume.path) if each.what == str(path)]
    assert all("it is a link" in each.sentence for each in told)
    assert [each.severity for each in told] == ["error"]
    assert "disk" not in told[0].remedy


def test_a_damaged_manifest_is_not_thrown_away_by_the_remedy(trainer: Trainer) -> None:
    manifest = trainer.save("a", {STATES: 100})
    path = Path(trainer.volume.outbox, manifest.file_name)
    path.write_bytes(path.read_bytes()[:-30])
    (told,) = (each for each in seen(trainer.volume.path) if each.what == str(path))
    assert f"{trainer.volume.links}/{manifest.save_id}" in told.remedy
    assert Path(trainer.volume.link_folder(manifest.save_id)).is_dir()
