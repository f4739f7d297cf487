"""What a person wants to know of one agent, worked out from what it and the trainer last said.

One function for the page, the metrics and ``ds-ckpt status``, so that they never disagree. It is
handed the documents of ``status/`` (the agent has them in memory, the command reads the files) and
the time.

* **Lag** is the age of the oldest save that can become durable and is not.
* **Exposure** is the training that would be lost if the pod died now: from the newest durable save
  to the last sign of training. That sign is now while the trainer's heartbeat is fresh, its last
  heartbeat once it is silent, and, once it has finished, or nothing is known of it, the newest save
  that it handed over. What was trained before the attempt began was lost already, or is durable.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds_ckpt_sidecar.observe.remedies import remedy
from ds_ckpt_store.contract.manifest import (
    FRESH_SECONDS,
    Restored,
    SaveState,
    SaveStatus,
    SidecarStatus,
    TrainerStatus,
)
from ds_ckpt_store.stores import shown

OPEN: frozenset[SaveState] = frozenset({"discovered", "uploading", "stored", "failed"})
DURABLE: frozenset[SaveState] = frozenset({"committed", "cleaned"})
_INTERVALS = 10  # between saves, of which the median is taken


@dataclass(frozen=True)
class SaveView:
    """One save.

    Attributes:
        saved: seconds since the epoch, and not after its hand-over here: the clock of the node
            that named the time may be ahead; 0 of a file that is no manifest.
        age_seconds: since then.
        durable_seconds: from then to the commit; None if it is not durable, or nobody noted when.
        bytes_done: of ``bytes_total`` that this node uploads; shards alike.
        share: of the bytes, 0 to 1.
        rate: bytes per second of late; 0 if it is not under way.
        left_seconds: until this node's part is stored, at that rate; None if not known.
        waiting_for: nodes whose parts are missing while this node's is stored.
        waiting_seconds: since it waits for them.
        durable: it is a checkpoint.
        open: it is none yet, and can become one by itself.
    """

    save_id: str
    tag: str
    step: int | None
    kind: str
    state: SaveState
    reason: str
    saved: float
    age_seconds: float
    durable_seconds: float | None
    bytes_total: int
    bytes_done: int
    shards_total: int
    shards_done: int
    share: float
    rate: float
    left_seconds: float | None
    waiting_for: tuple[str, ...]
    waiting_seconds: float
    durable: bool
    open: bool


@dataclass(frozen=True)
class Newest:
    """The newest durable save of the run: tag, id, seconds since the epoch, step if known."""

    tag: str
    save_id: str
    saved: float
    step: int | None
    age_seconds: float


@dataclass(frozen=True)
class View:
    """One agent and its volume. Seconds and bytes as the names say; None: not known.

    Attributes:
        now: for which this holds, seconds since the epoch.
        alive: the agent's heartbeat is fresh, and it has not stopped.
        saves: those on the volume and those that left it of late, the newest first.
        lag_seconds: 0 if no save waits to become durable.
        lost_saves: that are newer than the newest durable one, and will not become durable by
            themselves.
        save_interval_seconds: median between the last saves; 0 if there were fewer than three.
        waiting_seconds: longest wait of a save for other nodes.
        limit_bytes: that the volume may hold before the pod is evicted; 0 if only its disk counts.
        error: the last, unless all has been well since; with what to do about it.
        unready: why the agent cannot store now; empty if it can.
    """

    now: float
    alive: bool
    heartbeat: float
    version: str
    state: str
    pid: int
    run_id: str
    node: str
    destination: str
    epoch: int
    saves: tuple[SaveView, ...]
    lag_seconds: float
    lost_saves: int
    exposure_seconds: float
    exposure_steps: int | None
    save_interval_seconds: float
    backlog_saves: int
    backlog_shards: int
    backlog_bytes: int
    waiting_seconds: float
    newest: Newest | None
    free_bytes: int
    total_bytes: int
    used_bytes: int
    high_water_bytes: int
    limit_bytes: int
    unfreed_bytes: int
    refused_manifests: int
    failures: int
    rate: float
    bandwidth: int
    streams: int
    error: str
    error_time: float
    remedy: str
    unready: str
    trainer: TrainerStatus | None
    trainer_state: str
    trainer_silent_seconds: float | None
    restore_seconds: float | None
    restore_bytes: int | None
    credentials_expiry: float | None


def look(
    sidecar: SidecarStatus | None,
    trainer: TrainerStatus | None,
    saves: Iterable[SaveStatus],
    now: float,
    restored: Restored | None = None,
) -> View:
    """The view.

    Args:
        sidecar: the agent's last heartbeat; None: there was none.
        trainer: the trainer's.
        saves: where each save stands.
        now: seconds since the epoch.
        restored: what the volume was restored from.
    """
    said = sidecar or SidecarStatus(time=0.0, pid=0, version="", state="stopped")
    views = sorted(
        (_save(save, said, now) for save in saves), key=lambda save: save.save_id, reverse=True
    )
    unfinished = [save for save in views if save.open and save.saved]
    newest = _newest(said, views, restored, now)
    seconds, steps = _exposure(views, newest, trainer, now)
    return View(
        now=now,
        alive=said.state != "stopped" and not said.is_silent(now),
        heartbeat=said.time,
        version=said.version,
        state=said.state if sidecar is not None else "never seen",
        pid=said.pid,
        run_id=said.run_id or (trainer.run_id if trainer is not None else ""),
        node=said.node,
        destination=without_secrets(said.destination),
        epoch=said.epoch,
        saves=tuple(views),
        lag_seconds=max((save.age_seconds for save in unfinished), default=0.0),
        lost_saves=_lost(views, newest),
        exposure_seconds=seconds,
        exposure_steps=steps,
        save_interval_seconds=_interval(views),
        backlog_saves=len(unfinished),
        backlog_shards=sum(save.shards_total - save.shards_done for save in unfinished),
        backlog_bytes=sum(save.bytes_total - save.bytes_done for save in unfinished),
        waiting_seconds=max((save.waiting_seconds for save in unfinished), default=0.0),
        newest=newest,
        free_bytes=said.free_bytes,
        total_bytes=said.total_bytes,
        used_bytes=said.used_bytes,
        high_water_bytes=said.high_water_bytes,
        limit_bytes=said.limit_bytes,
        unfreed_bytes=said.unfreed_bytes,
        refused_manifests=said.refused_manifests,
        failures=said.failures,
        rate=said.rate,
        bandwidth=said.bandwidth,
        streams=said.streams,
        error=said.last_error,
        error_time=said.last_error_time,
        remedy=remedy(said.last_error_kind) if said.last_error else "",
        unready=why_unready(sidecar, now),
        trainer=trainer,
        trainer_state=_trainer_state(trainer, now),
        trainer_silent_seconds=None if trainer is None else max(0.0, now - trainer.time),
        restore_seconds=None if restored is None else restored.seconds,
        restore_bytes=None if restored is None else restored.bytes,
        credentials_expiry=said.credentials_expiry,
    )


def without_secrets(url: str) -> str:
    """A URL, which anybody may have written, without what may be secret in it."""
    try:
        return shown(url) if url else ""
    except ValueError:
        return "..."


def _save(save: SaveStatus, said: SidecarStatus, now: float) -> SaveView:
    saved = min(save.saved_ms / 1000, save.handed_over or float("inf"))
    done = min(save.bytes_done, save.bytes_total)
    rate = said.rate if save.state == "uploading" else 0.0
    waits = bool(save.waiting_for) and save.state in OPEN
    known = save.durable_since > 0 and saved > 0 and save.state in DURABLE
    return SaveView(
        save_id=save.save_id,
        tag=save.tag,
        step=save.step,
        kind=save.kind,
        state=save.state,
        reason=save.reason,
        saved=saved,
        age_seconds=max(0.0, now - (saved or save.time)),
        durable_seconds=max(0.0, save.durable_since - saved) if known else None,
        bytes_total=save.bytes_total,
        bytes_done=done,
        shards_total=save.shards_total,
        shards_done=min(save.shards_done, save.shards_total),
        share=done / save.bytes_total if save.bytes_total else float(save.state in DURABLE),
        rate=rate,
        left_seconds=(save.bytes_total - done) / rate if rate > 0 else None,
        waiting_for=tuple(save.waiting_for) if waits else (),
        waiting_seconds=max(0.0, now - save.waiting_since) if waits and save.waiting_since else 0.0,
        durable=save.state in DURABLE,
        open=save.state in OPEN,
    )


def _trainer_state(trainer: TrainerStatus | None, now: float) -> str:
    if trainer is None:
        return "unknown"
    if trainer.finished:
        return "finished"
    return "running" if now - trainer.time < FRESH_SECONDS else "silent"


def why_unready(sidecar: SidecarStatus | None, now: float) -> str:
    """Why the agent cannot store now; empty if it can.

    One that says nothing cannot, as far as anybody knows. This is the only judge: of the probe too.

    Args:
        sidecar: its last heartbeat; None: there was none.
        now: seconds since the epoch.
    """
    if sidecar is None:
        return "no agent was ever seen on this volume"
    if sidecar.unready:
        return sidecar.unready
    if sidecar.state not in ("running", "draining"):
        return f"the agent is {sidecar.state}"
    if not sidecar.is_silent(now):
        return ""
    return (
        f"the agent was last heard of {now - sidecar.time:.0f} s ago: it has ended, or hangs in a "
        "call to the volume or the store"
    )


def _newest(
    said: SidecarStatus, saves: Sequence[SaveView], restored: Restored | None, now: float
) -> Newest | None:
    """Of what the agent says of the store, which may hold what this volume has never seen.

    Its time is that of this volume's own save, if it is there: see :class:`SaveView`.
    An agent that has not reached the store knows nothing of it; then what was durable here counts.
    """
    known = [(save.saved, save.tag, save.save_id, save.step) for save in saves if save.durable]
    if restored is not None:
        known.append((restored.time_ms / 1000, restored.tag, restored.save_id, restored.step))
    if said.newest_committed_save:
        save_id, step = said.newest_committed_save, said.newest_committed_step
        steps = {each_id: each_step for _, _, each_id, each_step in known}
        step = steps.get(save_id) if step is None else step
        own = [save.saved for save in saves if save.save_id == save_id and save.saved]
        at = min([said.newest_committed_ms / 1000, *own])
        found = (at, said.newest_committed_tag, save_id, step)
    elif known and (said.unready or said.state not in ("running", "draining")):
        found = max(known, key=lambda each: each[0])
    else:
        return None
    saved, tag, save_id, step = found
    return Newest(tag, save_id, saved, step, max(0.0, now - saved))


def _lost(saves: Iterable[SaveView], newest: Newest | None) -> int:
    after = newest.save_id if newest is not None else ""
    return sum(not (save.durable or save.open) and save.save_id > after for save in saves)


def _exposure(
    saves: Sequence[SaveView],
    newest: Newest | None,
    trainer: TrainerStatus | None,
    now: float,
) -> tuple[float, int | None]:
    """Seconds and steps of training that are not durable; steps may be not known."""
    handed_over = [save for save in saves if save.saved]
    last_save = max(handed_over, key=lambda save: save.saved, default=None)
    if trainer is None or trainer.finished:
        until = last_save.saved if last_save is not None else 0.0
        step = last_save.step if last_save is not None else None
    else:
        silent = now - trainer.time
        until = now if silent < FRESH_SECONDS else trainer.time
        step = trainer.step
    since = _beginning(saves, newest, trainer, now)
    if since is None:
        return 0.0, None
    seconds = max(0.0, until - since)
    if newest is not None:
        known = step is not None and newest.step is not None
        return seconds, max(0, (step or 0) - (newest.step or 0)) if known else None
    return seconds, step


def _beginning(
    saves: Sequence[SaveView], newest: Newest | None, trainer: TrainerStatus | None, now: float
) -> float | None:
    """When that began which would be lost; None if nobody knows of any training.

    A time that is still to come is of a clock that is ahead, and of a save that this volume has
    not seen: then what was handed over here before it bounds the loss, or the attempt's beginning.
    """
    started = trainer.started if trainer is not None and not trainer.finished else None
    if newest is not None:
        since = newest.saved
        if since > now:
            here = [save.saved for save in saves if save.saved and save.save_id < newest.save_id]
            since = max(here, default=since if started is None else started)
        return since if started is None else max(since, started)
    if trainer is not None and trainer.started is not None:
        return trainer.started
    return min((save.saved for save in saves if save.saved), default=None)


def _interval(saves: Sequence[SaveView]) -> float:
    times = sorted(save.saved for save in saves if save.saved)[-_INTERVALS - 1 :]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return statistics.median(gaps) if len(gaps) > 1 else 0.0
