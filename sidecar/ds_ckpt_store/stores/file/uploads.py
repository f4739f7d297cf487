"""Uploads in parts: one data file that is written at offsets, and a list of the parts it holds.

Nothing of a part is synced until the whole is completed, so a part that the list names may have
been lost with the power. What this process has written through a descriptor that it still holds is
known, as the sync on that descriptor tells of every failed write since; all other parts are read
again before the object gets its name.

The descriptor stays open from the first use of an upload to its end: on NFS, closing a file sends
all that is dirty and waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_ckpt_store.contract import digest
from ds_ckpt_store.errors import CorruptionError, NotFoundError, RefusedError
from ds_ckpt_store.stores.file.answers import info_of
from ds_ckpt_store.stores.file.copying import Copier, crc32c_again, leave_cache, start_writeback
from ds_ckpt_store.stores.file.folder import Folder, sync_folder
from ds_ckpt_store.stores.port import ObjectInfo, Part, Source, Upload

PART_SIZE = "part_size"


@dataclass(eq=False)
class _Open:
    """An upload that this process works on."""

    fd: int
    size: int
    part_size: int
    writing: threading.Lock = field(default_factory=threading.Lock)
    written: dict[int, int] = field(default_factory=dict)  # number to CRC32C, as it was read again
    users: int = 0
    over: bool = False

    def close(self) -> None:
        """Close the descriptor, once."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    __del__ = close  # a store that nobody closed must not keep a mount busy


