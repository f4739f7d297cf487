"""One pass over everything that a sidecar has to do: find, own, advance, clean, retain.

A pass may be cut anywhere and repeated; it holds no truth of its own. An error of one save is
reported, and the pass goes on with the next; only a lost lease or a request to stop ends it.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Collection
from dataclasses import replace

from ds_ckpt_sidecar.journal import Journal
from ds_ckpt_sidecar.lifecycle import DECIDED, Lifecycle, Save
from ds_ckpt_sidecar.local import LocalFiles
from ds_ckpt_sidecar.observe.log import Growing, Log
from ds_ckpt_sidecar.observe.report import AgentState, Reporter
from ds_ckpt_sidecar.observe.tally import Tally
from ds_ckpt_sidecar.outbox import Found, Outbox
from ds_ckpt_sidecar.settings import AgentSettings
from ds_ckpt_store.catalog import Catalog, Lease
from ds_ckpt_store.contract import access, names
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.manifest import (
    RECOVERY,
    RESTING,
    NodeManifest,
    Restored,
    SaveState,
    SaveStatus,
    TrainerStatus,
)
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import (
    AccessError,
    CkptError,
    CorruptionError,
    DamagedError,
    InputError,
    OwnershipError,
    PausedError,
    RefusedError,
    StoreError,
    UnknownSchemaError,
)
from ds_ckpt_store.records import Record
from ds_ckpt_store.retention import Retention

LONGEST_BACKOFF = 60.0
HURRIED_BACKOFF = 1.0
TRAINER_SILENT_SECONDS = 60.0


class Syncer:
    """The work of one sidecar on one volume and one prefix. Used from one thread."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        volume: Volume,
        local: LocalFiles,
        node: str,
        catalog: Catalog,
        lifecycle: Lifecycle,
        journal: Journal,
        reporter: Reporter,
        log: Log,
        failures: Growing,
        clock: Clock,
        rng: random.Random,
        tally: Tally,
        heard: Callable[[Save, str], None],
        hurried: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._volume = volume
        self._node = node
        self._catalog = catalog
        self._lifecycle = lifecycle
        self._journal = journal
        self._reporter = reporter
        self._log = log
        self._failures = failures
        self._clock = clock
        self._rng = rng
        self._tally = tally
        self._heard = heard
        self._hurried = hurried
        self._outbox = Outbox(volume, node)
        self._local = local
        self._saves: dict[str, Save] = {}
        self._bad: dict[str, str] = {}
        self._lost: dict[str, Save] = {}
        self._leases: dict[str, Lease] = {}
        self._attempt = ""
        self._age: Callable[[], float] | None = None
        self._run_id = settings.run_id
        self._renew_due = 0.0
        self._retain_due = 0.0
        self._may_retain = True
        self._swept = False
        self._released = False
        self._newest_committed = (0, "", "")
        self._newest_step: int | None = None
        self._looked_up = False
        self.current: Save | None = None
        self.trouble, self._trouble_kind = "", ""

    # ---- what a caller asks

    def look_up_committed(self) -> None:
        """Tell the trainer, before it decides what to resume from, what the store holds.

        Nothing is owned for that: a trainer that finds an empty volume must hear of a checkpoint
        at once.
        """
        try:
            newest = self._catalog.latest()
        except (CkptError, OSError) as error:
            self._failures.error("latest", "latest.unreadable", error=str(error))
            return
        self._looked_up = True
        if newest is not None and self._settings.run_id in ("", newest.run_id):
            self._run_id = self._run_id or newest.run_id
            self._note_committed(newest)

    def unfinished(self) -> list[Save]:
        """Saves of this volume that this sidecar can still do something for."""
        return [save for save in self._saves.values() if save.state not in DECIDED | RESTING]

    def waiting(self) -> list[Save]:
        """Saves of which this node has stored all, and other nodes have not."""
        return [save for save in self.unfinished() if save.waiting_for]

    def worth_staying_for(self) -> list[Save]:
        """The unfinished ones that an agent that is told to end still works or waits for.

        Not those that lack other nodes' parts and are older than a checkpoint: nobody resumes from
        them any more, and whichever node comes last commits them.
        """
        newest = self.newest_committed()
        newest_id = "" if newest is None else newest[2]
        return [s for s in self.unfinished() if not s.waiting_for or s.save_id > newest_id]

    def troubles(self) -> list[str]:
        """One sentence for each save that is not, and will not become, a checkpoint by itself."""
        return [*(_sentence(save) for save in self._lost.values()), *self.refused()]

    def refused(self) -> list[str]:
        """One sentence for each save or file of the outbox that rests until a person mends it."""
        resting = [_sentence(save) for save in self._saves.values() if save.state in RESTING]
        return [*resting, *(f"{_legible(name)}: {reason}" for name, reason in self._bad.items())]

    def newest_committed(self) -> tuple[int, str, str] | None:
        """Time in ms, tag and id of the newest checkpoint of the run; empty ones: there is none.

        None if nobody could look yet.
        """
        return self._newest_committed if self._looked_up else None

    def not_durable(self, trouble: str = "") -> list[str]:
        """One line for each save of this volume that is no checkpoint, the newest first.

        Args:
            trouble: what is in the way of all of them, if something is.
        """
        saves = {**self._saves, **self._lost}
        lines = [
            f"{save.manifest.tag}: {save.state}, {_why(save, trouble)}{self._outdated(save)}"
            for _, save in sorted(saves.items(), reverse=True)
            if save.state not in ("committed", "cleaned")
        ]
        bad = self._bad.items()
        return [*lines, *(f"{_legible(name)}: not taken, {reason}" for name, reason in bad)]

    def _outdated(self, save: Save) -> str:
        is_old = save.manifest.time_ms < self._newest_committed[0]
        return "; a newer checkpoint is durable" if is_old else ""

    def failures(self) -> int:
        """How often in a row the save that fares worst has failed."""
        return max((s.tries for s in self.unfinished() if not s.waiting_for), default=0)

    def has_urgent(self) -> bool:
        """Whether a save of a trainer that is about to end waits for another one."""
        waits = [s for s in self.unfinished() if s.manifest.kind == RECOVERY and not s.waiting_for]
        return bool(waits) and self.current not in waits

    def must_make_way(self, pick: Callable[[list[Save]], Save]) -> bool:
        """Whether another save than the one under way is to go first now.

        Args:
            pick: chooses one of those that can be tried; a save that has just been handed over is
                among them.
        """
        current = self.current
        if current is None:
            return False
        self.find()
        now = self._clock.monotonic()
        ready = [save for save in self.unfinished() if save is current or save.due <= now]
        return current in ready and pick(ready) is not current

    def next_due(self) -> float | None:
        """When, on the monotonic clock, the earliest save wants to be tried again."""
        return min((save.due for save in self.unfinished()), default=None)

    def beat(self, state: AgentState, *, now: bool = False) -> None:
        """The heartbeat over the volume."""
        unfinished = self.unfinished()
        lease = self._leases.get(self._attempt)
        self._reporter.beat(
            state,
            now=now,
            run_id=self._run_id,
            node=self._node,
            destination=self._settings.destination,
            backlog_saves=len(unfinished),
            backlog_bytes=sum(save.bytes_total - save.bytes_done for save in unfinished),
            newest_committed_ms=self._newest_committed[0],
            newest_committed_tag=self._newest_committed[1],
            newest_committed_save=self._newest_committed[2],
            newest_committed_step=self._newest_step,
            refused_manifests=len(self._bad),
            epoch=lease.epoch if lease else 0,
        )

    # ---- one pass

    def sync(self, *, pick: Callable[[list[Save]], Save], check: Callable[[], None]) -> None:
        """One pass over what was discovered.

        In a hurry saves alone count: nothing is removed, neither here nor in the store, what
        others have left is looked at last, and what failed is tried again soon.

        Args:
            pick: chooses the save that is tried next.
            check: called often; may raise PausedError.

        Raises:
            PausedError: from ``check``; call again to continue.
            OwnershipError: another run holds the prefix; nothing of it was touched.
            StoreError: the lease could not be read or written.
        """
        trainer = self._trainer()
        if not self._own(trainer):
            self._reporter.error("")
            return
        if not self._hurried():
            self._sweep(check)
        self.trouble, self._trouble_kind = self._try_all(pick, check)
        self._sweep(check)
        if not self._hurried():
            self._tidy()
            self._retain(trainer, check)
        self._release(trainer)
        self._reporter.error(self.trouble, self._trouble_kind)

    def _try_all(
        self, pick: Callable[[list[Save]], Save], check: Callable[[], None]
    ) -> tuple[str, str]:
        """Try each save once, unless it is to rest; what the last one failed of, and its class."""
        soon = self._clock.monotonic() + self._longest_backoff()
        troubled = ("", "")
        todo = sorted(self.unfinished(), key=lambda save: save.save_id)
        while todo:
            save = pick(todo)
            todo.remove(save)
            save.due = min(save.due, soon)
            if save.due > self._clock.monotonic():
                troubled = troubled if troubled[0] else (save.reason, save.failure)
                continue
            self.current = save
            try:
                self._lifecycle.advance(save, self._lease_of(save), check)
            except (PausedError, OwnershipError):
                raise
            except (CkptError, OSError) as error:
                self._failed(save, error)
                troubled = (str(error), save.failure)
            else:
                self._advanced(save)
                if not self._hurried():
                    self._tidy()
            finally:
                self.current = None
        return troubled

    def renew(self) -> None:
        """Renew the lease if it is due; called from ``check`` too, so also in a long upload.

        Only while there is work or a live trainer: a run that is over must not keep others out.
        """
        if not self._attempt or self._released or self._clock.monotonic() < self._renew_due:
            return
        if self.unfinished() or self._trainer_lives():
            self._take(self._attempt, (), age=self._age)

    # ---- find

    def find(self) -> None:
        """See what was handed over meanwhile, so that others hear of it in a long upload too.

        Only then: between owning attempts and trying their saves none may come to them.
        """
        if self.current is None:
            return
        with contextlib.suppress(OSError):
            self.discover()

    def discover(self) -> None:
        """See what was handed over. Before each pass: what is told of it asks the store nothing."""
        found = self._outbox.scan()
        there = {entry.name for entry in found}
        for save_id, save in list(self._saves.items()):
            if save.file_name not in there and save is not self.current:
                del self._saves[save_id]
                self._reporter.forget(save_id)
        for name in [name for name in self._bad if name not in there]:
            del self._bad[name]
            self._reporter.forget(_status_id(name))
        self._forget_gone({name.split(".")[0] for name in there})
        for entry in found:
            if entry.manifest is None:
                self._refuse(entry)
            elif entry.manifest.save_id not in self._saves:
                self._bad.pop(entry.name, None)
                save = Save(entry.manifest, entry.name, entry.written)
                self._saves[save.save_id] = save
                known = self._journal.entry(save.save_id)
                if known is not None:
                    save.told = known.state in DECIDED
                    save.bytes_done = self._lifecycle.bytes_known(save)
                else:
                    self._lifecycle.enter(save, "discovered")
                    self._log.info(
                        "save.discovered",
                        **self._lifecycle.facts(save),
                        nodes=len(save.manifest.nodes),
                    )

    def _forget_gone(self, there: set[str]) -> None:
        """Once, at start: what the journal knows of saves that have left the volume meanwhile."""
        if self._swept:
            return
        for save_id in self._journal.save_ids():
            if save_id not in there:
                self._journal.forget(save_id)

    def _refuse(self, entry: Found) -> None:
        """A file of the outbox that is no manifest for us: say so once, and keep it."""
        if self._bad.get(entry.name) == entry.reason:
            return
        self._bad[entry.name] = entry.reason
        state: SaveState = "quarantined" if entry.verdict == "bad" else "held"
        # A name on the volume may be any bytes; a status may be written under a save id alone.
        name = entry.name.encode(errors="backslashreplace").decode()
        self._log.warning(f"save.{state}", file=name, reason=entry.reason)
        status = SaveStatus(
            save_id=_status_id(entry.name),
            state=state,
            reason=f"{name}: {entry.reason}",
            time=self._clock.time(),
        )
        self._reporter.save(status)

    def _trainer(self) -> TrainerStatus | None:
        try:
            return self._volume.trainer_status()
        except (InputError, OSError) as error:
            self._failures.error("trainer", "trainer.unreadable", error=str(error))
            return None

    def _trainer_lives(self) -> bool:
        """Whether the trainer's heartbeat is fresh; both containers of a pod share one clock."""
        trainer = self._trainer()
        if trainer is None or trainer.finished:
            return False
        return abs(self._clock.time() - trainer.time) <= TRAINER_SILENT_SECONDS

    # ---- own

    def _own(self, trainer: TrainerStatus | None) -> bool:
        """Step 1 for every attempt on this volume, the earliest first; False if there is none."""
        self._follow_run(trainer)
        self._hold_foreign()
        attempts = {save.manifest.attempt for save in self.unfinished()}
        current = max(attempts, default="")
        if trainer is not None and trainer.run_id == self._run_id:
            current = trainer.attempt
        new = current != self._attempt or current not in self._leases
        # A trainer that is gone, and left no work, is no reason to take a lease in its name.
        finished = trainer is not None and trainer.finished
        if current and new and (attempts or finished or self._trainer_lives()):
            self._attempt, self._released = current, False
            known = trainer if trainer is not None and trainer.attempt == current else None
            self._age = self._age_of(known.started) if known is not None else None
            self._take(current, self._nodes_of(current, known), age=self._age)
            self._swept = False  # what an earlier attempt completed late is looked for once more
        for attempt in sorted(attempts - {current, *self._leases}):
            self._take(attempt, (), age=self._age_of(self._began(attempt)), left_over=True)
        self.renew()
        return bool(self._leases)

    def _follow_run(self, trainer: TrainerStatus | None) -> None:
        """Work for the run that the settings name, else for that of the trainer on this volume.

        A volume that is used again first shows the heartbeat of the run before.
        """
        run_id = self._settings.run_id or self._run_id
        if not self._settings.run_id and trainer is not None:
            run_id = trainer.run_id
        elif not run_id and self._saves:
            run_id = max(self._saves.values(), key=lambda save: save.save_id).manifest.run_id
        if self._run_id and run_id != self._run_id:
            self._log.warning("run.changed", from_run=self._run_id, run_id=run_id)
            self._saves, self._leases = {}, {}
            self._attempt, self._released, self._swept = "", False, False
            self._newest_committed, self._looked_up = (0, "", ""), False
            self._newest_step = None
            self.discover()
        self._run_id = run_id

    def _nodes_of(self, attempt: str, trainer: TrainerStatus | None) -> set[str]:
        """Nodes of an attempt, as its trainer and the saves on this volume name them."""
        named = set(trainer.nodes) if trainer is not None else set()
        for save in self._saves.values():
            if save.manifest.attempt == attempt:
                named.update(save.manifest.nodes)
        return named

    def _began(self, attempt: str) -> float | None:
        """When an attempt began, as its saves on this volume say."""
        manifests = [save.manifest for save in self._saves.values()]
        return next((m.started for m in manifests if m.attempt == attempt), None)

    def _age_of(self, started: float | None) -> Callable[[], float] | None:
        """How long ago an attempt began; its trainer and we have one clock."""
        return None if started is None else lambda: max(0.0, self._clock.time() - started)

    def _take(
        self,
        attempt: str,
        nodes: Collection[str],
        *,
        age: Callable[[], float] | None = None,
        left_over: bool = False,
    ) -> None:
        before = self._leases.get(attempt)
        lease = self._catalog.own(
            self._run_id,
            attempt,
            self._node,
            nodes=nodes,
            stale_after=self._settings.lease_stale_seconds,
            age=age,
            left_over=left_over,
        )
        if lease.newest:  # what was the newest when it was asked for is not so any more
            self._leases = {a: replace(each, newest=False) for a, each in self._leases.items()}
        self._leases[attempt] = lease
        self._renew_due = self._clock.monotonic() + self._settings.lease_renew_seconds
        facts = {"run_id": self._run_id, "attempt": attempt, "epoch": lease.epoch}
        if before is None:
            self._log.info("lease.taken", **facts, newest=lease.newest)
        elif before.newest and not lease.newest:
            self._log.warning(
                "lease.passed",
                **facts,
                reason="a newer attempt has taken over; saves that were begun are finished",
            )
        if lease.took_over:
            self._log.warning("lease.took_over", **facts, from_run=lease.took_over)

    def _lease_of(self, save: Save) -> Lease:
        return self._leases[save.manifest.attempt]

    def _hold_foreign(self) -> None:
        for save in self.unfinished():
            if save.manifest.run_id != self._run_id:
                reason = (
                    f"it is of run {save.manifest.run_id!r}, and this agent works for "
                    f"{self._run_id!r}: start an agent with --run-id {save.manifest.run_id} and "
                    "that run's destination, or remove it"
                )
                self._lifecycle.enter(save, "held", reason)
            elif save.manifest.destination not in (None, self._settings.destination):
                reason = (
                    f"the trainer asked for {save.manifest.destination!r} and this agent is set "
                    f"to {self._settings.destination!r}"
                )
                self._lifecycle.enter(save, "held", reason)

    def _sweep(self, check: Callable[[], None]) -> None:
        """At start, and once for each attempt: commit what is complete, and point to the newest."""
        if self._swept:
            return
        for intent in self._catalog.undecided():
            check()
            if intent.run_id != self._run_id:
                continue
            try:
                self._catalog.commit(intent)
            except (DamagedError, UnknownSchemaError) as error:
                self._log.error("save.undecided", save_id=intent.save_id, error=str(error))
        committed = self._catalog.committed()
        self._looked_up = True
        if committed:
            if self._catalog.point(committed[-1]):
                self._log.info("latest.moved", tag=committed[-1].tag, folder=committed[-1].folder)
            self._note_committed(committed[-1])
        for key, reason in self._catalog.damaged.items():
            self._log.error("record.damaged", key=key, reason=reason)
        self._swept = True

    # ---- after a step

    def _advanced(self, save: Save) -> None:
        self._failures.clear(save.save_id)
        if save.state in ("superseded", "abandoned", "failed"):
            self._lost[save.save_id] = save
        save.tries = save.tries + 1 if save.waiting_for else 0
        save.due = self._clock.monotonic() + (self._backoff(save.tries) if save.tries else 0.0)
        if save.state == "committed" and save.record is not None:
            self._note_committed(save.manifest)
            self._retain_due = 0.0
        self._heard(save, "")

    def _note_committed(self, saved: Record | NodeManifest) -> None:
        known = (saved.time_ms, saved.tag, saved.save_id)
        if known > self._newest_committed:
            self._newest_committed, self._newest_step = known, saved.step

    def _failed(self, save: Save, error: CkptError | OSError) -> None:
        save.tries += 1
        delay = self._backoff(save.tries)
        save.due = self._clock.monotonic() + delay
        save.reason, save.failure = str(error), type(error).__name__
        operation = error.operation if isinstance(error, StoreError) else "save"
        self._tally.failed(operation, save.failure)
        if isinstance(error, CorruptionError):
            self._tally.unlike()
        self._lifecycle.report(save)
        self._failures.error(
            save.save_id,
            "save.delayed",
            **self._lifecycle.facts(save),
            error=str(error),
            kind=save.failure,
            next_try_seconds=round(delay, 1),
        )
        self._heard(save, str(error))

    def _longest_backoff(self) -> float:
        return HURRIED_BACKOFF if self._hurried() else LONGEST_BACKOFF

    def _backoff(self, tries: int) -> float:
        bound = min(self._longest_backoff(), 2.0 ** min(tries - 1, 10))
        return bound * self._rng.uniform(0.5, 1.0)

    # ---- clean and retain

    def _tidy(self) -> None:
        """Step 8 under the local rule: the newest committed saves stay, the rest may go.

        Of a save that was disturbed the other shards may be the only copy that there is: it goes
        when a later one is committed. While the ranks choose what to resume from, nothing goes.
        """
        committed = sorted(
            (save for save in self._saves.values() if save.state == "committed"),
            key=lambda save: (save.manifest.time_ms, save.save_id),
        )
        newest = committed[len(committed) - min(self._settings.keep_local, len(committed)) :]
        kept = {save.save_id for save in newest}
        due = [s for s in self._saves.values() if s.state in DECIDED and s.save_id not in kept]
        restored = self._passed_by(committed[-1]) if committed else None
        if not due and restored is None:
            return
        try:
            lock = self._volume.fs.try_lock(self._volume.cleaning_lock)
        except PermissionError as error:  # the ranks may hold it: nothing goes meanwhile
            why = access.denied(error, self._volume.fs)
            self._failures.error("clean", "clean.failed", error=f"{error}; {why}")
            return
        except OSError as error:  # no byte free: then cleaning is what is needed most
            self._failures.error("clean", "clean.unlocked", error=str(error))
            lock = None
        else:
            if lock is None:
                return
        try:
            for save in due:
                self._clean(save)
            if restored is not None:
                self._clean_restored(restored)
        finally:
            if lock is not None:
                os.close(lock)

    def _clean(self, save: Save) -> None:
        reused = self._is_reused(save)
        later = self._newest_committed[0] > save.manifest.time_ms
        if save.state == "superseded" and not reused and not later:
            return
        try:
            if self._lifecycle.clean(save, folder_reused=reused):
                del self._saves[save.save_id]
                self._reporter.forget(save.save_id)
        except OSError as error:
            self._failures.error(
                f"clean {save.save_id}",
                "clean.failed",
                **self._lifecycle.facts(save),
                error=str(error),
            )

    def _is_reused(self, save: Save) -> bool:
        """Whether a later save of the same tag lives in the same folder."""
        mine = save.manifest
        return any(
            (other.manifest.root, other.manifest.tag) == (mine.root, mine.tag)
            and other.save_id > save.save_id
            for other in self._saves.values()
        )

    def _passed_by(self, newest: Save) -> Restored | None:
        """The checkpoint that this volume was restored from, if a later one is committed."""
        try:
            restored = self._volume.restored_from()
        except (CkptError, OSError) as error:
            self._failures.error("clean restored", "clean.failed", error=str(error))
            return None
        if restored is None or restored.time_ms >= newest.manifest.time_ms:
            return None
        return restored if self._settings.keep_local < 2 else None

    def _clean_restored(self, restored: Restored) -> None:
        try:
            if self._local.remove_restored(restored):
                self._log.info("restored.cleaned", tag=restored.tag, save_id=restored.save_id)
        except (CkptError, OSError) as error:
            self._failures.error("clean restored", "clean.failed", error=str(error))

    def _retain(self, trainer: TrainerStatus | None, check: Callable[[], None]) -> None:
        """Step 9."""
        lease = self._leases.get(self._attempt)
        if self._settings.keep_last is None or lease is None or not lease.newest:
            return
        if self._clock.monotonic() < self._retain_due or not self._may_retain:
            return
        pause = self._settings.retention_pause
        self._retain_due = self._clock.monotonic() + min(max(pause, 1.0), 300.0)
        # Looked at and not renewed: a run that is over must not keep others out.
        owner = self._catalog.owner()
        if owner is None or (owner.run_id, owner.epoch) != (self._run_id, lease.epoch):
            return
        lease = Lease(lease.epoch, True, self._catalog.store_time(self._node))
        retention = Retention(self._catalog, self._run_id, self._settings.keep_last, pause)
        source = {trainer.resumed_from} if trainer and trainer.resumed_from else set()
        try:
            done = retention.apply(lease, source, check)
        except (AccessError, RefusedError) as error:  # what cannot be deleted is not given up
            self._may_retain = False
            self._failures.error(
                "retention",
                "retention.failed",
                error=str(error),
                reason="nothing more is given up until the agent starts anew: it needs the right "
                "to delete, or no --keep-last",
            )
            self._tally.failed(error.operation, type(error).__name__)
            return
        self._tally.retained(len(done.deleted), done.objects)
        if done.deleted or done.purged:
            self._log.info(
                "retention.applied",
                given_up=list(done.deleted),
                purged=list(done.purged),
                objects=done.objects,
            )

    def _release(self, trainer: TrainerStatus | None) -> None:
        """Say in the lease that this node is finished, once its trainer is and all is decided."""
        if (
            trainer is None
            or not trainer.finished
            or trainer.attempt != self._attempt
            or self._released
        ):
            return
        # It may have saved between the look at the outbox and the one at what it says of itself.
        self.discover()
        if self.unfinished():
            return
        self._catalog.own(
            self._run_id,
            self._attempt,
            self._node,
            finished=True,
            stale_after=self._settings.lease_stale_seconds,
        )
        self._released = True
        self._log.info("lease.released", run_id=self._run_id, attempt=self._attempt)


def _status_id(name: str) -> str:
    """Under which a file of the outbox is reported: a status is written under a save id alone."""
    save_id = name.encode(errors="backslashreplace").decode().split(".")[0]
    return save_id if names.is_save_id(save_id) else "unnamed"


def _why(save: Save, trouble: str) -> str:
    if save.reason or trouble:
        return save.reason or trouble
    if save.waiting_for:
        return f"stored here, and not yet by nodes {', '.join(save.waiting_for)}"
    total = save.bytes_total
    return f"{(total - save.bytes_left) >> 20} of {-(-total >> 20)} MiB are stored"


def _legible(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


def _sentence(save: Save) -> str:
    return f"save {save.save_id} (tag {save.manifest.tag!r}) is {save.state}: {save.reason}"
