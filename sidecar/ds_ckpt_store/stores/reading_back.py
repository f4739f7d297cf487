"""Small objects on a store that refuses nothing: read again after each write, and put right.

Where the proof is READ_BACK a store takes whatever arrives, and where it is WRITTEN_CHECKSUM it
tells what it wrote, right or wrong. ``transfer/`` sees to shards; the protocol's documents
(records, lease, receipts, pointer) come through here. A document that was changed on its way is
replaced by the right one, over the very version that this write made, so that no other writer's is
touched.

What stays open: a write that was changed on its way *and* whose answer was lost cannot be told
from another writer's. Whoever reads it finds that it is damaged, and decides nothing from it.
"""

from __future__ import annotations

from ds_ckpt_store.contract.names import is_data
from ds_ckpt_store.errors import CorruptionError
from ds_ckpt_store.stores.forwarding import Forwarding
from ds_ckpt_store.stores.port import (
    BytesSource,
    Condition,
    IfVersion,
    ObjectInfo,
    Proof,
    Source,
    Store,
)

TRIES = 4
_VIEW = 1 << 20


class ReadingBack(Forwarding):
    """Reads documents back; passes data on, which the transfer reads back itself.

    Args:
        store: a store that may store other bytes than it was sent.
        swaps: it honours :class:`IfVersion`; else a wrong document is written over plainly, which
            is safe where each is written by one creator (``SwapByCreate``) or one node alone.
    """

    def __init__(self, store: Store, *, swaps: bool) -> None:
        super().__init__(store)
        self._swaps = swaps

    def put(self, key: str, source: Source, *, condition: Condition = None) -> ObjectInfo:
        """Write, read again, and write again what arrived wrong.

        Raises:
            CorruptionError: it kept arriving wrong.
        """
        info = self.store.put(key, source, condition=condition)
        told = self.store.proof is Proof.WRITTEN_CHECKSUM and info.crc32c == source.crc32c
        if told or is_data(key):
            return info
        with source.open() as reader:
            sent = b"".join(iter(lambda: bytes(reader.read(_VIEW)), b""))
        for _ in range(TRIES):
            stored, now = self.store.get(key)
            if stored == sent:
                return now
            if now.version != info.version:
                return info  # another writer has been there since; ours is history
            again = IfVersion(now.version) if self._swaps else None
            info = self.store.put(key, BytesSource(sent), condition=again)
        raise CorruptionError("put", key, f"arrived changed {TRIES} times in a row")