class Uploads:
    """The unfinished uploads of one folder.

    Args:
        folder: where.
        copier: how.
    """

    def __init__(self, folder: Folder, copier: Copier) -> None:
        self._folder = folder
        self._copier = copier
        self._mutex = threading.Lock()
        self._open: dict[str, _Open] = {}

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """Start an upload; ``part_size`` in ``metadata`` is every part's but the last's."""
        self._folder.path("begin", key)
        self._folder.prepare("begin", key)
        self._close_orphans()
        part_size = int(metadata.get(PART_SIZE, size))
        if size < 1 or part_size < 1:
            raise RefusedError("begin", key, f"{size} bytes in parts of {part_size}")
        upload = Upload(key, self._folder.fresh())
        start = json.dumps({"key": key, "size": size, "part_size": part_size})
        with self._folder.temporary_file() as (fd, temporary):
            os.write(fd, (start + "\n").encode())
            os.fsync(fd)
            # First, and whole: by it uploads() finds leftovers.
            os.rename(temporary, self._list(upload))
        os.close(os.open(self._data(upload), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
        sync_folder(self._folder.temporary)
        return upload

    def put_part(self, upload: Upload, number: int, source: Source, *, read_again: bool) -> Part:
        """Write a part at its offset, let the disk begin with it, and note that it is there."""
        with self._using("put_part", upload) as entry:
            offset = (number - 1) * entry.part_size
            expected = min(entry.part_size, entry.size - offset)
            if number < 1 or source.size != expected:
                raise RefusedError(
                    "put_part",
                    upload.key,
                    f"part {number} has {source.size} bytes; of {entry.size} in parts of "
                    f"{entry.part_size} it would have {max(expected, 0)}",
                )
            entry.written.pop(number, None)
            count, checksum = self._copier.copy(
                source, entry.fd, offset, entry.writing, read_again=read_again
            )
            if count != source.size:
                raise CorruptionError(
                    "put_part", upload.key, f"the source gave {count} of {source.size} bytes"
                )
            start_writeback(entry.fd, offset, count)
            value = source.crc32c if checksum is None else checksum
            part = Part(number, count, value, digest.to_hex(value))
            line = json.dumps({"number": number, "size": part.size, "token": part.token})
            try:
                _append(self._list(upload), line)
            except FileNotFoundError:
                raise _gone("put_part", upload) from None
            if checksum is not None:
                entry.written[number] = checksum
            return part

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """The parts noted so far; of a part sent twice, the later."""
        return self._progress("parts", upload)[2]

    def complete(self, upload: Upload, parts: Sequence[Part], *, read_again: bool) -> ObjectInfo:
        """Check that the parts are those noted and cover the whole, sync, and publish.

        Args:
            upload: which.
            parts: what the caller knows of it.
            read_again: compare each part's checksum with the file, reading what this process has
                not written itself.
        """
        size, part_size, held = self._progress("complete", upload)
        named = {part.number: (part.size, part.token) for part in parts}
        wrong = sorted(number for number in named if held.get(number) != named[number])
        if wrong or sum(length for length, _ in named.values()) != size:
            raise _differs(
                upload, f"the parts do not make {size} bytes, or are not those held", wrong
            )
        with self._using("complete", upload) as entry:
            if os.fstat(entry.fd).st_size != size:
                raise _differs(upload, f"what is held of it has not {size} bytes", wrong)
            self._sync(upload, entry)
            if read_again:
                wrong = [
                    part.number
                    for part in parts
                    if _held_crc32c(entry, part, part_size) != part.crc32c
                ]
            if wrong:
                raise _differs(upload, "what the disk holds of these parts was changed", wrong)
            whole = digest.combine_all(
                (part.crc32c, part.size) for part in sorted(parts, key=lambda part: part.number)
            )
            try:
                self._folder.publish("complete", upload.key, entry.fd, self._data(upload), None)
            except FileNotFoundError:
                raise _gone("complete", upload) from None  # removed by another process just now
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._list(upload))
            leave_cache(entry.fd, size)
            info = info_of(upload.key, os.fstat(entry.fd), whole if read_again else None)
        self._forget(upload.token)
        return info

    def abort(self, upload: Upload) -> None:
        """Remove data and list."""
        for path in (self._data(upload), self._list(upload)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)
        self._forget(upload.token)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Uploads that were begun and neither completed nor aborted."""
        try:
            names = sorted(os.listdir(self._folder.temporary))
        except FileNotFoundError:
            return
        for name in names:
            token, _, kind = name.partition(".")
            if kind == "parts":
                path = os.path.join(self._folder.temporary, name)
                lines = _lines(path, only_first=True)
                if lines and str(lines[0]["key"]).startswith(prefix):
                    with contextlib.suppress(FileNotFoundError):  # it is over meanwhile
                        yield Upload(str(lines[0]["key"]), token, os.stat(path).st_mtime)

    def damage(self, upload: Upload) -> None:
        """Change the first byte of what is held, for the trial at start."""
        with open(self._data(upload), "r+b", buffering=0) as file:
            byte = file.read(1)
            file.seek(0)
            file.write(bytes([byte[0] ^ 1]))

    def close(self) -> None:
        """Close all files; an upload that is used later is opened again, and read again."""
        for token in tuple(self._open):
            self._forget(token)

    # ---- what is open

    @contextlib.contextmanager
    def _using(self, operation: str, upload: Upload) -> Iterator[_Open]:
        """An upload with its descriptor, which nobody closes meanwhile."""
        if not (os.path.exists(self._data(upload)) and os.path.exists(self._list(upload))):
            self._forget(upload.token)
            raise _gone(operation, upload)
        with self._mutex:
            entry = self._open.get(upload.token)
            if entry is None:
                size, part_size, _ = self._progress(operation, upload)
                try:
                    fd = os.open(self._data(upload), os.O_RDWR | os.O_CLOEXEC)
                except FileNotFoundError:
                    raise _gone(operation, upload) from None
                entry = self._open[upload.token] = _Open(fd, size, part_size)
            entry.users += 1
        try:
            yield entry
        finally:
            with self._mutex:
                entry.users -= 1
                if entry.over and not entry.users:
                    entry.close()

    def _forget(self, token: str) -> None:
        with self._mutex:
            entry = self._open.pop(token, None)
            if entry is not None:
                entry.over = True
                if not entry.users:
                    entry.close()

    def _close_orphans(self) -> None:
        """Give back the space of uploads that somebody else has removed."""
        for token, entry in tuple(self._open.items()):
            with contextlib.suppress(OSError):
                if os.fstat(entry.fd).st_nlink == 0:
                    self._forget(token)

    def _sync(self, upload: Upload, entry: _Open) -> None:
        """Sync the data. If that fails, nobody knows which bytes were lost: the upload is over.

        The kernel reports a failed write once and then takes the pages for written, so a second
        sync would succeed over bytes that never reached the disk.
        """
        try:
            os.fsync(entry.fd)
        except OSError:
            self.abort(upload)
            raise

    def _progress(
        self, operation: str, upload: Upload
    ) -> tuple[int, int, dict[int, tuple[int, str]]]:
        """(size, part size, parts held) of an upload."""
        lines = _lines(self._list(upload)) if os.path.exists(self._data(upload)) else []
        if not lines or lines[0]["key"] != upload.key:
            raise _gone(operation, upload)
        first, *rest = lines
        held = {int(line["number"]): (int(line["size"]), str(line["token"])) for line in rest}
        return int(first["size"]), int(first["part_size"]), held

    def _data(self, upload: Upload) -> str:
        if not upload.token.isalnum():
            raise RefusedError("upload", upload.key, f"{upload.token!r} is no upload of a folder")
        return os.path.join(self._folder.temporary, upload.token + ".data")

    def _list(self, upload: Upload) -> str:
        return self._data(upload).removesuffix(".data") + ".parts"


def _held_crc32c(entry: _Open, part: Part, part_size: int) -> int:
    known = entry.written.get(part.number)
    if known is not None:
        return known
    return crc32c_again(entry.fd, (part.number - 1) * part_size, part.size)


def _gone(operation: str, upload: Upload) -> NotFoundError:
    return NotFoundError(operation, upload.key, f"no upload {upload.token} is under way")


def _differs(upload: Upload, what: str, numbers: list[int]) -> CorruptionError:
    return CorruptionError("complete", upload.key, f"{what}: {numbers[:10]}; send them again")


def _append(path: str, line: str) -> None:
    """Add one line in one write, so that threads do not mix theirs."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(fd, (line + "\n").encode())
    finally:
        os.close(fd)


def _lines(path: str, *, only_first: bool = False) -> list[dict[str, str | int]]:
    """The whole lines of a parts list; a line torn by a crash is left out. Empty if it is gone."""
    found: list[dict[str, str | int]] = []
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
            if only_first:
                break
    return found
