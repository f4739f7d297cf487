"""One instance of a file system, with the few things that a store does with it.

Nothing is translated here: whatever the library raises comes out, but for two corrections. What
asked for a listing never gets half of one (fsspec's own ``find`` and ``walk`` leave out what could
not be listed), and a write that fails is not finished by closing its file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from ds_ckpt_store.errors import CorruptionError
from ds_ckpt_store.stores.port import Sink, Source

PIECE = 1 << 20  # bytes that are handed on at a time
READ_AHEAD = 4 << 20  # bytes that are asked for at a time
# Held while a large object is sent: fsspec's buffer, a copy of it, and what a library makes of it.
BUFFERS = 3
SFTP_PIECES = 8
FOLDER_TRIES = 3

Entry = dict[str, Any]


class ForeignError(Exception):
    """Carries what a source or a sink raised past the libraries; no fault of the file system.

    Args:
        error: what was raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class ShortSourceError(Exception):
    """A source gave another number of bytes than it announced.

    Args:
        count: bytes that it gave.
    """

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} bytes")
        self.count = count


class Access:
    """Calls on one instance; used by one thread at a time unless the instance is asynchronous.

    Args:
        fs: the instance.
        block: bytes of a large object that are held and sent at a time.

    Attributes:
        spent: the instance cannot be used again, or not before what it does has ended well.
    """

    # Renaming replaces a file in one step here, and says so if it could not.
    renames = False
    # There are folders, which have to be made. In object stores, that might make a bucket.
    folders = False

    def __init__(self, fs: Any, block: int) -> None:
        self.fs = fs
        self._block = block
        self.spent = False
        cache: Any = getattr(fs, "dircache", None)
        if hasattr(cache, "use_listings_cache"):
            cache.use_listings_cache = False

    @staticmethod
    def request_memory(block: int) -> int:
        """Bytes that a write holds beside its source's buffer."""
        return BUFFERS * block + PIECE

    # ---- looking

    def info(self, path: str) -> Entry:
        """What is known of a file or folder; FileNotFoundError if there is none."""
        self.fs.invalidate_cache()
        return dict(self.fs.info(path))

    def modified(self, path: str) -> Any:
        """When it was changed, for a file system that tells it only when asked."""
        try:
            return self.fs.modified(path)
        except (NotImplementedError, KeyError, AttributeError, TypeError):
            return None

    def entries(self, folder: str) -> list[Entry]:
        """What lies in a folder, or below it; FileNotFoundError if there is none."""
        self.fs.invalidate_cache()
        if _lists_flat(self.fs):
            found = self.fs.find(folder, detail=True, withdirs=False)
            return list(found.values()) if isinstance(found, dict) else []
        return list(self.fs.ls(folder, detail=True))

    # ---- reading

    def read(self, path: str, offset: int, length: int, sink: Sink) -> int:
        """Hand a range to the sink, in order; returns how many bytes came."""
        done = 0
        for data in self._pieces_of(path, offset, length):
            if len(data) > length - done:
                raise CorruptionError(
                    "read", path, f"more than the {length} bytes from {offset} that were asked for"
                )
            done += len(data)
            for start in range(0, len(data), PIECE):
                call(sink, memoryview(data)[start : start + PIECE])
        return done

    def _pieces_of(self, path: str, offset: int, length: int) -> Iterator[bytes]:
        end = offset + length
        if _reads_ranges(self.fs):
            while offset < end:
                data = self.fs.cat_file(path, start=offset, end=min(offset + READ_AHEAD, end))
                if not data:
                    return
                yield data
                offset += len(data)
            return
        with self.fs.open(path, "rb", block_size=READ_AHEAD) as file:
            file.seek(offset)
            while offset < end and (data := file.read(min(PIECE, end - offset))):
                yield data
                offset += len(data)

    # ---- writing

    def write(self, path: str, source: Source) -> None:
        """Write a file: a small one by one call, a large one block by block."""
        if source.size <= PIECE:
            self.fs.pipe_file(path, b"".join(pieces(source)))
            return
        file = self._open_to_write(path)
        try:
            for piece in pieces(source):
                file.write(piece)
        except BaseException:
            _abandon(file)
            raise
        file.close()

    def _open_to_write(self, path: str) -> Any:
        return self.fs.open(path, "wb", block_size=self._block)

    def rename(self, old: str, new: str) -> None:
        """Give a file its name, in place of what had it."""
        self.fs.mv(old, new)

    def remove(self, path: str) -> None:
        """Remove a file."""
        self.fs.rm_file(path)  # not ``rm``, which takes a name for a pattern

    def make_folders(self, path: str) -> None:
        """Make a folder and those above it, whoever else does the same."""
        for attempt in range(FOLDER_TRIES):
            try:
                self.fs.makedirs(path, exist_ok=True)
            except Exception:  # as likely because another process made one of them meanwhile
                with contextlib.suppress(FileNotFoundError):
                    if is_folder(self.info(path)):
                        return
                if attempt + 1 == FOLDER_TRIES:
                    raise
            else:
                return


