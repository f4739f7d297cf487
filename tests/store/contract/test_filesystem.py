"""What another container wrote is opened without following it anywhere; what we write is whole."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.errors import ManifestError


@pytest.fixture
def fs() -> Filesystem:
    return Filesystem()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/file").write_bytes(b"secret")
    (tmp_path / "root/a/b").mkdir(parents=True)
    (tmp_path / "root/a/b/file").write_bytes(b"mine")
    return tmp_path / "root"


def test_a_plain_file_is_opened(fs: Filesystem, root: Path) -> None:
    fd = fs.open_beneath(str(root), "a/b/file")
    assert os.read(fd, 10) == b"mine"
    os.close(fd)


def test_a_link_as_the_last_component_is_refused(fs: Filesystem, root: Path) -> None:
    (root / "a/b/link").symlink_to(root / "a/b/file")
    with pytest.raises(ManifestError, match="link"):
        fs.open_beneath(str(root), "a/b/link")


@pytest.mark.parametrize("path", ["out/file", "a/out/file", "a/out/deeper/file"])
def test_a_link_as_any_folder_on_the_way_is_refused(fs: Filesystem, root: Path, path: str) -> None:
    (root / "out").symlink_to(root.parent / "secret")
    (root / "a/out").symlink_to(root.parent / "secret", target_is_directory=True)
    for act in (
        lambda: fs.open_beneath(str(root), path),
        lambda: fs.stat_beneath(str(root), path),
        lambda: fs.take_beneath(str(root), path, str(root / "taken")),
    ):
        with pytest.raises(ManifestError, match="link"):
            act()
    assert (root.parent / "secret/file").exists()


def test_a_dangling_link_is_refused_and_not_taken_for_nothing(fs: Filesystem, root: Path) -> None:
    (root / "gone").symlink_to("nowhere")
    with pytest.raises(ManifestError):
        fs.open_beneath(str(root), "gone")
    state = fs.stat_beneath(str(root), "gone")
    assert state is not None
    assert not state.is_regular


def test_a_fifo_is_refused_at_once_and_not_waited_for(fs: Filesystem, root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(ManifestError, match="regular"):
        fs.open_beneath(str(root), "pipe")


def test_a_socket_is_refused(fs: Filesystem, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)  # the name of a socket may have only 107 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(ManifestError):
            fs.open_beneath(str(root), "socket")


def test_a_device_is_refused(fs: Filesystem) -> None:
    with pytest.raises(ManifestError, match="regular"):
        fs.open_beneath("/dev", "null")


def test_a_folder_is_refused(fs: Filesystem, root: Path) -> None:
    with pytest.raises(ManifestError, match="regular"):
        fs.open_beneath(str(root), "a/b")


@pytest.mark.parametrize("path", ["../secret/file", "a/../../secret/file", "/etc/passwd", "", "."])
def test_a_path_that_leaves_the_root_is_refused(fs: Filesystem, root: Path, path: str) -> None:
    with pytest.raises(ManifestError):
        fs.open_beneath(str(root), path)


def test_what_is_not_there_is_told_apart(fs: Filesystem, root: Path) -> None:
    assert fs.stat_beneath(str(root), "a/none") is None
    assert fs.stat_beneath(str(root), "none/none") is None
    assert fs.stat_beneath(str(root), "a/b/file/none") is None
    with pytest.raises(FileNotFoundError):
        fs.open_beneath(str(root), "a/none")


def test_an_emptied_folder_is_removed_beneath_the_root_only(fs: Filesystem, root: Path) -> None:
    (root.parent / "secret/empty").mkdir()
    (root / "out").symlink_to(root.parent / "secret")
    (root / "a/empty").mkdir()
    assert fs.remove_folder_beneath(str(root), "a/empty")
    assert not fs.remove_folder_beneath(str(root), "a/empty")
    assert not fs.remove_folder_beneath(str(root), "a/b")
    assert not fs.remove_folder_beneath(str(root), "out/empty")
    assert (root.parent / "secret/empty").is_dir()
    assert not (root / "a/empty").exists()


def test_no_descriptor_is_left_open_by_refusals(fs: Filesystem, root: Path) -> None:
    (root / "out").symlink_to(root.parent / "secret")
    os.mkfifo(root / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for path in ("out/file", "pipe", "a", "a/none", "../x"):
        with pytest.raises((ManifestError, OSError)):
            fs.open_beneath(str(root), path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_read_has_a_bound(fs: Filesystem, root: Path) -> None:
    assert fs.read(str(root / "a/b/file"), 4) == b"mine"
    with pytest.raises(ManifestError, match="most"):
        fs.read(str(root / "a/b/file"), 3)


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(fs: Filesystem, root: Path) -> None:
    path = root / "document"
    fs.write_atomic(str(path), b"one")
    reader = path.open("rb")
    fs.write_atomic(str(path), b"two")
    with reader:
        assert reader.read() == b"one"
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o664
    assert sorted(os.listdir(root)) == ["a", "document"]


def test_a_write_that_fails_leaves_the_former_file(
    fs: Filesystem, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "document"
    fs.write_atomic(str(path), b"one")

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        fs.write_atomic(str(path), b"two")
    assert path.read_bytes() == b"one"
    assert sorted(os.listdir(root)) == ["a", "document"]


def test_the_first_creator_wins(fs: Filesystem, root: Path) -> None:
    path = str(root / "node.json")
    assert fs.create_exclusive(path, b"first")
    assert not fs.create_exclusive(path, b"second")
    assert Path(path).read_bytes() == b"first"
    assert sorted(os.listdir(root)) == ["a", "node.json"]


def test_a_lock_is_held_by_one_and_goes_with_its_descriptor(fs: Filesystem, root: Path) -> None:
    path = str(root / "lock")
    first = fs.try_lock(path)
    assert first is not None
    assert fs.try_lock(path) is None
    os.close(first)
    second = fs.try_lock(path)
    assert second is not None
    os.close(second)


def test_a_lock_is_not_taken_through_a_link(fs: Filesystem, root: Path) -> None:
    (root / "lock").symlink_to(root.parent / "secret/file")
    with pytest.raises(OSError, match="symbolic"):
        fs.try_lock(str(root / "lock"))


def test_folders_are_shared_with_the_group(fs: Filesystem, root: Path) -> None:
    before = os.umask(0o077)
    try:
        fs.make_folder(str(root / "x/y"))
    finally:
        os.umask(before)
    for path in ("x", "x/y"):
        assert stat.S_IMODE((root / path).stat().st_mode) == 0o2775


def test_a_tree_is_removed_without_following_links(fs: Filesystem, root: Path) -> None:
    (root / "a/out").symlink_to(root.parent / "secret")
    fs.remove_tree(str(root / "a"))
    assert not (root / "a").exists()
    assert (root.parent / "secret/file").read_bytes() == b"secret"


def test_a_link_that_takes_the_place_of_a_folder_under_removal_is_not_followed(
    fs: Filesystem, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names_of, looked = os.listdir, 0

    def swap(path: str | int) -> list[str]:
        nonlocal looked
        looked += 1
        if looked == 2:  # a/b is known for a folder, and is about to be listed
            (root / "a/b").rename(root / "moved")
            (root / "a/b").symlink_to(root.parent / "secret")
        return names_of(path)

    monkeypatch.setattr(os, "listdir", swap)
    fs.remove_tree(str(root / "a"))
    assert looked == 2
    assert (root.parent / "secret/file").read_bytes() == b"secret"


def test_a_walk_sees_regular_files_only(fs: Filesystem, root: Path) -> None:
    (root / "a/out").symlink_to(root.parent / "secret")
    (root / "a/link").symlink_to("b/file")
    os.mkfifo(root / "a/pipe")
    assert [path for path, _ in fs.walk(str(root))] == ["a/b/file"]
