"""FTP as it needs to be done: fsspec's own calls take an answer that failed for an empty folder.

fsspec's ``ls`` and ``info`` answer "nothing there" when the connection for a listing could not be
made; a store that believed that would decide a save anew. Here MLSD and MLST are asked directly,
and files go in one stream instead of in many that are broken off.
"""

from __future__ import annotations

import contextlib
import ftplib
import io
from collections.abc import Iterator
from typing import Any

from ds_ckpt_store.stores.fsspec.access import PIECE, Entry, FolderAccess, call, pieces
from ds_ckpt_store.stores.port import Sink, Source

_BUFFERED = 4 * PIECE  # by the system and by TLS; a piece and its rest


class FtpAccess(FolderAccess):
    """One connection to one server, which must know MLST and MLSD (RFC 3659)."""

    renames = True

    @staticmethod
    def request_memory(block: int) -> int:
        """Few pieces."""
        del block
        return _BUFFERED

    def info(self, path: str) -> Entry:
        """By MLST."""
        try:
            answer = self.fs.ftp.sendcmd(f"MLST {path}")
        except ftplib.error_perm as error:
            if _is_550(error):
                raise FileNotFoundError(f"{error}: {path}") from None
            raise
        lines = answer.split("\n")
        if len(lines) < 3:
            raise OSError(f"no facts of {path} in {answer!r}")
        return _entry(path, dict(_facts(lines[1].lstrip(" ").partition(" ")[0])))

    def modified(self, path: str) -> Any:
        """MLST has told what there is to tell."""
        del path

    def entries(self, folder: str) -> list[Entry]:
        """By MLSD."""
        try:
            found = list(self.fs.ftp.mlsd(folder))
        except ftplib.error_perm as error:
            raise self._why(error, folder) from None
        return [
            _entry(f"{folder.rstrip('/')}/{name}", facts)
            for name, facts in found
            if facts.get("type", "").lower() not in ("cdir", "pdir")
        ]

    def _why(self, error: ftplib.error_perm, path: str) -> Exception:
        """What a refusal means: servers say 550 for what is not there and for what is forbidden."""
        if not self._is_there(path):
            return FileNotFoundError(f"{error}: {path}")
        return PermissionError(f"{error}: {path}") if _is_550(error) else error

    def _is_there(self, path: str) -> bool:
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def read(self, path: str, offset: int, length: int, sink: Sink) -> int:
        """By RETR; afterwards the connection is of use only if that was all of the file."""
        ftp = self.fs.ftp
        ftp.voidcmd("TYPE I")
        buffer = memoryview(bytearray(min(PIECE, max(length, 1))))
        done = 0
        self.spent = True  # an answer is owed from here on
        with contextlib.closing(self._retrieve(path, offset)) as connection:
            while done < length:
                count = connection.recv_into(buffer[: length - done])
                if count == 0:
                    break
                call(sink, buffer[:count])
                done += count
            at_end = done < length or not connection.recv(1)
        if at_end:  # else servers answer variously, since the rest was not taken
            ftp.voidresp()
            self.spent = False
        return done

    def _retrieve(self, path: str, offset: int) -> Any:
        try:
            return self.fs.ftp.transfercmd(f"RETR {path}", offset or None)
        except ftplib.error_perm as error:
            raise self._why(error, path) from None

    def write(self, path: str, source: Source) -> None:
        """By one STOR."""
        self.spent = True
        try:
            self.fs.ftp.storbinary(f"STOR {path}", _Reader(pieces(source)), blocksize=PIECE)
        except ftplib.error_perm as error:  # an answer, so none is owed any more
            self.spent = False
            raise self._why(error, path.rpartition("/")[0]) from None
        self.spent = False

    def rename(self, old: str, new: str) -> None:
        """By RNFR and RNTO; where a server does not replace, what is there is removed first."""
        try:
            self.fs.ftp.rename(old, new)
        except ftplib.error_perm:
            if not self._is_there(new) or not self._is_there(old):
                raise
            self.fs.ftp.delete(new)
            self.fs.ftp.rename(old, new)

    def remove(self, path: str) -> None:
        """By DELE."""
        try:
            self.fs.ftp.delete(path)
        except ftplib.error_perm as error:
            raise self._why(error, path) from None

    def make_folders(self, path: str) -> None:
        """By MKD, from the uppermost that is not there."""
        lacking = []
        folder = path
        while folder and not self._is_there(folder):
            lacking.append(folder)
            folder = folder.rpartition("/")[0]
        for folder in reversed(lacking):
            try:
                self.fs.ftp.mkd(folder)
            except ftplib.error_perm:
                if not self._is_there(folder):  # or another thread was faster
                    raise


class _Reader(io.RawIOBase):
    """What ``storbinary`` reads from."""

    def __init__(self, source: Iterator[bytes]) -> None:
        super().__init__()
        self._source = source

    def read(self, size: int | None = -1) -> bytes:
        """The next piece."""
        del size
        return next(self._source, b"")


def _is_550(error: ftplib.error_perm) -> bool:
    return str(error).startswith("550")


def _facts(text: str) -> Iterator[tuple[str, str]]:
    for fact in text.rstrip(";").split(";"):
        name, _, value = fact.partition("=")
        yield name.lower(), value


def _entry(path: str, facts: dict[str, str]) -> Entry:
    kind = facts.get("type", "").lower()
    is_folder = kind in ("dir", "cdir", "pdir")
    entry: Entry = dict(facts)
    entry["name"] = path
    entry["type"] = "directory" if is_folder else "file" if kind == "file" else "other"
    entry["size"] = int(facts["size"]) if facts.get("size", "").isdecimal() else None
    return entry
