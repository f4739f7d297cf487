"""Uploading the shards of a save: in parts, in parallel, resumable, each one proven.

The store is the truth, and the log only saves work: whatever the log says or has lost, and
whenever the process died, what :meth:`Uploader.upload` reports as stored is an object that the
store was seen to hold with the shard's size and CRC32C.

* A part that was sent before is not sent again if the log knows it, the store still lists it, and
  the file still has those bytes. The file is read again for that, so a shard that was changed
  between two starts is caught.
* An object is made only after the CRC32C of what was read (or, under WRITTEN_CHECKSUM, of what
  the store wrote of it) equals the one of the manifest: a shard that changes under the upload
  never becomes an object.
* Bytes changed on their way are sent again, and not for ever.

How one shard goes is in :mod:`~ds_ckpt_store.transfer.shard`. Memory: one buffer and what the
store's SDK holds for each request, and as many requests as the budget allows. Descriptors: no more
shards are open at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.errors import CorruptionError, ShardChangedError
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.transfer.budget import Budget
from ds_ckpt_store.transfer.coordinator import Coordinator
from ds_ckpt_store.transfer.plan import PREFERRED_PART
from ds_ckpt_store.transfer.shard import LocalShard, ShardUpload, Stored
from ds_ckpt_store.transfer.upload_log import MemoryUploadLog, UploadLog

__all__ = ["LocalShard", "MemoryUploadLog", "Stored", "UploadLog", "Uploader"]


class Uploader:
    """Uploads shards to one store.

    Args:
        store: where to; retries of transient errors are its (decorator's) business.
        executor: runs the jobs; it needs ``budget.fit`` threads, or runs them within ``submit``.
        budget: requests at a time, over all shards of a call, and bandwidth.
        part_size: preferred size of a part, bytes; a shard of at most this size is sent whole.
        clock: for the pause before bytes are sent again that arrived changed.
        keep_cached: leave what was sent in the page cache; else its pages are given back, so that
            reading a checkpoint does not push out what training reads.
        unlike: told, from any thread, of bytes that arrived changed and are sent again.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        *,
        budget: Budget,
        part_size: int = PREFERRED_PART,
        clock: Clock,
        keep_cached: bool = False,
        unlike: Callable[[CorruptionError], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._executor = executor
        self._budget = budget
        self._part_size = part_size
        self._clock = clock
        self._keep_cached = keep_cached
        self._unlike = unlike

    def upload(
        self,
        shards: Sequence[LocalShard],
        log: UploadLog,
        *,
        check: Callable[[], None],
        progress: Callable[[int], None],
        stored: Callable[[Stored], None],
    ) -> list[Stored]:
        """Upload and verify all shards; all callbacks happen in the calling thread.

        Args:
            shards: in the order in which they are begun; keys are distinct.
            log: what was done before, and will have been done for the next start.
            check: called at least once a second and before each request; if it raises, what is
                on its way is awaited and logged, and then the error is raised.
            progress: bytes newly sent, after each request.
            stored: a shard is verified.

        Returns:
            One entry for each shard, in the same order.

        Raises:
            ShardChangedError: a shard is not what its manifest says; nothing was made of it.
            CorruptionError: what was sent kept arriving changed.
            CkptError: as the store, ``open`` or ``check`` raised it. Another call continues.
        """
        results: dict[str, Stored] = {}

        def finish(result: Stored) -> None:
            log.add_stored(result.key, result.version)
            results[result.key] = result
            stored(result)

        stories = (
            ShardUpload(
                shard,
                self._store,
                log,
                part_size=self._part_size,
                clock=self._clock,
                budget=self._budget,
                keep_cached=self._keep_cached,
                progress=progress,
                unlike=self._unlike,
            ).story(finish)
            for shard in shards
        )
        Coordinator(
            self._executor, budget=self._budget, check=check, fatal=(ShardChangedError,)
        ).run(stories)
        return [results[shard.key] for shard in shards]
