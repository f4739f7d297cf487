"""The state machine of one save in one sidecar.

::

    discovered -> uploading -> stored -> committed -> cleaned
         |            |           |
         +------------+-----------+--> superseded | abandoned | quarantined | failed | held

``stored`` means that this node's receipt is put; ``committed`` that the record says so, whoever
made it. Nothing here remembers more than the journal's hint: each call of :meth:`Lifecycle.advance`
asks the store where the save stands and goes on from there, so a crash at any point, or an answer
that never came, costs a repetition and nothing else. A save that waits for other nodes returns at
once and is asked again later; it holds up no other.

This module is the only writer of states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ds_ckpt_sidecar.journal import Journal
from ds_ckpt_sidecar.local import LocalFiles
from ds_ckpt_sidecar.observe.log import Log
from ds_ckpt_sidecar.observe.tally import ENDS, Tally, Timing
from ds_ckpt_store.catalog import Catalog, Lease
from ds_ckpt_store.contract import digest, names
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.manifest import NodeManifest, SaveState, SaveStatus, Shard
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import (
    AccessError,
    ManifestError,
    NotFoundError,
    RefusedError,
    ShardChangedError,
)
from ds_ckpt_store.records import Intent, PartSums, Receipt, Record, StoredFile
from ds_ckpt_store.transfer.upload import LocalShard, Stored, Uploader

DECIDED: frozenset[SaveState] = frozenset({"committed", "cleaned", "abandoned", "superseded"})
_AS_HOPED = frozenset({"discovered", "uploading", "stored", "committed", "cleaned"})
LONGEST_LOOK = 120.0  # seconds between two looks at receipts that count as waiting, at most


class SaveReporter(Protocol):
    """Where states are reported to."""

    def save(self, status: SaveStatus) -> None:
        """Take a snapshot of one save."""


@dataclass
class Save:
    """One save on this volume: its manifest, and what this process knows of it.

    Times are seconds since the epoch: ``published`` when its manifest was written, and None what
    this process has not seen (:class:`~ds_ckpt_sidecar.observe.tally.Timing`).
    """

    manifest: NodeManifest
    file_name: str
    published: float = 0.0
    state: SaveState = "discovered"
    reason: str = ""
    receipt_put: bool = False
    waiting_for: tuple[str, ...] = ()
    waited: float = 0.0
    looked: float | None = None
    record: Record | None = None
    bytes_done: int = 0
    shards_done: int = 0
    begun: float | None = None
    sent: float | None = None
    stored: float | None = None
    waiting_since: float = 0.0
    durable_since: float = 0.0
    due: float = 0.0
    tries: int = 0
    failure: str = ""
    told: bool = False

    @property
    def save_id(self) -> str:
        """Its id."""
        return self.manifest.save_id

    @property
    def bytes_left(self) -> int:
        """Bytes that are not known to be stored."""
        return 0 if self.receipt_put else max(0, self.bytes_total - self.bytes_done)

    @property
    def shards_total(self) -> int:
        """Files that this node uploads."""
        return len(self.manifest.shards) + len(self.manifest.companions)

    def status(self, now: float) -> SaveStatus:
        """Where it stands; ``now`` in seconds since the epoch."""
        return SaveStatus(
            save_id=self.save_id,
            tag=self.manifest.tag,
            state=self.state,
            reason=self.reason,
            time=now,
            saved_ms=self.manifest.time_ms,
            handed_over=self.published,
            step=self.manifest.step,
            kind=self.manifest.kind,
            bytes_total=self.bytes_total,
            bytes_done=min(self.bytes_done, self.bytes_total),
            shards_total=self.shards_total,
            shards_done=self.shards_done,
            folder=self.manifest.folder,
            waiting_for=list(self.waiting_for),
            waiting_since=self.waiting_since,
            durable_since=self.durable_since,
        )

    @functools.cached_property
    def bytes_total(self) -> int:
        """Bytes that this node uploads."""
        return sum(shard.size for shard in (*self.manifest.shards, *self.manifest.companions))


class Lifecycle:
    """Moves saves from the outbox to a committed record, and then off the volume.

    Args:
        volume: the shared volume.
        local: the saves' files on it.
        catalog: the prefix that they go to.
        uploader: the data path.
        journal: this sidecar's memory.
        reporter: told of every state.
        log: one line per step.
        clock: time.
        tally: counts.
        abandon_seconds: see :meth:`_give_up_waiting`.
    """

    def __init__(
        self,
        *,
        volume: Volume,
        local: LocalFiles,
        catalog: Catalog,
        uploader: Uploader,
        journal: Journal,
        reporter: SaveReporter,
        log: Log,
        clock: Clock,
        tally: Tally,
        abandon_seconds: float,
    ) -> None:
        self._volume = volume
        self._local = local
        self._catalog = catalog
        self._uploader = uploader
        self._journal = journal
        self._reporter = reporter
        self._log = log
        self._clock = clock
        self._tally = tally
        self._abandon_seconds = abandon_seconds

    # ---- states

    def enter(self, save: Save, state: SaveState, reason: str = "") -> None:
        """Put a save into a state: journal, status file and log line."""
        changed = save.state != state or reason not in ("", save.reason)
        again = state == "committed" and save.told and not reason  # said by an earlier start
        save.state, save.reason = state, reason
        self._journal.set_state(save.save_id, state, reason)
        self.report(save)
        if changed:
            say = self._log.info if state in _AS_HOPED else self._log.warning
            event = "save.found_committed" if again else f"save.{state}"
            say(event, **self.facts(save), **({"reason": reason} if reason else {}))
            if state in ENDS and not save.told:
                self._tally.ended(state)

    def report(self, save: Save) -> None:
        """Write where a save stands."""
        self._reporter.save(save.status(self._clock.time()))

    @staticmethod
    def facts(save: Save) -> dict[str, object]:
        """What every log line says of a save."""
        manifest = save.manifest
        return {
            "save_id": manifest.save_id,
            "tag": manifest.tag,
            "node": manifest.node[:8],
            "bytes": save.bytes_total,
        }

    def bytes_known(self, save: Save) -> int:
        """Bytes of a save that the journal knows to be stored."""
        parts, whole = self._journal.stored(save.save_id)
        if not whole:
            return parts
        sizes = {shard.key: shard.size for shard in self._to_upload(save.manifest)}
        return parts + sum(sizes.get(key, 0) for key in whole)

    # ---- to a decision

    def advance(self, save: Save, lease: Lease, check: Callable[[], None]) -> None:
        """Take a save as far as it can go now.

        Args:
            save: the save; its fields are updated.
            lease: what :meth:`Catalog.own` gave for the save's attempt.
            check: called between steps and parts; may raise to stop, and all that was done counts.

        Raises:
            StoreError, ShardUnreadableError: try again later.
            PausedError: from ``check``.
        """
        check()
        record = self._catalog.record(save.save_id)
        if record is None:
            intent = self._catalog.intend(save.manifest, lease.epoch)
            try:
                _agree(save.manifest, intent)
                if save.manifest.shards:
                    self._store(save, check)
            except ManifestError as error:
                self.enter(save, "quarantined", str(error))
                return
            except ShardChangedError as error:
                self._tally.unlike()
                if not self._was_stored(save):
                    # Its bytes are gone: nobody can complete it, unless it was complete before.
                    reason = f"node {save.manifest.node}: {error}"
                    self._follow(save, self._catalog.abandon(intent, reason), superseded=str(error))
                    return
            record = self._commit(save, intent, lease)
        if record is not None:
            self._follow(save, record)

    def _store(self, save: Save, check: Callable[[], None]) -> None:
        """Steps 3 to 5: every shard stored and verified by this process, then the receipt."""
        manifest = save.manifest
        if save.receipt_put and manifest.node in self._catalog.receipt_nodes(save.save_id):
            return
        started = self._clock.monotonic()
        save.bytes_done, save.shards_done = self.bytes_known(save), 0
        save.begun = save.begun or self._clock.time()
        self.enter(save, "uploading")
        proofs: set[str] = set()

        def progress(count: int) -> None:
            save.bytes_done += count
            if save.bytes_done >= save.bytes_total:
                save.sent = self._clock.time()
            self._tally.sent(count)
            self.report(save)

        def stored(shard: Stored) -> None:
            save.shards_done += 1
            proofs.add(shard.proof.value)

        done = self._uploader.upload(
            self._to_upload(manifest),
            self._journal.log(save.save_id),
            check=check,
            progress=progress,
            stored=stored,
        )
        save.bytes_done = save.bytes_total
        save.sent = save.sent or self._clock.time()
        resumed = sum(shard.resumed_parts for shard in done)
        self._tally.resumed(resumed)
        self._log.info(
            "save.uploaded",
            **self.facts(save),
            shards=len(done),
            resumed_parts=resumed,
            proof=",".join(sorted(proofs)),
            seconds=round(self._clock.monotonic() - started, 3),
        )
        sums = {shard.key: _part_sums(shard) for shard in done}
        self._catalog.put_receipt(
            Receipt(
                save_id=save.save_id,
                node=manifest.node,
                files=[
                    _stored_file(shard, manifest.node, sums[_key(manifest, shard, companion=False)])
                    for shard in manifest.shards
                ],
                companions=[_stored_file(shard, manifest.node) for shard in manifest.companions],
                proof=",".join(sorted(proofs)),
            )
        )
        save.receipt_put, save.stored = True, self._clock.time()
        self.enter(save, "stored")

    def _was_stored(self, save: Save) -> bool:
        """Whether an earlier start stored this node's part whole: then its files count no more."""
        manifest = save.manifest
        if manifest.node not in self._catalog.receipt_nodes(save.save_id):
            return False
        folder = self._catalog.store.list(f"{manifest.folder}/")
        sizes = {info.key: info.size for info in folder}
        if any(sizes.get(shard.key) != shard.size for shard in self._to_upload(manifest)):
            return False
        save.receipt_put, save.bytes_done = True, save.bytes_total
        self.enter(save, "stored")
        return True

    def _to_upload(self, manifest: NodeManifest) -> list[LocalShard]:
        return [
            LocalShard(
                _key(manifest, shard, companion=companion),
                shard.size,
                digest.from_hex(shard.crc32c),
                partial(self._local.open, manifest, shard, companion=companion),
            )
            for shards, companion in ((manifest.shards, False), (manifest.companions, True))
            for shard in shards
        ]

    def _commit(self, save: Save, intent: Intent, lease: Lease) -> Record | None:
        """Step 6; None while something is missing."""
        found = self._catalog.commit(intent)
        save.waiting_for = found.missing_nodes
        if found.missing_objects:
            save.receipt_put = False  # back to step 3
            raise NotFoundError(
                "commit",
                found.missing_objects[0],
                f"{len(found.missing_objects)} objects that receipts name are missing or have "
                "another size; this node looks at its own again",
            )
        if found.record is not None:
            return found.record
        now = self._clock.monotonic()
        if save.looked is None:
            save.waiting_since = self._clock.time()
            self._log.info("save.waiting", **self.facts(save), waiting_for=list(save.waiting_for))
        else:
            save.waited += min(now - save.looked, LONGEST_LOOK)
        save.looked = now
        self.report(save)
        return self._give_up_waiting(save, intent, lease)

    def _give_up_waiting(self, save: Save, intent: Intent, lease: Lease) -> Record | None:
        """Abandon a save of which nodes are missing whose attempt, or part in it, is over.

        The wait is counted in time in which the store answered us, since this process began to
        wait: while it was down, the others could not store anything either. Receipts are listed
        once more before the decision.
        """
        if save.waited < self._abandon_seconds:
            return None
        if lease.newest and self._are_at_work(save):
            return None
        reason = f"nodes {', '.join(save.waiting_for)} did not store their shards"
        return self._catalog.abandon(intent, reason)

    def _are_at_work(self, save: Save) -> bool:
        """Whether one of the missing nodes has not said in the lease that it is finished.

        Another run's lease says nothing of them.
        """
        owner = self._catalog.owner()
        if owner is None or owner.run_id != save.manifest.run_id:
            return True
        return not set(save.waiting_for).isdisjoint(owner.unfinished)

    def _follow(self, save: Save, record: Record, superseded: str = "") -> None:
        """Steps 7 and after: do what the decision says."""
        save.record = record
        save.waiting_for = ()
        if record.state == "committed":
            self._catalog.point(record)
            if save.state != "committed":
                self._end_uploads(save)
                self._journal.forget_work(save.save_id)
                save.bytes_done, save.shards_done = save.bytes_total, save.shards_total
                if not save.told:
                    self._time(save)
                self.enter(save, "committed")
            return
        known = self._journal.entry(save.save_id)
        if known is not None and known.state == "superseded":  # by an earlier start
            superseded = known.reason
        self._withdraw(save)
        if record.state == "deleted":
            self.enter(save, "committed", f"given up since: {record.reason}")
        else:
            self.enter(
                save, "superseded" if superseded else "abandoned", superseded or record.reason
            )

    def _time(self, save: Save) -> None:
        """Note when a save became durable, and how long that took."""
        save.durable_since = self._clock.time()
        self._tally.committed(
            Timing(
                saved=save.manifest.time_ms / 1000,
                published=save.published,
                begun=save.begun,
                sent=save.sent,
                stored=save.stored,
                committed=save.durable_since,
            )
        )

    def _withdraw(self, save: Save) -> None:
        """Remove what this node stored of a save that will never be a checkpoint."""
        self._end_uploads(save)
        if save.record is not None and save.record.state == "abandoned":
            manifest = save.manifest
            keys = [
                *(_key(manifest, shard, companion=False) for shard in manifest.shards),
                *(_key(manifest, shard, companion=True) for shard in manifest.companions),
            ]
            try:
                self._catalog.delete_objects(keys)
            except (AccessError, RefusedError) as error:  # an agent may lack that right; gc has it
                self._log.warning("objects.left", **self.facts(save), error=str(error))
        self._journal.forget_work(save.save_id)

    def _end_uploads(self, save: Save) -> None:
        """Abort unfinished uploads of a decided save, also one that the journal never heard of.

        An agent that is killed between beginning an upload and noting it leaves such a one. The
        save is decided, so no node has a use for any of them.
        """
        store = self._catalog.store
        try:
            for upload in self._journal.uploads(save.save_id):
                store.abort(upload)
            for upload in store.uploads(f"{save.manifest.folder}/"):
                store.abort(upload)
        except (AccessError, RefusedError) as error:
            self._log.warning("uploads.left", **self.facts(save), error=str(error))

    # ---- off the volume

    def clean(self, save: Save, *, folder_reused: bool = False) -> bool:
        """Remove a decided save from the volume; False if the trainer's ``latest`` names it.

        The manifest goes last, so that a run that dies on the way is repeated.

        Args:
            save: the save.
            folder_reused: a later save of the same tag lives in its folder; the links alone go.
        """
        manifest = save.manifest
        if save.state not in DECIDED:
            return False
        if not folder_reused and self._local.is_latest(manifest):
            return False
        self._local.remove(manifest, links_only=folder_reused)
        self.enter(save, "cleaned" if save.state == "committed" else save.state, save.reason)
        self._volume.fs.unlink(f"{self._volume.outbox}/{save.file_name}")
        self._volume.fs.sync_folder(self._volume.outbox)
        self._journal.forget(save.save_id)
        return True


def _key(manifest: NodeManifest, shard: Shard, *, companion: bool) -> str:
    path = f"{names.COMPANIONS_DIR}/{shard.path}" if companion else shard.path
    return f"{manifest.folder}/{path}"


def _part_sums(stored: Stored) -> PartSums | None:
    if not stored.part_sums:
        return None
    return PartSums(
        size=stored.part_size, crc32c="".join(digest.to_hex(value) for value in stored.part_sums)
    )


def _stored_file(shard: Shard, node: str, parts: PartSums | None = None) -> StoredFile:
    return StoredFile(
        path=shard.path,
        size=shard.size,
        crc32c=shard.crc32c,
        node=node,
        rank=shard.rank,
        sha256=shard.sha256,
        parts=parts,
    )


def _agree(manifest: NodeManifest, intent: Intent) -> None:
    """The intent that was read back must be of the very save that the manifest describes."""
    if (intent.folder, intent.nodes, intent.run_id) != (
        manifest.folder,
        manifest.nodes,
        manifest.run_id,
    ):
        raise ManifestError(
            f"the store holds another intent for save {manifest.save_id}: tag {intent.tag!r} of "
            f"run {intent.run_id!r} over {len(intent.nodes)} nodes; nothing of this one is sent"
        )
