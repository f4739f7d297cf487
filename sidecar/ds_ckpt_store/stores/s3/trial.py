"""Does this server refuse bodies that do not match their checksum? Tried for real."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ds_ckpt_store.contract import digest
from ds_ckpt_store.errors import (
    AccessError,
    CorruptionError,
    NotFoundError,
    RefusedError,
    StoreError,
)
from ds_ckpt_store.stores.port import BytesSource, Part, Proof, Source, Upload
from ds_ckpt_store.stores.s3.clients import Clients

if TYPE_CHECKING:
    from ds_ckpt_store.stores.s3.store import S3Store

# Two parts, so that a whole's checksum differs from that of its only part.
_FIRST, _SECOND = 5 << 20, b"the second part"


class Trial:
    """One trial of one proof.

    Args:
        store: to try.
        clients: its clients.
        proof: that it may have.
        key: to write under; removed afterwards.
    """

    def __init__(self, store: S3Store, clients: Clients, proof: Proof, key: str) -> None:
        self._store = store
        self._clients = clients
        self._proof = proof
        self._key = key
        self._uploads: list[Upload] = []

    def passed(self) -> bool:
        """Whether bodies are refused whose first byte is changed after their checksum was made."""
        if self._proof is Proof.READ_BACK:
            return True
        store = self._store
        # May we write at all? With MD5, which buckets that lock what they get ask for.
        plain = BytesSource(b"plain")
        store.put_with(self._clients.get(), Proof.CONTENT_MD5, self._key, plain)
        try:
            return self._tried()
        except AccessError:
            self._complete_plainly()  # some servers say so too of checksums that they do not know
            return False
        except (CorruptionError, RefusedError, NotFoundError):
            return False  # what is right was refused: this proof is not for this server
        finally:
            with contextlib.suppress(StoreError):
                for upload in self._uploads:
                    store.abort(upload)
                store.delete(self._key)

    def _tried(self) -> bool:
        store, proof, key = self._store, self._proof, self._key
        honest = self._clients.get(proof)
        lying = self._clients.new(proof)
        lying.meta.events.register("before-send.s3", _change_a_byte)
        small = BytesSource(b"a small object")
        try:
            store.put_with(honest, proof, key, small)
            if proof is Proof.STORED_CHECKSUM and self._stored() != small.crc32c:
                return False
            if not _refused(lambda: store.put_with(lying, proof, key, small)):
                return False
            upload = self._begin()
            if not _refused(lambda: store.put_part_with(lying, proof, upload, 1, small)):
                return False
        finally:
            lying.close()
        return proof is not Proof.STORED_CHECKSUM or self._whole_is_checked(upload)

    def _whole_is_checked(self, upload: Upload) -> bool:
        store = self._store
        bodies = BytesSource(bytes(_FIRST)), BytesSource(_SECOND)
        whole = digest.combine_all((body.crc32c, body.size) for body in bodies)
        parts = self._put_all(upload, bodies)
        if not _refused(lambda: store.complete_with(self._proof, upload, parts, whole ^ 1)):
            return False
        again = self._begin()
        store.complete_with(self._proof, again, self._put_all(again, bodies), whole)
        return self._stored() == whole

    def _complete_plainly(self) -> None:
        """The same without a checksum: may we end uploads at all?

        Raises:
            AccessError: no.
        """
        store, plain = self._store, Proof.CONTENT_MD5
        upload = store.begin_with(plain, self._key, {})
        self._uploads.append(upload)
        body = BytesSource(_SECOND)
        part = store.put_part_with(self._clients.get(), plain, upload, 1, body)
        store.complete_with(plain, upload, [part], body.crc32c)

    def _begin(self) -> Upload:
        upload = self._store.begin_with(self._proof, self._key, {})
        self._uploads.append(upload)
        return upload

    def _put_all(self, upload: Upload, bodies: Sequence[Source]) -> Sequence[Part]:
        client = self._clients.get(self._proof)
        return [
            self._store.put_part_with(client, self._proof, upload, number, body)
            for number, body in enumerate(bodies, 1)
        ]

    def _stored(self) -> int | None:
        return self._store.head_with(Proof.STORED_CHECKSUM, self._key).crc32c


def _change_a_byte(request: Any, **_: object) -> None:
    """Change the first byte of a body that is about to be sent."""
    if request.method == "PUT":
        body = request.body
        data = bytearray(body if isinstance(body, bytes) else b"".join(iter(body.read, b"")))
        data[0] ^= 1
        request.body = bytes(data)


def _refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except (CorruptionError, RefusedError, AccessError):
        return True
    return False
