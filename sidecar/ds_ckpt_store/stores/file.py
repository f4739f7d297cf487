"""``file://``: a folder as a store: NFS, a persistent volume, a disk, a RAM disk.

An object is a plain file whose path below the root is its key. It appears whole or not at all:
it is written under ``.ds_ckpt-tmp/``, synced, and then renamed. Every change of the visible tree
is made under one exclusive lock (``flock``, which NFS carries to its server), so conditions hold
between processes and hosts that share the folder.

The version of an object is its (inode, mtime, size). A publish makes the mtime of a key grow, so a
version does not come back while the key exists, even if the kernel's clock ticks slowly.

The bytes are checked once, by reading the object back (:attr:`Proof.READ_BACK`); nothing is
stored beside them, so any tool may copy the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.clock import fresh_token, system_random
from ds_ckpt_store.errors import (
    AccessError,
    CorruptionError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    SettingsError,
    StoreError,
    TransientError,
)
from ds_ckpt_store.stores.port import (
    Capabilities,
    Condition,
    IfAbsent,
    IfVersion,
    Limits,
    ObjectInfo,
    Part,
    Proof,
    Sink,
    Source,
    Upload,
)

TEMPORARY = ".ds_ckpt-tmp"
PART_SIZE = "part_size"
ANY_SIZE = 1 << 62

_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_MAY_HEAL = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EMFILE)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)

# Over NFS, flock is a lock of the whole process: threads are kept apart here.
_PUBLISHING = threading.Lock()


def open_url(url: str, environ: Mapping[str, str], stall_seconds: float) -> FileStore:
    """See :func:`ds_ckpt_store.stores.open_store`; a folder has no settings."""
    del environ, stall_seconds
    return FileStore.from_url(url)


class FileStore:
    """The store in one folder. The folder is made by the first write, its parent is not.

    Args:
        root: absolute path.
        rng: names temporary files.
    """

    def __init__(self, root: str, *, rng: random.Random | None = None) -> None:
        self._root = root
        self._temporary = os.path.join(root, TEMPORARY)
        self._rng = rng or system_random()
        self._ready = False

    @classmethod
    def from_url(cls, url: str) -> FileStore:
        """Open ``file:///absolute/folder``; nothing is touched yet.

        Raises:
            SettingsError: a relative path, a host, or the root of the machine.
        """
        parts = urlsplit(url)
        path = unquote(parts.path)
        if parts.netloc:
            raise SettingsError(
                f"{url!r}: {parts.netloc!r} stands where a host would; "
                f"a folder is written with three slashes: file:///folder"
            )
        if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise SettingsError(f"{url!r}: the folder must be an absolute path without '..'")
        root = os.path.normpath("/" + path.lstrip("/"))
        if root == "/":
            raise SettingsError(
                f"{url!r}: the root of the machine is no destination; name a folder"
            )
        return cls(root)

    # ---- what it is

    @property
    def url(self) -> str:
        """``file://`` and the folder."""
        return f"file://{self._root}"

    @property
    def capabilities(self) -> Capabilities:
        """All but stored checksums; parts of any size."""
        limits = Limits(
            min_part=1,
            max_part=ANY_SIZE,
            max_parts=1_000_000,
            max_object=ANY_SIZE,
            max_put=ANY_SIZE,
        )
        return Capabilities(proofs=(Proof.READ_BACK,), limits=limits)

    @property
    def proof(self) -> Proof:
        """Always READ_BACK."""
        return Proof.READ_BACK

    def use_proof(self, proof: Proof) -> None:
        """READ_BACK is the only one."""
        if proof is not Proof.READ_BACK:
            raise RefusedError("use_proof", "", f"a folder cannot give {proof.value}")

    def refuses_corruption(self, proof: Proof, key: str) -> bool:
        """Only reading back shows anything."""
        del key
        return proof is Proof.READ_BACK

    def close(self) -> None:
        """Nothing is held open."""

    # ---- objects

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Write to a temporary file, sync it, and publish it under the condition."""
        with self._errors("put", key):
            target = self._path("put", key)
            self._prepare("put", key)
            with self._temporary_file() as (fd, temporary):
                written = _copy(source, fd, 0)
                if written != source.size:
                    raise CorruptionError(
                        "put", key, f"the source gave {written} of its {source.size} bytes"
                    )
                os.fsync(fd)
                self._publish("put", key, temporary, target, condition)
                return _info(key, os.fstat(fd))

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Read a file whole."""
        with self._errors("get", key), self._open("get", key) as file:
            return file.read(), _info(key, os.fstat(file.fileno()))

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """Read a range in views of 1 MiB."""
        with self._errors("read", key), self._open("read", key) as file:
            size = os.fstat(file.fileno()).st_size
            if size < offset + length:
                raise CorruptionError(
                    "read", key, f"has {size} bytes, {offset + length} were expected"
                )
            view = memoryview(bytearray(min(digest.CHUNK, length)))
            done = 0
            while done < length:
                piece = view[: min(len(view), length - done)]
                count = os.preadv(file.fileno(), [piece], offset + done)
                if count == 0:
                    raise TransientError("read", key, f"ended after {done} of {length} bytes")
                sink(piece[:count])
                done += count

    def head(self, key: str) -> ObjectInfo:
        """What the folder says of a file."""
        with self._errors("head", key), self._open("head", key) as file:
            return _info(key, os.fstat(file.fileno()))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Walk the tree in order of key; files that vanish meanwhile are left out."""
        with self._errors("list", prefix):
            if not os.path.isdir(self._root):
                self._require_parent("list", prefix)
                return
            yield from self._walk("", prefix)

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(os.path.join(self._root, folder)) as entries:
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
                    yield from self._walk(inside, prefix)
            elif key.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):
                    state = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(state.st_mode):
                        yield _info(key, state)

    def delete(self, key: str) -> None:
        """Unlink, and remove the folders that this empties, or that a killed delete emptied."""
        with self._errors("delete", key):
            target = self._path("delete", key)
            top = os.path.join(self._root, key.partition("/")[0])
            if _stat(target) is None and (top == target or not os.path.isdir(top)):
                return
            self._prepare("delete", key)
            with self._locked():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(target)
                folder = os.path.dirname(target)
                while folder != self._root:
                    try:
                        os.rmdir(folder)
                    except (FileNotFoundError, NotADirectoryError):
                        pass
                    except OSError:
                        break
                    folder = os.path.dirname(folder)
            _sync_folder(folder)

    # ---- multipart uploads: one data file, written at offsets, and a list of the parts it holds

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """Start an upload.

        Args:
            key: of the object to be.
            size: bytes of the whole.
            metadata: ``part_size`` says how many bytes every part but the last has; without it
                there is one part.
        """
        with self._errors("begin", key):
            self._path("begin", key)
            self._prepare("begin", key)
            part_size = int(metadata.get(PART_SIZE, size))
            if size < 1 or part_size < 1:
                raise RefusedError("begin", key, f"{size} bytes in parts of {part_size}")
            upload = Upload(key, fresh_token(self._rng))
            start = json.dumps({"key": key, "size": size, "part_size": part_size})
            with self._temporary_file() as (fd, temporary):
                os.write(fd, (start + "\n").encode())
                os.fsync(fd)
                # First, and whole: by it uploads() finds leftovers.
                os.rename(temporary, self._parts_list(upload))
            os.close(os.open(self._data(upload), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
            _sync_folder(self._temporary)
            return upload

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        """Write a part at its offset, and note that it is there.

        Nothing is synced yet: :meth:`complete` syncs the whole, and what a power loss took from a
        part that was noted shows when the object is read back.
        """
        with self._errors("put_part", upload.key):
            size, part_size, _ = self._progress("put_part", upload)
            offset = (number - 1) * part_size
            expected = min(part_size, size - offset)
            if number < 1 or source.size != expected:
                raise RefusedError(
                    "put_part",
                    upload.key,
                    f"part {number} has {source.size} bytes; of {size} in parts of {part_size} "
                    f"it would have {max(expected, 0)}",
                )
            fd = os.open(self._data(upload), os.O_RDWR | os.O_CLOEXEC)
            try:
                written = _copy(source, fd, offset)
                if written != source.size:
                    raise CorruptionError(
                        "put_part", upload.key, f"the source gave {written} of {source.size} bytes"
                    )
            finally:
                os.close(fd)
            part = Part(number, source.size, source.crc32c, digest.to_hex(source.crc32c))
            line = json.dumps({"number": number, "size": part.size, "token": part.token})
            _append(self._parts_list(upload), line)
            return part

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """The parts noted so far; of a part sent twice, the later."""
        with self._errors("parts", upload.key):
            return self._progress("parts", upload)[2]

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """Check that the parts are those noted and cover the whole, and publish."""
        with self._errors("complete", upload.key):
            target = self._path("complete", upload.key)
            size, _, held = self._progress("complete", upload)
            named = {part.number: (part.size, part.token) for part in parts}
            wrong = sorted(number for number in named if held.get(number) != named[number])
            if wrong or sum(length for length, _ in named.values()) != size:
                raise CorruptionError(
                    "complete",
                    upload.key,
                    f"the parts do not make {size} bytes, or differ from those held: {wrong[:10]}",
                )
            fd = os.open(self._data(upload), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
                self._publish("complete", upload.key, self._data(upload), target, None)
                os.unlink(self._parts_list(upload))
                return _info(upload.key, os.fstat(fd))
            finally:
                os.close(fd)

    def abort(self, upload: Upload) -> None:
        """Remove data and list."""
        with self._errors("abort", upload.key):
            for path in (self._data(upload), self._parts_list(upload)):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(path)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Uploads that were begun and neither completed nor aborted."""
        with self._errors("uploads", prefix):
            try:
                names = sorted(os.listdir(self._temporary))
            except FileNotFoundError:
                return
            for name in names:
                token, _, kind = name.partition(".")
                if kind == "parts":
                    lines = _lines(os.path.join(self._temporary, name))
                    if lines and str(lines[0]["key"]).startswith(prefix):
                        yield Upload(str(lines[0]["key"]), token)

    def _progress(
        self, operation: str, upload: Upload
    ) -> tuple[int, int, dict[int, tuple[int, str]]]:
        """(size, part size, parts held) of an upload."""
        lines = _lines(self._parts_list(upload)) if os.path.exists(self._data(upload)) else []
        if not lines or lines[0]["key"] != upload.key:
            raise NotFoundError(operation, upload.key, f"no upload {upload.token} is under way")
        first, *rest = lines
        held = {int(line["number"]): (int(line["size"]), str(line["token"])) for line in rest}
        return int(first["size"]), int(first["part_size"]), held

    def _data(self, upload: Upload) -> str:
        if not upload.token.isalnum():
            raise RefusedError("upload", upload.key, f"{upload.token!r} is no upload of a folder")
        return os.path.join(self._temporary, upload.token + ".data")

    def _parts_list(self, upload: Upload) -> str:
        return self._data(upload).removesuffix(".data") + ".parts"

    # ---- paths and folders

    def _path(self, operation: str, key: str) -> str:
        components = key.split("/")
        if any(part in ("", ".", "..") for part in components) or "\0" in key:
            raise RefusedError(operation, key, "is no path below a folder")
        if components[0] == TEMPORARY:
            raise RefusedError(operation, key, f"{TEMPORARY} is the store's own")
        return os.path.join(self._root, *components)

    @contextlib.contextmanager
    def _open(self, operation: str, key: str) -> Iterator[BinaryIO]:
        try:
            fd = os.open(
                self._path(operation, key),
                os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            )
        except (FileNotFoundError, NotADirectoryError):
            if not os.path.isdir(self._root):
                self._require_parent(operation, key)
            raise NotFoundError(operation, key, f"no such file under {self._root}") from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise NotFoundError(operation, key, f"no regular file under {self._root}")
        with os.fdopen(fd, "rb", buffering=0) as file:
            yield file

    def _require_parent(self, operation: str, key: str) -> None:
        parent = os.path.dirname(self._root)
        if not os.path.isdir(parent):
            raise RefusedError(
                operation,
                key,
                f"the destination does not exist: there is no folder {parent}; "
                f"mount it, make it, or correct {self.url}",
            )

    def _prepare(self, operation: str, key: str) -> None:
        """Make root and temporary folder, and remove what a killed process left."""
        if self._ready and os.path.isdir(self._temporary):
            return
        self._require_parent(operation, key)
        for folder in (self._root, self._temporary):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
                _sync_folder(os.path.dirname(folder))
        for name in os.listdir(self._temporary):
            if name.endswith(".put"):
                with contextlib.suppress(FileNotFoundError, BlockingIOError, PermissionError):
                    _unlink_unlocked(os.path.join(self._temporary, name))
        self._ready = True

    # ---- writing

    @contextlib.contextmanager
    def _temporary_file(self) -> Iterator[tuple[int, str]]:
        """A new file, locked as long as it is written, so that nobody takes it for a leftover."""
        while True:
            path = os.path.join(self._temporary, fresh_token(self._rng) + ".put")
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                break
            os.close(fd)  # taken for a leftover between the two calls above
        try:
            yield fd, path
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.close(fd)

    def _publish(
        self, operation: str, key: str, temporary: str, target: str, condition: Condition
    ) -> None:
        """Give a finished, synced file its name, if the condition holds under the lock."""
        with self._locked():
            current = _stat(target)
            if isinstance(condition, IfAbsent) and current is not None:
                raise PreconditionError(operation, key, "exists")
            if isinstance(condition, IfVersion):
                version = "" if current is None else _version(current)
                if version != condition.version:
                    raise PreconditionError(
                        operation, key, f"has version {version!r}, not {condition.version!r}"
                    )
            if current is not None:
                _outlive(temporary, current)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if isinstance(condition, IfAbsent):
                self._link(operation, key, temporary, target)
            else:
                os.replace(temporary, target)
        folder = os.path.dirname(target)
        while True:  # a folder made just now is durable only when its parent is synced
            with contextlib.suppress(FileNotFoundError):
                _sync_folder(folder)
            if folder == self._root:
                break
            folder = os.path.dirname(folder)

    @staticmethod
    def _link(operation: str, key: str, temporary: str, target: str) -> None:
        """A link fails if the name exists, lock or no lock; some filesystems have none."""
        try:
            os.link(temporary, target)
        except FileExistsError:
            raise PreconditionError(operation, key, "exists") from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.replace(temporary, target)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with _PUBLISHING:
            fd = os.open(
                os.path.join(self._temporary, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666
            )
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield
            finally:
                os.close(fd)

    # ---- errors

    @contextlib.contextmanager
    def _errors(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._translate(operation, key, error) from error

    def _translate(self, operation: str, key: str, error: OSError) -> StoreError:
        if error.errno in _FULL:
            return TransientError(operation, key, f"{error.strerror}: {self._space()}; free some")
        if error.errno in _DENIED:
            return AccessError(
                operation,
                key,
                f"{error.strerror}: {error.filename or self._root}, as uid {os.geteuid()}; "
                f"let this user write there, or mount it writable",
            )
        if error.errno in _MAY_HEAL:
            return TransientError(operation, key, str(error))
        return RefusedError(operation, key, str(error))

    def _space(self) -> str:
        try:
            state = os.statvfs(self._root)
        except OSError as error:
            return f"the filesystem of {self._root} ({error.strerror})"
        free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
        return f"the filesystem of {self._root} has {free} of {total} bytes free"


def _version(state: os.stat_result) -> str:
    return f"{state.st_ino}-{state.st_mtime_ns}-{state.st_size}"


def _info(key: str, state: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, state.st_size, _version(state), state.st_mtime)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _outlive(path: str, current: os.stat_result) -> None:
    """Make a file's mtime later than that of the file which it replaces."""
    state = os.lstat(path)
    if state.st_mtime_ns <= current.st_mtime_ns:
        os.utime(path, ns=(state.st_atime_ns, current.st_mtime_ns + 1))


def _copy(source: Source, fd: int, offset: int) -> int:
    """Write a source's bytes at an offset; returns how many."""
    done = 0
    with source.open() as reader:
        while piece := memoryview(reader.read(digest.CHUNK)):
            while piece:
                count = os.pwrite(fd, piece, offset + done)
                piece = piece[count:]
                done += count
    return done


def _append(path: str, line: str) -> None:
    """Add one line in one write, so that threads do not mix theirs."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        os.write(fd, (line + "\n").encode())
    finally:
        os.close(fd)


def _lines(path: str) -> list[dict[str, str | int]]:
    """The whole lines of a parts list; a line torn by a crash is left out. Empty if it is gone."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return []
    found: list[dict[str, str | int]] = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _unlink_unlocked(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(fd)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
