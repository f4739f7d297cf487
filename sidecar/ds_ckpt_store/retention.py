"""What may be deleted in the store, and in which order.

Record first: a checkpoint stops being one before its first byte goes, so whatever dies in between
leaves a tombstone with some objects, never a committed record without them. Only the newest
epoch deletes. Never deleted: what ``latest`` names, a pinned one, a held one, one that a live
attempt resumed from, one that is further in training than the newest, and the last one left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ds_ckpt_store.catalog import Catalog, Lease
from ds_ckpt_store.records import Record

DEFAULT_PAUSE = 3600.0


def expired(
    committed: Sequence[Record],
    *,
    keep_last: int,
    run_id: str,
    latest: str | None,
    protected: Collection[str],
) -> list[Record]:
    """Which committed records the rule "keep the last N" gives up.

    Args:
        committed: all committed records of the prefix, in any order.
        keep_last: how many of the newest of this run stay; at least 1.
        run_id: only records of this run are given up.
        latest: save id that ``latest`` names.
        protected: save ids that must stay (held, resumed from).

    Returns:
        Oldest first.
    """
    own = sorted((record for record in committed if record.run_id == run_id), key=_order)
    newest_step = own[-1].step if own else None
    return [
        record
        for record in own[: -max(keep_last, 1)]
        if not record.pin
        and record.save_id != latest
        and record.save_id not in protected
        and not _is_further(record.step, newest_step)
    ]


def _is_further(step: int | None, newest: int | None) -> bool:
    """Whether a checkpoint is further in training than the newest one.

    Then training was begun anew, or further back: perhaps by mistake, and what would be given up
    is days of work. It goes once training has come as far again.
    """
    return step is not None and newest is not None and step > newest


def _order(record: Record) -> tuple[int, int, str]:
    return record.order


@dataclass(frozen=True)
class Retained:
    """What one pass did: save ids given up, save ids purged, and objects deleted."""

    deleted: tuple[str, ...] = ()
    purged: tuple[str, ...] = ()
    objects: int = 0


class Retention:
    """Applies "keep the last N" to one run under a prefix.

    Args:
        catalog: the prefix.
        run_id: the run whose checkpoints may go.
        keep_last: how many of the newest stay.
        pause: seconds, by the store's clock, between giving up a record and deleting its objects;
            a reader that had just chosen it still finds it whole.
    """

    def __init__(
        self, catalog: Catalog, run_id: str, keep_last: int, pause: float = DEFAULT_PAUSE
    ) -> None:
        self._catalog = catalog
        self._run_id = run_id
        self._keep_last = keep_last
        self._pause = pause

    def apply(
        self,
        lease: Lease,
        resumed_from: Collection[str] = (),
        check: Callable[[], None] = lambda: None,
    ) -> Retained:
        """One pass; does nothing unless ours is the newest epoch. Safe to repeat after a crash.

        Args:
            lease: ours, looked at just now.
            resumed_from: saves that live attempts resumed from.
            check: called before each deletion, of which there may be very many; may raise to stop.
        """
        if not lease.newest:
            return Retained()
        records = self._catalog.records()
        committed = [record for record in records if record.state == "committed"]
        if not committed or committed[-1].epoch > lease.epoch:
            return Retained()
        self._catalog.point(committed[-1])
        pointed = self._catalog.latest()
        if pointed is None:
            return Retained()
        parents = {r.parent for r in committed if r.epoch == lease.epoch and r.parent}
        deleted = []
        for record in expired(
            committed,
            keep_last=self._keep_last,
            run_id=self._run_id,
            latest=pointed.save_id,
            protected={*self._catalog.held(lease.store_time), *parents, *resumed_from},
        ):
            if self._catalog.replace(record, state="deleted", reason="retention") is not None:
                deleted.append(record.save_id)
        purged, objects = self._purge(lease, check)
        return Retained(tuple(deleted), purged, objects)

    def _purge(self, lease: Lease, check: Callable[[], None]) -> tuple[tuple[str, ...], int]:
        purged, objects = [], 0
        # A hold that came between our look at the holds and the swap keeps the objects at least.
        held = self._catalog.held(lease.store_time)
        for record in self._catalog.records():
            if record.state != "deleted" or record.purged or record.run_id != self._run_id:
                continue
            if record.save_id in held:
                continue
            age = lease.store_time - self._catalog.record_modified(record.save_id)
            if self._pause > 0 and age < self._pause:
                continue
            for key, _ in record.objects():
                check()
                objects += self._catalog.delete_objects([key])
            if self._catalog.replace(record, purged=True) is not None:
                purged.append(record.save_id)
        return tuple(purged), objects
