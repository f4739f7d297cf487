"""Whose the prefix is, and what the store promises: proofs and conditions, tried for real."""

from __future__ import annotations

from collections.abc import Iterator

from ds_ckpt_sidecar.examine.finding import Finding
from ds_ckpt_store.catalog import STALE_AFTER, Catalog
from ds_ckpt_store.contract.clock import fresh_token, system_random
from ds_ckpt_store.errors import CkptError, DamagedError, UnknownSchemaError, WeakStoreError
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.probe import fit, for_reading, probe

_ALLOW = "DS_CKPT_ALLOW_WEAK_STORE=1 (--allow-weak-store), if one node alone uses this prefix"


def look_at_owner(store: Store, run_id: str, store_time: float) -> Iterator[Finding]:
    """Which run has the lease.

    Args:
        store: the store.
        run_id: the run that asks; empty if it is not known.
        store_time: by the store's clock, in seconds since the epoch; 0 if it is not known.
    """
    try:
        lease = Catalog(for_reading(store), system_random()).lease()
    except DamagedError as error:
        yield Finding(
            "error",
            store.url,
            f"its lease is damaged: {error}",
            f"move {', '.join(error.objects)} away; the next start of an agent makes a new one",
        )
        return
    except UnknownSchemaError as error:
        yield Finding(
            "error",
            store.url,
            f"its lease is newer than this version: {error}",
            "run a sidecar that is as new as those that have worked under this prefix",
        )
        return
    except (CkptError, OSError) as error:
        yield Finding("note", store.url, f"its lease cannot be read: {error}")
        return
    if lease is None:
        yield Finding("ok", store.url, "the prefix is nobody's yet")
        return
    owner, modified = lease
    age = max(store_time - modified, 0.0) if store_time else 0.0
    said = f"run {owner.run_id!r} has the prefix, and was last heard of {age:.0f} s ago"
    if not store_time:
        said = f"run {owner.run_id!r} has the prefix"
    if not run_id or owner.run_id == run_id:
        yield Finding("ok", store.url, said)
    elif owner.unfinished and age < (owner.stale_seconds or STALE_AFTER):
        yield Finding(
            "error",
            store.url,
            f"{said}, and we are run {run_id!r}: nothing of ours is stored while it is at work",
            "use one prefix for each run (DS_CKPT_DESTINATION), or give DS_CKPT_RUN_ID that run's "
            "name if this is the same run",
        )
    else:
        yield Finding(
            "warning",
            store.url,
            f"{said}, and we are run {run_id!r}: we take the prefix over, and its checkpoints "
            "stay there beside ours",
            "use one prefix for each run (DS_CKPT_DESTINATION), if that is not meant",
        )


def look_at_promises(store: Store, *, allow_weak: bool) -> Iterator[Finding]:
    """What the store refuses and what it lets happen, found out as the agent does at its start."""
    rng = system_random()
    try:
        findings = probe(store, rng, f"doctor-{fresh_token(rng)}")
    except (CkptError, OSError) as error:
        yield Finding("error", store.url, f"what it promises cannot be tried: {error}")
        return
    said = findings.describe()
    try:
        fit(store, findings, allow_weak=allow_weak)
    except WeakStoreError as error:
        yield Finding("error", store.url, f"{said}. {error}", _ALLOW)
        return
    if not findings.conditional_create:
        yield Finding(
            "warning",
            store.url,
            f"{said}: of two sidecars that decide one save both may win",
            "let one node alone use this prefix",
        )
    elif findings.doubt() is not None:
        yield Finding("warning", store.url, f"{said}: {findings.doubt()}", "see docs/stores")
    else:
        yield Finding("ok", store.url, said)
