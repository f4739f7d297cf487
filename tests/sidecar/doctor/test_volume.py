"""The volume itself, and whether hook and sidecar mean the same one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_sidecar.examine import mount
from tests.sidecar.doctor.support import (
    STATES,
    carry_out,
    matter,
    only,
    seen,
    share,
    umask,
)
from tests.sidecar.handoff import Trainer

# ---- the volume itself


def test_a_volume_that_is_not_there_is_named_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "none", tmp_path / "file"):
        error = only(seen(path), "error")
        assert error.what == str(path)
        assert "DS_CKPT_VOLUME" in error.remedy
        assert "volumeMounts" in error.remedy


def test_a_volume_that_we_may_not_enter_is_named_with_its_owner(volume: Path) -> None:
    os.chown(volume, 1000, 1000)
    volume.chmod(0o700)
    error = only(seen(volume), "error")
    assert "uid 1000, gid 1000, mode 0700" in error.sentence
    assert "runAsUser: 1000" in error.remedy
    carry_out(error.remedy)
    assert "error" not in {each.severity for each in seen(volume)}


def test_a_folder_above_the_volume_that_we_may_not_search_is_named(
    volume: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    assert only(seen(volume), "error").what == str(tmp_path)


def test_a_link_in_the_place_of_our_folder_is_refused(volume: Path, tmp_path: Path) -> None:
    (volume / ".ds_ckpt").symlink_to(tmp_path)
    error = only(seen(volume), "error")
    assert error.what == f"{volume}/.ds_ckpt"
    assert "is a link" in error.sentence


@contextlib.contextmanager
def mounted(path: Path, *options: str) -> Iterator[Path]:
    path.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(path)], capture_output=True, text=True)
    if done.returncode and "permission denied" in done.stderr:
        pytest.skip("this user may not mount a filesystem")
    assert done.returncode == 0, done.stderr
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_memory_a_full_disk_and_few_inodes_are_told(tmp_path: Path) -> None:
    options = ("-t", "tmpfs", "-o", "size=1m,nr_inodes=100,mode=2777", "tmpfs")
    with mounted(tmp_path / "memory", *options) as path:
        found = seen(path)
        assert "counts against the pod's memory limits" in " ".join(e.sentence for e in found)
        warning = only(found, "warning")
        assert "inodes are free" in warning.sentence
        trainer = Trainer(path)
        trainer.save("step1", {STATES: 600 << 10})
        share(trainer)
        os.chmod(trainer.volume.path, 0o2777)
        told = [each.sentence for each in seen(path, uid=0) if each.severity == "warning"]
        assert any("the next one does not fit" in each for each in told)
        (path / "rest").write_bytes(bytes(os.statvfs(path).f_bavail * 4096))
        error = only(seen(path, uid=0), "error")
        assert "No space left" in error.sentence
        assert "emptyDir.sizeLimit" in error.remedy


def test_a_volume_that_is_mounted_read_only_is_told(volume: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "mnt", "--bind", "-o", "ro", str(volume)) as path:
        errors = [each for each in seen(path) if each.severity == "error"]
    assert {"readOnly" in each.remedy for each in errors} == {True}
    assert any("read-only" in each.sentence for each in errors)


@pytest.mark.parametrize("in_a_pod", [False, True])
def test_a_container_s_own_file_system_is_no_shared_volume(
    tmp_path: Path, in_a_pod: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that only looks like the mount: nothing was mounted at that path here."""
    if in_a_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    # Not every file system may lie below an overlay.
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "mode=755", "tmpfs") as disk:
        for name in ("lower", "upper", "work"):
            (disk / name).mkdir()
        layers = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
        with mounted(tmp_path / "root", "-t", "overlay", "-o", layers, "overlay") as root:
            path = root / "checkpoints"
            path.mkdir()
            path.chmod(0o2777)
            finding = only(seen(path), "error" if in_a_pod else "warning")
            assert "no other container sees" in finding.sentence
            assert f"mount one volume (an emptyDir or a claim) at {path}" in finding.remedy
            trainer = Trainer(path)
            trainer.say()
            assert matter(seen(path, uid=0)) == [], "it is shared: a trainer writes there"


