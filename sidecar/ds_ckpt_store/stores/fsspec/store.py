"""The store over any file system of fsspec, with the weakest promises that are of use.

What a reader sees while an object is written: where a rename replaces (files of this machine, FTP,
SFTP), the old object and then the new one, whole, because the bytes go to a temporary name first.
In object stores the same, because a request or a commit makes the object. Elsewhere perhaps a part
of it: the uploader reads a shard back before it says that it is stored, and documents are JSON,
which a beginning of it is not.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ds_ckpt_store.contract.clock import fresh_token, system_random
from ds_ckpt_store.errors import (
    AccessError,
    CkptError,
    CorruptionError,
    NotFoundError,
    RefusedError,
    StoreError,
    TransientError,
)
from ds_ckpt_store.stores.fsspec.access import (
    Access,
    Entry,
    ForeignError,
    ShortSourceError,
    is_folder,
    is_shared,
)
from ds_ckpt_store.stores.fsspec.answers import translate
from ds_ckpt_store.stores.fsspec.facts import modified_of, seconds, version_of
from ds_ckpt_store.stores.fsspec.instances import Instances, access_class
from ds_ckpt_store.stores.fsspec.options import FsspecOptions
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

TEMPORARY = ".ds_ckpt-tmp"  # as in a folder of file://, which keeps its lock there
SUFFIX = ".whole"
LEFTOVER_SECONDS = 24 * 3600.0
ANY_SIZE = 1 << 62
MAX_BLOCKS = 10_000  # S3's number of parts; others allow more


class FsspecStore:
    """One folder of a file system.

    Args:
        options: which, and how to open it.
        rng: names temporary files.
    """

    def __init__(self, options: FsspecOptions, *, rng: random.Random | None = None) -> None:
        self._options = options
        self._root = options.root
        self._rng = rng or system_random()
        self._access = access_class(options)
        self._instances = Instances(options)
        self._making = threading.Lock()
        self._made: set[str] = set()
        self._cleared = False

    # ---- what it is

    @property
    def url(self) -> str:
        """As the user wrote it."""
        return self._options.url

    @property
    def capabilities(self) -> Capabilities:
        """No conditions, no parts, no checksums."""
        size = ANY_SIZE if self._access.renames else MAX_BLOCKS * self._options.block
        return Capabilities(
            conditional_create=False,
            swap=False,
            parts=False,
            resumable=False,
            request_memory=self._access.request_memory(self._options.block),
            proofs=(Proof.READ_BACK,),
            limits=Limits(min_part=1, max_object=size, max_put=size),
        )

    @property
    def proof(self) -> Proof:
        """Always READ_BACK."""
        return Proof.READ_BACK

    def use_proof(self, proof: Proof) -> None:
        """READ_BACK is the only one."""
        if proof is not Proof.READ_BACK:
            raise RefusedError("use_proof", "", f"{self.url} cannot give {proof.value}")

    def refuses_corruption(self, proof: Proof, key: str) -> bool:
        """Only reading back shows anything."""
        del key
        return proof is Proof.READ_BACK

    def credentials_expiry(self) -> float | None:
        """None: fsspec does not tell."""
        return None

    def close(self) -> None:
        """Let go of connections."""
        self._instances.close()

    # ---- objects

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Write a file whole; a condition is refused, never ignored."""
        if condition is not None:
            raise RefusedError("put", key, f"{self.url} knows no conditional writes")
        limit = self.capabilities.limits.max_put
        if source.size > limit:
            raise RefusedError(
                "put",
                key,
                f"has {source.size} bytes, of at most {limit} in blocks of {self._options.block}; "
                f"set DS_CKPT_FSSPEC_BLOCK_MIB higher",
            )
        path = self._path("put", key)
        with self._using("put", key, write=True) as access:
            try:
                if self._access.renames:
                    return self._put_by_rename(access, key, path, source)
                self._need_folder(access, path)
                self._write(access, path, source)
                return self._written(access, key, path, source)
            except ShortSourceError as error:
                raise CorruptionError(
                    "put", key, f"the source gave {error.count} of its {source.size} bytes"
                ) from None

    def _write(self, access: Access, path: str, source: Source) -> None:
        """Write in place; of a kind unknown here, a folder below one that is there may be lacking.

        No folder above that is made: in an object store it might become a bucket.
        """
        try:
            access.write(path, source)
        except FileNotFoundError:
            if access.folders or is_shared(self._options.kind):
                raise
            access.info(self._root)
            access.make_folders(path.rpartition("/")[0])
            access.write(path, source)

    def _put_by_rename(self, access: Access, key: str, path: str, source: Source) -> ObjectInfo:
        temporary = f"{self._root}/{TEMPORARY}/{fresh_token(self._rng)}{SUFFIX}"
        self._need_folder(access, temporary)
        self._need_folder(access, path)
        try:
            access.write(temporary, source)
            info = self._written(access, key, temporary, source)
            self._refuse_folder(access, key, path)
            access.rename(temporary, path)
        except BaseException:
            self._drop(access, temporary)
            raise
        if not self._cleared:
            self._cleared = True
            self._clear_up(access, info.modified)
        return info

    def _drop(self, access: Access, temporary: str) -> None:
        """Remove a file that did not become an object; if that fails, a later start does."""
        with contextlib.suppress(Exception):
            able = self._instances.take() if access.spent else access
            able.remove(temporary)
            if able is not access:
                self._instances.give_back(able)

    @staticmethod
    def _refuse_folder(access: Access, key: str, path: str) -> None:
        """Else a file might be moved into it."""
        with contextlib.suppress(FileNotFoundError):
            if is_folder(access.info(path)):
                raise RefusedError("put", key, "there is a folder of that name")

    def _written(self, access: Access, key: str, path: str, source: Source) -> ObjectInfo:
        entry = access.info(path)
        if entry.get("size") != source.size:
            raise TransientError(
                "put", key, f"holds {entry.get('size')} of the {source.size} bytes that were sent"
            )
        return self._info(access, key, path, entry)

    def _clear_up(self, access: Access, now: float) -> None:
        """Remove what killed processes left; what is being written is not a day old."""
        with contextlib.suppress(Exception):
            for entry in access.entries(f"{self._root}/{TEMPORARY}"):
                modified = modified_of(entry)
                ours = str(entry["name"]).endswith(SUFFIX)
                if ours and modified and modified + LEFTOVER_SECONDS < now:
                    access.remove(str(entry["name"]))

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Read a file whole. What is told of it is from before, so never newer than the bytes."""
        found = bytearray()
        with self._using("get", key) as access:
            path, info = self._find(access, "get", key)
            count = access.read(path, 0, info.size, found.extend) if info.size else 0
        if count != info.size:
            raise TransientError("get", key, f"ended after {count} of {info.size} bytes")
        return bytes(found), info

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """Read a range in views of at most 1 MiB."""
        with self._using("read", key) as access:
            path, info = self._find(access, "read", key)
            if info.size < offset + length:
                raise CorruptionError(
                    "read", key, f"has {info.size} bytes, {offset + length} were expected"
                )
            count = access.read(path, offset, length, sink) if length else 0
        if count != length:
            raise TransientError("read", key, f"ended after {count} of {length} bytes")

    def head(self, key: str) -> ObjectInfo:
        """What the file system says of a file."""
        with self._using("head", key) as access:
            return self._find(access, "head", key)[1]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All files below the prefix's folder, sorted here."""
        with self._using("list", prefix) as access:
            found = [info for info in self._walk(access, prefix) if info.key.startswith(prefix)]
        yield from sorted(found, key=lambda info: info.key.encode())

    def _walk(self, access: Access, prefix: str) -> Iterator[ObjectInfo]:
        waiting = [prefix.rpartition("/")[0]]
        while waiting:
            folder = waiting.pop()
            path = f"{self._root}/{folder}" if folder else self._root
            try:
                entries = access.entries(path)
            except (FileNotFoundError, NotADirectoryError):
                self._need_parent(access, "list", prefix)
                continue
            for entry in entries:
                key = self._key(str(entry["name"]), path, folder)
                if not key or key.split("/")[0] == TEMPORARY:
                    continue
                if entry.get("type") == "file":
                    yield self._info(access, key, f"{self._root}/{key}", entry)
                elif is_folder(entry) and (
                    f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/")
                ):
                    waiting.append(key)

    @staticmethod
    def _key(name: str, path: str, folder: str) -> str:
        """Key of what was listed in a folder; empty if it does not lie there."""
        inside = path.strip("/") + "/"
        name = name.lstrip("/")
        if not name.startswith(inside):
            return ""
        rest = name[len(inside) :].rstrip("/")
        return f"{folder}/{rest}" if folder and rest else rest

    def delete(self, key: str) -> None:
        """Remove a file; folders that this empties stay, since not all remove only empty ones."""
        with contextlib.suppress(NotFoundError), self._using("delete", key, write=True) as access:
            access.remove(self._path("delete", key))

    # ---- multipart uploads: none

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """Refused."""
        del size, metadata
        raise self._no_parts("begin", key)

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        """Refused."""
        del number, source
        raise self._no_parts("put_part", upload.key)

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """Refused."""
        raise self._no_parts("parts", upload.key)

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """Refused."""
        del parts
        raise self._no_parts("complete", upload.key)

    def abort(self, upload: Upload) -> None:
        """Refused."""
        raise self._no_parts("abort", upload.key)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """There are none."""
        del prefix
        return iter(())

    def _no_parts(self, operation: str, key: str) -> RefusedError:
        return RefusedError(operation, key, f"{self.url} takes no uploads in parts")

    # ---- inner workings

    def _path(self, operation: str, key: str) -> str:
        components = key.split("/")
        if any(part in ("", ".", "..") for part in components) or _has_control(key):
            raise RefusedError(operation, key, "is no path below a folder")
        if components[0] == TEMPORARY:
            raise RefusedError(operation, key, f"{TEMPORARY} is the store's own")
        return f"{self._root}/{key}"

    def _find(self, access: Access, operation: str, key: str) -> tuple[str, ObjectInfo]:
        path = self._path(operation, key)
        entry = access.info(path)
        if entry.get("type") != "file":
            raise NotFoundError(operation, key, f"no regular file under {self.url}")
        if not isinstance(entry.get("size"), int):
            raise RefusedError(operation, key, f"{self.url} does not tell sizes")
        return path, self._info(access, key, path, entry)

    @staticmethod
    def _info(access: Access, key: str, path: str, entry: Entry) -> ObjectInfo:
        modified = modified_of(entry) or seconds(access.modified(path))
        return ObjectInfo(key, int(entry["size"]), version_of(entry), modified)

    def _need_parent(self, access: Access, operation: str, key: str) -> None:
        """A root without a parent is no empty store: a mount is missing, or a name is wrong."""
        parent = self._root.rpartition("/")[0]
        if not access.folders or not parent.strip("/") or self._made:
            return
        with contextlib.suppress(AccessError, PermissionError):
            try:
                access.info(parent)
            except FileNotFoundError:
                raise RefusedError(
                    operation,
                    key,
                    f"the destination does not exist: there is no folder {parent}; "
                    f"mount it, make it, or correct {self.url}",
                ) from None

    def _need_folder(self, access: Access, path: str) -> None:
        """Make the folder of a path, once. The root's parent is never made: it may be a mount."""
        folder = path.rpartition("/")[0]
        if not access.folders or folder in self._made:
            return
        self._need_parent(access, "put", path[len(self._root) + 1 :])
        with self._making:
            if folder not in self._made:
                access.make_folders(folder)
                self._made.add(folder)

    @contextlib.contextmanager
    def _using(self, operation: str, key: str, *, write: bool = False) -> Iterator[Access]:
        """An instance to work with, and its errors as ours."""
        try:
            access = self._instances.take()
        except CkptError:
            raise
        except Exception as error:
            self._instances.clear()
            raise self._translate(operation, key, error, write=False) from error
        try:
            yield access
        except ForeignError as error:
            raise error.error from None
        except (NotFoundError, CorruptionError, RefusedError):  # found here, between two calls
            self._instances.give_back(access)
            raise
        except CkptError:
            raise
        except Exception as error:
            ours = self._translate(operation, key, error, write=write)
            if isinstance(ours, NotFoundError):
                self._instances.give_back(access)
            elif isinstance(ours, TransientError):
                self._instances.clear()
            raise ours from error
        else:
            self._instances.give_back(access)

    def _translate(self, operation: str, key: str, error: Any, *, write: bool) -> StoreError:
        said = self._options.hide(str(error)) or "no reason"
        text = f"{self.url}: {type(error).__name__}: {said}"
        ours = translate(operation, key, error, text, write=write)
        if operation != "put" or not isinstance(ours, NotFoundError):
            return ours
        if self._access.folders:
            self._made.clear()  # somebody removed a folder: make it again
            return TransientError("put", key, text)
        return RefusedError("put", key, f"{text}; make the bucket or container, or the folder")


def _has_control(text: str) -> bool:
    """Whether it holds characters that would end a line of a protocol."""
    return any(ord(character) < 32 or ord(character) == 127 for character in text)


def _may_hold(folder: str, prefix: str) -> bool:
    """Whether keys with a prefix may lie in a folder, which is given with its slash."""
    return folder.startswith(prefix) or prefix.startswith(folder)
