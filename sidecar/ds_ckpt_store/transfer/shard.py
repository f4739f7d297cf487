"""One shard's way into the store: found there, sent whole, or sent in parts and completed.

What each answer of the store is taken for:

* A shard that the log says was verified is looked at; so is one that goes in parts, or whole
  because the store has no parts. A small one of which the log knows nothing is sent without
  looking: the key belongs to this save alone and its bytes are compared with the manifest first,
  so at worst the same bytes are sent twice.
* A shard that goes whole is compared with its manifest before, under every proof, because a put
  takes the place of what may be stored and committed already.
* Under STORED_CHECKSUM and WRITTEN_CHECKSUM an answer to a put that tells the CRC32C of the object
  is the proof; else the object is looked at, and under READ_BACK it is read.
* Under WRITTEN_CHECKSUM the store reads again what it has written, so parts are not read before.
  If what was written is not what the manifest says, the file is read to learn who changed it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
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
    SettingsError,
    ShardChangedError,
    StoreError,
)
from ds_ckpt_store.stores.port import ObjectInfo, Part, Proof, Store, Upload
from ds_ckpt_store.transfer.budget import Budget
from ds_ckpt_store.transfer.coordinator import Job, Steps, Story
from ds_ckpt_store.transfer.plan import PartPlan, plan_parts, sent_whole
from ds_ckpt_store.transfer.proof import (
    check_head,
    check_read_back,
    find_stored,
    read_crc32c,
    tells_all,
)
from ds_ckpt_store.transfer.source import FileSlice, size_of
from ds_ckpt_store.transfer.upload_log import UploadLog

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
        part_size: bytes of each part but the last.
        part_sums: CRC32C of each part, in order; empty if it was sent whole, or found there.
    """

    key: str
    size: int
    crc32c: int
    version: str
    proof: Proof
    resumed_parts: int
    part_size: int = 0
    part_sums: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Sent:
    """What one job found stored, and what it sent for that."""

    part: Part
    resumed: bool


