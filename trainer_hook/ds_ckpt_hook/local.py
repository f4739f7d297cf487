"""What one node's volume holds completely, and moving out of sight what must not be loaded.

A save counts as complete if this node's own manifest says so, all its files have the manifest's
size and checksum, and the ranks that run here now wrote it. What must not be loaded is renamed
into ``.ds_ckpt/aside/``. Of that, what was never handed over is kept until the next of its kind
comes, and what was, until the sidecar has stored or given up its save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ds_ckpt_hook import deepspeed_files
from ds_ckpt_hook.errors import NotPublishedError
from ds_ckpt_hook.session import Session, restored_on
from ds_ckpt_hook.settings import Place
from ds_ckpt_store.contract import digest, names
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.manifest import NodeManifest, Shard
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError

logger = logging.getLogger("ds_ckpt_hook")

_READERS = 4
_CLEANING_SECONDS = 60.0
_CLEANING_POLL = 0.2
_LABEL = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class Held:
    """One save that a node seems to hold completely; ``manifest`` is None if it was restored."""

    save_id: str
    tag: str
    time_ms: int
    attempt: str
    manifest: NodeManifest | None = None


def keep_from_cleaning(volume: Volume, clock: Clock) -> int:
    """Keep the sidecar from taking saves away, for as long as the returned descriptor is open.

    From the first look at what a volume holds until ``latest`` names what was agreed on: the
    sidecar removes what is committed, and what ``latest`` names it leaves.

    Raises:
        NotPublishedError: the sidecar is at it for a minute already.
        OSError: the lock cannot be opened.
    """
    until = clock.monotonic() + _CLEANING_SECONDS
    while True:
        lock = volume.fs.try_lock(volume.cleaning_lock)
        if lock is not None:
            return lock
        if clock.monotonic() >= until:
            raise NotPublishedError(
                f"the sidecar has been removing saves for {_CLEANING_SECONDS:.0f} s (it holds "
                f"{volume.cleaning_lock})"
            )
        clock.sleep(_CLEANING_POLL)


def held_saves(session: Session, place: Place) -> dict[str, Held]:
    """Saves of this run that this node seems to hold, by id; sizes are compared, sums are not."""
    found: dict[str, Held] = {}
    for manifest in _newest_of_each_tag(session, place).values():
        if _suffices(session, manifest) and _has_sizes(place, manifest):
            found[manifest.save_id] = Held(
                manifest.save_id, manifest.tag, manifest.time_ms, manifest.attempt, manifest
            )
    for restored in restored_on(place):
        if restored.save_id not in found:
            found[restored.save_id] = Held(restored.save_id, restored.tag, restored.time_ms, "")
    return found


def is_whole(place: Place, held: Held) -> bool:
    """Whether every byte of a save is right."""
    if held.manifest is None:
        from ds_ckpt_hook import remote

        paths = {place.volume.path, place.save_dir}
        volumes = [Volume(path, place.volume.fs) for path in paths]
        return any(remote.is_restored(volume, held.save_id) for volume in volumes)
    shards = [*held.manifest.shards, *held.manifest.replicas]
    folder = f"{place.save_dir}/{held.tag}"
    with ThreadPoolExecutor(_READERS, "ds_ckpt verify") as executor:
        return all(executor.map(lambda shard: _is_right(place.volume, folder, shard), shards))


def unmanaged(session: Session, place: Place, pattern: str | None = None) -> list[str]:
    """Tags that lay here before the hook was first used on this volume.

    Nothing of ours can vouch for them, and they are no leftovers of ours either.
    """
    fs = place.volume.fs
    made = fs.stat(f"{place.volume.own}/node.json")
    known = {manifest.tag for manifest in _manifests(session)}
    known.update(each.tag for each in restored_on(place))
    return [
        tag
        for tag in _tags(session, place, pattern)
        if tag not in known
        and made is not None
        and all(state.mtime_ns < made.mtime_ns for _, state in fs.walk(f"{place.save_dir}/{tag}"))
    ]


def known_durable(session: Session, place: Place) -> str:
    """What this volume tells of a committed checkpoint of this run; empty if nothing."""
    for restored in restored_on(place):
        if restored.run_id == session.run_id:
            return f"{place.volume.path} was restored from {restored.tag!r}"
    try:
        sidecar = session.volume.sidecar_status()
    except (CkptError, OSError):
        sidecar = None
    if sidecar is not None and sidecar.newest_committed_ms and sidecar.run_id == session.run_id:
        return f"the sidecar tells of {sidecar.newest_committed_tag!r} in {sidecar.destination}"
    for manifest in _newest_of_each_tag(session, place).values():
        with contextlib.suppress(CkptError, OSError):
            status = session.volume.save_status(manifest.save_id)
            if status is not None and status.state == "committed":
                return f"{manifest.tag!r} was committed"
    return ""


def set_aside(
    session: Session, place: Place, agreed: Held | None, now_ms: int, pattern: str | None = None
) -> list[str]:
    """Rename what must not be loaded: all but the agreed save and whole, known, older ones.

    What is older than our first use of the volume stays where it is. ``pattern`` is that of
    :func:`deepspeed_files.tag_folders`.

    Returns:
        A sentence for each checkpoint that was moved.

    Raises:
        OSError: something could not be renamed.
    """
    fs = place.volume.fs
    known = _newest_of_each_tag(session, place)
    tags = _tags(session, place, pattern)
    kept = {tag for tag in tags if _may_stay(place, tag, known, agreed)}
    kept.update(unmanaged(session, place, pattern))
    moved = []
    for tag in reversed(tags):  # a tag below another one first
        if tag in kept:
            continue
        manifest = known.get(tag)
        label = manifest.save_id if manifest is not None else f"{now_ms:012x}"
        target = _free_name(place.volume, f"{label}/{tag}")
        fs.make_folder(os.path.dirname(target))
        source = f"{place.save_dir}/{tag}"
        if any(other.startswith(f"{tag}/") for other in kept):
            fs.make_folder(target)
            for name in fs.names(source):
                state = fs.stat(f"{source}/{name}")
                if state is not None and not state.is_folder:
                    fs.rename(f"{source}/{name}", f"{target}/{name}")
        else:
            fs.rename(source, target)
        why = "is not known to be complete" if manifest is None else "is newer or torn"
        moved.append(f"{source} {why} and was moved to {target}")
    _forget_earlier(place, f"{now_ms:012x}")
    latest = f"{place.save_dir}/latest"
    if agreed is None and fs.stat(latest) is not None:
        target = _free_name(place.volume, f"{now_ms:012x}/latest")
        fs.make_folder(os.path.dirname(target))
        fs.rename(latest, target)
    return moved


def _forget_earlier(place: Place, label: str) -> None:
    """Of what no manifest names, keep only what was set aside last: a crash loop fills no disk."""
    fs, aside = place.volume.fs, place.volume.aside
    unnamed = [name for name in fs.names(aside) if _LABEL.fullmatch(name)]
    if label in unnamed:
        for name in unnamed:
            if name != label:
                fs.remove_tree(f"{aside}/{name}")


def point(place: Place, tag: str) -> None:
    """Make DeepSpeed's ``latest`` name a tag, durably.

    Raises:
        OSError: it could not be written.
    """
    place.volume.fs.write_atomic(f"{place.save_dir}/latest", tag.encode())


def _free_name(volume: Volume, wanted: str) -> str:
    path = f"{volume.aside}/{wanted}"
    number = 0
    while volume.fs.stat(path) is not None:
        number += 1
        path = f"{volume.aside}/{wanted}.{number}"
    return path


def _may_stay(
    place: Place, tag: str, known: Mapping[str, NodeManifest], agreed: Held | None
) -> bool:
    if agreed is None:
        return False
    if tag == agreed.tag:
        return True
    manifest = known.get(tag)
    older = manifest is not None and manifest.time_ms <= agreed.time_ms
    return manifest is not None and older and _has_sizes(place, manifest)


def _tags(session: Session, place: Place, pattern: str | None) -> list[str]:
    """Tags of all checkpoints in save_dir, sorted: known ones, and what looks like one.

    What looks like one, and is a part of a known one, is none: the folder that DeepSpeed makes
    within that of another trainer.
    """
    fs = place.volume.fs
    known: dict[str, list[str]] = {}
    for manifest in _manifests(session):
        if manifest.root == place.root:
            shards = (*manifest.shards, *manifest.replicas)
            known.setdefault(manifest.tag, []).extend(shard.path for shard in shards)
    for restored in restored_on(place):
        inside = f"{restored.tag}/"
        known.setdefault(restored.tag, []).extend(
            entry.path[len(inside) :] for entry in restored.files if entry.path.startswith(inside)
        )
    parts = {
        f"{tag}/{folder}"
        for tag, paths in known.items()
        for p in paths
        for folder in names.parents(p)
    }
    found = set(deepspeed_files.tag_folders(fs, place.save_dir, pattern))
    there = {
        tag
        for tag in known
        if (state := fs.stat(f"{place.save_dir}/{tag}")) is not None and state.is_folder
    }
    return sorted(there | (found - parts))


def _newest_of_each_tag(session: Session, place: Place) -> dict[str, NodeManifest]:
    """A tag that was saved again stands on the volume in its newest form only."""
    newest: dict[str, NodeManifest] = {}
    for manifest in _manifests(session):
        if manifest.run_id == session.run_id and manifest.root == place.root:
            other = newest.get(manifest.tag)
            if other is None or manifest.time_ms > other.time_ms:
                newest[manifest.tag] = manifest
    return newest


def _manifests(session: Session) -> Iterator[NodeManifest]:
    """Manifests of this node that can be read, of whichever run."""
    for name in session.volume.manifests():
        try:
            manifest = session.volume.manifest(name)
        except (CkptError, OSError) as error:
            logger.warning("manifest %s is passed over: %s", name, error)
            continue
        if manifest.node == session.node:
            yield manifest


def _suffices(session: Session, manifest: NodeManifest) -> bool:
    """Whether the ranks that run here now find all that they read."""
    if not manifest.elsewhere:
        return True
    return (
        manifest.world_size == session.world_size
        and set(session.ranks) <= set(manifest.ranks)
        and all(deepspeed_files.is_own_to_a_rank(path) for path in manifest.elsewhere)
    )


def _has_sizes(place: Place, manifest: NodeManifest) -> bool:
    folder = f"{place.save_dir}/{manifest.tag}"
    states = (
        (place.volume.fs.stat(f"{folder}/{shard.path}"), shard.size)
        for shard in (*manifest.shards, *manifest.replicas)
    )
    return all(s is not None and s.is_regular and s.size == size for s, size in states)


def _is_right(volume: Volume, folder: str, shard: Shard) -> bool:
    try:
        fd = volume.fs.open_beneath(folder, shard.path)
    except (OSError, CkptError):
        return False
    try:
        if volume.fs.fstat(fd).size != shard.size:
            return False
        found = digest.crc32c_of_fd(fd, 0, shard.size)
        return found == (digest.from_hex(shard.crc32c), shard.size)
    except OSError:
        return False
    finally:
        os.close(fd)
