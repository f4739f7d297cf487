"""The scene of a campaign: a volume with saves, a store, an agent, and what must hold at any time.

Three saves are handed over before the agent starts: one tag, and another that is saved twice, on
new inodes, so that the first of these two lives by its links alone. The volume itself came from
a restore. One shard of the newest save takes two parts. The agent keeps one checkpoint
in the store and one on the volume, so it uploads, commits, points, cleans and retains. An agent
was killed there before and has left something everywhere, so clearing up dies too.
"""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ds_ckpt_sidecar.agent import Agent
from ds_ckpt_sidecar.journal import Journal
from ds_ckpt_sidecar.local import LocalFiles
from ds_ckpt_sidecar.settings import AgentSettings
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract import digest, names
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.manifest import NodeIdentity, NodeManifest, Restored, RestoredFile
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.records import Record
from ds_ckpt_store.restore import Restore
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.file import FileStore
from ds_ckpt_store.stores.port import BytesSource, Store
from ds_ckpt_store.transfer.budget import Budget
from tests.sidecar.crashes.dying import Inline, StillClock
from tests.sidecar.handoff import START_MS, Files, Trainer

NODE = "0123456789abcdef" * 2
PART = 5 << 20
_LARGE = random.Random(4).randbytes(PART + 100_000)

SAVES: list[tuple[str, Files]] = [
    ("global_step1", {"mp_rank_00_model_states.pt": b"one" * 1000, "sub/optim.pt": b"1"}),
    ("global_step2", {"mp_rank_00_model_states.pt": b"two" * 9000, "sub/optim.pt": b"2"}),
    ("global_step2", {"mp_rank_00_model_states.pt": _LARGE, "sub/optim.pt": b"3"}),
]
COMPANIONS: Files = {"zero_to_fp32.py": b"# converts\n"}


class BrokenError(AssertionError):
    """Something that must hold does not."""


def must(holds: bool, sentence: str) -> None:
    """Raise unless it holds; unlike ``assert``, also where nobody rewrites assertions."""
    if not holds:
        raise BrokenError(sentence)


@dataclass
class Scene:
    """One volume and one store.

    Attributes:
        path: of the volume.
        url: of the store, for settings.
        saves: oldest first.
        versions: of the objects of committed saves, when they were looked at last.
    """

    path: str
    url: str
    saves: list[NodeManifest]
    versions: dict[str, str] = field(default_factory=dict)


def build(path: str, url: str) -> Scene:
    """Make the volume, the same each time but for its inodes."""
    volume = Volume(path)
    volume.fs.make_folder(volume.own)
    volume.fs.write_atomic(f"{volume.own}/node.json", NodeIdentity(node=NODE).to_bytes())
    trainer = Trainer(path, seed=5)
    _restored(trainer)
    saves = [trainer.save(tag, files, companions=COMPANIONS) for tag, files in SAVES]
    trainer.say()
    _leave_behind(trainer.volume, url, saves[-1])
    return Scene(path, url, saves)


def _leave_behind(volume: Volume, url: str, newest: NodeManifest) -> None:
    """What killed agents have left."""
    gone = names.new_save_id(START_MS - 9000, random.Random(6))
    fs = volume.fs
    with open(f"{volume.status}/.sidecar.json.1.0123abcd.tmp", "wb") as file:
        file.write(b"{")
    fs.make_folder(f"{volume.trash}/{gone}")
    fs.write_atomic(f"{volume.trash}/{gone}/0", b"perhaps the only copy")
    journal = Journal(volume.journal)
    journal.set_state(gone, "committed")
    journal.close()
    store = open_store(url)
    store.begin(f"{newest.folder}/{newest.shards[0].path}", newest.shards[0].size, {})
    store.put(f".ds_ckpt/probe/{NODE}/0-create", BytesSource(b"probe"))
    store.begin(f".ds_ckpt/probe/{NODE}/0-proof", 5, {})
    store.close()


def _restored(trainer: Trainer) -> None:
    """The checkpoint that the volume was restored from, before the first save."""
    manifest = trainer.save(
        "global_step0",
        {"mp_rank_00_model_states.pt": b"zero"},
        time_ms=START_MS - 5000,
        publish=False,
        protection="none",
    )
    trainer.time_ms = START_MS
    files = [
        RestoredFile(
            **{**shard.model_dump(exclude={"rank", "sha256"}), "path": f"global_step0/{shard.path}"}
        )
        for shard in manifest.shards
    ]
    restored = Restored(
        source="file:///elsewhere",
        run_id=trainer.run_id,
        save_id=manifest.save_id,
        tag=manifest.tag,
        time_ms=manifest.time_ms,
        epoch=1,
        files=files,
    )
    trainer.volume.fs.write_atomic(trainer.volume.restored, restored.to_bytes())


class Quiet:
    """A log that keeps what went wrong, to be read when a test fails."""

    def __init__(self) -> None:
        self.troubles: list[str] = []

    def info(self, event: str, **values: Any) -> None:
        pass

    def warning(self, event: str, **values: Any) -> None:
        self.troubles.append(f"{event} {values}")

    error = warning


def run_agent(
    scene: Scene,
    store: Store,
    *,
    fs: Filesystem | None = None,
    journal: Any = Journal,
    seed: int,
) -> tuple[int, Quiet]:
    """``ds-ckpt agent --once``; returns exit code and log."""
    log = Quiet()
    settings = AgentSettings(
        volume=scene.path,
        destination=scene.url,
        keep_last=1,
        retention_pause=0,
        part_mib=PART >> 20,
        streams=2,
    )
    agent = Agent(
        settings,
        store=store,
        volume=Volume(scene.path, fs),
        log=log,
        clock=StillClock(2_000_000_000),
        rng=random.Random(seed),
        open_journal=journal,
        executor=Inline(),
    )
    return agent.run(once=True), log


