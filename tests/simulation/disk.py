"""A volume: names in memory, bytes in memory files, so that descriptors are real ones.

What the real code does with a descriptor (read and write ranges, truncate, sync, give pages back)
it does on the kernel's own memory files. Everything that has a name goes through here, is a call at
which a process may die, and is whole or not done, as on a POSIX filesystem.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import sqlite3
import stat
from collections.abc import Callable
from typing import Any

from ds_ckpt_store.contract.filesystem import FILE_MODE, FileStat, Filesystem, Space
from ds_ckpt_store.errors import ManifestError
from tests.simulation import seams
from tests.simulation.kernel import EPOCH, Process

TICK_NS = 4_000_000  # what a filesystem's times are rounded to


class File:
    """An inode with bytes."""

    __slots__ = ("_data", "_fd", "inode", "links", "mode", "mtime_ns", "owner")

    def __init__(self, inode: int, data: bytes, mtime_ns: int, owner: str) -> None:
        self.inode = inode
        self._data: bytes = data
        self._fd = -1
        self.mtime_ns = mtime_ns
        self.mode = stat.S_IFREG | FILE_MODE
        self.links = 0
        self.owner = owner

    @property
    def size(self) -> int:
        return len(self._data) if self._fd < 0 else os.fstat(self._fd).st_size

    @property
    def data(self) -> bytes:
        if self._fd < 0:
            return self._data
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0)

    def descriptor(self) -> int:
        """The memory file behind it; stays open as long as the volume."""
        if self._fd < 0:
            self._fd = os.memfd_create("shard", os.MFD_CLOEXEC)
            os.pwrite(self._fd, self._data, 0)
            self._data = b""
        return self._fd

    def replace(self, data: bytes) -> None:
        """Truncate and write, in place."""
        if self._fd < 0:
            self._data = data
        else:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, data, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Folder:
    """An inode with names."""

    __slots__ = ("inode", "links", "mode", "names")

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self.mode = stat.S_IFDIR | 0o2775
        self.names: dict[str, File | Folder] = {}
        self.links = 2


class Disk:
    """One volume, as long as its pod lives.

    Args:
        path: where it is mounted.
        number: that no other volume of this run has.
        capacity: bytes.
    """

    def __init__(self, path: str, number: int, *, capacity: int = 1 << 40) -> None:
        self.path = path
        self.capacity = capacity
        self.full = False
        self.number = number
        self.root = Folder(1)
        self._inodes = itertools.count(2)
        self.files: list[File] = []
        self.open: dict[int, File] = {}
        self.locks: dict[str, tuple[int, int, Process]] = {}
        self.database = f"journal{self.number}"
        self._kept: sqlite3.Connection | None = seams.keep_database(self.database)
        self.known_folders: dict[str, Folder] = {}
        self.on_new_name: dict[str, list[Callable[[], None]]] = {}
        self.on_removed: Callable[[Process, Disk, str, File], None] = lambda *_: None
        for name in path.strip("/").split("/"):
            folder = self.folder_at(path.split(f"/{name}")[0]) or self.root
            folder.names[name] = Folder(next(self._inodes))

    def lose_journal(self) -> None:
        """The database is gone, and a new one is begun."""
        self.close_database()
        self._kept = seams.keep_database(self.database)

    def close_database(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def close(self) -> None:
        """The volume is gone."""
        self.close_database()
        for file in self.files:
            file.close()
        for fd, inode, _ in self.locks.values():
            if _is_open(fd, inode):
                os.close(fd)
        self.locks.clear()

    def new_file(self, data: bytes, now: float, owner: str) -> File:
        ns = int((EPOCH + now) * 1e9) // TICK_NS * TICK_NS
        file = File(next(self._inodes), data, ns, owner)
        self.files.append(file)
        return file

    def new_folder(self) -> Folder:
        return Folder(next(self._inodes))

    def at(self, path: str) -> File | Folder | None:
        """What has a name."""
        parent, _, leaf = path.rpartition("/")
        folder = self.known_folders.get(parent)
        if folder is not None and leaf:
            return folder.names.get(leaf)
        node: File | Folder = self.root
        for name in _components(path):
            if node.__class__ is not Folder:
                return None
            found = node.names.get(name)
            if found is None:
                return None
            node = found
        if node.__class__ is Folder:
            self.known_folders[path] = node
        return node

    def folders_changed(self) -> None:
        """A folder has gone, or has another name."""
        self.known_folders.clear()

    def folder_at(self, path: str) -> Folder | None:
        found = self.known_folders.get(path) or self.at(path)
        return found if isinstance(found, Folder) else None


@functools.lru_cache(maxsize=1 << 14)
def _components(path: str) -> tuple[str, ...]:
    return tuple(name for name in path.split("/") if name)


def _is_open(fd: int, inode: int) -> bool:
    """Whether a descriptor is still the one that was given out."""
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


class SimFilesystem(Filesystem):
    """The volume as one process sees it."""

    def __init__(self, disk: Disk, process: Process) -> None:
        self.disk = disk
        self._process = process

    def _step(self, what: str, path: str) -> None:
        process = self._process
        process.step(what)
        # One call in a dozen takes long enough for others to do something.
        if process.stream.strikes("disk waits"):
            process.wait(process.stream.rng.random() * 0.2)

    def _change(self, what: str, path: str, *, needs_room: bool = False) -> None:
        self._step(what, path)
        if self._process.kernel.trace is not None:
            self._process.kernel.say(f"{what} {path}")
        if needs_room and self.disk.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def _done(self, what: str) -> None:
        self._process.step(what)

    def _parent(self, path: str) -> tuple[Folder, str]:
        parent, _, leaf = path.rpartition("/")
        known = self.disk.known_folders.get(parent)
        if known is not None:
            return known, leaf
        folder = self.disk.at(parent)
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not isinstance(folder, Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return folder, leaf

    def _state(self, node: File | Folder) -> FileStat:
        if isinstance(node, Folder):
            return FileStat(0, self.disk.number, node.inode, 0, node.mode, 0, node.links)
        size = node.size
        return FileStat(
            size, self.disk.number, node.inode, node.mtime_ns, node.mode, 0, node.links, size
        )

    def _set(self, path: str, node: File | Folder) -> None:
        folder, leaf = self._parent(path)
        before = folder.names.get(leaf)
        folder.names[leaf] = node
        if isinstance(node, File):
            node.links += 1
        if isinstance(before, File):
            self._unlinked(path, before)
        for callback in self.disk.on_new_name.get(path.rpartition("/")[0], ()):
            callback()

    def _unlinked(self, path: str, file: File) -> None:
        file.links -= 1
        if file.links == 0:
            self.disk.on_removed(self._process, self.disk, path, file)

    # ---- reading

    def open_beneath(self, root: str, relative: str) -> int:
        if any(component in ("", ".", "..") for component in relative.split("/")):
            raise ManifestError(f"path {relative!r} is not normalized")
        self._step("open", relative)
        folder, leaf = self._parent(f"{root}/{relative}")
        node = folder.names.get(leaf)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), relative)
        if not isinstance(node, File):
            raise ManifestError(f"{relative!r} under {root} is not a regular file")
        fd = os.dup(node.descriptor())
        self.disk.open[fd] = node
        return fd

    def stat_beneath(self, root: str, relative: str) -> FileStat | None:
        return self.stat(f"{root}/{relative}")

    def take_beneath(self, root: str, relative: str, target: str) -> None:
        self.rename(f"{root}/{relative}", target)

    def remove_folder_beneath(self, root: str, relative: str) -> bool:
        return self.remove_folder(f"{root}/{relative}")

    def fstat(self, fd: int) -> FileStat:
        return self._state(self.disk.open[fd])

    def stat(self, path: str) -> FileStat | None:
        self._step("stat", path)
        node = self.disk.at(path)
        return self._state(node) if node is not None else None

    def is_folder(self, path: str) -> bool:
        return self.disk.folder_at(path) is not None

    def read(self, path: str, limit: int) -> bytes:
        self._step("read", path)
        folder, leaf = self._parent(path)
        node = folder.names.get(leaf)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not isinstance(node, File):
            raise ManifestError(f"{path} is not a regular file")
        data = node.data
        if len(data) > limit:
            raise ManifestError(f"{path} has {len(data)} bytes: {limit} is the most")
        return data

    def names(self, path: str) -> list[str]:
        self._step("list", path)
        folder = self.disk.folder_at(path)
        return sorted(folder.names) if folder is not None else []

    def space(self, path: str) -> Space:
        return Space(self.disk.capacity, 0 if self.disk.full else self.disk.capacity // 2)

    # ---- writing

    def make_folder(self, path: str) -> None:
        if self.disk.folder_at(path) is not None:
            self._step("look for folder", path)
            return
        self.make_folder(path.rpartition("/")[0])
        self._change("make folder", path, needs_room=True)
        folder, leaf = self._parent(path)
        folder.names.setdefault(leaf, self.disk.new_folder())
        self._done("folder made")

    def write_atomic(self, path: str, data: bytes, *, durable: bool = True) -> None:
        temporary = self._temporary_file(path, data)
        self._change("write", path)
        node = self._remove_temporary(temporary)
        self._set(path, node)
        self._done("written")

    def create_exclusive(self, path: str, data: bytes, *, durable: bool = True) -> bool:
        temporary = self._temporary_file(path, data)
        self._change("create", path)
        folder, leaf = self._parent(path)
        created = leaf not in folder.names
        if created:
            node = self.disk.at(temporary)
            if node is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), temporary)
            self._set(path, node)
        self._change("remove temporary", temporary)
        self._remove_temporary(temporary)
        return created

    def _remove_temporary(self, path: str) -> File | Folder:
        """Take a temporary file's name; the agent that took over may have cleared it up."""
        folder, name = self._parent(path)
        node = folder.names.pop(name, None)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if isinstance(node, File):
            node.links -= 1
        return node

    def _temporary_file(self, path: str, data: bytes) -> str:
        self._change("write temporary", path, needs_room=True)
        parent, _, leaf = path.rpartition("/")
        folder, _ = self._parent(path)
        token = self._process.stream.rng.getrandbits(32)
        name = f".{leaf[:200]}.1.{token:08x}.tmp"
        file = self.disk.new_file(data, self._process.kernel.now, self._process.name)
        file.links = 1
        folder.names[name] = file
        return f"{parent}/{name}"

    def open_write(self, path: str) -> int:
        self._change("open to write", path)
        folder, leaf = self._parent(path)
        node = folder.names.get(leaf)
        if node is None:
            if self.disk.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            node = self.disk.new_file(b"", self._process.kernel.now, self._process.name)
            self._set(path, node)
        if not isinstance(node, File):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        fd = os.open(f"/proc/self/fd/{node.descriptor()}", os.O_RDWR | os.O_CLOEXEC)
        self.disk.open[fd] = node
        return fd

    def write_in_place(self, path: str, data: bytes) -> None:
        """As a trainer writes: truncate, then piece by piece; a death leaves what was written."""
        self._change("overwrite", path, needs_room=True)
        folder, leaf = self._parent(path)
        node = folder.names.get(leaf)
        if node is None:
            node = self.disk.new_file(b"", self._process.kernel.now, self._process.name)
            self._set(path, node)
        if not isinstance(node, File):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        node.replace(data[: len(data) // 2])
        node.mtime_ns = self._now_ns()
        self._step("overwrite", path)
        node.replace(data)
        node.mtime_ns = self._now_ns()
        self._done("overwritten")

    def _now_ns(self) -> int:
        return int((EPOCH + self._process.kernel.now) * 1e9) // TICK_NS * TICK_NS

    def try_lock(self, path: str) -> int | None:
        self._change("lock", path)
        held = self.disk.locks.get(path)
        if held is not None and _is_open(held[0], held[1]) and not held[2].dead:
            # The other lock keeps cleaning from a resume: without it there is no promise (A7).
            is_agents = path.endswith("/agent.lock")
            if not is_agents or not self._process.stream.strikes("lock does not hold"):
                return None
        elif held is not None and _is_open(held[0], held[1]):
            os.close(held[0])
        fd = os.memfd_create("lock", os.MFD_CLOEXEC)
        self.disk.locks[path] = (fd, os.fstat(fd).st_ino, self._process)
        return fd

    def link(self, source: str, target: str) -> None:
        self._change("link", target, needs_room=True)
        folder, leaf = self._parent(source)
        node = folder.names.get(leaf)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        parent, name = self._parent(target)
        if name in parent.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        self._set(target, node)
        self._done("linked")

    def rename(self, source: str, target: str) -> None:
        self._change("rename", f"{source} to {target}")
        folder, leaf = self._parent(source)
        node = folder.names.get(leaf)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        parent, name = self._parent(target)
        there = parent.names.get(name)
        if there is node:
            return
        if isinstance(there, Folder) and (there.names or not isinstance(node, Folder)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
        del folder.names[leaf]
        if isinstance(node, File):
            node.links -= 1
        else:
            self.disk.folders_changed()
        self._set(target, node)
        self._done("renamed")

    def unlink(self, path: str) -> None:
        self._change("unlink", path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder, leaf = self._parent(path)
            node = folder.names.get(leaf)
            if isinstance(node, Folder):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if node is not None:
                del folder.names[leaf]
                self._unlinked(path, node)
        self._done("unlinked")

    def remove_folder(self, path: str) -> bool:
        self._change("remove folder", path)
        try:
            parent, leaf = self._parent(path)
        except OSError:
            return False
        node = parent.names.get(leaf)
        if not isinstance(node, Folder) or node.names:
            return False
        del parent.names[leaf]
        self.disk.folders_changed()
        self._done("folder removed")
        return True

    def sync_file(self, path: str) -> None:
        self._step("sync", path)

    def sync_folder(self, path: str) -> None:
        self._step("sync folder", path)

    def let_group_in(self, path: str, gid: int = -1) -> None:
        """Every process of the world may do all."""

    # ---- for the checker and the trainer

    def remove_quickly(self, path: str) -> None:
        """A trainer's own rotation: a folder and all in it."""
        self._change("rotate", path)
        parent, leaf = self._parent(path)
        node = parent.names.pop(leaf, None)
        self.disk.folders_changed()
        if node is not None:
            self._forget(node, path)

    def _forget(self, node: File | Folder, path: str) -> None:
        if isinstance(node, File):
            self._unlinked(path, node)
            return
        for name, inner in node.names.items():
            self._forget(inner, f"{path}/{name}")


def tree(disk: Disk, path: str) -> dict[str, bytes]:
    """Every file below a folder: relative path to bytes."""
    found: dict[str, bytes] = {}

    def look(node: Any, prefix: str) -> None:
        for name, inner in sorted(node.names.items()):
            if isinstance(inner, File):
                found[prefix + name] = inner.data
            else:
                look(inner, f"{prefix}{name}/")

    folder = disk.folder_at(path)
    if folder is not None:
        look(folder, "")
    return found
