"""The store for who decides beside agents: by the same writes as they, or not at all.

One that swapped plainly beside one that makes swaps of creates would each decide by itself (A4 of
the protocol). So what the store does is found out as an agent finds it out at its start. On a store
that cannot decide between two writers an agent is the only one, and nobody may be beside it.
"""

from __future__ import annotations

import random

from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import fresh_token
from ds_ckpt_store.errors import WeakStoreError
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.probe import fit, probe


def for_deciding(
    store: Store, rng: random.Random, name: str, *, allow_weak: bool, stale_after: float
) -> Store:
    """The store as agents write to it.

    Args:
        store: as it was opened, calls repeated.
        rng: names what the probe writes.
        name: who asks, for its probe, its clock and messages.
        allow_weak: accept a store without conditional create, while no agent is at work.
        stale_after: seconds, by the store's clock, of an agent's silence that is its end.

    Raises:
        WeakStoreError: the store has no conditional create, and that was not allowed, or an agent
            is at work.
        StoreError: the store cannot be used.
    """
    findings = probe(store, rng, f"{name}-{fresh_token(rng)}")
    fitted = fit(store, findings, allow_weak=allow_weak)
    if not findings.conditional_create:
        _need_silence(Catalog(fitted, rng), name, stale_after)
    return fitted


def _need_silence(catalog: Catalog, name: str, seconds: float) -> None:
    lease = catalog.lease()
    if lease is None or not lease[0].unfinished:
        return
    age = catalog.store_time(name) - lease[1]
    if age < seconds:
        raise WeakStoreError(
            f"{catalog.store.url} has no conditional create, and an agent was at work there "
            f"{age:.0f} s ago: it and {name} could both decide a save; try again when the agent "
            "has ended"
        )