class FolderAccess(Access):
    """A file system with folders, of which no more is known."""

    folders = True


class LocalAccess(FolderAccess):
    """Files of this machine: nothing is buffered, and a rename replaces."""

    renames = True

    @staticmethod
    def request_memory(block: int) -> int:
        """A piece and the next."""
        del block
        return 2 * PIECE


class SftpAccess(FolderAccess):
    """SFTP: several requests under way at a time, and renames by ``posix-rename``, which replaces.

    A request carries 32 KiB, so one at a time would cost a round trip for each of them.
    """

    renames = True

    def __init__(self, fs: Any, block: int) -> None:
        super().__init__(fs, min(block, PIECE))
        fs.ftp.get_channel().settimeout(fs.ssh_kwargs.get("timeout"))

    @staticmethod
    def request_memory(block: int) -> int:
        """Few pieces."""
        del block
        return SFTP_PIECES * PIECE

    def _open_to_write(self, path: str) -> Any:
        file = super()._open_to_write(path)
        file.set_pipelined(True)
        return file

    def _pieces_of(self, path: str, offset: int, length: int) -> Iterator[bytes]:
        end = offset + length
        with self.fs.open(path, "rb") as file:
            for start in range(offset, end, READ_AHEAD):
                stop = min(start + READ_AHEAD, end)
                yield from file.readv(
                    [(at, min(PIECE, stop - at)) for at in range(start, stop, PIECE)]
                )


def is_folder(entry: Entry) -> bool:
    """Whether an entry is a folder."""
    return entry.get("type") == "directory"


def is_shared(kind: Any) -> bool:
    """Whether threads may share an instance: then all its work is done in one loop."""
    return bool(getattr(kind, "async_impl", False))


def is_local(kind: Any) -> bool:
    """Whether it is this machine's own files."""
    return issubclass(kind, LocalFileSystem)


def pieces(source: Source) -> Iterator[bytes]:
    """A source's bytes, in copies of their own: a library may keep what it is given.

    Raises:
        ForeignError: the source raised something.
        ShortSourceError: it gave another number of bytes than it announced.
    """
    count = 0
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(call(source.open))
        while piece := bytes(call(reader.read, PIECE)):
            count += len(piece)
            yield piece
    if count != source.size:
        raise ShortSourceError(count)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call what is not the file system's; what that raises is told apart.

    Raises:
        ForeignError: with what it raised.
    """
    try:
        return function(*arguments)
    except BaseException as error:
        raise ForeignError(error) from error


def _abandon(file: Any) -> None:
    """Let go of a file that was written in part. Closing one of an object store would finish it."""
    with contextlib.suppress(Exception):
        file.discard()
    if isinstance(file, AbstractBufferedFile):
        file.closed = True
    else:
        with contextlib.suppress(Exception):
            file.close()


def _overrides(fs: Any, base: type, name: str) -> bool:
    return getattr(type(fs), name) is not getattr(base, name)


def _lists_flat(fs: Any) -> bool:
    """Whether it lists all below a folder by itself; the walk of fsspec leaves out what fails."""
    return isinstance(fs, AsyncFileSystem) and _overrides(fs, AsyncFileSystem, "_find")


def _reads_ranges(fs: Any) -> bool:
    """Whether it reads a range by one call; else that call opens the file, and seeks."""
    return isinstance(fs, AsyncFileSystem) or _overrides(fs, AbstractFileSystem, "cat_file")