INFO = r"""27 1 254:0 / / rw,relatime - overlay overlay rw,lowerdir=/a
40 27 0:9 / /check\040points rw - ext4 /dev/sda rw
41 27 0:10 / /data rw shared:1 - nfs4 server:/x rw,vers=4.2,local_lock=none
42 41 0:11 / /data/deep ro - tmpfs tmpfs rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [
        ("/checkpoints", "/", "overlay"),
        ("/check points/run", "/check points", "ext4"),
        ("/data", "/data", "nfs4"),
        ("/database", "/", "overlay"),
        ("/data/deep/x", "/data/deep", "tmpfs"),
    ],
)
def test_a_path_lies_on_the_deepest_mount_above_it(path: str, point: str, kind: str) -> None:
    found = mount.mount_of(path, INFO)
    assert found is not None
    assert (found.point, found.kind) == (point, kind)
    assert ("ro" in found.options) == (kind == "tmpfs")


def test_nfs_is_told_with_what_to_mind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mountinfo").write_text(f"1 0 0:1 / {tmp_path} rw - nfs4 s:/ rw\n")
    monkeypatch.setattr(mount, "MOUNTS", str(tmp_path / "mountinfo"))
    (finding,) = mount.look_at_mount(str(tmp_path), shared=False)
    assert finding.severity == "note"
    assert "one folder of its own for each node" in finding.sentence


def test_a_file_system_without_hard_links_is_a_warning(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None that has no links is at hand here."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    warning = only(seen(volume), "warning")
    assert "hard links" in warning.sentence
    assert "emptyDir" in warning.remedy


def test_what_nobody_expected_is_a_warning_and_no_exception(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: 1 / 0)
    found = seen(volume)
    assert "ZeroDivisionError" in only(found, "warning").sentence
    assert "ok" in {each.severity for each in found}


# ---- hook and sidecar


def test_a_manifest_of_a_newer_hook_is_an_error_that_names_the_upgrade(trainer: Trainer) -> None:
    with umask(0o002):
        manifest = trainer.save("step1", {"0.pt": 100})
    path = Path(trainer.volume.outbox) / manifest.file_name
    path.write_text(json.dumps({"schema": 99}))
    share(trainer)
    error = only(seen(trainer.volume.path), "error")
    assert error.what == str(path)
    assert "schema 99" in error.sentence
    assert "as new as the hook" in error.remedy


def test_a_file_in_the_outbox_that_is_no_manifest_is_an_error(trainer: Trainer) -> None:
    (Path(trainer.volume.outbox) / "x.json").write_text("{")
    share(trainer)
    assert "no manifest" in only(seen(trainer.volume.path), "error").sentence


@pytest.mark.parametrize("above", [False, True])
def test_a_trainer_that_hands_over_in_another_folder_is_told(volume: Path, above: bool) -> None:
    """save_dir lies below the mount, and one of the two was told the other folder."""
    run = volume / "run"
    run.mkdir()
    run.chmod(0o2777)
    other = Trainer(volume if above else run)
    with umask(0o002):
        other.save("step1", {STATES: 10})
    share(other)
    errors = [each for each in seen(run if above else volume) if each.severity == "error"]
    assert any(other.volume.own in each.sentence for each in errors)
    assert any(f"DS_CKPT_VOLUME={other.volume.path}" in each.remedy for each in errors)


def test_a_folder_that_was_only_restored_into_is_no_other_volume(volume: Path) -> None:
    (volume / "run" / ".ds_ckpt").mkdir(parents=True)
    (volume / "run" / ".ds_ckpt" / "restored.json").write_text("{}")
    assert "error" not in {each.severity for each in seen(volume, uid=0)}


def test_a_checkpoint_without_the_hook_is_a_warning(volume: Path) -> None:
    folder = volume / "step1"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / STATES).write_bytes(b"x")
    warning = only(seen(volume), "warning")
    assert warning.what == str(folder)
    assert "after_save" in warning.remedy


def test_a_large_volume_is_looked_at_in_part_and_says_so(trainer: Trainer) -> None:
    with umask(0o002):
        trainer.save("step1", {f"{n}.pt": 1 for n in range(300)})
    share(trainer)
    before = time.monotonic()
    found = seen(trainer.volume.path, most=100)
    assert time.monotonic() - before < 5
    assert "the first 100 files" in " ".join(each.sentence for each in found)
    assert matter(found) == []
