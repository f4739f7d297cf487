"""The folder store where folders differ from buckets: full, missing, forbidden, hostile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_store.errors import (
    CorruptionError,
    NotFoundError,
    RefusedError,
    SettingsError,
    TransientError,
)
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.file import TEMPORARY, FileStore
from ds_ckpt_store.stores.port import BytesSource, IfAbsent


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def store(root: Path) -> FileStore:
    return FileStore(str(root))


# ---- where


@pytest.mark.parametrize(
    "url",
    ["file://folder", "file://host/folder", "file:folder", "file:///", "file:///a/../b", "file:"],
)
def test_a_url_that_names_no_absolute_folder_is_refused(url: str) -> None:
    with pytest.raises(SettingsError):
        open_store(url)


def test_a_url_may_escape_characters(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    open_store(f"file://{tmp_path}/a%20b").put("k", BytesSource(b"x"))
    assert (tmp_path / "a b" / "k").read_bytes() == b"x"


def test_the_folder_is_made_by_the_first_write(store: FileStore, root: Path) -> None:
    assert list(store.list("")) == []
    with pytest.raises(NotFoundError):
        store.get("k")
    assert not root.exists()
    store.put("k", BytesSource(b"x"))
    assert (root / "k").read_bytes() == b"x"


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.put("k", BytesSource(b"x")),
        lambda store: store.get("k"),
        lambda store: list(store.list("")),
        lambda store: store.begin("k", 1, {}),
    ],
)
def test_a_destination_that_is_not_mounted_is_named(tmp_path: Path, call) -> None:
    store = FileStore(str(tmp_path / "not-mounted" / "run"))
    with pytest.raises(RefusedError, match=r"no folder .*/not-mounted; mount it"):
        call(store)
    assert not (tmp_path / "not-mounted").exists()


@pytest.mark.parametrize(
    "key", ["../x", "a/../../x", "/etc/x", "", "a//b", "a/", "./a", "a\0b", f"{TEMPORARY}/lock"]
)
def test_a_key_never_leaves_the_folder(store: FileStore, tmp_path: Path, key: str) -> None:
    for call in (
        lambda: store.put(key, BytesSource(b"x")),
        lambda: store.get(key),
        lambda: store.delete(key),
        lambda: store.begin(key, 1, {}),
    ):
        with pytest.raises(RefusedError):
            call()
    assert not (tmp_path / "x").exists()


def test_a_link_is_no_object(store: FileStore, root: Path, tmp_path: Path) -> None:
    store.put("k", BytesSource(b"x"))
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    assert [info.key for info in store.list("")] == ["k"]
    with pytest.raises((NotFoundError, RefusedError)):
        store.get("link")


def test_no_key_leads_through_a_link(store: FileStore, root: Path, tmp_path: Path) -> None:
    store.put("k", BytesSource(b"x"))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/x").write_bytes(b"precious")
    (root / "out").symlink_to(tmp_path / "outside")
    for call in (
        lambda: store.put("out/x", BytesSource(b"evil")),
        lambda: store.put("out/new", BytesSource(b"evil"), condition=IfAbsent()),
        lambda: store.get("out/x"),
        lambda: store.head("out/x"),
        lambda: store.read("out/x", 0, 1, lambda view: None),
        lambda: store.delete("out/x"),
        lambda: store.begin("out/x", 1, {}),
    ):
        with pytest.raises(RefusedError, match="link"):
            call()
    assert (tmp_path / "outside/x").read_bytes() == b"precious"
    assert os.listdir(tmp_path / "outside") == ["x"]


# ---- full, forbidden


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_says_how_full_and_heals_when_there_is_room(small_disk: Path) -> None:
    store = FileStore(str(small_disk / "run"))
    store.put("k", BytesSource(bytes(600 << 10)))
    with pytest.raises(TransientError, match=r"No space left.*/disk/run has \d+ of 1048576 bytes"):
        store.put("big", BytesSource(bytes(900 << 10)))
    assert [info.key for info in store.list("")] == ["k"]
    store.delete("k")
    store.put("big", BytesSource(bytes(900 << 10)))
    assert store.head("big").size == 900 << 10


def test_a_part_that_found_the_disk_full_is_not_held(small_disk: Path) -> None:
    store = FileStore(str(small_disk / "run"))
    upload = store.begin("k", 1800 << 10, {"part_size": str(900 << 10)})
    store.put_part(upload, 1, BytesSource(bytes(900 << 10)))
    with pytest.raises(TransientError):
        store.put_part(upload, 2, BytesSource(bytes(900 << 10)))
    assert store.parts(upload).keys() == {1}
    store.close()


AS_NOBODY = """
import os, sys
from ds_ckpt_store.stores.file import FileStore
from ds_ckpt_store.stores.port import BytesSource
from ds_ckpt_store.errors import CkptError
store = FileStore(sys.argv[1])
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for call in (lambda: store.put("new", BytesSource(b"x")), lambda: store.get("k")):
    try:
        call()
    except CkptError as error:
        print(type(error).__name__, error)
