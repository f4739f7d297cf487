"""A committed checkpoint read straight from its store: by pieces, verified, through a cache.

A file's pieces are the parts that the sidecar sent it in, each with a checksum in the record; of a
file that was small, or whose record tells no such checksums, the file itself is the one piece. Of
a piece no byte is handed out before all of it was compared with the record. So what is read of
a large file is fetched by parts, and nothing that the store or the network changed gets through.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from ds_ckpt_hook import remote, room
from ds_ckpt_hook.cache import BLOCK, Cache, Entry, Wanted, blocks
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.clock import Clock, SystemClock, system_random
from ds_ckpt_store.contract.digest import combine_all, crc32c
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import (
    CorruptionError,
    DamagedError,
    NotFoundError,
    NothingCommittedError,
    SettingsError,
    TagError,
)
from ds_ckpt_store.records import Record
from ds_ckpt_store.stores import shown
from ds_ckpt_store.transfer.budget import Budget
from ds_ckpt_store.transfer.download import Downloader, RemoteShard
from ds_ckpt_store.transfer.proof import read_crc32c


def split(url: str) -> tuple[str, str, str]:
    """The run's URL, the folder of a save in it, and the path in that folder, empty for none.

    Raises:
        SettingsError: no part of it is ``<tag>@<save id>``.
    """
    parts = url.rstrip("/").split("/")
    for number, part in enumerate(parts):
        try:
            names.tag_of(part)
        except TagError:
            continue
        return "/".join(parts[:number]), part, "/".join(parts[number + 1 :])
    raise SettingsError(
        f"{shown(url) if urlsplit(url).scheme else url!r} names no checkpoint: write "
        "<destination>/<tag>@<save id>, as ds_ckpt_hook.history tells it"
    )


class StoredCheckpoint:
    """One committed checkpoint, open for reading; close it, or use it in a ``with``.

    It may be used by many threads. A process that forks opens its own.

    Args:
        url: ``<destination>/<tag>@<save id>``.
        cache: the node's cache; as the environment says if None.
        clock: time.

    Attributes:
        url: as given.
        record: what is committed.

    Raises:
        SettingsError: the URL names no checkpoint, or no store that can work.
        NothingCommittedError: there is no such checkpoint, or it is not committed (any more).
        StoreError: the store did not answer.
    """

    def __init__(self, url: str, *, cache: Cache | None = None, clock: Clock | None = None) -> None:
        run, folder, path = split(url)
        if path:
            raise SettingsError(f"{shown(url)}: {path!r} is more than a checkpoint's folder")
        self.url = url
        self._folder = folder
        self._cache = cache_of(os.environ) if cache is None else cache
        clock, rng = clock or SystemClock(), system_random()
        self._budget = Budget(clock)
        with contextlib.ExitStack() as opened:
            reading = remote.reading(run, clock, rng, self._budget.heed)
            self._store = opened.enter_context(reading)
            self._catalog = Catalog(self._store, rng)
            self.record = _committed(self._catalog, folder)
            self._opened = opened.pop_all()
        self._files = {
            key.removeprefix(f"{folder}/"): [
                Wanted(self._store.url, key, piece) for piece in entry.pieces
            ]
            for key, entry in self.record.objects()
        }
        self._sums: dict[str, list[int]] = {}  # of blocks of pieces that no cache holds
        self._executor = ThreadPoolExecutor(self._budget.fit, "ds_ckpt read")
        self._downloader = Downloader(
            self._store, self._executor, budget=self._budget, fs=Filesystem(), clock=clock
        )

    @property
    def files(self) -> list[str]:
        """Paths of its files, sorted; those beside the folder are under ``.companions/``."""
        return sorted(self._files)

    def open(self, path: str) -> io.BufferedReader:
        """A file of it, to read and seek in; fetched as it is read.

        Raises:
            FileNotFoundError: it has no such file.
        """
        return io.BufferedReader(_File(self, path, self._pieces(path)), 1 << 20)

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Have what these ranges lie in on the node, many pieces at a time.

        Args:
            ranges: ``(path, offset, length)`` in bytes.

        Raises:
            FileNotFoundError: it has no such file.
            DamagedError: the store holds other bytes than were committed.
            StoreError: the store did not answer.
        """
        wanted: dict[Wanted, None] = {}
        for path, offset, length in ranges:
            for each in self._pieces(path):
                if each.piece.offset < offset + length and offset < each.piece.end:
                    wanted[each] = None
        self._cache.bring(list(wanted), self._fetch)

    def close(self) -> None:
        """Close the connections; files of it that are open can read no more from the store."""
        self._executor.shutdown()
        self._opened.close()

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pieces(self, path: str) -> list[Wanted]:
        if path not in self._files:
            raise FileNotFoundError(
                f"checkpoint {self.record.tag!r} has no file {path!r}; it has "
                f"{', '.join(self.files[:10])}{', ...' if len(self._files) > 10 else ''}"
            )
        return self._files[path]

    def _fetch(self, shards: Sequence[RemoteShard], done: Callable[[RemoteShard], None]) -> None:
        with self._explained():
            self._downloader.fetch(shards, check=_go_on, progress=_pass_over, done=done)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Tell a checkpoint that was deleted while it was read from a damaged one."""
        try:
            yield
        except DamagedError:
            _committed(self._catalog, self._folder)
            raise

    def _piece(self, wanted: Wanted) -> Entry | _Direct:
        entry = self._cache.open(wanted)
        if entry is None:
            self._cache.bring([wanted], self._fetch)
            entry = self._cache.open(wanted)
        return _Direct(self, wanted) if entry is None else entry

    def _replace(self, wanted: Wanted) -> _Direct:
        """What to read in the place of an entry that the disk has damaged."""
        self._cache.drop(wanted)
        return _Direct(self, wanted)

    # ---- where no cache holds a piece: it is read twice, and in little memory

    def _sums_of(self, wanted: Wanted) -> list[int]:
        """The sums of a piece's blocks, which together are what the record says.

        Raises:
            DamagedError: they are not.
        """
        if wanted.name not in self._sums:
            cut = blocks(wanted.piece.size)
            with self._reading(wanted):
                sums = list(self._executor.map(lambda each: self._sum(wanted, *each), cut))
                whole = zip(sums, (length for _, length in cut), strict=True)
                if combine_all(whole) != wanted.piece.crc32c:
                    raise _damaged(wanted, "has other bytes than were committed")
            self._sums[wanted.name] = sums
        return self._sums[wanted.name]

    def _sum(self, wanted: Wanted, offset: int, length: int) -> int:
        begin = wanted.piece.offset + offset
        return read_crc32c(self._store, wanted.key, begin, length, self._budget.pace)

    def _block(self, wanted: Wanted, number: int, length: int) -> bytes:
        """A block, which must be what it was the first time.

        Raises:
            DamagedError: the store gave other bytes than before.
        """
        expected = self._sums_of(wanted)[number]
        data = bytearray()
        with self._reading(wanted):
            offset = wanted.piece.offset + number * BLOCK
            self._store.read(wanted.key, offset, length, data.extend)
            if crc32c(data) != expected:
                raise _damaged(wanted, "reads differently each time")
        return bytes(data)

    @contextlib.contextmanager
    def _reading(self, wanted: Wanted) -> Iterator[None]:
        with self._explained():
            try:
                yield
            except NotFoundError:
                raise _damaged(wanted, "is missing") from None
            except CorruptionError as error:
                raise _damaged(wanted, f"cannot be read as recorded: {error.answer}") from None


class _Direct:
    """A piece that is read from the store, block by block."""

    def __init__(self, checkpoint: StoredCheckpoint, wanted: Wanted) -> None:
        self._checkpoint = checkpoint
        self._wanted = wanted

    def block(self, number: int, length: int) -> bytes:
        """A block."""
        return self._checkpoint._block(self._wanted, number, length)

    def close(self) -> None:
        """Nothing is held."""


def cache_of(environ: Mapping[str, str]) -> Cache:
    """The node's cache: the folder ``DS_CKPT_CACHE``, of ``DS_CKPT_CACHE_MIB`` at most.

    Without a folder it lies on the volume, where a restart finds it, or in the machine's folder
    for temporary files. On the volume it takes half of what checkpoints leave free, and
    ``ready_to_save`` drops it before it says that there is no room.

    Raises:
        SettingsError: the size is no number, or the temporary folder is somebody else's.
    """
    text = environ.get("DS_CKPT_CACHE_MIB") or ""
    if text and not text.isdecimal():
        raise SettingsError(f"DS_CKPT_CACHE_MIB={text!r}: a whole number of MiB is needed")
    limit = int(text) << 20 if text else None
    if folder := environ.get("DS_CKPT_CACHE"):
        return Cache(os.path.abspath(folder), limit)
    path = environ.get("DS_CKPT_DIR") or ""
    if path and os.path.isdir(path):
        volume = Volume(path)
        return Cache(volume.cache, limit, free=lambda: room.left_on(volume))
    folder = f"{tempfile.gettempdir()}/ds_ckpt-cache-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    if os.lstat(folder).st_uid != os.getuid() or os.path.islink(folder):
        raise SettingsError(
            f"{folder} belongs to somebody else: set DS_CKPT_CACHE to a folder of your own"
        )
    return Cache(folder, limit)


def open_file(url: str) -> io.BufferedReader:
    """See :func:`ds_ckpt_hook.open`."""
    run, folder, path = split(url)
    if not path:
        raise SettingsError(f"{shown(url)} names a checkpoint, and no file of it")
    checkpoint = StoredCheckpoint(f"{run}/{folder}")
    try:
        file = _File(checkpoint, path, checkpoint._pieces(path), closes=True)
    except BaseException:
        checkpoint.close()
        raise
    return io.BufferedReader(file, 1 << 20)


def _committed(catalog: Catalog, folder: str) -> Record:
    tag, save_id = names.tag_of(folder)
    record = catalog.record(save_id)
    if record is None:
        raise NothingCommittedError(
            f"{catalog.store.url} holds no committed checkpoint {tag!r} of save {save_id}: it is "
            "still being uploaded, or was never there; `ds-ckpt ls` tells what is committed"
        )
    if record.state != "committed" or record.folder != folder:
        raise NothingCommittedError(
            f"{catalog.store.url}: save {save_id} is {record.state} as {record.folder}, and cannot "
            f"be read as {folder}; `ds-ckpt ls` tells what is committed"
        )
    return record


class _File(io.RawIOBase):
    """One file: reads block by block, each compared with its checksum.

    Args:
        checkpoint: what it belongs to.
        path: in the checkpoint.
        pieces: of the file, in order.
        closes: whether the checkpoint is closed with it.
    """

    def __init__(
        self, checkpoint: StoredCheckpoint, path: str, pieces: list[Wanted], *, closes: bool = False
    ) -> None:
        super().__init__()
        self.name = f"{checkpoint.url}/{path}"
        self._checkpoint = checkpoint
        self._path = path
        self._pieces = pieces
        self._starts = [each.piece.offset for each in pieces]
        self._size = pieces[-1].piece.end
        self._closes = closes
        self._position = 0
        self._number = -1  # of the piece that is open
        self._open: Entry | _Direct | None = None
        self._held: tuple[int, bytes] = (-1, b"")  # the block read last, and where it begins

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Bytes from the file's start."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to another position in the file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or as much of it as the file has.

        Raises:
            DamagedError: the store holds other bytes than were committed.
            StoreError: the store did not answer.
        """
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._size - self._position)]
        if not view:
            return 0
        if self._number_at(self._position) != self._number_at(self._position + len(view) - 1):
            self._checkpoint.prefetch([(self._path, self._position, len(view))])
        done = 0
        while done < len(view):
            start, block = self._block_at(self._position)
            found = block[self._position - start :][: len(view) - done]
            view[done : done + len(found)] = found
            done += len(found)
            self._position += len(found)
        return done

    def readall(self) -> bytes:
        """All that is left."""
        data = bytearray(max(0, self._size - self._position))
        self.readinto(data)
        return bytes(data)

    def close(self) -> None:
        """Let go of what it holds."""
        if not self.closed:
            if self._open is not None:
                self._open.close()
            if self._closes:
                self._checkpoint.close()
        super().close()

    def _number_at(self, position: int) -> int:
        return bisect.bisect_right(self._starts, position) - 1

    def _block_at(self, position: int) -> tuple[int, bytes]:
        start, block = self._held
        if start <= position < start + len(block):
            return self._held
        number = self._number_at(position)
        wanted = self._pieces[number]
        piece = wanted.piece
        if number != self._number or self._open is None:
            if self._open is not None:
                self._open.close()
            self._open, self._number = None, number
            self._open = self._checkpoint._piece(wanted)
        index = (position - piece.offset) // BLOCK
        length = min(BLOCK, piece.size - index * BLOCK)
        found = self._open.block(index, length)
        if found is None:
            self._open.close()
            self._open = self._checkpoint._replace(wanted)
            found = self._open.block(index, length)
        self._held = piece.offset + index * BLOCK, found
        return self._held


def _damaged(wanted: Wanted, reason: str) -> DamagedError:
    return DamagedError(f"{wanted.url}/{wanted.key} {reason}", (wanted.key,))


def _go_on() -> None:
    """Nobody stops a reader but the reader."""


def _pass_over(_: int) -> None:
    """Nobody counts."""
