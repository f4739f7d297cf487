"""What nobody will ever use again, and how it goes: unfinished uploads, and saves that died.

Everything is judged by what the store says at that moment, and by its own clock. Only what a
decision explains is removed, and a decision is read, or made, before anything that rests on it:

* A save without a record is dead if it cannot be committed, its attempt is over, no node that
  still owes its part is at work, and nothing of it was written for long. It is abandoned as any
  sidecar would do it: committed if it is complete after all, else by one conditional create.
* A record is never taken back. So what lies in the folder of an abandoned save, and every upload
  that is unfinished in the folder of a decided one, is of no use to anybody, however it came there
  and however late: it goes at once.
* What no intent and no record explains, and what a damaged or newer document may explain, stays,
  and is reported. What belongs to another run is none of our business.

A sweep may die anywhere, run beside another one, and beside sidecars at work: whatever it did not
get to, or what came late, is found by the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ds_ckpt_store.catalog import STALE_AFTER, Catalog, Commit
from ds_ckpt_store.contract import names
from ds_ckpt_store.errors import (
    AccessError,
    DamagedError,
    NotFoundError,
    RefusedError,
    StoreError,
    TagError,
    UnknownSchemaError,
)
from ds_ckpt_store.records import Intent, Record
from ds_ckpt_store.stores.port import ObjectInfo, Upload

OLDER_THAN = 86400.0
CLOCK_NAME = "gc"
_UNREADABLE = (DamagedError, UnknownSchemaError)
_NOT_ALLOWED = (AccessError, RefusedError)

Kind = Literal["upload", "object", "save", "complete", "leftover", "unexplained"]


@dataclass(frozen=True)
class Finding:
    """One thing that a sweep found.

    Attributes:
        kind: ``complete`` is a save that was, or would be, committed; ``save`` one that was given
            up and cleared; ``upload``, ``object`` and ``leftover`` were removed; ``unexplained``
            is reported only.
        key: of the object or upload; for ``save``, ``complete`` and ``unexplained`` the folder.
        save_id: the save it belongs to; empty if none.
        reason: a sentence.
        objects: how many objects it stands for.
        size: bytes of these, or of an upload's parts.
    """

    kind: Kind
    key: str
    save_id: str
    reason: str
    objects: int = 1
    size: int = 0


@dataclass(frozen=True)
class Left:
    """What a sweep looked at and left where it is: it may still be used, or could not be removed.

    Attributes:
        key: of the object or upload, or a save's folder.
        save_id: the save it belongs to; empty if none.
        reason: a sentence.
        failed: it should have gone, and the store did not allow it.
    """

    key: str
    save_id: str
    reason: str
    failed: bool = False


@dataclass(frozen=True)
class _Fate:
    """What is known of a folder: why it must not be touched, or what was decided on its save."""

    save_id: str = ""
    unexplained: str = ""
    foreign: bool = False
    record: Record | None = None


@dataclass
class _Sweep:
    """What one sweep knows."""

    dry_run: bool
    check: Callable[[], None]
    now: float
    uploads: dict[str, list[Upload]] = field(default_factory=dict)
    foreseen: dict[str, Literal["committed", "abandoned"]] = field(default_factory=dict)
    newest: Record | None = None


class Collector:
    """Finds and removes the garbage of one run under a prefix.

    Args:
        catalog: the prefix.
        run_id: the run; nothing of another one is touched.
        older_than: seconds, by the store's clock, for which nothing of a dead save was written.
        stale_after: seconds without a sign of life after which a node, or the lease, counts as
            silent, if ``older_than`` is shorter.

    Attributes:
        left: of the last sweep, what it did not remove, and why.
        foreign: of the last sweep, the number of folders of other runs.
        dated: whether the last sweep knew the store's time. A dry run that may not write does not,
            and takes the newest of our own documents for it: it may find less than there is.
        pointed: the record that the last sweep moved ``latest`` to.
        known: whether the last sweep met anything of the run at all.
    """

    def __init__(
        self,
        catalog: Catalog,
        run_id: str,
        *,
        older_than: float = OLDER_THAN,
        stale_after: float = STALE_AFTER,
    ) -> None:
        self._catalog = catalog
        self._run_id = run_id
        self._older_than = older_than
        self._patience = max(older_than, stale_after)
        self.left: list[Left] = []
        self.foreign = 0
        self.dated = True
        self.pointed: Record | None = None
        self.known = False

    def sweep(self, *, dry_run: bool, check: Callable[[], None] = lambda: None) -> list[Finding]:
        """One sweep; see :meth:`look`. Repeat it until it finds nothing that can be removed."""
        return list(self.look(dry_run=dry_run, check=check))

    def look(self, *, dry_run: bool, check: Callable[[], None] = lambda: None) -> Iterator[Finding]:
        """One sweep, each finding handed over when it is dealt with.

        Args:
            dry_run: change nothing; of what is written there is one small object that tells the
                store's time, if that is allowed.
            check: called before each step; may raise to stop.

        Raises:
            StoreError: the store did not answer, or does not let us decide on a save. What is not
                allowed to be removed is in :attr:`left` instead.
        """
        self.left, self.foreign, self.pointed = [], 0, None
        self.known = False
        sweep = _Sweep(dry_run, check, self._store_time(dry_run))
        for upload in self._uploads():
            sweep.uploads.setdefault(_place(upload.key), []).append(upload)
        yield from self._saves(sweep)
        yield from self._objects(sweep)
        self._point(sweep)
        yield from self._unfinished(sweep)
        yield from self._leftovers(sweep)

    def _store_time(self, dry_run: bool) -> float:
        self.dated = True
        try:
            return self._catalog.store_time(CLOCK_NAME)
        except StoreError:  # no right to write, or no byte free
            if not dry_run:
                raise
            self.dated = False
            return self._catalog.newest_write()

    def _uploads(self) -> Iterator[Upload]:
        try:
            yield from self._catalog.store.uploads("")
        except _NOT_ALLOWED as error:
            self.left.append(Left("", "", f"unfinished uploads cannot be listed: {error}", True))

    # ---- saves without a record

    def _saves(self, sweep: _Sweep) -> Iterator[Finding]:
        for intent in self._catalog.undecided():
            sweep.check()
            if intent.run_id != self._run_id:
                continue
            self.known = True
            try:
                yield from self._decide(sweep, intent)
            except _UNREADABLE as error:
                objects, size, _ = self._contents(intent.folder)
                yield Finding(
                    "unexplained", intent.folder, intent.save_id, str(error), objects, size
                )

    def _decide(self, sweep: _Sweep, intent: Intent) -> Iterator[Finding]:
        found = self._catalog.foresee(intent)
        if found.record is not None and not sweep.dry_run:
            found = self._catalog.commit(intent)
        if found.record is not None:
            yield from self._decided(sweep, intent, found.record)
            return
        objects, size, written = self._contents(intent.folder)
        alive = self._sign_of_life(sweep, intent, found, written)
        if alive:
            self.left.append(Left(intent.folder, intent.save_id, alive))
            return
        reason = f"{_lack(found)}, its attempt is over, and nothing of it was written for " + (
            _long(self._older_than)
        )
        if not sweep.dry_run:
            record = self._catalog.abandon(intent, f"gc: {reason}")
            if record.state != "abandoned":
                yield from self._decided(sweep, intent, record)
                return
            self._clear(sweep, intent)
        sweep.foreseen[intent.save_id] = "abandoned"
        yield Finding("save", intent.folder, intent.save_id, reason, objects, size)

    def _decided(self, sweep: _Sweep, intent: Intent, record: Record) -> Iterator[Finding]:
        """It is complete, or somebody has decided it meanwhile."""
        if record.state == "committed":
            sweep.foreseen[intent.save_id] = "committed"
            yield Finding(
                "complete",
                intent.folder,
                intent.save_id,
                "every node has stored its part, and nobody has committed it",
                len(record.files) + len(record.companions),
                record.size,
            )

    def _contents(self, folder: str) -> tuple[int, int, float]:
        """Number and bytes of the objects in a folder, and when the last was written."""
        objects, size, written = 0, 0, 0.0
        for info in self._catalog.store.list(f"{folder}/"):
            objects, size = objects + 1, size + info.size
            written = max(written, info.modified)
        return objects, size, written

    def _sign_of_life(
        self, sweep: _Sweep, intent: Intent, found: Commit, objects_written: float
    ) -> str:
        """Why a save that lacks something may still be finished, as a sentence; empty if dead."""
        try:
            lease = self._catalog.lease()
        except _UNREADABLE as error:
            return f"nobody can tell whether its attempt is over: {error}"
        if lease is None:
            return "there is no lease, so nobody can tell whether its attempt is over"
        owner, renewed = lease
        is_ours = owner.run_id == self._run_id
        is_newest = is_ours and intent.attempt == owner.attempt
        at_work = is_ours and sweep.now - renewed < self._patience
        if is_newest and owner.unfinished and at_work:
            return f"its attempt is the newest, and was at work {_ago(sweep.now - renewed)}"
        if is_ours and not is_newest and intent.epoch >= owner.epoch:
            return f"it is of epoch {intent.epoch} and the lease of {owner.epoch}: it may be newer"
        for node in found.missing_nodes or intent.nodes:
            seen = self._catalog.last_seen(node)
            if at_work and node in owner.unfinished:
                seen = max(seen, renewed)
            if sweep.now - seen < self._patience:
                return f"node {node} has not stored its part, and was here {_ago(sweep.now - seen)}"
        uploads = sweep.uploads.get(_place(f"{intent.folder}/"), [])
        written = max(
            objects_written,
            self._catalog.last_said(intent.save_id),
            renewed if is_newest else 0.0,
            *(upload.modified for upload in uploads),
            0.0,
        )
        if sweep.now - written < self._older_than:
            return f"something of it was written {_ago(sweep.now - written)}"
        return ""

    def _clear(self, sweep: _Sweep, intent: Intent) -> None:
        """Remove the objects of a save that was just abandoned."""
        for info in self._catalog.store.list(f"{intent.folder}/"):
            sweep.check()
            self._delete(info.key, intent.save_id)

    # ---- objects, folder by folder

    def _objects(self, sweep: _Sweep) -> Iterator[Finding]:
        data = (info for info in self._catalog.store.list("") if names.is_data(info.key))
        for place, objects in itertools.groupby(data, lambda info: _place(info.key)):
            sweep.check()
            yield from self._folder(sweep, place, objects)

    def _folder(
        self, sweep: _Sweep, place: str, objects: Iterable[ObjectInfo]
    ) -> Iterator[Finding]:
        fate = self._fate(place)
        if fate.unexplained:
            yield _unexplained(place, fate, objects)
            return
        record = fate.record
        if record is not None and record.state == "committed":
            sweep.newest = max(sweep.newest or record, record, key=lambda each: each.order)
        if fate.foreign:
            self.foreign += 1
            return
        self.known = True
        if record is not None and record.state == "committed":
            yield from self._beside(record, objects)
        elif record is not None:
            yield from self._bury(sweep, record, objects)

    def _fate(self, place: str) -> _Fate:
        """What explains a folder, read now. Whose save it is, is asked after it was seen there."""
        folder = place.removesuffix("/")
        try:
            _, save_id = names.tag_of(folder)
        except TagError:
            save_id = ""
        if folder == place or not save_id:
            return _Fate(unexplained="it is nothing of this layout")
        try:
            record = self._catalog.record(save_id)
            known = record or self._catalog.intent(save_id)
        except _UNREADABLE as error:
            return _Fate(save_id, unexplained=str(error))
        if known is None:
            return _Fate(save_id, unexplained="there is neither an intent nor a record of it")
        if known.folder != folder:
            return _Fate(save_id, unexplained=f"save {save_id} is that of {known.folder}")
        return _Fate(save_id, foreign=known.run_id != self._run_id, record=record)

    def _beside(self, record: Record, objects: Iterable[ObjectInfo]) -> Iterator[Finding]:
        """What lies in a checkpoint's folder and is not of it: no sidecar put it there."""
        listed = {key for key, _ in record.objects()}
        strange = [info for info in objects if info.key not in listed]
        if strange:
            yield Finding(
                "unexplained",
                record.folder,
                record.save_id,
                f"its record does not list {_some([info.key for info in strange])}",
                len(strange),
                sum(info.size for info in strange),
            )

    def _bury(
        self, sweep: _Sweep, record: Record, objects: Iterable[ObjectInfo]
    ) -> Iterator[Finding]:
        """What lies in the folder of a save that is no checkpoint, or no longer one."""
        why_left = self._still_read(sweep, record)
        if why_left:
            self.left.append(Left(record.folder, record.save_id, why_left))
            return
        # An abandoned record lists nothing; of one that was committed, what it lists may go.
        listed = {key for key, _ in record.objects()}
        reason = f"its save was {record.state}"
        strange = []
        for info in objects:
            sweep.check()
            if record.state == "deleted" and info.key not in listed:
                strange.append(info)
                continue
            if sweep.dry_run or self._delete(info.key, record.save_id):
                yield Finding("object", info.key, record.save_id, reason, 1, info.size)
        yield from self._beside(record, strange)

    def _still_read(self, sweep: _Sweep, record: Record) -> str:
        """Why retention is to remove it, in its own time, and not we; empty if we may."""
        if record.state != "deleted" or record.purged:
            return ""
        try:
            given_up = self._catalog.record_modified(record.save_id)
        except NotFoundError:
            return "its record is gone"
        if sweep.now - given_up < self._older_than:
            return f"retention gave it up {_ago(sweep.now - given_up)} and removes it itself"
        held, unknown = self._catalog.holds(sweep.now)
        if record.save_id in held:
            return "a restore holds it"
        return "a hold cannot be read, and may be of it" if unknown else ""

    # ---- the rest

    def _point(self, sweep: _Sweep) -> None:
        """Whoever committed a save and died may have left ``latest`` behind."""
        sweep.check()
        if sweep.newest is None or sweep.dry_run:
            return
        try:
            if self._catalog.point(sweep.newest):
                self.pointed = sweep.newest
        except UnknownSchemaError as error:
            self.left.append(Left(names.LATEST, "", str(error)))

    def _unfinished(self, sweep: _Sweep) -> Iterator[Finding]:
        for place, uploads in sorted(sweep.uploads.items()):
            if not names.is_data(place):
                continue
            fate = self._fate(place)
            if fate.unexplained:
                yield Finding(
                    "unexplained",
                    place.removesuffix("/"),
                    fate.save_id,
                    f"{len(uploads)} unfinished uploads: {fate.unexplained}",
                    objects=0,
                )
            decision = fate.record.state if fate.record else sweep.foreseen.get(fate.save_id)
            if fate.unexplained or fate.foreign or decision is None:
                continue
            for upload in uploads:
                yield from self._end(sweep, upload, fate.save_id, f"its save is {decision}")

    def _end(
        self, sweep: _Sweep, upload: Upload, save_id: str, reason: str, kind: Kind = "upload"
    ) -> Iterator[Finding]:
        sweep.check()
        size = self._size(upload)
        if size is not None and (sweep.dry_run or self._abort(upload, save_id)):
            yield Finding(kind, upload.key, save_id, reason, 0, size)

    def _size(self, upload: Upload) -> int | None:
        """Bytes of what is held of an upload, 0 if unknown; None if it is gone."""
        try:
            return sum(size for size, _ in self._catalog.store.parts(upload).values())
        except NotFoundError:
            return None
        except _NOT_ALLOWED:
            return 0

    def _leftovers(self, sweep: _Sweep) -> Iterator[Finding]:
        for info, reason in self._catalog.leftovers(sweep.now, self._patience):
            sweep.check()
            if sweep.dry_run or self._delete(info.key, ""):
                yield Finding("leftover", info.key, "", reason, 1, info.size)
        for place, uploads in sweep.uploads.items():
            for upload in uploads:
                old = 0.0 < upload.modified <= sweep.now - self._patience
                if old and not names.is_data(place):
                    reason = "a probe that was killed left it"
                    yield from self._end(sweep, upload, "", reason, "leftover")

    # ---- removing

    def _delete(self, key: str, save_id: str) -> bool:
        return self._removed(key, save_id, lambda: self._catalog.delete_objects([key]))

    def _abort(self, upload: Upload, save_id: str) -> bool:
        return self._removed(upload.key, save_id, lambda: self._catalog.store.abort(upload))

    def _removed(self, key: str, save_id: str, remove: Callable[[], object]) -> bool:
        """Whether it is gone now. What we may not remove must not keep us from the rest."""
        try:
            remove()
        except _NOT_ALLOWED as error:
            self.left.append(Left(key, save_id, f"it could not be removed: {error}", failed=True))
            return False
        return True


def _place(key: str) -> str:
    """The folder of a key, with a slash; a key that lies in none is its own."""
    head, slash, _ = key.partition("/")
    return head + slash


def _unexplained(place: str, fate: _Fate, objects: Iterable[ObjectInfo]) -> Finding:
    count, size = 0, 0
    for info in objects:
        count, size = count + 1, size + info.size
    key = place.removesuffix("/")
    return Finding("unexplained", key, fate.save_id, fate.unexplained, count, size)


def _lack(found: Commit) -> str:
    if found.missing_nodes:
        return f"nodes {_some(found.missing_nodes)} have not stored their parts"
    return f"objects {_some(found.missing_objects)} that receipts name are missing"


def _some(items: Iterable[str]) -> str:
    listed = list(items)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


def _ago(seconds: float) -> str:
    return f"{_long(max(seconds, 0.0))} ago"


def _long(seconds: float) -> str:
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