"""


def test_another_user_is_told_path_and_uid(store: FileStore, root: Path) -> None:
    store.put("k", BytesSource(b"x"))
    for path in (root, root / TEMPORARY):
        path.chmod(0o555)
    (root / "k").chmod(0o000)
    for parent in root.parents:
        if parent.owner() == root.owner() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(root)], capture_output=True, text=True, check=True
    )
    uid = 65534 if os.geteuid() == 0 else os.geteuid()
    assert done.stdout.count("AccessError") == 2, done.stdout
    assert done.stdout.count(f"as uid {uid}; let this user") == 2


# ---- crashes


def test_what_a_killed_writer_left_is_swept_and_was_never_visible(root: Path) -> None:
    script = """
import os, signal, sys
from ds_ckpt_store.stores.file import FileStore
from ds_ckpt_store.stores.port import BytesSource
class Source(BytesSource):
    def open(self):
        os.kill(os.getpid(), signal.SIGKILL)
FileStore(sys.argv[1]).put("k", Source(b"x"))
"""
    subprocess.run([sys.executable, "-c", script, str(root)], check=False)
    assert [path.suffix for path in (root / TEMPORARY).iterdir()] == [".put"]
    store = FileStore(str(root))
    assert list(store.list("")) == []
    store.put("other", BytesSource(b"x"))
    assert not list((root / TEMPORARY).glob("*.put"))


def test_a_file_that_is_being_written_is_not_swept(root: Path) -> None:
    class Source(BytesSource):
        def open(self):
            FileStore(str(root)).put("other", BytesSource(b"x"))
            return super().open()

    FileStore(str(root)).put("k", Source(b"slow"))
    assert (root / "k").read_bytes() == b"slow"


def test_a_parts_list_torn_by_a_crash_costs_that_part_only(store: FileStore, root: Path) -> None:
    upload = store.begin("k", 30, {"part_size": "10"})
    store.put_part(upload, 1, BytesSource(b"1" * 10))
    store.put_part(upload, 2, BytesSource(b"2" * 10))
    (parts,) = (root / TEMPORARY).glob("*.parts")
    parts.write_bytes(parts.read_bytes()[:-5])
    assert store.parts(upload).keys() == {1}


# ---- several processes

COUNT = """
import sys
from ds_ckpt_store.errors import PreconditionError
from ds_ckpt_store.stores.file import FileStore
from ds_ckpt_store.stores.port import BytesSource, IfVersion
store, done = FileStore(sys.argv[1]), 0
while done < 200:
    data, info = store.get("count")
    try:
        number = str(int(data) + 1).encode()
        store.put("count", BytesSource(number), condition=IfVersion(info.version))
    except PreconditionError:
        continue
    done += 1
"""


def test_processes_that_swap_one_object_lose_no_update(store: FileStore, root: Path) -> None:
    store.put("count", BytesSource(b"1000"))
    command = [sys.executable, "-c", COUNT, str(root)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert store.get("count")[0] == b"1400"


# ---- multipart sizes


def test_a_part_of_another_size_is_refused(store: FileStore) -> None:
    upload = store.begin("k", 25, {"part_size": "10"})
    for number, size in ((0, 10), (1, 9), (3, 10), (4, 1)):
        with pytest.raises(RefusedError):
            store.put_part(upload, number, BytesSource(bytes(size)))


def test_a_source_that_ends_early_is_not_stored(store: FileStore) -> None:
    source = BytesSource(b"12345")
    source.size = 6
    with pytest.raises(CorruptionError, match="5 of its 6"):
        store.put("k", source)
    assert list(store.list("")) == []


# ---- what else is in the folder


def test_any_tool_can_read_and_nothing_else_is_left(store: FileStore, root: Path) -> None:
    store.put("a/b/c", BytesSource(b"x"), condition=IfAbsent())
    upload = store.begin("a/d", 3, {})
    store.complete(upload, [store.put_part(upload, 1, BytesSource(b"abc"))])
    assert (root / "a/b/c").read_bytes() == b"x"
    assert (root / "a/d").read_bytes() == b"abc"
    assert [path.name for path in (root / TEMPORARY).iterdir()] == ["lock"]
    store.delete("a/b/c")
    assert not (root / "a/b").exists()
    store.delete("a/d")
    assert [path.name for path in root.iterdir()] == [TEMPORARY]


def test_a_rewrite_in_the_same_instant_has_another_version(store: FileStore, root: Path) -> None:
    """Inodes are used again at once and the kernel's clock stands still for milliseconds."""
    versions = {store.put("k", BytesSource(b"same size %02d" % n)).version for n in range(50)}
    assert len(versions) == 50
    mtimes = os.stat(root / "k").st_mtime_ns
    assert str(mtimes) in store.head("k").version


def test_a_version_does_not_come_back_when_the_clock_goes_back(
    store: FileStore, root: Path
) -> None:
    store.put("k", BytesSource(b"1"))
    ahead = os.stat(root / "k").st_mtime_ns + 3600 * 10**9
    os.utime(root / "k", ns=(ahead, ahead))
    info = store.put("k", BytesSource(b"2"))
    assert os.stat(root / "k").st_mtime_ns == ahead + 1
    assert info.version == store.head("k").version
