"""The shared volume's filesystem behind one seam, so that it can be simulated and made to fail.

What other containers wrote there is not trusted: files are opened beneath a root, component by
component, without following a link, and only regular files are opened. What is written appears
whole or not at all, and stays: temporary name, fsync, rename, fsync of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from ds_ckpt_store.errors import ManifestError

FILE_MODE = 0o664
FOLDER_MODE = 0o2775
_GROUPS_FILE = 0o060
_GROUPS_FOLDER = 0o2070
_RUNS_AS_OWNER = stat.S_ISUID | stat.S_ISGID
_TEMPORARY = re.compile(r"\.(.+)\.[0-9]+\.[0-9a-f]{8}\.tmp")
MAX_DEPTH = 512  # no deeper than a path that we hand over can be
_STAYS = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True)
class FileStat:
    """What identifies one state of one file; times in nanoseconds, sizes in bytes.

    ``allocated`` is what it takes on the disk: less than ``size`` where the file has holes.
    ``gid`` is -1 where a filesystem knows no groups.
    """

    size: int
    device: int
    inode: int
    mtime_ns: int
    mode: int
    uid: int
    links: int
    allocated: int = 0
    gid: int = -1

    @property
    def is_regular(self) -> bool:
        """Neither link, folder, device nor pipe."""
        return stat.S_ISREG(self.mode)

    @property
    def is_folder(self) -> bool:
        """A real folder, not a link to one."""
        return stat.S_ISDIR(self.mode)

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """(device, inode, size, mtime_ns): equal means, as far as can be told, unchanged."""
        return (self.device, self.inode, self.size, self.mtime_ns)


@dataclass(frozen=True)
class Space:
    """Bytes of a filesystem."""

    total: int
    free: int


def _to_stat(result: os.stat_result) -> FileStat:
    return FileStat(
        result.st_size,
        result.st_dev,
        result.st_ino,
        result.st_mtime_ns,
        result.st_mode,
        result.st_uid,
        result.st_nlink,
        result.st_blocks * 512,
        result.st_gid,
    )


class Filesystem:
    """The operating system's filesystem. Paths are absolute strings unless said otherwise.

    Every method raises ``OSError`` as the system gave it; a caller turns it into a sentence.
    """

    # ---- reading

    def open_beneath(self, root: str, relative: str) -> int:
        """A descriptor to read a regular file under ``root``, following no link on the way.

        Raises:
            ManifestError: the path leaves the root, or names a link, device, pipe or folder.
            OSError: as the system says (``ENOENT``, ``EACCES``, ...).
        """
        folder, leaf = self._open_parent(root, relative)
        try:
            fd = self._open_at(folder, leaf, os.O_RDONLY | os.O_NONBLOCK, root, relative)
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ManifestError(f"{relative!r} under {root} is not a regular file")
        return fd

    def stat_beneath(self, root: str, relative: str) -> FileStat | None:
        """State of a path under ``root``, following no link on the way; None if there is nothing.

        Raises:
            ManifestError: the path leaves the root, or a folder on the way is a link.
        """
        try:
            folder, leaf = self._open_parent(root, relative)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return _to_stat(os.stat(leaf, dir_fd=folder, follow_symlinks=False))
        except FileNotFoundError:
            return None
        finally:
            os.close(folder)

    def take_beneath(self, root: str, relative: str, target: str) -> None:
        """Rename a path under ``root`` to ``target``, following no link on the way.

        Raises:
            ManifestError: the path leaves the root, or a folder on the way is a link.
        """
        folder, leaf = self._open_parent(root, relative)
        try:
            os.rename(leaf, target, src_dir_fd=folder)
        finally:
            os.close(folder)

    def remove_folder_beneath(self, root: str, relative: str) -> bool:
        """Remove an empty folder under ``root``, following no link; False if it stays."""
        try:
            folder, leaf = self._open_parent(root, relative)
        except (ManifestError, FileNotFoundError, NotADirectoryError):
            return False
        try:
            os.rmdir(leaf, dir_fd=folder)
        except OSError as error:
            if error.errno in _STAYS:
                return False
            raise
        finally:
            os.close(folder)
        return True

    def _open_parent(self, root: str, relative: str) -> tuple[int, str]:
        *folders, leaf = relative.split("/")
        if any(component in ("", ".", "..") for component in (*folders, leaf)):
            raise ManifestError(f"path {relative!r} is not normalized")
        current = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for folder in folders:
                following = self._open_at(
                    current, folder, os.O_RDONLY | os.O_DIRECTORY, root, relative
                )
                os.close(current)
                current = following
        except BaseException:
            os.close(current)
            raise
        return current, leaf

    @staticmethod
    def _open_at(folder: int, name: str, flags: int, root: str, relative: str) -> int:
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO) or (
                error.errno == errno.ENOTDIR
                and stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
            ):
                raise ManifestError(
                    f"{relative!r} under {root}: {name!r} is a link or a device"
                ) from None
            raise

    def fstat(self, fd: int) -> FileStat:
        """State of an open file."""
        return _to_stat(os.fstat(fd))

    def removes_open_files(self, folder: str) -> bool:
        """Whether a file in a folder of our own loses its last name while it is open.

        On NFS, and on some filesystems in user space, it gets a hidden one until it is closed.
        """
        path = self._temporary(f"{folder}/open", b"", durable=False)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        finally:
            os.unlink(path)
        try:
            return os.fstat(fd).st_nlink == 0
        finally:
            os.close(fd)

    def is_kept(self, fd: int) -> bool:
        """Whether a file that we have open will stay when we close it, as far as can be told.

        It stays if it has a name, or if others have it open. The latter is known of files of our
        own user, where the filesystem has leases.
        """
        try:
            if os.fstat(fd).st_nlink:
                return True
            # It has no name, so nobody can open it now and break the lease (which is a signal).
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            return error.errno == errno.EAGAIN
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def stat(self, path: str) -> FileStat | None:
        """State of a path without following a link at its end; None if there is nothing."""
        try:
            return _to_stat(os.lstat(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_folder(self, path: str) -> bool:
        """Whether a path leads to a folder, through links if need be."""
        return os.path.isdir(path)

    def read(self, path: str, limit: int) -> bytes:
        """The whole of a small regular file.

        Raises:
            ManifestError: it is a link or no regular file, or larger than ``limit`` bytes.
        """
        root, _, leaf = path.rpartition("/")
        fd = self.open_beneath(root or "/", leaf)
        try:
            size = os.fstat(fd).st_size
            if size > limit:
                raise ManifestError(f"{path} has {size} bytes: {limit} is the most")
            chunks = bytearray()
            while chunk := os.read(fd, min(1 << 20, limit + 1 - len(chunks))):
                chunks += chunk
                if len(chunks) > limit:
                    raise ManifestError(f"{path} grew over {limit} bytes while it was read")
            return bytes(chunks)
        finally:
            os.close(fd)

    def names(self, path: str) -> list[str]:
        """Names in a folder, sorted; empty if there is no such folder."""
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def walk(self, root: str) -> Iterator[tuple[str, FileStat]]:
        """Every regular file below ``root``: (relative path, state), sorted; links are skipped."""
        for name in self.names(root):
            state = self.stat(f"{root}/{name}")
            if state is None:
                continue
            if state.is_folder:
                for path, inner in self.walk(f"{root}/{name}"):
                    yield f"{name}/{path}", inner
            elif state.is_regular:
                yield name, state

    def space(self, path: str) -> Space:
        """Total and free bytes of the filesystem that holds ``path``."""
        usage = shutil.disk_usage(path)
        return Space(usage.total, usage.free)

    # ---- writing

    def make_folder(self, path: str) -> None:
        """A folder and its parents, group-writable and set-gid, for both containers.

        It gets the group of the folder that it lies in, also where that one is not set-gid.
        """
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        self.make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            group = os.stat(parent).st_gid
            if os.lstat(path).st_gid != group:
                with contextlib.suppress(PermissionError):
                    os.chown(path, -1, group, follow_symlinks=False)
            with contextlib.suppress(PermissionError):
                os.chmod(path, FOLDER_MODE)

    def write_atomic(self, path: str, data: bytes, *, durable: bool = True) -> None:
        """Replace a file whole: temporary name, fsync, rename, fsync of the folder.

        Args:
            path: the file; its folder must exist.
            data: all of its bytes.
            durable: False leaves out both fsyncs (for heartbeats, which are written again soon).
        """
        temporary = self._temporary(path, data, durable=durable)
        os.replace(temporary, path)
        if durable:
            self.sync_folder(os.path.dirname(path))

    def create_exclusive(self, path: str, data: bytes, *, durable: bool = True) -> bool:
        """Create a file whole, unless there is one; False if there was."""
        temporary = self._temporary(path, data, durable=durable)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        if durable:
            self.sync_folder(os.path.dirname(path))
        return True

    @staticmethod
    def _temporary(path: str, data: bytes, *, durable: bool) -> str:
        folder, name = os.path.split(path)
        temporary = f"{folder}/.{name[:200]}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            try:
                os.fchmod(fd, FILE_MODE)
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            os.unlink(temporary)
            raise
        return temporary

    def temporaries(self, folder: str) -> list[tuple[str, str, float]]:
        """Files that a writer is at work on, or left when it was killed.

        Returns:
            For each the path, the name that it would have got (its first 200 characters), and when
            it was written, in seconds since the epoch.
        """
        found = []
        for name in self.names(folder):
            match = _TEMPORARY.fullmatch(name)
            state = self.stat(f"{folder}/{name}") if match else None
            if match and state is not None and state.is_regular:
                found.append((f"{folder}/{name}", match.group(1), state.mtime_ns / 1e9))
        return found

    def open_write(self, path: str) -> int:
        """A descriptor to write ranges of a file of our own, created if absent, links refused.

        The group may read and write it, whatever the umask says; others as the umask says.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, FILE_MODE)
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & _GROUPS_FILE != _GROUPS_FILE:
            with contextlib.suppress(OSError):
                os.fchmod(fd, mode | _GROUPS_FILE)
        return fd

    def try_lock(self, path: str) -> int | None:
        """Lock a file of our own for as long as the returned descriptor is open.

        None if another process, or another descriptor of this one, holds it. The lock goes with
        its process, however that ends.
        """
        try:
            fd = self.open_write(path)
        except PermissionError:
            # Of another user who does not let the group write. To lock it, reading is enough.
            if self.stat(path) is None:
                raise
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def let_group_in(self, path: str, gid: int = -1) -> None:
        """Let the group read and write a file, or change a folder, as far as it is ours to change.

        Kubernetes does the same to what it finds on a volume with an ``fsGroup``. A link is not
        followed, and a program that runs as its owner stays as it is.

        Args:
            path: a file or folder; it is no error if there is none.
            gid: the group that trainer and sidecar have in common. What has another one gets it,
                unless everybody may use it. -1 leaves the group as it is.
        """
        with contextlib.suppress(OSError):
            state = os.lstat(path)
            folder = stat.S_ISDIR(state.st_mode)
            if not folder and (not stat.S_ISREG(state.st_mode) or state.st_mode & _RUNS_AS_OWNER):
                return
            mode = stat.S_IMODE(state.st_mode) | (_GROUPS_FOLDER if folder else _GROUPS_FILE)
            everybodys = state.st_mode & (0o002 if folder else 0o004)
            regroup = gid not in (-1, state.st_gid) and not everybodys
            if mode == stat.S_IMODE(state.st_mode) and not regroup:
                return
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(path, flags)
            try:
                if regroup:
                    with contextlib.suppress(OSError):
                        os.fchown(fd, -1, gid)
                os.fchmod(fd, mode)
            finally:
                os.close(fd)

    def link(self, source: str, target: str) -> None:
        """A hard link, not following a link at the end of ``source``."""
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: str, target: str) -> None:
        """Rename within the filesystem, replacing a file at ``target``."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a name; it is no error if there is none."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def remove_folder(self, path: str) -> bool:
        """Remove an empty folder; False if it is not empty, or absent."""
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno in _STAYS:
                return False
            raise
        return True

    def remove_tree(self, path: str) -> None:
        """Remove a folder of our own with all that is in it; links are removed, not followed.

        Not even one that takes a folder's place while this is at work.
        """
        folder, name = os.path.split(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._remove_at(parent, name, MAX_DEPTH)
            finally:
                os.close(parent)

    def _remove_at(self, parent: int, name: str, depth: int) -> None:
        if not depth:
            raise OSError(errno.ELOOP, f"more than {MAX_DEPTH} folders within each other", name)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            folder = os.open(name, flags, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)
            return
        try:
            for inner in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    self._remove_at(folder, inner, depth - 1)
        finally:
            os.close(folder)
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError as error:
            if error.errno not in _STAYS:
                raise

    def sync_file(self, path: str) -> None:
        """fsync a file and the name that it has."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        self.sync_folder(os.path.dirname(path))

    def sync_folder(self, path: str) -> None:
        """fsync a folder, so that names in it survive a power loss."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
