"""The store, as far as resuming needs it; the only place where the hook touches one.

Imported inside ``agree_on_resume`` and only with a destination: a trainer that only hands over
needs neither the store's code nor a cloud SDK.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import DamagedError, MissingExtraError
from ds_ckpt_store.restore import Restore, is_restored
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import Store
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


def committed(destination: str, clock: Clock, rng: random.Random) -> list[Committed]:
    """All committed checkpoints of a store.

    Raises:
        SettingsError: the URL cannot work.
        MissingExtraError: a library is not installed.
        StoreError: the store did not answer.
        DamagedError: there are records, and not one that can be read.
    """
    with _opened(destination, clock, rng) as store:
        catalog = Catalog(store, rng)
        records = catalog.committed()
        if catalog.damaged and not records:
            raise DamagedError(
                f"{len(catalog.damaged)} records cannot be read, and no committed one is left: "
                + "; ".join(catalog.damaged.values()),
                tuple(catalog.damaged),
            )
        return [
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
        _opened(destination, clock, rng, budget.heed) as store,
        ThreadPoolExecutor(budget.fit, "ds_ckpt restore") as executor,
    ):
        Restore(store, executor, budget=budget, clock=clock, rng=rng).run(volume, save_id=save_id)


@contextlib.contextmanager
def _opened(
    destination: str,
    clock: Clock,
    rng: random.Random,
    heed: Callable[[Exception], None] = lambda _: None,
) -> Iterator[Store]:
    try:
        from ds_ckpt_store.stores.probe import for_reading
        from ds_ckpt_store.stores.retry import RetryStore
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"agree_on_resume from a store ({error.name})", "sidecar") from None
    store = open_store(destination)
    try:
        yield for_reading(RetryStore(store, clock, rng, on_retry=lambda retry: heed(retry.error)))
    finally:
        store.close()


__all__ = ["Committed", "committed", "is_restored", "restore"]
