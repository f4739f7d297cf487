"""``az://``: Azure's blob service, by azure-storage-blob.

What is taken from the SDK is signing, credentials, connections and parsing. What is not: its
chunked upload (its block ids are random, so it cannot resume), its chunked download (it holds each
chunk in memory) and its retries (``RetryStore`` does that for every store).

Azure knows no upload as a thing of its own: a blob has blocks that were sent and not yet made part
of it. What is an upload here is a nonce in the ids of its blocks (:mod:`.blocks`). Any write of the
blob drops all blocks that it does not name, also those of other uploads of the same blob; the
service drops them too, a week after the last one came (by its documentation).

The service checks the CRC64 or MD5 of each body that it receives, and keeps no checksum. So the
CRC32C of an object is our own claim, in its metadata: written by the very request that makes the
object of blocks whose bytes were checked, and only if all were. It changes only with the object.
"""

from __future__ import annotations

import base64
import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from azure.storage.blob import BlobBlock, BlobClient, BlobProperties, BlockState

from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.clock import fresh_token, system_random
from ds_ckpt_store.errors import (
    CorruptionError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    StoreError,
    TransientError,
)
from ds_ckpt_store.stores import STALL_SECONDS
from ds_ckpt_store.stores.azure.blocks import MARK, Block, Examined, check
from ds_ckpt_store.stores.azure.calls import WHOLE_IN_MEMORY, Calls, matching
from ds_ckpt_store.stores.azure.options import AzureOptions
from ds_ckpt_store.stores.azure.rules import Reader
from ds_ckpt_store.stores.body import Body
from ds_ckpt_store.stores.port import (
    BytesSource,
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
from ds_ckpt_store.stores.rules import BucketRules

PROOFS = (Proof.CONTENT_CRC64, Proof.CONTENT_MD5, Proof.READ_BACK)
LIMITS = Limits(
    min_part=1,
    max_part=4000 << 20,
    max_parts=50_000,
    max_object=50_000 * (4000 << 20),
    max_put=4000 << 20,
)
PAGE = 500  # blobs that a page of a listing holds in memory, with their metadata

_CRC32C = "crc32c"
_PROOF = "proof"
_ABORTED = "aborted"
_CHECKED = (Proof.CONTENT_CRC64.value, Proof.CONTENT_MD5.value)
# Metadata of a folder of an account with a hierarchical namespace, which is listed like a blob.
_FOLDER = "hdi_isfolder"


class AzureStore:
    """One prefix of one container.

    Args:
        options: where it is, who we are, how objects are stored.
        stall_seconds: a connection on which nothing moves for so long is given up.

    Raises:
        SettingsError: the SDK cannot work with the options.
    """

    def __init__(self, options: AzureOptions, stall_seconds: float = STALL_SECONDS) -> None:
        self._options = options
        self._root = options.prefix + "/" if options.prefix else ""
        self._proof = PROOFS[0]
        self._calls = Calls(options, stall_seconds)
        self._rng = system_random()
        self._lock = threading.Lock()
        self._alive: set[str] = set()  # nonces of uploads that were seen to be there
        self._given_up: dict[str, set[str]] = {}  # by key: aborted, and not yet dropped

    # ---- what it is

    @property
    def url(self) -> str:
        """As it was opened."""
        return self._options.url

    @property
    def capabilities(self) -> Capabilities:
        """What Azure promises; the probe finds out what this server does."""
        return Capabilities(
            request_memory=WHOLE_IN_MEMORY + (256 << 10), proofs=PROOFS, limits=LIMITS
        )

    @property
    def proof(self) -> Proof:
        """The proof in use."""
        return self._proof

    def use_proof(self, proof: Proof) -> None:
        """Make later writes with this proof."""
        self._proof = proof

    def credentials_expiry(self) -> float | None:
        """Of the shared access signature, or of the identity's token."""
        return self._calls.credentials.expiry()

    def close(self) -> None:
        """Close the pool of connections."""
        self._calls.container.close()

    # ---- objects

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Put Blob, or one block and its commit, with If-None-Match or If-Match."""
        proof = self._proof
        examined = check(source, proof)
        if examined.crc32c != source.crc32c:
            raise CorruptionError("put", key, "the bytes changed while they were examined")
        return self._put(proof, key, source, examined, condition)

    def _put(
        self,
        proof: Proof,
        key: str,
        source: Source,
        examined: Examined,
        condition: Condition = None,
    ) -> ObjectInfo:
        metadata = {_CRC32C: digest.to_hex(examined.crc32c), _PROOF: proof.value}
        if source.size <= WHOLE_IN_MEMORY:
            data = _whole(source)
            with self._conditional(key, condition), self._calls.errors("put", key, write=True):
                answer = self._blob(key).upload_blob(
                    data,
                    length=len(data),
                    overwrite=True,
                    metadata=metadata,
                    headers=examined.headers,
                    **self._calls.making(key),
                    **matching(condition),
                )
        else:
            block = Block(fresh_token(self._rng), 1, proof, examined.crc32c)
            self._stage("put", key, block, source, examined.headers)
            with self._conditional(key, condition):
                answer = self._commit("put", key, [block.name], metadata, condition)
        crc = _claimed(metadata)
        return ObjectInfo(key, source.size, answer["etag"], 0.0, crc)

    @contextlib.contextmanager
    def _conditional(self, key: str, condition: Condition) -> Iterator[None]:
        try:
            yield
        except NotFoundError as error:
            if not isinstance(condition, IfVersion):
                raise
            # With If-Match, 404 says that there is no blob to match.
            raise PreconditionError("put", key, error.answer) from error

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Get Blob, whole."""
        found: list[tuple[bytes, ObjectInfo]] = []

        def receive(headers: Mapping[str, str], pieces: Iterator[bytes]) -> None:
            data = b"".join(pieces)
            modified = parsedate_to_datetime(headers["Last-Modified"]).timestamp()
            crc = _claimed(_metadata(headers))
            found.append((data, ObjectInfo(key, len(data), headers["ETag"], modified, crc)))

        self._receive("get", key, receive)
        return found[-1]

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """Get Blob with a range, handed on as it comes; it must be the range asked for."""
        if length == 0:
            self.head(key)
            return
        last = offset + length - 1

        def receive(headers: Mapping[str, str], pieces: Iterator[bytes]) -> None:
            given = headers.get("Content-Range", "")
            if not given.startswith(f"bytes {offset}-{last}/"):
                raise CorruptionError(
                    "read",
                    key,
                    f"asked for bytes {offset}-{last}, got {given or 'the whole object'}",
                )
            left = length
            for piece in pieces:
                sink(memoryview(piece))
                left -= len(piece)
            if left:
                raise TransientError("read", key, f"ended {left} bytes early")

        self._receive("read", key, receive, offset=offset, length=length)

    def _receive(
        self,
        operation: str,
        key: str,
        receive: Callable[[Mapping[str, str], Iterator[bytes]], None],
        **which: int,
    ) -> None:
        """One GET, whose body is handed to ``receive`` as it comes.

        The SDK's own reader would hold the range in memory and ask again for what is missing, so
        the body is taken where the SDK shows each answer, and the SDK's reader is left by an
        exception.
        """

        def hook(response: Any) -> None:
            answer = response.http_response
            if answer.status_code not in (200, 206):
                return
            try:
                if _FOLDER in _metadata(answer.headers):
                    raise NotFoundError(operation, key, "is a folder")
                receive(answer.headers, answer.iter_raw())
            finally:
                answer.close()
            raise _Received

        with contextlib.suppress(_Received), self._calls.errors(operation, key):
            self._blob(key).download_blob(raw_response_hook=hook, **self._calls.with_key(), **which)

    def head(self, key: str) -> ObjectInfo:
        """Get Blob Properties; the CRC32C is what we claimed when we committed checked blocks."""
        with self._calls.errors("head", key):
            found = self._blob(key).get_blob_properties(**self._calls.with_key())
        if _FOLDER in (found.metadata or {}):
            raise NotFoundError("head", key, "is a folder")
        return self._info(key, found)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List Blobs over all pages; sorted here, by the bytes of the key."""
        found = [self._info(key, blob) for key, blob in self._listed("list", prefix, "metadata")]
        yield from sorted(found, key=lambda info: info.key.encode())

    def _listed(
        self, operation: str, prefix: str, *include: str
    ) -> Iterator[tuple[str, BlobProperties]]:
        with self._calls.errors(operation, prefix):
            pages = self._calls.container.list_blobs(
                name_starts_with=self._root + prefix, include=[*include], results_per_page=PAGE
            )
            for blob in pages:
                if _FOLDER not in (blob.metadata or {}):
                    yield blob.name.removeprefix(self._root), blob

    def delete(self, key: str) -> None:
        """Delete Blob, with its snapshots."""
        with contextlib.suppress(NotFoundError), self._calls.errors("delete", key, write=True):
            self._blob(key).delete_blob(delete_snapshots="include")

    def _blob(self, key: str) -> BlobClient:
        return self._calls.blob(self._root + key)

    @staticmethod
    def _info(key: str, found: BlobProperties) -> ObjectInfo:
        etag = found.etag if found.etag.startswith('"') else f'"{found.etag}"'
        crc = _claimed(found.metadata or {})
        return ObjectInfo(key, found.size, etag, found.last_modified.timestamp(), crc)

    # ---- multipart uploads

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """Put Block of a mark; a token is the nonce. What metadata says, the blocks say too."""
        del size, metadata
        return self._begin(self._proof, key)

    def _begin(self, proof: Proof, key: str) -> Upload:
        mark = BytesSource(b"An upload was begun.")
        block = Block(fresh_token(self._rng), MARK, proof, mark.crc32c)
        self._stage("begin", key, block, mark, check(mark, proof).headers)
        with self._lock:
            self._alive.add(block.nonce)
        return Upload(key, block.nonce)

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        """Put Block; a part's token is the block's id, its CRC32C that of the bytes examined.

        The service takes blocks for any nonce. So whether an upload that this process did not
        begin is still there is asked once, before its first block.
        """
        with self._lock:
            alive = upload.token in self._alive
        if not alive:
            self.parts(upload)
        return self._put_part(self._proof, upload, number, source)

    def _put_part(self, proof: Proof, upload: Upload, number: int, source: Source) -> Part:
        examined = check(source, proof)
        block = Block(upload.token, number, proof, examined.crc32c)
        self._stage("put_part", upload.key, block, source, examined.headers)
        return Part(number, source.size, block.crc32c, block.name)

    def _stage(
        self, operation: str, key: str, block: Block, source: Source, headers: Mapping[str, str]
    ) -> None:
        with (
            contextlib.closing(Body(source)) as body,
            self._calls.errors(operation, key, write=True),
        ):
            answer = self._blob(key).stage_block(
                block.name,
                body,
                length=source.size,
                headers=dict(headers),
                **self._calls.encryption(),
            )
        sent = headers.get("x-ms-content-crc64")
        told = answer.get("content_crc64")
        if sent and told and base64.b64encode(told).decode() != sent:
            raise CorruptionError(operation, key, "the service computed another CRC64")

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """The blocks that were sent for an upload, with a proof as good as the one in use."""
        found = {}
        for block, size in self._of(upload, self._uncommitted("parts", upload.key)):
            if block.number != MARK and block.is_checked_as(self._proof):
                found[block.number] = (size, block.name)
        return found

    def _of(
        self, upload: Upload, blocks: Sequence[tuple[Block, int]]
    ) -> Sequence[tuple[Block, int]]:
        own = [(block, size) for block, size in blocks if block.nonce == upload.token]
        with self._lock:
            gone = not own or upload.token in self._given_up.get(upload.key, ())
            if gone:
                self._alive.discard(upload.token)
            else:
                self._alive.add(upload.token)
        if gone:
            raise NotFoundError("parts", upload.key, f"no blocks of the upload {upload.token}")
        return own

    def _uncommitted(self, operation: str, key: str) -> Sequence[tuple[Block, int]]:
        """Blocks of ours that are no part of a blob; none if there is no such blob."""
        try:
            with self._calls.errors(operation, key):
                _, listed = self._blob(key).get_block_list("uncommitted")
        except NotFoundError:
            return ()
        blocks = ((Block.parse(item.id), item.size) for item in listed)
        return [(block, size) for block, size in blocks if block is not None]

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """Put Block List of exactly these blocks, with the whole's CRC32C in the metadata."""
        proof = self._proof
        numbers = [part.number for part in parts]
        if not parts or numbers != sorted(set(numbers)):
            self.parts(upload)
            raise RefusedError("complete", upload.key, "no parts, or not in ascending order")
        for part in parts:
            block = Block.parse(part.token)
            expected = (upload.token, part.number, part.crc32c)
            if block is None or (block.nonce, block.number, block.crc32c) != expected:
                raise CorruptionError(
                    "complete", upload.key, f"part {part.number} is not the block {part.token!r}"
                )
            if not block.is_checked_as(proof):
                raise CorruptionError(
                    "complete", upload.key, f"part {part.number} was sent without a checksum"
                )
        whole = digest.combine_all((part.crc32c, part.size) for part in parts)
        metadata = {
            _CRC32C: digest.to_hex(whole),
            _PROOF: proof.value,
            "partsize": str(parts[0].size),
        }
        try:
            answer = self._commit("complete", upload.key, [part.token for part in parts], metadata)
        except CorruptionError:
            self.parts(upload)  # raises NotFoundError if the upload is gone
            raise
        with self._lock:
            self._alive.discard(upload.token)
            self._given_up.pop(upload.key, None)
        size = sum(part.size for part in parts)
        return ObjectInfo(upload.key, size, answer["etag"], 0.0, _claimed(metadata))

    def _commit(
        self,
        operation: str,
        key: str,
        names: Sequence[str],
        metadata: dict[str, str],
        condition: Condition = None,
    ) -> Mapping[str, Any]:
        with self._calls.errors(operation, key, write=True):
            answer: Mapping[str, Any] = self._blob(key).commit_block_list(
                [BlobBlock(name, BlockState.UNCOMMITTED) for name in names],
                metadata=metadata,
                validate_content=True,
                **self._calls.making(key),
                **matching(condition),
            )
        return answer

    def abort(self, upload: Upload) -> None:
        """Drop the blocks if no other upload of the blob has any; otherwise leave them.

        Azure drops blocks only with a write of the blob, which drops all. So an empty blob is
        made, if there is none, and deleted again. Where other uploads have blocks, or there is a
        blob, ours are left: they are in no upload of this process any more, the next write of the
        blob drops them, and the service does so within a week.
        """
        key = upload.key
        with self._lock:
            self._alive.discard(upload.token)
            given_up = self._given_up.setdefault(key, set())
            given_up.add(upload.token)
        present = {block.nonce for block, _ in self._uncommitted("abort", key)}
        try:
            with self._calls.errors("abort", key):
                blob = self._blob(key).get_blob_properties(**self._calls.with_key())
        except NotFoundError:
            if present and present <= given_up:
                self._drop_blocks(key)
                present = set()
        else:
            if _ABORTED in (blob.metadata or {}):  # of an earlier call, whose answer was lost
                self._delete_if("abort", key, blob.etag)
        if not present:
            with self._lock:
                self._given_up.pop(key, None)

    def _drop_blocks(self, key: str) -> None:
        try:
            answer = self._commit("abort", key, [], {_ABORTED: "true"}, IfAbsent())
        except PreconditionError:
            return  # somebody made the blob, which dropped the blocks; it stays
        self._delete_if("abort", key, answer["etag"])

    def _delete_if(self, operation: str, key: str, etag: str) -> None:
        with (
            contextlib.suppress(NotFoundError, PreconditionError),
            self._calls.errors(operation, key, write=True),
        ):
            self._blob(key).delete_blob(delete_snapshots="include", **matching(IfVersion(etag)))

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Nonces of the blocks of blobs that nothing was committed to.

        Blocks beside a blob that exists are not found: nothing can drop them but a write of it.
        """
        for key, blob in self._listed("uploads", prefix, "uncommittedblobs", "metadata"):
            if blob.size:
                continue
            nonces = {block.nonce for block, _ in self._uncommitted("uploads", key)}
            with self._lock:
                nonces -= self._given_up.get(key, set())
            for nonce in sorted(nonces):
                yield Upload(key, nonce)

    # ---- beside the port, for whoever looks for what is wrong

    def rules(self) -> BucketRules:
        """See :mod:`~ds_ckpt_store.stores.rules`."""
        return Reader(self._options, self._calls).read()

    def credentials(self) -> str:
        """What kind of credentials the settings name."""
        return self._calls.credentials.source

    # ---- the proof of a proof

    def refuses_corruption(self, proof: Proof, key: str) -> bool:
        """Send bodies whose first byte is changed after their checksum was made."""
        if proof is Proof.READ_BACK:
            return True
        right, wrong = BytesSource(b"a small object"), BytesSource(b"A small object")
        self._put(Proof.READ_BACK, key, right, check(right, Proof.READ_BACK))  # may we write?
        examined = check(right, proof)
        upload = Upload(key, fresh_token(self._rng))
        block = Block(upload.token, 1, proof, examined.crc32c)
        try:
            self._put(proof, key, right, examined)
            self._stage("put_part", key, block, right, examined.headers)
            return _refused(lambda: self._put(proof, key, wrong, examined)) and _refused(
                lambda: self._stage("put_part", key, block, wrong, examined.headers)
            )
        except (CorruptionError, RefusedError, NotFoundError):
            return False  # what is right was refused: this proof is not for this server
        finally:
            with contextlib.suppress(StoreError):
                self.delete(key)
                self.abort(upload)


class _Received(Exception):  # noqa: N818
    """The body was received; nothing is left to do for the SDK."""


def _metadata(headers: Mapping[str, str]) -> dict[str, str]:
    names_and_values = ((name.lower(), value) for name, value in headers.items())
    start = "x-ms-meta-"
    return {
        name.removeprefix(start): value
        for name, value in names_and_values
        if name.startswith(start)
    }


def _whole(source: Source) -> bytes:
    """The bytes of a small source, in memory once."""
    buffer = io.BytesIO()
    with contextlib.closing(Body(source)) as body:
        while piece := body.read():
            buffer.write(piece)
    return buffer.getvalue()


def _claimed(metadata: Mapping[str, str]) -> int | None:
    """CRC32C of the whole, if we committed it, of bytes that the service had checked."""
    if metadata.get(_PROOF) not in _CHECKED:
        return None
    try:
        return digest.from_hex(metadata.get(_CRC32C, ""))
    except ValueError:
        return None


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except (CorruptionError, RefusedError):
        return True
    return False
