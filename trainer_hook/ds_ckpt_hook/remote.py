"""The store, as far as resuming, history and reading need it; only here the hook opens one.

Imported inside ``agree_on_resume``, and only with a destination, inside ``history``, and where a
checkpoint is read from its store: a trainer that only hands over needs neither the store's code nor
a cloud SDK.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ds_ckpt_store.catalog import STALE_AFTER, Catalog
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.curate import BY_NAME
from ds_ckpt_store.deciding import for_deciding
from ds_ckpt_store.errors import DamagedError, MissingExtraError
from ds_ckpt_store.restore import Restore, is_restored
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.probe import for_reading
from ds_ckpt_store.transfer.budget import Budget


@dataclass(frozen=True)
class Committed:
    """One committed checkpoint in the store."""

    save_id: str
    tag: str
    time_ms: int
    epoch: int
    attempt: str
    run_id: str


def decided(
    destination: str, clock: Clock, rng: random.Random
) -> tuple[list[Committed], frozenset[str]]:
    """All committed checkpoints of a store, and the ids of those that were deleted by name.

    Raises:
        SettingsError: the URL cannot work.
        MissingExtraError: a library is not installed.
        StoreError: the store did not answer.
        DamagedError: there are records, and not one that can be read.
    """
    with reading(destination, clock, rng) as store:
        catalog = Catalog(store, rng)
        every = catalog.records()
        records = [record for record in every if record.state == "committed"]
        if catalog.damaged and not records:
            raise DamagedError(
                f"{len(catalog.damaged)} records cannot be read, and no committed one is left: "
                + "; ".join(catalog.damaged.values()),
                tuple(catalog.damaged),
            )
        committed = [
            Committed(
                save_id=record.save_id,
                tag=record.tag,
                time_ms=record.time_ms,
                epoch=record.epoch,
                attempt=record.attempt,
                run_id=record.run_id,
            )
            for record in records
        ]
        unwanted = (r.save_id for r in every if r.state == "deleted" and r.reason == BY_NAME)
        return committed, frozenset(unwanted)


def restore(
    destination: str, volume: Volume, save_id: str, clock: Clock, rng: random.Random
) -> None:
    """Bring one committed checkpoint onto a volume, every shard verified.

    Raises:
        CkptError: it could not be restored; nothing half-restored has a checkpoint's name.
        OSError: the volume cannot be written.
    """
    budget = Budget(clock)
    with (
        reading(destination, clock, rng, budget.heed) as store,
        ThreadPoolExecutor(budget.fit, "ds_ckpt restore") as executor,
    ):
        Restore(store, executor, budget=budget, clock=clock, rng=rng).run(volume, save_id=save_id)


@contextlib.contextmanager
def reading(
    destination: str,
    clock: Clock,
    rng: random.Random,
    heed: Callable[[Exception], None] = lambda _: None,
) -> Iterator[Store]:
    """A store as a reader must see it, calls repeated; closed at the end.

    Raises:
        SettingsError: the URL cannot work.
        MissingExtraError: a library is not installed.
    """
    with _opened(destination, clock, rng, heed) as store:
        yield for_reading(store)


@contextlib.contextmanager
def deciding(destination: str, clock: Clock, rng: random.Random, name: str) -> Iterator[Store]:
    """A store as agents write to it, calls repeated; closed at the end.

    Raises:
        SettingsError: the URL cannot work.
        MissingExtraError: a library is not installed.
        WeakStoreError: it cannot decide between two writers, and an agent is at work.
        StoreError: it cannot be used.
    """
    with _opened(destination, clock, rng) as store:
        lease = Catalog(for_reading(store), rng).owner()
        stale = max(STALE_AFTER, lease.stale_seconds if lease is not None else 0.0)
        # Agents have filled it, so it was accepted, however weak it is.
        yield for_deciding(store, rng, name, allow_weak=True, stale_after=stale)


@contextlib.contextmanager
def _opened(
    destination: str,
    clock: Clock,
    rng: random.Random,
    heed: Callable[[Exception], None] = lambda _: None,
) -> Iterator[Store]:
    try:
        from ds_ckpt_store.stores.retry import RetryStore
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"a store asked by the trainer ({error.name})", "sidecar") from None
    store = open_store(destination)
    try:
        yield RetryStore(store, clock, rng, on_retry=lambda retry: heed(retry.error))
    finally:
        store.close()


__all__ = ["Committed", "decided", "deciding", "is_restored", "reading", "restore"]