# ---- what must hold


def check_always(scene: Scene, store: Store) -> None:
    """I1 to I4 as far as one moment shows them; reads only."""
    catalog = Catalog(store, random.Random(0))
    records = {record.save_id: record for record in catalog.records()}
    must(not catalog.damaged, f"damaged records: {catalog.damaged}")
    versions = {}
    for record in records.values():
        if record.state == "committed":
            versions.update(_check_objects(record, store))
    for key in versions.keys() & scene.versions.keys():
        must(versions[key] == scene.versions[key], f"I4: {key} was written again")
    scene.versions = versions
    text = catalog.latest_text()
    folders = {record.folder for record in records.values() if record.state == "committed"}
    must(text is None or text in folders, f"I2: latest names {text!r}, committed are {folders}")
    local = LocalFiles(Volume(scene.path))
    for manifest in scene.saves:
        if manifest.save_id not in records:
            _check_local(local, manifest)


def _check_objects(record: Record, store: Store) -> Iterator[tuple[str, str]]:
    there = {info.key: info for info in store.list(f"{record.folder}/")}
    for key, entry in record.objects():
        must(key in there, f"I1: {key} is missing")
        data = store.get(key)[0]
        found = (len(data), digest.to_hex(digest.crc32c(data)))
        must(found == (entry.size, entry.crc32c), f"I1: {key} has {found}")
        yield key, there[key].version


def _check_local(local: LocalFiles, manifest: NodeManifest) -> None:
    for shards, companion in ((manifest.shards, False), (manifest.companions, True)):
        for shard in shards:
            what = f"I3: {shard.path} of {manifest.tag} ({manifest.save_id}), not decided,"
            try:
                fd = local.open(manifest, shard, companion=companion)
            except Exception as error:
                raise BrokenError(f"{what} is lost: {error}") from error
            try:
                value, _ = digest.crc32c_of_fd(fd, 0, shard.size)
            finally:
                os.close(fd)
            must(digest.to_hex(value) == shard.crc32c, f"{what} has other bytes")


@dataclass(frozen=True)
class Rest:
    """Everything that lies in the store and on the volume when there is nothing left to do."""

    objects: frozenset[str]
    uploads: int
    files: frozenset[str]
    volume: frozenset[str]
    journal: tuple[tuple[str, int], ...]


def look(scene: Scene, store: Store) -> Rest:
    """What lies there now, by name."""
    with closing(sqlite3.connect(Volume(scene.path).journal)) as db:
        tables = ("saves", "uploads", "parts", "stored")
        rows = tuple(
            (table, db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]) for table in tables
        )
    root = scene.url.removeprefix("file://")
    return Rest(
        frozenset(info.key for info in store.list("")),
        sum(1 for _ in store.uploads("")),
        frozenset(_everything(root)) if isinstance(store, FileStore) else frozenset(),
        frozenset(name for name in _everything(scene.path) if "journal.db" not in name),
        rows,
    )


def _everything(root: str) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        for name in folders:
            yield f"{os.path.relpath(folder, root)}/{name}/"
        for name in files:
            yield f"{os.path.relpath(folder, root)}/{name}"


def check_rest(scene: Scene, store: Store, expected: Rest, scratch: str) -> None:
    """At rest: the newest is committed, named and whole on both sides, and nothing is left over."""
    catalog = Catalog(store, random.Random(0))
    states = {record.save_id: record.state for record in catalog.records()}
    *older, newest = scene.saves
    wanted = {manifest.save_id: "deleted" for manifest in older} | {newest.save_id: "committed"}
    must(states == wanted, f"decisions are {states}, not {wanted}")
    must(catalog.latest_text() == newest.folder, f"I2: latest is {catalog.latest_text()!r}")
    _check_local(LocalFiles(Volume(scene.path)), newest)
    check_as(look(scene, store), expected)
    restore_anew(store, scratch)
    check_restored(Volume(scratch), newest.tag, SAVES[-1][1])


def check_as(found: Rest, expected: Rest) -> None:
    """All lies as it does after a run that nobody disturbed."""
    for what in ("objects", "uploads", "files", "volume", "journal"):
        here, there = getattr(found, what), getattr(expected, what)
        if isinstance(here, frozenset):
            must(here == there, f"{what}: left over {here - there}, missing {there - here}")
        must(here == there, f"{what}: {here}, not {there}")


def restore_anew(store: Store, path: str) -> None:
    """Restore the newest checkpoint onto a new volume."""
    clock = StillClock(2_000_000_000)
    budget = Budget(clock, streams=1)
    Restore(store, Inline(), budget=budget, clock=clock, rng=random.Random(1)).run(Volume(path))


def check_restored(volume: Volume, tag: str, files: Files, companions: Files = COMPANIONS) -> None:
    """The volume holds a checkpoint whole and exact, and its ``latest`` names it."""
    must(_read(f"{volume.path}/latest") == tag.encode(), "latest on the volume names it")
    found = {
        path: _read(f"{volume.path}/{tag}/{path}")
        for path, _ in volume.fs.walk(f"{volume.path}/{tag}")
    }
    _compare(found, files)
    for name, data in companions.items():
        must(_read(f"{volume.path}/{name}") == data, f"{name} has other bytes")


def _compare(found: Mapping[str, bytes], files: Files) -> None:
    must(found.keys() == files.keys(), f"restored {sorted(found)}, not {sorted(files)}")
    for path, data in files.items():
        must(found[path] == data, f"restored {path} has other bytes")


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
