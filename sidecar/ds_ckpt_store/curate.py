"""What people keep and throw away by name: pin, unpin, delete.

A deletion by name goes the way of retention, and holds no lease: record first, then the objects,
so whatever dies in between leaves a tombstone with some objects, never a committed record without
them. Repeated, it goes on. Everything is decided by a swap over the record that was judged, so that
a pin, retention, a restore and another deletion at the same time come before it or after it.

Never deleted: a pinned one, one that a restore holds, and the last committed one under the prefix.
The newest of its run, and what ``latest`` names, only if that is said. Then the one that is to take
its place is pinned first: whoever was just giving that one up, because a newer one stood above it,
loses his swap. So there is always a committed one left, whoever deletes at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ds_ckpt_store.catalog import DECIDING_ROUNDS, Catalog
from ds_ckpt_store.errors import (
    KeptError,
    NothingCommittedError,
    StoreError,
    TransientError,
    UnknownSchemaError,
)
from ds_ckpt_store.records import Record
from ds_ckpt_store.retention import DEFAULT_PAUSE

CLOCK_NAME = "history"
BY_NAME = "deleted by name"


@dataclass(frozen=True)
class Deleted:
    """What became of one checkpoint that was deleted: it is none any more.

    Attributes:
        tag: its tag.
        save_id: its save.
        objects: how many objects this call deleted.
        left: why objects of it are still there, and when they go; empty if none are.
    """

    tag: str
    save_id: str
    objects: int
    left: str = ""


class Curator:
    """Keeps and deletes checkpoints of one prefix by name.

    Args:
        catalog: the prefix, over a store of :func:`ds_ckpt_store.deciding.for_deciding`.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    # ---- pins

    def pin(self, save_id: str) -> Record:
        """Keep a committed checkpoint from retention and from deletion.

        Raises:
            NothingCommittedError: it is no committed checkpoint, or retention came first.
            TransientError: others kept writing the record.
        """
        # Written also if it is pinned: who pinned it for a moment must not take our pin off.
        return self._set_pin(save_id, pinned=True)

    def unpin(self, save_id: str) -> Record:
        """Take a pin off. Raises as :meth:`pin`."""
        return self._set_pin(save_id, pinned=False)

    def _set_pin(self, save_id: str, *, pinned: bool) -> Record:
        for _ in range(DECIDING_ROUNDS):
            record = self._decided(save_id)
            if record.state == "deleted":
                raise NothingCommittedError(
                    f"{_name(record)} was given up ({record.reason}): it is no checkpoint any "
                    "more, and no pin brings it back"
                )
            if not pinned and not record.pin:
                return record
            changed = self._catalog.replace(record, pin=pinned)
            if changed is not None:
                return changed
        raise self._lost("pin" if pinned else "unpin", save_id)

    # ---- deletion

    def delete(
        self, save_ids: Collection[str], *, even_newest: bool = False, at_once: bool = False
    ) -> list[Deleted]:
        """Give checkpoints up, and delete their objects when no reader can be at them any more.

        What an earlier call left, because its pause was not over, goes too if it is by now.

        Args:
            save_ids: which; all are judged before the first one is given up.
            even_newest: also what a restart would resume from.
            at_once: do not wait the pause for readers that hold nothing (``verify``, plain copies,
                a restore that may not write). What a restore holds is waited for all the same.

        Returns:
            One for each, oldest first.

        Raises:
            KeptError: one of them must stay.
            NothingCommittedError: one of them is no checkpoint.
            TransientError: others kept writing a record; repeat it.
        """
        now = self._catalog.store_time(CLOCK_NAME)
        wanted = sorted((self._decided(each) for each in set(save_ids)), key=_order)
        ids = [record.save_id for record in wanted]
        self._point()
        for record in wanted:
            self._refuse_kept(record, ids, now, even_newest=even_newest)
        given_up = [self._give_up(each, ids, now, even_newest=even_newest) for each in ids]
        self._point()
        deleted = [self._purge(record, now, at_once=at_once) for record in given_up]
        for record in self._catalog.records():
            earlier = record.state == "deleted" and record.reason == BY_NAME
            if earlier and not record.purged and record.save_id not in ids:
                self._purge(record, now, at_once=False)
        return deleted

    def _give_up(
        self, save_id: str, wanted: Collection[str], now: float, *, even_newest: bool
    ) -> Record:
        for _ in range(DECIDING_ROUNDS):
            record = self._decided(save_id)
            if record.state == "deleted":
                return record
            self._point()  # so that no move of it is on its way to what is given up
            committed = self._refuse_kept(record, wanted, now, even_newest=even_newest)
            if not self._is_newest(record, committed):
                deleted = self._catalog.replace(record, state="deleted", reason=BY_NAME)
            else:
                deleted = self._give_up_newest(record, _next(record, committed, wanted))
            if deleted is not None:
                return deleted
        raise self._lost("delete", save_id)

    def _give_up_newest(self, record: Record, heir: Record) -> Record | None:
        """Give up what a restart would resume from, once what it then resumes from is safe.

        Returns:
            The tombstone; None if either of them was changed meanwhile.
        """
        pinned = heir if heir.pin else self._catalog.replace(heir, pin=True)
        if pinned is None:
            return None
        try:
            return self._catalog.replace(record, state="deleted", reason=BY_NAME)
        finally:
            if not heir.pin:  # a pin that stays behind does no harm
                with contextlib.suppress(StoreError):
                    self._catalog.replace(pinned, pin=False)

    def _refuse_kept(
        self, record: Record, wanted: Collection[str], now: float, *, even_newest: bool
    ) -> list[Record]:
        """Raise if a checkpoint must stay; else all that are committed."""
        if record.state == "deleted":
            return []
        committed = self._catalog.committed()
        held = self._held(record, now)
        why = ""
        if record.pin:
            why = "it is pinned: take the pin off first"
        elif held:
            why = f"{held}: delete it when that is over"
        elif all(each.save_id in wanted for each in committed):
            why = (
                "nothing committed would be left; to throw a whole run away, remove its prefix "
                "with the store's own tools once no agent is at work"
            )
        elif not even_newest and self._is_newest(record, committed):
            why = "it is what a restart resumes from: say even_newest=True if that is what you want"
        if why:
            raise KeptError(f"{_name(record)} in {self._catalog.store.url} stays: {why}")
        return committed

    def _is_newest(self, record: Record, committed: Sequence[Record]) -> bool:
        """Whether it is the newest of its run, or what ``latest`` names."""
        newest = [each.save_id for each in committed if each.run_id == record.run_id][-1:]
        pointed = self._catalog.latest()
        return record.save_id in newest or (
            pointed is not None and pointed.save_id == record.save_id
        )

    def _point(self) -> None:
        """Let ``latest`` name the newest of what is left; one that names a newer schema stays."""
        committed = self._catalog.committed()
        if committed:
            with contextlib.suppress(UnknownSchemaError):
                self._catalog.point(committed[-1])

    def _purge(self, record: Record, now: float, *, at_once: bool) -> Deleted:
        """Delete what a tombstone lists, unless somebody may still be reading it."""
        if record.purged:
            return Deleted(record.tag, record.save_id, 0)
        left = self._held(record, now)  # looked at after the swap: one of both sees the other
        age = now - self._catalog.record_modified(record.save_id)
        if not at_once and age < DEFAULT_PAUSE:
            left = left or (
                f"its objects stay for {DEFAULT_PAUSE / 60:.0f} min, for readers that have just "
                "begun"
            )
        if left:
            again = "a later deletion, the agent's retention, or ds-ckpt gc removes its objects"
            return Deleted(record.tag, record.save_id, 0, f"{left}; {again}")
        count = self._catalog.delete_objects(key for key, _ in record.objects())
        self._catalog.replace(record, purged=True)
        return Deleted(record.tag, record.save_id, count)

    # ---- looking

    def _decided(self, save_id: str) -> Record:
        """The record of what is, or was, a checkpoint."""
        record = self._catalog.record(save_id)
        url = self._catalog.store.url
        if record is None:
            if self._catalog.intent(save_id) is None:
                raise NothingCommittedError(f"{url} knows no save {save_id}")
            raise NothingCommittedError(
                f"save {save_id} in {url} is still being stored: wait until it is committed"
            )
        if record.state == "abandoned":
            raise NothingCommittedError(
                f"{_name(record)} in {url} was abandoned and never was a checkpoint "
                f"({record.reason}); ds-ckpt gc removes what is left of it"
            )
        return record

    def _held(self, record: Record, now: float) -> str:
        """Why somebody may be reading it, as the beginning of a sentence; empty if nobody is."""
        held, unknown = self._catalog.holds(now)
        if record.save_id in held:
            return "a restore holds it (one that was killed lets go by itself, within an hour)"
        return "a hold of this prefix cannot be read, and may be of it" if unknown else ""

    def _lost(self, operation: str, save_id: str) -> TransientError:
        return TransientError(
            operation, save_id, f"lost to other writers {DECIDING_ROUNDS} times in a row: repeat it"
        )


def _next(record: Record, committed: Sequence[Record], wanted: Collection[str]) -> Record:
    """What a restart resumes from once this one is gone: of its run, if there is any."""
    left = [each for each in committed if each.save_id not in wanted]
    return max(left, key=lambda each: (each.run_id == record.run_id, each.order))


def _order(record: Record) -> tuple[int, int, str]:
    return record.order


def _name(record: Record) -> str:
    return f"checkpoint {record.tag!r} (save {record.save_id})"
