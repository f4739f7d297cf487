"""What a store holds, for the user's own code: listed, compared by metrics, pinned, deleted.

:func:`history` reads and does nothing else: no exchange with other ranks, no state, nothing on the
volume. A rank may call it in the middle of training, as may a script on another machine. What it
returns is a snapshot; pins and deletions look at the store anew, and are judged by what stands
there then.

No module of this name may be ``history``: the first import would put it in the function's place.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Literal, overload

from ds_ckpt_store.contract.clock import SystemClock, system_random
from ds_ckpt_store.errors import InputError, NothingCommittedError, StoreError

if TYPE_CHECKING:
    from ds_ckpt_store.catalog import Catalog
    from ds_ckpt_store.contract.manifest import SaveInfo
    from ds_ckpt_store.curate import Curator, Deleted
    from ds_ckpt_store.records import Record

logger = logging.getLogger("ds_ckpt_hook")

State = Literal["committed", "storing", "abandoned", "deleted"]
_SHOWN = 10  # names in a message


@dataclass(frozen=True)
class Checkpoint:
    """One save as the store knows it.

    Attributes:
        tag: what ``save_checkpoint`` was given.
        save_id: names this save and no other, also if the tag was saved again.
        step: the engine's global step, if it was known.
        saved: when, in UTC.
        kind: what ``after_save`` was told.
        metrics: what ``after_save`` was told; None for what was not finite.
        bytes: what the store holds of it once it is committed; 0 before, and when it is gone.
        pinned: neither retention nor a deletion takes it.
        state: ``committed``, or with ``every`` also ``storing`` (no decision yet), ``abandoned``
            (it never became complete) and ``deleted``.
        run_id: of the run that saved it.
        url: its folder in the store; the files in it are DeepSpeed's own.
    """

    tag: str
    save_id: str
    step: int | None
    saved: datetime
    kind: str
    metrics: Mapping[str, float | None] = field(hash=False)
    bytes: int
    pinned: bool
    state: State
    run_id: str
    url: str


class History(Sequence[Checkpoint]):
    """What a store held when it was asked, oldest first; see :func:`ds_ckpt_hook.history`.

    Attributes:
        url: of the store.
        run_id: the run that was asked for; None for all.
        damaged: what could not be read, and so is not in here: key to reason.
    """

    def __init__(
        self,
        url: str,
        run_id: str | None,
        entries: Sequence[Checkpoint],
        damaged: Mapping[str, str],
    ) -> None:
        self.url = url
        self.run_id = run_id
        self.damaged = dict(damaged)
        self._entries = tuple(entries)

    @overload
    def __getitem__(self, index: int) -> Checkpoint: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Checkpoint, ...]: ...

    def __getitem__(self, index: int | slice) -> Checkpoint | tuple[Checkpoint, ...]:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<History of {self.url}: {[each.tag for each in self]}>"

    # ---- choosing

    def newest(self) -> Checkpoint:
        """The newest committed checkpoint: of the newest attempt the last that was saved.

        Raises:
            NothingCommittedError: there is none.
        """
        return self._committed()[-1]

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> Checkpoint:
        """The committed checkpoint with the least or greatest value; of equal ones the newest.

        One without this metric, or whose value was not finite, is passed over.

        Raises:
            InputError: no such mode; or no checkpoint has a value of this metric: says which have.
            NothingCommittedError: nothing is committed.
        """
        if mode not in ("min", "max"):
            raise InputError(f"mode {mode!r}: write 'min' for the least value, 'max' for the most")
        committed = self._committed()
        valued = [
            (value if mode == "max" else -value, number)
            for number, each in enumerate(committed)
            if (value := each.metrics.get(metric)) is not None and math.isfinite(value)
        ]
        if valued:
            return committed[max(valued)[1]]
        known = sorted({name for each in committed for name in each.metrics})
        if metric in known:
            raise InputError(f"metric {metric!r} was not finite in any checkpoint of {self.url}")
        there = f"there are {_some(known)}" if known else "after_save was told of no metrics"
        raise InputError(f"no checkpoint of {self.url} has a metric {metric!r}; {there}")

    def _committed(self) -> list[Checkpoint]:
        found = [each for each in self if each.state == "committed"]
        if not found:
            whose = f" of run {self.run_id!r}" if self.run_id is not None else ""
            raise NothingCommittedError(
                f"{self.url} holds no committed checkpoint{whose}"
                + "".join(f"; but for a damaged one: {each}" for each in self.damaged.values())
            )
        return found

    # ---- changing

    def pin(self, *saves: Checkpoint | str) -> None:
        """Keep checkpoints for good: neither retention nor a deletion takes them.

        Args:
            saves: entries of a history, save ids, or tags that name one save.

        Raises:
            InputError: a tag names several saves: says which.
            NothingCommittedError: there is none such, or it was given up before.
            StoreError: the store could not be asked, or does not allow it.
            WeakStoreError: the store cannot decide between two writers, and an agent is at work.
        """
        if saves:
            with self._deciding() as (catalog, curator):
                for save_id in self._save_ids(catalog, saves):
                    curator.pin(save_id)

    def unpin(self, *saves: Checkpoint | str) -> None:
        """Take pins off again. Arguments and errors as of :meth:`pin`."""
        if saves:
            with self._deciding() as (catalog, curator):
                for save_id in self._save_ids(catalog, saves):
                    curator.unpin(save_id)

    def delete(
        self, *saves: Checkpoint | str, even_newest: bool = False, at_once: bool = False
    ) -> list[Deleted]:
        """Delete checkpoints: from now on they are none, and are restored no more.

        ``agree_on_resume`` with a destination passes over them, though the volumes may hold them.
        All are judged before the first is given up. Their files go when an hour has passed, for
        readers that have just begun: with a later call, the agent's retention, or ``ds-ckpt gc``.
        A call that died half way is repeated.

        Args:
            saves: entries of a history, save ids, or tags that name one save.
            even_newest: also the newest of its run, and what ``latest`` names.
            at_once: delete the files now, unless a restore is reading them.

        Returns:
            What became of each: how many objects are gone, and why others are left.

        Raises:
            KeptError: one is pinned, being restored, the newest, or the last. Nothing was deleted,
                unless it came to be so while others were.
            InputError: see :meth:`pin`; so for the others.
        """
        if not saves:
            return []
        with self._deciding() as (catalog, curator):
            save_ids = self._save_ids(catalog, saves, deleted_too=True)
            return curator.delete(save_ids, even_newest=even_newest, at_once=at_once)

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[tuple[Catalog, Curator]]:
        from ds_ckpt_hook import remote
        from ds_ckpt_store.catalog import Catalog
        from ds_ckpt_store.curate import CLOCK_NAME, Curator

        rng = system_random()
        with _naming(self.url), remote.deciding(self.url, SystemClock(), rng, CLOCK_NAME) as store:
            catalog = Catalog(store, rng)
            yield catalog, Curator(catalog)

    def _save_ids(
        self, catalog: Catalog, saves: Sequence[Checkpoint | str], *, deleted_too: bool = False
    ) -> list[str]:
        """Save ids of what is named, looked up now."""
        if all(isinstance(each, Checkpoint) for each in saves):
            return [each.save_id for each in saves if isinstance(each, Checkpoint)]
        records = [each for each in catalog.records() if self.run_id in (None, each.run_id)]
        return [
            each.save_id
            if isinstance(each, Checkpoint)
            else self._save_id(records, each, deleted_too=deleted_too)
            for each in saves
        ]

    def _save_id(self, records: Sequence[Record], name: str, *, deleted_too: bool) -> str:
        if any(each.save_id == name for each in records):
            return name
        tagged = [each for each in records if each.tag == name]
        found = [each for each in tagged if each.state == "committed"]
        if not found and deleted_too:  # a deletion that died is repeated by the same name
            found = [each for each in tagged if each.state == "deleted" and not each.purged]
        if len(found) > 1:
            ids = _some([each.save_id for each in found])
            raise InputError(
                f"tag {name!r} names {len(found)} saves in {self.url}: give the save id, oldest "
                f"first {ids}"
            )
        if found:
            return found[0].save_id
        known = sorted({each.tag for each in records if each.state == "committed"})
        there = f"committed tags: {_some(known)}" if known else "it holds none at all"
        raise NothingCommittedError(f"{self.url} holds no checkpoint {name!r}; {there}")


def history(url: str, run_id: str | None = None, *, every: bool = False) -> History:
    """See :func:`ds_ckpt_hook.history`."""
    from ds_ckpt_hook import remote
    from ds_ckpt_store.catalog import Catalog

    rng = system_random()
    with _naming(url), remote.reading(url, SystemClock(), rng) as store:
        catalog = Catalog(store, rng)
        intents = catalog.undecided() if every else []  # first: a decision hides no save
        records = catalog.records() if every else catalog.committed()
        damaged = dict(catalog.damaged)
        shown = store.url
    decided = {each.save_id for each in records}
    entries = [
        *(_entry(each, each.state, 0 if each.purged else each.size, shown) for each in records),
        *(_entry(each, "storing", 0, shown) for each in intents if each.save_id not in decided),
    ]
    for reason in damaged.values():
        logger.warning("left out of the history: %s", reason)
    return History(
        url, run_id, [each for each in entries if run_id in (None, each.run_id)], damaged
    )


def _entry(save: SaveInfo, state: State, size: int, url: str) -> Checkpoint:
    return Checkpoint(
        tag=save.tag,
        save_id=save.save_id,
        step=save.step,
        saved=datetime.fromtimestamp(save.time_ms / 1000, timezone.utc),
        kind=save.kind,
        metrics=dict(save.metrics),
        bytes=size,
        pinned=save.pin,
        state=state,
        run_id=save.run_id,
        url=f"{url}/{save.folder}",
    )


@contextlib.contextmanager
def _naming(url: str) -> Iterator[None]:
    """Let an error of the store say which one it was."""
    try:
        yield
    except StoreError as error:
        told = f"{error.answer}; the store is {url}"
        raise type(error)(error.operation, error.key, told) from error


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) for name in names[:_SHOWN]) + more
