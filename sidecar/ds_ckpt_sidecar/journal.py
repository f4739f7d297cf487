"""The sidecar's memory, in SQLite: which state each save is in, and which parts are stored.

A cache, not a truth: everything in it is checked against the store before it is believed, and
losing it costs repeated work and nothing else. So a journal that is damaged is moved aside and
begun anew, and one that cannot be written (no byte free) goes on in memory; and what parts and
objects were stored is written by the half second when many come, so that thousands of small
shards do not wait for the disk. States of saves are written at once.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from ds_ckpt_store.contract.clock import Clock, SystemClock
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.manifest import SaveState
from ds_ckpt_store.stores.port import Part, Upload

SCHEMA = 1
FLUSH_SECONDS = 0.5
_LOCKED = (5, 6)  # SQLITE_BUSY, SQLITE_LOCKED
_COPY_TRIES = 3

_TABLES = """
CREATE TABLE IF NOT EXISTS saves (
    save_id TEXT PRIMARY KEY, state TEXT NOT NULL, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS uploads (
    save_id TEXT, key TEXT, token TEXT NOT NULL, part_size INTEGER NOT NULL,
    PRIMARY KEY (save_id, key));
CREATE TABLE IF NOT EXISTS parts (
    save_id TEXT, key TEXT, number INTEGER, size INTEGER NOT NULL, crc32c INTEGER NOT NULL,
    token TEXT NOT NULL, PRIMARY KEY (save_id, key, number));
CREATE TABLE IF NOT EXISTS stored (
    save_id TEXT, key TEXT, version TEXT NOT NULL, PRIMARY KEY (save_id, key));
"""


@dataclass(frozen=True)
class Entry:
    """What the journal remembers of one save."""

    state: SaveState
    reason: str


class Journal:
    """The memory of one sidecar. Used from one thread.

    Args:
        path: the database file, or ``:memory:``.
        warn: called with a sentence when the journal had to be begun anew or goes on in memory.
        clock: for how long what was stored may stay unwritten.
    """

    def __init__(
        self,
        path: str,
        warn: Callable[[str], None] = lambda _: None,
        clock: Clock | None = None,
    ) -> None:
        self._path = path
        self._warn = warn
        self._clock = clock or SystemClock()
        self._flush_due = 0.0
        self._logs: dict[str, JournalLog] = {}
        self._db = self._open()

    @property
    def durable(self) -> bool:
        """False once it goes on in memory."""
        return self._path != ":memory:"

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect(self._path)
        except sqlite3.OperationalError as error:
            return self._in_memory(error)
        except sqlite3.DatabaseError as error:
            return self._begin_anew(error)

    def _begin_anew(self, error: Exception) -> sqlite3.Connection:
        aside = f"{self._path}.damaged"
        self._warn(
            f"the journal {self._path} is damaged ({error}); moved to {aside} and begun anew: "
            "uploads are compared with the store again, nothing is lost"
        )
        try:
            for ending in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path + ending)
            os.replace(self._path, aside)
            return self._connect(self._path)
        except (OSError, sqlite3.Error) as again:
            return self._in_memory(again)

    @staticmethod
    def _connect(path: str) -> sqlite3.Connection:
        if path != ":memory:":
            _let_group_in(path)
        db = sqlite3.connect(path, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA:
                raise sqlite3.DatabaseError(f"schema {version} is newer than {SCHEMA}")
            db.executescript(_TABLES)
            db.execute(f"PRAGMA user_version={SCHEMA}")
        except sqlite3.Error:
            db.close()
            raise
        return db

    def _in_memory(self, error: Exception) -> sqlite3.Connection:
        self._warn(
            f"the journal {self._path} cannot be written ({error}); going on in memory: after a "
            "restart, uploads that are under way begin anew; make room on the volume"
        )
        self._path = ":memory:"
        return self._connect(":memory:")

    def _write(self, statement: str, *values: object) -> None:
        """Take one statement into the open transaction; :meth:`flush` writes it."""
        try:
            self._execute(statement, values)
        except sqlite3.Error as error:
            self._go_on_after(error)
            self._execute(statement, values)

    def _execute(self, statement: str, values: tuple[object, ...]) -> None:
        if not self._db.in_transaction:
            self._db.execute("BEGIN")
        self._db.execute(statement, values)

    def _go_on_after(self, error: sqlite3.Error) -> None:
        """Begin anew, or go on in memory with what was written so far."""
        if not self.durable:
            raise error
        before = self._db
        if isinstance(error, sqlite3.OperationalError):
            self._db = self._in_memory(error)
            with contextlib.suppress(sqlite3.Error):
                _copy(before, self._db)
            before.close()
        else:
            before.close()
            self._db = self._begin_anew(error)

    def flush(self) -> None:
        """Write what is not written yet; called again and again while an upload runs."""
        if self._db.in_transaction and self._clock.monotonic() >= self._flush_due:
            self.write_all()

    def write_all(self) -> None:
        """Write what is not written yet, now."""
        if not self._db.in_transaction:
            return
        self._flush_due = self._clock.monotonic() + FLUSH_SECONDS
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._go_on_after(error)

    def _rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.DatabaseError as error:  # a page that opening it did not look at
            if not self.durable:
                raise
            self._db.close()
            self._db = self._begin_anew(error)
            return []

    def close(self) -> None:
        """Close the database."""
        self.write_all()
        self._db.close()

    # ---- saves

    def entry(self, save_id: str) -> Entry | None:
        """What is remembered of one save."""
        rows = self._rows("SELECT state, reason FROM saves WHERE save_id = ?", save_id)
        if not rows or rows[0][0] not in get_args(SaveState):
            return None
        return Entry(*rows[0])

    def set_state(self, save_id: str, state: SaveState, reason: str = "") -> None:
        """Remember the state of a save."""
        self._write("INSERT OR REPLACE INTO saves VALUES (?, ?, ?)", save_id, state, reason)
        self.write_all()

    def forget_work(self, save_id: str) -> None:
        """Forget uploads, parts and stored objects of a save that is decided."""
        for table in ("uploads", "parts", "stored"):
            self._write(f"DELETE FROM {table} WHERE save_id = ?", save_id)  # noqa: S608
        self.write_all()

    def forget(self, save_id: str) -> None:
        """Forget a save altogether."""
        self.forget_work(save_id)
        self._write("DELETE FROM saves WHERE save_id = ?", save_id)
        self.write_all()
        self._logs.pop(save_id, None)

    def save_ids(self) -> list[str]:
        """Every save that is remembered."""
        return [row[0] for row in self._rows("SELECT save_id FROM saves ORDER BY save_id")]

    def uploads(self, save_id: str) -> list[Upload]:
        """Unfinished uploads of a save."""
        rows = self._rows("SELECT key, token FROM uploads WHERE save_id = ?", save_id)
        return [Upload(key, token) for key, token in rows]

    def stored(self, save_id: str) -> tuple[int, list[str]]:
        """What is known to be stored of a save: bytes in parts, and keys of whole objects."""
        [(parts,)] = self._rows(
            "SELECT COALESCE(SUM(size), 0) FROM parts WHERE save_id = ?", save_id
        ) or [(0,)]
        whole = self._rows("SELECT key FROM stored WHERE save_id = ?", save_id)
        return parts, [row[0] for row in whole]

    def log(self, save_id: str) -> JournalLog:
        """The part of the journal that an upload of one save reads and writes."""
        return self._logs.setdefault(save_id, JournalLog(self, save_id))


def _let_group_in(path: str) -> None:
    """Let the agent of another user of the common group go on with it.

    SQLite gives the mode of the database to what it makes beside it. To be called while this
    process has no connection: closing any descriptor of a file takes SQLite's locks off it.
    """
    fs = Filesystem()
    with contextlib.suppress(OSError):  # which SQLite says
        if fs.stat(path) is None:
            os.close(fs.open_write(path))
    for ending in ("", "-wal", "-shm"):
        fs.let_group_in(path + ending)


def _copy(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Copy all that can be read; sqlite3 itself would wait without end for one that is locked.

    Raises:
        sqlite3.Error: it stays locked, or is damaged.
    """
    tries = 0

    def give_up(status: int, _remaining: int, _total: int) -> None:
        nonlocal tries
        tries += status in _LOCKED
        if tries > _COPY_TRIES:
            raise sqlite3.OperationalError("the database is locked")

    source.backup(target, progress=give_up, sleep=0.05)


class JournalLog:
    """The upload log of one save (:class:`ds_ckpt_store.transfer.upload.UploadLog`).

    It asks once which shards the journal knows at all, so that a new one of thousands costs one
    statement.
    """

    def __init__(self, journal: Journal, save_id: str) -> None:
        self._journal = journal
        self._save_id = save_id
        self._keys: set[str] | None = None

    def _known(self) -> set[str]:
        """Keys of which there may be something to read or to forget."""
        if self._keys is None:
            tables = ("uploads", "parts", "stored")
            parts = (f"SELECT key FROM {table} WHERE save_id=?" for table in tables)  # noqa: S608
            rows = self._journal._rows(" UNION ".join(parts), *[self._save_id] * len(tables))
            self._keys = {row[0] for row in rows}
        return self._keys

    def _rows(self, statement: str, key: str) -> list[tuple[Any, ...]]:
        if key not in self._known():
            return []
        return self._journal._rows(statement, self._save_id, key)

    def upload(self, key: str) -> tuple[Upload, int] | None:
        """The unfinished upload of a key and its part size in bytes."""
        rows = self._rows("SELECT token, part_size FROM uploads WHERE save_id=? AND key=?", key)
        return (Upload(key, rows[0][0]), rows[0][1]) if rows else None

    def begin(self, key: str, upload: Upload, part_size: int) -> None:
        """Remember a new upload; forgets parts of an earlier one."""
        self.forget(key)
        self._known().add(key)
        self._journal._write(
            "INSERT INTO uploads VALUES (?, ?, ?, ?)", self._save_id, key, upload.token, part_size
        )
        self._journal.write_all()

    def parts(self, key: str) -> list[Part]:
        """Parts that were stored, by number."""
        rows = self._rows(
            "SELECT number, size, crc32c, token FROM parts WHERE save_id=? AND key=? "
            "ORDER BY number",
            key,
        )
        return [Part(*row) for row in rows]

    def add_part(self, key: str, part: Part) -> None:
        """Remember a stored part."""
        self._known().add(key)
        self._journal._write(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?)",
            self._save_id,
            key,
            part.number,
            part.size,
            part.crc32c,
            part.token,
        )
        self._journal.flush()

    def forget(self, key: str) -> None:
        """Forget the upload of a key, its parts, and that it was stored."""
        if key not in self._known():
            return
        self._known().discard(key)
        for table in ("uploads", "parts", "stored"):
            self._journal._write(
                f"DELETE FROM {table} WHERE save_id=? AND key=?",  # noqa: S608
                self._save_id,
                key,
            )

    def stored(self, key: str) -> str | None:
        """Version of the object that was verified, or None."""
        rows = self._rows("SELECT version FROM stored WHERE save_id=? AND key=?", key)
        return rows[0][0] if rows else None

    def add_stored(self, key: str, version: str) -> None:
        """Remember a verified object; its upload is over."""
        self.forget(key)
        self._known().add(key)
        self._journal._write("INSERT INTO stored VALUES (?, ?, ?)", self._save_id, key, version)
        self._journal.flush()
