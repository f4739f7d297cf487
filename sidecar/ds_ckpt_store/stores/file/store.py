"""The port over one folder."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import unquote, urlsplit

from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.clock import system_random
from ds_ckpt_store.errors import (
    CorruptionError,
    RefusedError,
    SettingsError,
    TransientError,
)
from ds_ckpt_store.stores.file.answers import info_of
from ds_ckpt_store.stores.file.copying import READ_AGAIN, Copier, leave_cache
from ds_ckpt_store.stores.file.folder import Folder
from ds_ckpt_store.stores.file.trial import shows_what_is_written
from ds_ckpt_store.stores.file.uploads import Uploads
from ds_ckpt_store.stores.port import (
    Capabilities,
    Condition,
    Limits,
    ObjectInfo,
    Part,
    Proof,
    Sink,
    Source,
    Upload,
)

ANY_SIZE = 1 << 62
_LIMITS = Limits(
    min_part=1, max_part=ANY_SIZE, max_parts=1_000_000, max_object=ANY_SIZE, max_put=ANY_SIZE
)
_PROOFS = (Proof.WRITTEN_CHECKSUM, Proof.READ_BACK)


class FileStore:
    """The store in one folder. The folder is made by the first write, its parent is not.

    Args:
        root: absolute path.
        rng: names temporary files.
    """

    def __init__(self, root: str, *, rng: random.Random | None = None) -> None:
        self._root = root
        self._folder = Folder(root, rng or system_random())
        self._copier = Copier()
        self._uploads = Uploads(self._folder, self._copier)
        self._proof = _PROOFS[0]

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
        return Capabilities(request_memory=READ_AGAIN, proofs=_PROOFS, limits=_LIMITS)

    @property
    def proof(self) -> Proof:
        """The proof that writes are made with."""
        return self._proof

    def use_proof(self, proof: Proof) -> None:
        """WRITTEN_CHECKSUM, or READ_BACK: then nothing is read again here."""
        if proof not in _PROOFS:
            raise RefusedError("use_proof", "", f"a folder cannot give {proof.value}")
        self._proof = proof

    def refuses_corruption(self, proof: Proof, key: str) -> bool:
        """Whether the checksums that come back are those of the bytes on the disk.

        A body with a wrong checksum of its own must come back with the right one; an upload of
        which another process changed a byte on the disk must not be completed.
        """
        if proof is Proof.READ_BACK:
            return True
        if proof not in _PROOFS:
            return False
        store, later = FileStore(self._root), FileStore(self._root)
        try:
            return shows_what_is_written(store, later, key, self._uploads.damage)
        finally:
            store.close()
            later.close()

    def credentials_expiry(self) -> float | None:
        """None: there are no credentials."""
        return None

    def close(self) -> None:
        """Close the files of unfinished uploads."""
        self._uploads.close()

    # ---- objects

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Write to a temporary file, read it again, sync it, and publish it."""
        with self._folder.errors("put", key):
            self._folder.path("put", key)
            self._folder.prepare("put", key)
            with self._folder.temporary_file() as (fd, temporary):
                count, checksum = self._copier.copy(
                    source, fd, 0, threading.Lock(), read_again=self._reads_again
                )
                if count != source.size:
                    raise CorruptionError(
                        "put", key, f"the source gave {count} of its {source.size} bytes"
                    )
                os.fsync(fd)
                self._folder.publish("put", key, fd, temporary, condition)
                leave_cache(fd, count)
                return info_of(key, os.fstat(fd), checksum)

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Read a file whole."""
        with self._folder.errors("get", key), self._folder.opened("get", key) as file:
            return file.read(), info_of(key, os.fstat(file.fileno()))

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """Read a range in views of 1 MiB."""
        with self._folder.errors("read", key), self._folder.opened("read", key) as file:
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
        """What the folder says of a file: no checksum, as none is stored."""
        with self._folder.errors("head", key), self._folder.opened("head", key) as file:
            return info_of(key, os.fstat(file.fileno()))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Walk the tree in order of key; files that vanish meanwhile are left out."""
        with self._folder.errors("list", prefix):
            if self._folder.require("list", prefix):
                yield from self._folder.walk("", prefix)

    def delete(self, key: str) -> None:
        """Unlink, and remove the folders that this empties."""
        with self._folder.errors("delete", key):
            self._folder.remove("delete", key)

    # ---- multipart uploads

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """Start an upload.

        Args:
            key: of the object to be.
            size: bytes of the whole.
            metadata: ``part_size`` says how many bytes every part but the last has; without it
                there is one part.
        """
        with self._folder.errors("begin", key):
            return self._uploads.begin(key, size, metadata)

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        """Write a part at its offset, read it again, and note that it is there.

        Nothing is synced yet: :meth:`complete` syncs the whole.
        """
        with self._folder.errors("put_part", upload.key):
            return self._uploads.put_part(upload, number, source, read_again=self._reads_again)

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """The parts noted so far; of a part sent twice, the later."""
        with self._folder.errors("parts", upload.key):
            return self._uploads.parts(upload)

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """Sync, read again what another process has written, and publish.

        Raises:
            NotFoundError: the upload is gone.
            CorruptionError: a part is not held, or was changed on the disk.
            TransientError: the disk did not take what was written. The upload is gone then, since
                nobody can tell which of its bytes were lost: begin anew.
        """
        with self._folder.errors("complete", upload.key):
            return self._uploads.complete(upload, parts, read_again=self._reads_again)

    def abort(self, upload: Upload) -> None:
        """Remove data and list."""
        with self._folder.errors("abort", upload.key):
            self._uploads.abort(upload)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Uploads that were begun and neither completed nor aborted."""
        with self._folder.errors("uploads", prefix):
            yield from self._uploads.uploads(prefix)

    @property
    def _reads_again(self) -> bool:
        return self._proof is Proof.WRITTEN_CHECKSUM
