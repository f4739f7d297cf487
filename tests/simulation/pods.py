"""What the processes of a pod do, and those that come beside it: restore, gc, and people."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_ckpt_sidecar.agent import Agent
from ds_ckpt_sidecar.journal import Journal
from ds_ckpt_sidecar.settings import AgentSettings
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.collect import Collector
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.curate import Curator
from ds_ckpt_store.errors import CkptError, KeptError, NothingCommittedError
from ds_ckpt_store.restore import Restore
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.probe import Findings, fit
from ds_ckpt_store.stores.retry import RetryPolicy, RetryStore
from ds_ckpt_store.transfer.budget import Budget
from tests.simulation.cloud import PART, URL, Cloud
from tests.simulation.disk import Disk, SimFilesystem
from tests.simulation.kernel import Process, SimClock
from tests.simulation.seams import Inline, SimJournal

POLICY = RetryPolicy(tries=5, deadline=60.0)


class Settings(AgentSettings):
    """Parts of a few bytes, so that a shard of a hundred has several."""

    @property
    def part_bytes(self) -> int:
        return PART


@dataclass(frozen=True)
class AgentOptions:
    """What agents of one job are told."""

    run_id: str
    keep_last: int | None
    keep_local: int
    retention_pause: float
    abandon_seconds: float
    order: str
    exit_when_finished: bool = False

    @functools.cached_property
    def _common(self) -> AgentSettings:
        return Settings(
            volume="/",
            destination=URL,
            run_id=self.run_id,
            keep_last=self.keep_last,
            keep_local=self.keep_local,
            retention_pause=self.retention_pause,
            order=self.order,  # type: ignore[arg-type]
            rescan_seconds=60.0,
            drain_seconds=15.0,
            lease_stale_seconds=STALE_SECONDS,
            abandon_seconds=self.abandon_seconds,
            page_cache="keep",
            exit_when_finished=self.exit_when_finished,
            trainer_gone_seconds=GONE_SECONDS,
        )

    def settings(self, volume: str) -> AgentSettings:
        return self._common.model_copy(update={"volume": volume})


STALE_SECONDS = 150.0
GONE_SECONDS = 100.0


class Lines:
    """The agent's log: figures, and lines of the trace."""

    COUNTED = {
        "lease.took_over": "takeovers from another run",
        "lease.passed": "leases passed to a newer attempt",
        "save.superseded": "saves superseded",
        "save.abandoned": "saves abandoned",
        "save.quarantined": "saves quarantined",
        "save.committed": "saves seen committed",
        "save.cleaned": "saves cleaned from a volume",
        "save.waiting": "saves that waited for other nodes",
        "restored.cleaned": "restored checkpoints cleaned from a volume",
        "agent.standby": "agents that stood by",
        "agent.draining": "agents told to drain",
        "agent.noticed": "agents told that their pod will end",
        "trainer.over": "agents that saw their trainer's end",
        "journal.degraded": "journals lost",
        "volume.cleared_up": "volumes cleared up",
    }

    def __init__(self, process: Process) -> None:
        self._process = process

    def _line(self, event: str, **values: Any) -> None:
        kernel = self._process.kernel
        counted = self.COUNTED.get(event)
        if counted is not None:
            kernel.chance.count(counted)
        elif event == "retention.applied":
            for _ in values.get("given_up", ()):
                kernel.chance.count("checkpoints given up by retention")
        elif event == "save.uploaded" and values.get("resumed_parts"):
            kernel.chance.count("uploads resumed")
        elif event == "pass.failed" and values.get("kind") == "OwnershipError":
            kernel.chance.count("passes refused for another run")
        if kernel.trace is not None:
            kernel.say(f"log {event} {values}")

    info = warning = error = _line


