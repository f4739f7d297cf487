"""Uploading the shards of a save: in parts, in parallel, resumable, each one proven.

The store is the truth, and the log only saves work: whatever the log says or has lost, and
whenever the process died, what :meth:`Uploader.upload` reports as stored is an object that the
store was seen to hold with the shard's size and CRC32C.

* A part that was sent before is not sent again if the log knows it, the store still lists it, and
  the file still has those bytes. The file is read again for that, so a shard that was changed
  between two starts is caught.
* An object is completed only after the CRC32C of what was read, combined over its parts, equals
  the one of the manifest: a shard that changes under the upload never becomes an object.
* Bytes changed on their way are sent again, and not for ever.

Memory: ``streams`` x 1 MiB for buffers, and what the store's SDK holds for each request.
Descriptors: at most ``streams`` shards are open at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.digest import combine_all, to_hex
from ds_ckpt_store.errors import (
    AmbiguousError,
    CorruptionError,
    NotFoundError,
    ShardChangedError,
    StoreError,
)
from ds_ckpt_store.stores.port import ObjectInfo, Part, Proof, Store, Upload
from ds_ckpt_store.transfer.coordinator import Coordinator, Job, Steps, Story
from ds_ckpt_store.transfer.plan import PREFERRED_PART, PartPlan, plan_parts, sent_whole
from ds_ckpt_store.transfer.proof import (
    check_head,
    check_read_back,
    find_stored,
    read_crc32c,
)
from ds_ckpt_store.transfer.source import FileSlice, size_of
from ds_ckpt_store.transfer.upload_log import MemoryUploadLog, UploadLog

__all__ = ["LocalShard", "MemoryUploadLog", "Stored", "UploadLog", "Uploader"]

PART_TRIES = 4
SHARD_TRIES = 3
_PAUSE_SECONDS = 0.1

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class LocalShard:
    """One file to upload.

    Attributes:
        key: where to, relative to the store's prefix.
        size: bytes, as the manifest says.
        crc32c: of the whole, as the manifest says.
        open: a new descriptor for reading, which the uploader closes; called from any thread; may
            raise a :class:`~ds_ckpt_store.errors.CkptError`.
    """

    key: str
    size: int
    crc32c: int
    open: Callable[[], int]


@dataclass(frozen=True)
class Stored:
    """A shard that the store was seen to hold.

    Attributes:
        key: relative to the prefix.
        size: bytes.
        crc32c: of the whole.
        version: the store's token for this object.
        proof: how the store showed it.
        resumed_parts: parts that an earlier start had sent.
    """

    key: str
    size: int
    crc32c: int
    version: str
    proof: Proof
    resumed_parts: int


@dataclass(frozen=True)
class _Sent:
    """What one job found stored, and what it sent for that."""

    part: Part
    resumed: bool


class Uploader:
    """Uploads shards to one store.

    Args:
        store: where to; retries of transient errors are its (decorator's) business.
        executor: runs the jobs; it needs ``streams`` threads, or runs them within ``submit``.
        streams: requests with a body at a time, over all shards of a call.
        part_size: preferred size of a part, bytes; a shard of at most this size is sent whole.
        clock: for the pause before bytes are sent again that arrived changed.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        *,
        streams: int,
        part_size: int = PREFERRED_PART,
        clock: Clock,
    ) -> None:
        self._store = store
        self._executor = executor
        self._streams = streams
        self._part_size = part_size
        self._clock = clock

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
            _ShardUpload(shard, self._store, log, self._part_size, self._clock, progress).story(
                finish
            )
            for shard in shards
        )
        Coordinator(
            self._executor, streams=self._streams, check=check, fatal=(ShardChangedError,)
        ).run(stories)
        return [results[shard.key] for shard in shards]


