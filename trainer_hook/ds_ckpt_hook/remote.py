"""The store, as far as resuming needs it; the only place where the hook touches one.

Imported inside ``agree_on_resume`` and only with a destination: a trainer that only hands over
needs neither the store's code nor a cloud SDK.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.restore import Restore, is_restored
from ds_ckpt_store.stores import open_store

STREAMS = 8


@dataclass(frozen=True)
class Committed:
    """One committed checkpoint in the store."""

    save_id: str
    tag: str
    time_ms: int
    epoch: int
    attempt: str


def committed(destination: str, rng: random.Random) -> list[Committed]:
    """All committed checkpoints of a store.

    Raises:
        SettingsError: the URL cannot work.
        MissingExtraError: the store's SDK is not installed.
        StoreError: the store did not answer.
    """
    store = open_store(destination)
    try:
        records = Catalog(store, rng).committed()
    finally:
        store.close()
    return [
        Committed(
            save_id=record.save_id,
            tag=record.tag,
            time_ms=record.time_ms,
            epoch=record.epoch,
            attempt=record.attempt,
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
    store = open_store(destination)
    try:
        with ThreadPoolExecutor(STREAMS, "ds_ckpt restore") as executor:
            Restore(store, executor, streams=STREAMS, clock=clock, rng=rng).run(
                volume, save_id=save_id
            )
    finally:
        store.close()


__all__ = ["Committed", "committed", "is_restored", "restore"]
