"""A decorator that changes nothing: the base of those that change one thing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ds_ckpt_store.stores.port import (
    Capabilities,
    Condition,
    ObjectInfo,
    Part,
    Proof,
    Sink,
    Source,
    Store,
    Upload,
)


class Forwarding:
    """Passes every call of the port on to another store.

    Args:
        store: the store within.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def url(self) -> str:
        """Of the store within."""
        return self.store.url

    @property
    def capabilities(self) -> Capabilities:
        """Of the store within."""
        return self.store.capabilities

    @property
    def proof(self) -> Proof:
        """Of the store within."""
        return self.store.proof

    def use_proof(self, proof: Proof) -> None:
        """Passed on."""
        self.store.use_proof(proof)

    def refuses_corruption(self, proof: Proof, key: str) -> bool:
        """Passed on."""
        return self.store.refuses_corruption(proof, key)

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Passed on."""
        return self.store.put(key, source, condition=condition)

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Passed on."""
        return self.store.get(key)

    def read(self, key: str, offset: int, length: int, sink: Sink) -> None:
        """Passed on."""
        self.store.read(key, offset, length, sink)

    def head(self, key: str) -> ObjectInfo:
        """Passed on."""
        return self.store.head(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Passed on."""
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        """Passed on."""
        self.store.delete(key)

    def begin(self, key: str, size: int, metadata: Mapping[str, str]) -> Upload:
        """Passed on."""
        return self.store.begin(key, size, metadata)

    def put_part(self, upload: Upload, number: int, source: Source) -> Part:
        """Passed on."""
        return self.store.put_part(upload, number, source)

    def parts(self, upload: Upload) -> dict[int, tuple[int, str]]:
        """Passed on."""
        return self.store.parts(upload)

    def complete(self, upload: Upload, parts: Sequence[Part]) -> ObjectInfo:
        """Passed on."""
        return self.store.complete(upload, parts)

    def abort(self, upload: Upload) -> None:
        """Passed on."""
        self.store.abort(upload)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Passed on."""
        return self.store.uploads(prefix)

    def credentials_expiry(self) -> float | None:
        """Of the store within."""
        return self.store.credentials_expiry()

    def close(self) -> None:
        """Passed on."""
        self.store.close()
