"""The invariants of the protocol, judged by what store and volumes show and by nothing else.

Each change of an object is judged before the next call is made, and so is each removal of the last
name of a file. What must hold at rest is judged at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ds_ckpt_store.contract.digest import crc32c, to_hex
from ds_ckpt_store.contract.manifest import NodeManifest, Restored, parse
from ds_ckpt_store.curate import BY_NAME
from ds_ckpt_store.errors import CkptError
from ds_ckpt_store.records import Intent, Owner, Record, StoredFile
from ds_ckpt_store.stores.memory import StoredObject
from tests.simulation.cloud import Cloud
from tests.simulation.disk import Disk, File
from tests.simulation.kernel import Kernel, Process
from tests.simulation.trainer import MODEL, marks_of

RECORDS = ".ds_ckpt/checkpoints/"
SAVES = ".ds_ckpt/saves/"
RECEIPTS = ".ds_ckpt/receipts/"
OWNER = ".ds_ckpt/owner.json"
NEXT = {
    None: {"committed", "abandoned"},
    "committed": {"committed", "deleted"},  # a pin
    "deleted": {"deleted"},
    "abandoned": set(),
}
DISTURBED = ("written again", "changed since", "since it was saved")
WINDOW = 60.0  # seconds in which a receipt and a tombstone may cross


@dataclass(frozen=True)
class Published:
    """One manifest that a hook has published."""

    disk: Disk
    manifest: NodeManifest


class Checker:
    """Judges one run; what it finds is in :attr:`broken`, the first first."""

    def __init__(self, kernel: Kernel, stale_seconds: float) -> None:
        self.kernel = kernel
        self.broken: list[str] = []
        self.cloud: Cloud | None = None
        self.committed: dict[str, tuple[Record, dict[str, StoredFile]]] = {}
        self.states: dict[str, str] = {}
        self.published: dict[str, dict[str, Published]] = {}
        self.by_name: set[str] = set()  # folders of what people deleted
        self.largest_epoch = 0
        self.attempt = ""
        self.passed_at = 0.0
        self.pointed: tuple[int, int, str] = (0, 0, "")
        self.pointed_at = ""
        self._stale = stale_seconds
        self._manifests: dict[tuple[int, int], NodeManifest | None] = {}

    def fails(self, sentence: str) -> None:
        """An invariant is broken."""
        self.kernel.say(f"BROKEN {sentence}")
        self.broken.append(f"{sentence} (at {self.kernel.now:.3f} s)")

    def _objects(self) -> dict[str, StoredObject]:
        if self.cloud is None:
            raise AssertionError("there is no store yet")
        return self.cloud.bucket.objects

    # ---- the store

    def changed(self, key: str, before: StoredObject | None) -> None:
        """An object was written or deleted."""
        after = self._objects().get(key)
        if not key.startswith(".ds_ckpt/"):
            if key == "latest":
                self._pointer(after)
            else:
                self._data(key, after)
        elif key.startswith(RECORDS):
            self._record(key, before, after)
        elif key == OWNER:
            self._lease(before, after)
        elif key.startswith(SAVES) and before is not None:
            self.fails(f"I4: intent {key} was written again, or deleted")

    def _data(self, key: str, after: StoredObject | None) -> None:
        save_id = key.partition("/")[0].rpartition("@")[2]
        found = self.committed.get(save_id)
        entry = found[1].get(key) if found is not None else None
        if entry is None:
            return
        if after is None:
            self.fails(f"I1: {key} was deleted and its record is committed")
        elif not _is(after, entry):
            self.fails(f"I4: {key} was written again with other bytes and its record is committed")

    def _record(self, key: str, before: StoredObject | None, after: StoredObject | None) -> None:
        if after is None:
            self.fails(f"I1: record {key} was deleted")
            return
        record = parse(Record, after.data)
        former = parse(Record, before.data) if before is not None else None
        if record.state not in NEXT[former.state if former else None]:
            said = former.state if former else "nothing"
            self.fails(f"I1: record {record.save_id} went from {said} to {record.state}")
        self.states[record.save_id] = record.state
        self.committed.pop(record.save_id, None)
        if record.state == "committed":
            files = dict(record.objects())
            self.committed[record.save_id] = (record, files)
            self.kernel.chance.count("records pinned" if former else "records committed")
            self._is_whole(record)
        elif record.state == "deleted" and former is not None and former.state == "committed":
            self._given_up(record)
        elif record.state == "abandoned":
            self.kernel.chance.count("records abandoned")
            self._abandoned(record)

    def _is_whole(self, record: Record) -> None:
        for key, entry in record.objects():
            item = self._objects().get(key)
            if item is None:
                self.fails(f"I1: {key} is missing and its record is committed")
            elif not _is(item, entry):
                self.fails(f"I1: {key} is not what its committed record says")
        torn = is_torn(record, {k: v.data for k, v in self._objects().items()})
        if torn:
            self.fails(f"I1: the committed checkpoint {record.folder} is torn: {torn}")

    def _given_up(self, record: Record) -> None:
        if record.reason == BY_NAME:
            self.kernel.chance.count("checkpoints given up by name")
            self.by_name.add(record.folder)
            if not self.committed:
                self.fails(f"I6: {record.folder} was deleted by name and was the last one")
            return
        own = [r.order for r, _ in self.committed.values() if r.run_id == record.run_id]
        if not own:
            self.fails(f"I6: the last checkpoint {record.folder} was given up")
        elif max(own) < record.order:
            self.fails(f"I6: the newest checkpoint {record.folder} was given up")
        self._by_the_newest(record)
        latest = self._objects().get("latest")
        if latest is not None and latest.data.decode().strip() == record.folder:
            self.fails(f"I2: {record.folder} was given up and latest names it")

    def _by_the_newest(self, record: Record) -> None:
        """Only the newest attempt gives up; one that was just passed may not know it yet."""
        task = self.kernel.running
        attempt = task.process.attempt() if task is not None and task.process is not None else ""
        if attempt not in ("", self.attempt) and self.kernel.now - self.passed_at > WINDOW:
            self.fails(
                f"I6: {record.folder} was given up by attempt {attempt}, which was passed "
                f"{self.kernel.now - self.passed_at:.0f} s before"
            )

    def _abandoned(self, record: Record) -> None:
        now = self.cloud.clock.time() if self.cloud else 0.0
        receipts = [
            self._objects().get(f"{RECEIPTS}{record.save_id}/{node}.json") for node in record.nodes
        ]
        times = [item.modified for item in receipts if item is not None]
        if len(times) == len(record.nodes) and now - max(times) > WINDOW:
            self.fails(
                f"I5: {record.folder} was abandoned {now - max(times):.0f} s after it was complete"
            )

    def _pointer(self, after: StoredObject | None) -> None:
        if after is None:
            self.fails("I2: latest was deleted")
            return
        folder = after.data.decode().strip()
        found = self.committed.get(folder.rpartition("@")[2])
        if found is None or found[0].folder != folder:
            self.fails(f"I2: latest names {folder}, which is not committed")
            return
        if found[0].order < self.pointed:
            if self.pointed_at not in self.by_name:
                self.fails(f"I6: latest moved back to {folder}")
            self.kernel.chance.count("moves of latest back, by name")
        self.pointed, self.pointed_at = found[0].order, folder

    def _lease(self, before: StoredObject | None, after: StoredObject | None) -> None:
        if after is None:
            self.fails("I6: the lease was deleted")
            return
        owner = parse(Owner, after.data)
        if owner.epoch < self.largest_epoch:
            self.fails(f"I6: the lease went back from epoch {self.largest_epoch} to {owner.epoch}")
        self.largest_epoch = owner.epoch
        if owner.attempt != self.attempt:
            self.attempt, self.passed_at = owner.attempt, self.kernel.now
        if before is None:
            return
        former = parse(Owner, before.data)
        if former.run_id != owner.run_id:
            self.kernel.chance.count("leases taken over by another run")
            age = after.modified - before.modified
            if former.unfinished and age <= self._stale:
                self.fails(
                    f"I6: run {owner.run_id} took the prefix from {former.run_id}, which "
                    f"had renewed its lease {age:.0f} s before"
                )
        elif former.attempt != owner.attempt:
            self.kernel.chance.count("leases taken by a newer attempt")

    # ---- the volumes

    def named(self, disk: Disk) -> list[NodeManifest]:
        """What stands in the outbox of a volume."""
        folder = disk.folder_at(f"{disk.path}/.ds_ckpt/outbox")
        found = []
        for name, file in sorted(folder.names.items()) if folder is not None else ():
            if name.startswith(".") or not isinstance(file, File):
                continue
            known = (disk.number, file.inode)
            if known not in self._manifests:
                try:
                    self._manifests[known] = parse(NodeManifest, file.data)
                except CkptError:
                    self._manifests[known] = None
            manifest = self._manifests[known]
            if manifest is not None:
                found.append(manifest)
        return found

    def appeared(self, disk: Disk) -> None:
        """A manifest was published."""
        for manifest in self.named(disk):
            nodes = self.published.setdefault(manifest.save_id, {})
            if manifest.node not in nodes:
                nodes[manifest.node] = Published(disk, manifest)
                if len(nodes) == 1:
                    self.kernel.chance.count("saves")

    def removed(self, process: Process, disk: Disk, path: str, file: File) -> None:
        """The last name of a file is gone."""
        if process.name.startswith("trainer") or not file.owner.startswith("trainer"):
            return
        size = file.size
        naming = [
            manifest
            for manifest in self.named(disk)
            for shard in (*manifest.shards, *manifest.replicas)
            if (shard.inode, shard.mtime_ns, shard.size) == (file.inode, file.mtime_ns, size)
        ]
        for manifest in naming:
            if manifest.save_id not in self.states:
                self.fails(
                    f"I3: {process.name} removed {path} of save {manifest.save_id}, which "
                    "is undecided"
                )
        restored = disk.at(f"{disk.path}/.ds_ckpt/restored.json")
        if isinstance(restored, File):
            source = parse(Restored, restored.data)
            if any(entry.inode == file.inode for entry in source.files):
                if source.save_id not in self.states:
                    self.fails(f"I3: {process.name} removed {path}, restored from nowhere")
                return
        if not naming and marks_of(file.data) is not None and "/aside/" not in path:
            self.fails(f"I3: {process.name} removed {path}, which no manifest names")

    # ---- at rest

    def rest(self, alive: Iterable[Disk], run_id: str) -> None:
        """Everybody of a run is well and idle."""
        here = set(alive)
        objects = self._objects()
        owner = parse(Owner, objects[OWNER].data) if OWNER in objects else None
        data = {key: item.data for key, item in objects.items()}
        newest = max((r.order for r, _ in self.committed.values()), default=None)
        latest = objects.get("latest")
        if newest is not None:
            folder = next(r.folder for r, _ in self.committed.values() if r.order == newest)
            if latest is None or latest.data.decode().strip() != folder:
                said = latest.data.decode() if latest else None
                self.fails(f"I2: at rest latest names {said} and {folder} is the newest")
        self._follow_training(data)
        for record, _ in self.committed.values():
            torn = is_torn(record, data)
            if torn:
                self.fails(f"I1: at rest {record.folder} is torn: {torn}")
        for folder in self.undecided(run_id):
            self.fails(f"I5: {folder} is complete and nobody decides it")
        for save_id, nodes in self.published.items():
            self._was_stored(save_id, nodes, here, owner.attempt if owner is not None else "")

    def undecided(self, run_id: str) -> list[str]:
        """Folders of the saves whose receipts are complete and that have no record."""
        objects = self._objects()
        found = []
        for key, item in objects.items():
            if key.startswith(SAVES):
                intent = parse(Intent, item.data)
                receipts = (f"{RECEIPTS}{intent.save_id}/{node}.json" for node in intent.nodes)
                decided = intent.save_id in self.states or intent.run_id != run_id
                if not decided and all(key in objects for key in receipts):
                    found.append(intent.folder)
        return found

    def _follow_training(self, data: dict[str, bytes]) -> None:
        """What sorts later was saved later, whatever the clocks said."""
        before: dict[str, tuple[int, int]] = {}
        for record, _ in sorted(self.committed.values(), key=lambda found: found[0].order):
            path = f"{record.folder}/{record.files[0].path}"
            marks = marks_of(data.get(path, b"")) or {}
            place = (marks.get("attempt", 0), marks.get("save", 0))
            if place < before.get(record.run_id, place):
                self.fails(f"I2: {record.folder} sorts after a checkpoint that was saved later")
            before[record.run_id] = place

    def _was_stored(
        self,
        save_id: str,
        nodes: dict[str, Published],
        alive: set[Disk],
        newest_attempt: str,
    ) -> None:
        any_manifest = next(iter(nodes.values())).manifest
        if not set(any_manifest.nodes) <= set(nodes):
            return
        if not all(nodes[node].disk in alive for node in any_manifest.nodes):
            return
        state = self.states.get(save_id)
        if state in ("committed", "deleted"):
            return
        reason = self._reason(save_id)
        if state == "abandoned":
            disturbed = any(text in reason for text in DISTURBED)
            if disturbed or any_manifest.attempt != newest_attempt:
                return
        self.fails(
            f"I5: all nodes of {any_manifest.folder} live and it is {state or 'undecided'}: "
            f"{reason}"
        )

    def _reason(self, save_id: str) -> str:
        item = self._objects().get(f"{RECORDS}{save_id}.json")
        return parse(Record, item.data).reason if item is not None else ""


def _is(item: StoredObject, entry: StoredFile) -> bool:
    return len(item.data) == entry.size and to_hex(crc32c(item.data)) == entry.crc32c


def is_torn(record: Record, data: dict[str, bytes]) -> str:
    """Why the files of a checkpoint are not those of one save; empty if they are."""
    found = {}
    for entry in record.files:
        marks = marks_of(data.get(f"{record.folder}/{entry.path}", b""))
        if marks is None:
            return f"{entry.path} is not whole"
        found[entry.path] = marks
    return not_one_save(found, record.tag)


def not_one_save(found: dict[str, dict[str, object]], tag: str) -> str:
    """Why files with these marks are not one whole save under a tag; empty if they are."""
    if not found:
        return "it has no files"
    first = next(iter(found.values()))
    for path, marks in found.items():
        if any(marks[key] != first[key] for key in ("run", "attempt", "save", "tag", "world")):
            return f"{path} is of another save: {marks} and {first}"
    ranks = sorted(int(str(m["rank"])) for path, m in found.items() if path != MODEL)
    if first["tag"] != tag:
        return f"its files are of tag {first['tag']!r}"
    if ranks != list(range(int(str(first["world"])))):
        return f"it has shards of ranks {ranks} of {first['world']}"
    if found.get(MODEL, {}).get("rank") != 0:
        return "its model file is not that of rank 0"
    return ""