class ShardUpload:
    """One shard's way into the store.

    Methods that yield run in the calling thread and have the log; those named as jobs run on the
    executor and have only their arguments.

    Args:
        shard: what.
        store: where to.
        log: what was done before, and will have been.
        part_size: preferred size of a part, bytes.
        clock: for pauses.
        budget: what all transfers share.
        keep_cached: leave what was sent in the page cache.
        progress: bytes newly sent, after each request.
        unlike: told, from any thread, of bytes that arrived changed and are sent again.
    """

    def __init__(
        self,
        shard: LocalShard,
        store: Store,
        log: UploadLog,
        *,
        part_size: int,
        clock: Clock,
        budget: Budget,
        keep_cached: bool,
        progress: Callable[[int], None],
        unlike: Callable[[CorruptionError], None],
    ) -> None:
        self._shard = shard
        self._store = store
        self._log = log
        self._part_size = part_size
        self._clock = clock
        self._budget = budget
        self._keep_cached = keep_cached
        self._progress = progress
        self._unlike = unlike

    def story(self, finish: Callable[[Stored], None]) -> Story:
        """All steps; ``finish`` is called when the store was seen to hold the shard."""
        try:
            yield from self._story(finish)
        except SettingsError as error:  # no plan fits; it speaks of sizes alone
            raise SettingsError(f"{self._shard.key}: {error}") from None

    def _story(self, finish: Callable[[Stored], None]) -> Story:
        shard = self._shard
        sent_parts: list[_Sent] = []
        if sent_whole(shard.size, self._store.capabilities, self._part_size):
            known = self._log.stored(shard.key)
            [(info, sent)] = yield [Job(partial(self._job_whole, known))]
            if sent:
                self._progress(sent)
        else:
            info, sent_parts = yield from self._in_parts()
        finish(
            Stored(
                shard.key,
                shard.size,
                shard.crc32c,
                info.version,
                self._store.proof,
                resumed_parts=sum(each.resumed for each in sent_parts),
                part_size=sent_parts[0].part.size if sent_parts else 0,
                part_sums=tuple(each.part.crc32c for each in sent_parts),
            )
        )

    # ---- a small shard: one job

    def _job_whole(self, known: str | None) -> tuple[ObjectInfo, int]:
        shard = self._shard
        if known is not None or shard.size > self._part_size:
            found = self._job_find(known)
            if found is not None:
                return found, 0
        with self._opened() as fd:
            info = self._job_again(partial(self._job_put, fd))
            self._give_back(fd, 0, shard.size)
            return info, shard.size

    def _job_put(self, fd: int) -> ObjectInfo:
        shard = self._shard
        source = self._slice(fd, 0, shard.size)
        self._compare(fd, source.crc32c)
        lost: StoreError | None = None
        try:
            info = self._store.put(shard.key, source)
            if tells_all(self._store, info, shard.size, shard.crc32c):
                return info
        except AmbiguousError as error:
            if self._is_written_checked():
                raise  # no later answer would tell what was written: write again
            lost = error  # perhaps it was applied: look
        try:
            info = self._job_check_head()
        except NotFoundError as error:
            raise lost or error from None
        if self._store.proof is Proof.READ_BACK:
            value = read_crc32c(self._store, shard.key, 0, shard.size, self._budget.pace)
            check_read_back(shard.key, value, shard.crc32c)
        return info

    # ---- a large one: look, begin or continue, parts, complete, verify

    def _in_parts(self) -> Steps[tuple[ObjectInfo, list[_Sent]]]:
        lost: StoreError | None = None
        for _ in range(SHARD_TRIES):
            known = self._log.stored(self._shard.key)
            [found] = yield [Job(partial(self._job_find, known))]
            if found is not None:
                return found, []
            try:
                with self._opened() as fd:
                    upload, plan, logged = yield from self._continue_or_begin()
                    sent = yield from self._send_parts(fd, upload, plan, logged)
                    # The kernel keeps pages in groups, and the groups at the edges of parts.
                    self._give_back(fd, 0, self._shard.size)
            except ShardChangedError:
                yield from self._drop()
                raise
            except NotFoundError as error:
                lost = error
                continue
            try:
                info = yield from self._complete(upload, [each.part for each in sent], plan)
            except CorruptionError as error:
                self._unlike(error)
                yield from self._drop()
                lost = error
            except (NotFoundError, AmbiguousError) as error:
                lost = error
            else:
                return info, sent
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
        """All parts, of which the whole's checksum is the manifest's."""
        pieces = list(plan)
        sent: list[_Sent] = yield [
            self._sending(fd, upload, piece, logged.get(piece[0])) for piece in pieces
        ]
        if not self._is_written_checked():
            self._compare(fd, _whole(sent))
            return sent
        for _ in range(PART_TRIES):
            if _whole(sent) == self._shard.crc32c:
                self._compare_size(fd)
                return sent
            read: list[int] = yield [
                Job(partial(self._job_sum, fd, offset, length)) for _, offset, length in pieces
            ]
            self._compare(
                fd,
                combine_all((value, piece[2]) for value, piece in zip(read, pieces, strict=True)),
            )
            wrong = [n for n, value in enumerate(read) if value != sent[n].part.crc32c]
            again = yield [self._sending(fd, upload, pieces[n], None) for n in wrong]
            for n, each in zip(wrong, again, strict=True):
                sent[n] = each
        raise CorruptionError(
            "put_part",
            self._shard.key,
            f"the store wrote other bytes than it was given, {PART_TRIES} times: check its disk",
        )

    def _sending(
        self, fd: int, upload: Upload, piece: tuple[int, int, int], logged: Part | None
    ) -> Job:
        return Job(partial(self._job_part, fd, upload, *piece, logged), self._part_done)

    def _part_done(self, sent: _Sent) -> None:
        if not sent.resumed:
            self._log.add_part(self._shard.key, sent.part)
            self._progress(sent.part.size)

    def _job_part(
        self, fd: int, upload: Upload, number: int, offset: int, length: int, logged: Part | None
    ) -> _Sent:
        def send() -> _Sent:
            source = self._slice(fd, offset, length)
            if logged is not None and (logged.size, logged.crc32c) == (length, source.crc32c):
                return _Sent(logged, resumed=True)
            return _Sent(self._store.put_part(upload, number, source), resumed=False)

        sent = self._job_again(send)
        self._give_back(fd, offset, length)
        return sent

    def _job_sum(self, fd: int, offset: int, length: int) -> int:
        return self._slice(fd, offset, length).crc32c

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
                Job(partial(read_crc32c, self._store, shard.key, offset, length, self._budget.pace))
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

    def _slice(self, fd: int, offset: int, length: int) -> FileSlice:
        return FileSlice(fd, offset, length, self._shard.key, self._budget.pace)

    def _is_written_checked(self) -> bool:
        return self._store.proof is Proof.WRITTEN_CHECKSUM

    def _give_back(self, fd: int, offset: int, length: int) -> None:
        """Take what was sent out of the page cache, so that it pushes nothing else out."""
        if length and not self._keep_cached:
            with suppress(OSError):  # a filesystem that cannot
                os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)

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
            except (CorruptionError, AmbiguousError) as error:
                if isinstance(error, CorruptionError):
                    self._unlike(error)
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


def _whole(sent: Sequence[_Sent]) -> int:
    return combine_all((each.part.crc32c, each.part.size) for each in sent)