def run_agent(
    process: Process,
    disk: Disk,
    cloud: Cloud,
    options: AgentOptions,
    started: Callable[[Agent], None],
) -> int:
    """The main program of a sidecar container."""

    def journal(path: str, warn: Callable[[str], None], clock: Clock) -> Journal:
        return SimJournal(path, warn, clock, process, disk.database)

    agent = Agent(
        options.settings(disk.path),
        store=cloud.connect(process),
        volume=Volume(disk.path, SimFilesystem(disk, process)),
        log=Lines(process),
        clock=SimClock(process),
        rng=process.stream.rng,
        open_journal=journal,
        executor=Inline(),
    )
    started(agent)
    return agent.run()


def retrying(process: Process, cloud: Cloud) -> Store:
    """The store as a command line would use it."""
    store = RetryStore(cloud.connect(process), SimClock(process), process.stream.rng, policy=POLICY)
    return fit(store, Findings(store.proof, conditional_create=True, swap=True))


def run_restore(
    process: Process, disk: Disk, cloud: Cloud, *, choose: int = 0, tag: str | None = None
) -> str:
    """``ds-ckpt restore``; the save that was restored, or nothing.

    Args:
        choose: 0 for the newest, 1 for the one before it, ...
        tag: by which to choose instead.
    """
    clock = SimClock(process)
    volume = Volume(disk.path, SimFilesystem(disk, process))
    try:
        store = retrying(process, cloud)
        restore = Restore(
            store, Inline(), budget=Budget(clock), clock=clock, rng=process.stream.rng
        )
        save_id = None
        if choose:
            committed = Catalog(store, process.stream.rng).committed()
            if len(committed) > choose:
                save_id = committed[-1 - choose].save_id
        result = restore.run(volume, tag=tag, save_id=save_id)
    except NothingCommittedError:
        process.kernel.chance.count("restores that found nothing")
        return ""
    except (CkptError, OSError) as error:
        process.kernel.say(f"restore failed: {error}")
        process.kernel.chance.count("restores that failed")
        return ""
    process.kernel.chance.count("restores")
    return result.record.save_id


def run_gc(
    process: Process, cloud: Cloud, run_id: str, *, older_than: float, dry_run: bool
) -> None:
    """``ds-ckpt gc``."""
    count = process.kernel.chance.count
    try:
        catalog = Catalog(retrying(process, cloud), process.stream.rng)
        collector = Collector(catalog, run_id, older_than=older_than, stale_after=STALE_SECONDS / 3)
        found = collector.sweep(dry_run=dry_run)
    except CkptError as error:
        process.kernel.say(f"gc failed: {error}")
        count("collections that failed")
        return
    count("collections")
    for finding in found:
        count(f"collected: {finding.kind}{' (listed only)' if dry_run else ''}")
        process.kernel.say(f"gc {finding}")


def run_curator(process: Process, cloud: Cloud, wanted: list[str], a: float, b: float) -> None:
    """Somebody pins, unpins or deletes by name, and repeats it until it is done or refused.

    Args:
        wanted: save ids; chosen at the first look and kept by whoever repeats it after a death.
        a, b: between 0 and 1; what is chosen, and what is done with it.
    """
    count = process.kernel.chance.count
    while True:
        try:
            catalog = Catalog(retrying(process, cloud), process.stream.rng)
            if not wanted:
                newest = catalog.committed()[-3:]  # where it matters most
                first = int(a * len(newest))
                wanted += [each.save_id for each in newest[first : first + 1 + int(a * 10) % 2]]
            if not wanted:
                count("nothing to curate")
                return
            curator = Curator(catalog)
            if b < 0.3:
                for save_id in wanted:
                    (curator.unpin if b < 0.1 else curator.pin)(save_id)
                count("pins by name")
            else:
                curator.delete(wanted, even_newest=b > 0.5, at_once=b > 0.7)
                count("deletions by name")
        except (KeptError, NothingCommittedError) as error:
            process.kernel.say(f"curator is refused: {error}")
            count("refused by name")
            return
        except CkptError as error:
            process.kernel.say(f"curator failed: {error}")
            SimClock(process).sleep(5)
        else:
            return