class _ShardUpload:
    """One shard's way into the store.

    Methods that yield run in the calling thread and have the log; those named as jobs run on the
    executor and have only their arguments.
    """

    def __init__(
        self,
        shard: LocalShard,
        store: Store,
        log: UploadLog,
        part_size: int,
        clock: Clock,
        progress: Callable[[int], None],
    ) -> None:
        self._shard = shard
        self._store = store
        self._log = log
        self._part_size = part_size
        self._clock = clock
        self._progress = progress

    def story(self, finish: Callable[[Stored], None]) -> Story:
        shard = self._shard
        resumed = 0
        if sent_whole(shard.size, self._store.capabilities.limits, self._part_size):
            known = self._log.stored(shard.key)
            [(info, sent)] = yield [Job(partial(self._job_whole, known))]
            if sent:
                self._progress(sent)
        else:
            info, resumed = yield from self._in_parts()
        finish(
            Stored(shard.key, shard.size, shard.crc32c, info.version, self._store.proof, resumed)
        )

    # ---- a small shard: one job

    def _job_whole(self, known: str | None) -> tuple[ObjectInfo, int]:
        found = self._job_find(known)
        if found is not None:
            return found, 0
        with self._opened() as fd:
            return self._job_again(partial(self._job_put, fd)), self._shard.size

    def _job_put(self, fd: int) -> ObjectInfo:
        shard = self._shard
        source = FileSlice(fd, 0, shard.size, shard.key)
        self._compare(fd, source.crc32c)
        lost: StoreError | None = None
        try:
            self._store.put(shard.key, source)
        except AmbiguousError as error:
            lost = error  # perhaps it was applied: look
        try:
            info = self._job_check_head()
        except NotFoundError as error:
            raise lost or error from None
        if self._store.proof is Proof.READ_BACK:
            value = read_crc32c(self._store, shard.key, 0, shard.size)
            check_read_back(shard.key, value, shard.crc32c)
        return info

    # ---- a large one: look, begin or continue, parts, complete, verify

    def _in_parts(self) -> Steps[tuple[ObjectInfo, int]]:
        lost: StoreError | None = None
        for _ in range(SHARD_TRIES):
            known = self._log.stored(self._shard.key)
            [found] = yield [Job(partial(self._job_find, known))]
            if found is not None:
                return found, 0
            try:
                with self._opened() as fd:
                    upload, plan, logged = yield from self._continue_or_begin()
                    sent = yield from self._send_parts(fd, upload, plan, logged)
            except ShardChangedError:
                yield from self._drop()
                raise
            except NotFoundError as error:
                lost = error
                continue
            try:
                info = yield from self._complete(upload, [each.part for each in sent], plan)
            except CorruptionError as error:
                yield from self._drop()
                lost = error
            except (NotFoundError, AmbiguousError) as error:
                lost = error
            else:
                return info, sum(each.resumed for each in sent)
        raise lost or AssertionError("tried at least once")

    def _continue_or_begin(self) -> Steps[tuple[Upload, PartPlan, dict[int, Part]]]:
        shard, log, limits = self._shard, self._log, self._store.capabilities.limits
        remembered = log.upload(shard.key)
        if remembered is not None:
            upload, part_size = remembered
            plan = PartPlan(shard.size, max(part_size, 1))
            try:
                [held] = yield [Job(partial(self._store.parts, upload))]
            except NotFoundError:
                log.forget(shard.key)
            else:
                if plan.fits(limits):
                    logged = {
                        part.number: part
                        for part in log.parts(shard.key)
                        if held.get(part.number) == (part.size, part.token)
                    }
                    return upload, plan, logged
                yield from self._drop()
        plan = plan_parts(shard.size, limits, self._part_size)
        metadata = {"crc32c": to_hex(shard.crc32c), "part_size": str(plan.part_size)}
        [upload] = yield [Job(partial(self._store.begin, shard.key, shard.size, metadata))]
        log.begin(shard.key, upload, plan.part_size)
        return upload, plan, {}

    def _send_parts(
        self, fd: int, upload: Upload, plan: PartPlan, logged: dict[int, Part]
    ) -> Steps[list[_Sent]]:
        sent: list[_Sent] = yield [
            Job(
                partial(self._job_part, fd, upload, number, offset, length, logged.get(number)),
                self._part_done,
            )
            for number, offset, length in plan
        ]
        self._compare(fd, combine_all((each.part.crc32c, each.part.size) for each in sent))
        return sent

    def _part_done(self, sent: _Sent) -> None:
        if not sent.resumed:
            self._log.add_part(self._shard.key, sent.part)
            self._progress(sent.part.size)

    def _job_part(
        self, fd: int, upload: Upload, number: int, offset: int, length: int, logged: Part | None
    ) -> _Sent:
        def send() -> _Sent:
            source = FileSlice(fd, offset, length, self._shard.key)
            if logged is not None and (logged.size, logged.crc32c) == (length, source.crc32c):
                return _Sent(logged, resumed=True)
            return _Sent(self._store.put_part(upload, number, source), resumed=False)

        return self._job_again(send)

    def _complete(self, upload: Upload, parts: Sequence[Part], plan: PartPlan) -> Steps[ObjectInfo]:
        shard = self._shard
        lost: StoreError | None = None
        try:
            yield [Job(partial(self._store.complete, upload, parts))]
        except (AmbiguousError, NotFoundError) as error:
            lost = error  # perhaps it was applied, by this call or by an earlier one: look
        try:
            [info] = yield [Job(self._job_check_head)]
        except NotFoundError as error:
            raise lost or error from None
        if self._store.proof is Proof.READ_BACK:
            sums = yield [
                Job(partial(read_crc32c, self._store, shard.key, offset, length))
                for _, offset, length in plan
            ]
            value = combine_all(
                (each, length) for each, (_, _, length) in zip(sums, plan, strict=True)
            )
            check_read_back(shard.key, value, shard.crc32c)
        return cast(ObjectInfo, info)

    def _drop(self) -> Steps[None]:
        remembered = self._log.upload(self._shard.key)
        if remembered is not None:
            with suppress(StoreError):  # gc finds what stays behind
                yield [Job(partial(self._store.abort, remembered[0]))]
            self._log.forget(self._shard.key)

    # ---- steps that both ways share

    @contextmanager
    def _opened(self) -> Iterator[int]:
        fd = self._shard.open()
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._compare_size(fd)
            yield fd
        finally:
            os.close(fd)

    def _job_again(self, send: Callable[[], ResultT]) -> ResultT:
        """Send until it arrives unchanged, reading the file anew each time."""
        for attempt in range(1, PART_TRIES):
            try:
                return send()
            except (CorruptionError, AmbiguousError):
                self._clock.sleep(_PAUSE_SECONDS * attempt)
        return send()

    def _job_find(self, known: str | None) -> ObjectInfo | None:
        shard = self._shard
        return find_stored(self._store, shard.key, shard.size, shard.crc32c, known)

    def _job_check_head(self) -> ObjectInfo:
        shard = self._shard
        return check_head(self._store, shard.key, shard.size, shard.crc32c)

    def _compare(self, fd: int, value: int) -> None:
        self._compare_size(fd)
        if value != self._shard.crc32c:
            raise ShardChangedError(
                f"{self._shard.key} has CRC32C {to_hex(value)}, and "
                f"{to_hex(self._shard.crc32c)} when it was saved: it was changed since"
            )

    def _compare_size(self, fd: int) -> None:
        size = size_of(fd, self._shard.key)
        if size != self._shard.size:
            raise ShardChangedError(
                f"{self._shard.key} has {size} bytes, and {self._shard.size} when it was saved: "
                "it was changed since"
            )
