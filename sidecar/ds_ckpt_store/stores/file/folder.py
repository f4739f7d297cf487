"""The folder itself: paths, temporary files, and how a file gets its name under a condition.

Every change of the visible tree is made under one exclusive lock (``flock``, which NFS carries to
its server), so conditions hold between processes and hosts that share the folder. What NFS does
otherwise than a disk is met here: a client remembers attributes for seconds, so a condition is
judged on a file that was opened for it, which asks the server; an answer may be lost and the
request be repeated, so a link that exists already, or a name that is gone, may be our own work;
and a removed file that is still open lives on under a name of the client's own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import re
import stat
import threading
from collections.abc import Iterator
from typing import BinaryIO

from ds_ckpt_store.contract.clock import fresh_token
from ds_ckpt_store.errors import NotFoundError, PreconditionError, RefusedError
from ds_ckpt_store.stores.file import answers
from ds_ckpt_store.stores.port import Condition, IfAbsent, IfVersion, ObjectInfo

TEMPORARY = ".ds_ckpt-tmp"

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_SILLY = re.compile(r"\.nfs[0-9a-fA-F]{16,}")

# Over NFS, flock is a lock of the whole process: threads are kept apart here.
_PUBLISHING = threading.Lock()


class Folder:
    """One folder and its ``.ds_ckpt-tmp``.

    Args:
        root: absolute path.
        rng: names temporary files.
    """

    def __init__(self, root: str, rng: random.Random) -> None:
        self.root = root
        self.temporary = os.path.join(root, TEMPORARY)
        self._rng = rng
        self._ready = False

    def errors(self, operation: str, key: str) -> contextlib.AbstractContextManager[None]:
        """Turn the system's errors into the port's."""
        return answers.errors(self.root, operation, key)

    def fresh(self) -> str:
        """A token that nobody has."""
        return fresh_token(self._rng)

    # ---- paths

    def path(self, operation: str, key: str) -> str:
        """The file of a key.

        Raises:
            RefusedError: the key is no path below the folder, leads through a link, or names what
                is not the user's.
        """
        components = key.split("/")
        if any(part in ("", ".", "..") for part in components) or "\0" in key:
            raise RefusedError(operation, key, "is no path below a folder")
        if components[0] == TEMPORARY:
            raise RefusedError(operation, key, f"{TEMPORARY} is the store's own")
        if any(_SILLY.fullmatch(part) for part in components):
            raise RefusedError(operation, key, "is a name that NFS gives to removed files")
        folder = self.root
        for component in components[:-1]:
            folder = os.path.join(folder, component)
            if os.path.islink(folder):
                raise RefusedError(operation, key, f"leads through a link, {folder}")
        return os.path.join(self.root, *components)

    @contextlib.contextmanager
    def opened(self, operation: str, key: str) -> Iterator[BinaryIO]:
        """A regular file, open for reading.

        Raises:
            NotFoundError: there is none.
        """
        try:
            fd = _open_for_reading(self.path(operation, key))
        except (FileNotFoundError, NotADirectoryError):
            self.require(operation, key)
            raise NotFoundError(operation, key, f"no such file under {self.root}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotFoundError(operation, key, f"no regular file under {self.root}")
        with os.fdopen(fd, "rb", buffering=0) as file:
            yield file

    def require(self, operation: str, key: str) -> bool:
        """Whether the folder is there.

        Raises:
            RefusedError: its parent is not either: nothing is mounted.
        """
        parent = os.path.dirname(self.root)
        if os.path.isdir(self.root):
            return True
        if not os.path.isdir(parent):
            raise RefusedError(
                operation,
                key,
                f"the destination does not exist: there is no folder {parent}; "
                f"mount it, make it, or correct file://{self.root}",
            )
        return False

    def prepare(self, operation: str, key: str) -> None:
        """Make root and temporary folder, and remove what a killed process left."""
        if self._ready and os.path.isdir(self.temporary):
            return
        self.require(operation, key)
        for folder in (self.root, self.temporary):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
                sync_folder(os.path.dirname(folder))
        for name in os.listdir(self.temporary):
            if name.endswith(".put"):
                with contextlib.suppress(FileNotFoundError, BlockingIOError, PermissionError):
                    _unlink_unlocked(os.path.join(self.temporary, name))
        self._ready = True

    # ---- names

    def walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        """Files below a folder, in order of key; those that vanish meanwhile are left out.

        Args:
            folder: relative to the root; empty or with a slash at its end.
            prefix: of the keys that are wanted.
        """
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                found = [(entry, entry.is_dir(follow_symlinks=False)) for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            return
        # A folder sorts as its name with the slash, which makes the walk's order that of the keys.
        found.sort(key=lambda item: os.fsencode(item[0].name + ("/" if item[1] else "")))
        for entry, is_folder in found:
            key = folder + entry.name
            if is_folder:
                inside = key + "/"
                if key != TEMPORARY and (inside.startswith(prefix) or prefix.startswith(inside)):
                    yield from self.walk(inside, prefix)
            elif key.startswith(prefix) and not _SILLY.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    state = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(state.st_mode):
                        yield answers.info_of(key, state)

    def remove(self, operation: str, key: str) -> None:
        """Unlink, and remove the folders that this empties, or that a killed delete emptied."""
        target = self.path(operation, key)
        top = os.path.join(self.root, key.partition("/")[0])
        if not os.path.lexists(target) and (top == target or not os.path.isdir(top)):
            return
        self.prepare(operation, key)
        with self._locked():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(target)
            folder = os.path.dirname(target)
            while folder != self.root:
                try:
                    os.rmdir(folder)
                except (FileNotFoundError, NotADirectoryError):
                    pass
                except OSError:
                    break
                folder = os.path.dirname(folder)
        sync_folder(folder)

    # ---- writing

    @contextlib.contextmanager
    def temporary_file(self) -> Iterator[tuple[int, str]]:
        """A new file, locked as long as it is written, so that nobody takes it for a leftover."""
        while True:
            path = os.path.join(self.temporary, self.fresh() + ".put")
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except BaseException:
                os.unlink(path)
                os.close(fd)
                raise
            if os.fstat(fd).st_nlink:
                break
            os.close(fd)  # taken for a leftover between the two calls above
        try:
            yield fd, path
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.close(fd)

    def publish(
        self, operation: str, key: str, fd: int, temporary: str, condition: Condition
    ) -> None:
        """Give a finished, synced file its name, if the condition holds under the lock.

        Args:
            operation: for messages.
            key: the name to be.
            fd: of the file.
            temporary: its path until now.
            condition: of the put.

        Raises:
            PreconditionError: it does not hold.
        """
        target = self.path(operation, key)
        with self._locked():
            current = _current(target)
            if isinstance(condition, IfAbsent) and current is not None:
                raise PreconditionError(operation, key, "exists")
            if isinstance(condition, IfVersion):
                version = "" if current is None else answers.version_of(current)
                if version != condition.version:
                    raise PreconditionError(
                        operation, key, f"has version {version!r}, not {condition.version!r}"
                    )
            if current is not None:
                _outlive(fd, current)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if not (
                isinstance(condition, IfAbsent) and _linked(operation, key, fd, temporary, target)
            ):
                _renamed(fd, temporary, target)
        folder = os.path.dirname(target)
        while True:  # a folder made just now is durable only when its parent is synced
            with contextlib.suppress(FileNotFoundError):
                sync_folder(folder)
            if folder == self.root:
                break
            folder = os.path.dirname(folder)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with _PUBLISHING:
            fd = os.open(
                os.path.join(self.temporary, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666
            )
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield
            finally:
                os.close(fd)


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_for_reading(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _current(path: str) -> os.stat_result | None:
    """The state of a file as its server has it: opening asks there, a bare stat may not."""
    try:
        fd = _open_for_reading(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # not ours to read, or a link: what the name says must do
        try:
            return os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def _outlive(fd: int, current: os.stat_result) -> None:
    """Make a file's mtime later than that of the file which it replaces."""
    state = os.fstat(fd)
    if state.st_mtime_ns <= current.st_mtime_ns:
        os.utime(fd, ns=(state.st_atime_ns, current.st_mtime_ns + 1))


def _linked(operation: str, key: str, fd: int, temporary: str, target: str) -> bool:
    """Link a file, which fails if the name exists, lock or no lock; some filesystems have none."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        if not _is(fd, target):
            raise PreconditionError(operation, key, "exists") from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def _renamed(fd: int, temporary: str, target: str) -> None:
    """Rename a file over what has its name."""
    try:
        os.replace(temporary, target)
    except FileNotFoundError:
        if not _is(fd, target):
            raise


def _is(fd: int, path: str) -> bool:
    """Whether a name is that of an open file: then a request was applied, its answer lost."""
    found = _current(path)
    return found is not None and os.path.samestat(found, os.fstat(fd))


def _unlink_unlocked(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(fd)
