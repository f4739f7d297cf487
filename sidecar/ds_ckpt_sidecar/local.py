"""Files of a save on the shared volume: opened for upload, and removed once it is decided.

The trainer's container owns these files and may change them at any moment, so nothing is believed:
paths are opened without following a link, and a name is unlinked only after it was taken into our
own folder and found to be, still, what the manifest names. Killed anywhere, it leaves each file
under its name, or in our own folder until the same removal is repeated.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence

from ds_ckpt_sidecar.unfreed import Unfreed
from ds_ckpt_store.contract import access, names
from ds_ckpt_store.contract.filesystem import FileStat
from ds_ckpt_store.contract.manifest import NodeManifest, Restored, RestoredFile, Shard
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import (
    InputError,
    ManifestError,
    ShardChangedError,
    ShardUnreadableError,
)

STALE_SECONDS = 3600.0


class LocalFiles:
    """Files of saves on one volume.

    Args:
        volume: the volume.
        unfreed: told of each file whose last name is removed; None: nobody wants to know.
    """

    def __init__(self, volume: Volume, unfreed: Unfreed | None = None) -> None:
        self._volume = volume
        self._unfreed = unfreed

    # ---- reading

    def open(self, manifest: NodeManifest, shard: Shard, *, companion: bool) -> int:
        """A descriptor on a shard: its link if there is one, else the trainer's own name.

        Raises:
            ManifestError: it is not there, leads outside the volume, is no regular file, or never
                had the size that the manifest says.
            ShardChangedError: it was written again since.
            ShardUnreadableError: permissions or I/O; says what to do.
        """
        link = f"{names.COMPANIONS_DIR}/{shard.path}" if companion else shard.path
        below = f"{names.VOLUME_DIR}/links/{manifest.save_id}/{link}"
        for path in (below, self._own_path(manifest, shard, companion=companion)):
            try:
                fd = self._volume.fs.open_beneath(self._volume.path, path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise self._unreadable(path, error) from None
            try:
                self._compare(manifest, shard, path, self._volume.fs.fstat(fd))
            except BaseException:
                os.close(fd)
                raise
            return fd
        raise ManifestError(
            f"shard {shard.path!r} is not on the volume, neither under {below!r} nor in the "
            "trainer's folder; was it removed before it was uploaded?"
        )

    def _own_path(self, manifest: NodeManifest, shard: Shard, *, companion: bool) -> str:
        """The trainer's own name of a file, relative to the volume."""
        if companion:
            return shard.path if manifest.root == "." else f"{manifest.root}/{shard.path}"
        return f"{self._volume.tag_folder(manifest)}/{shard.path}"

    @staticmethod
    def _compare(manifest: NodeManifest, shard: Shard, path: str, state: FileStat) -> None:
        if state.size == shard.size:
            return
        sizes = f"{path!r} has {state.size} bytes and its manifest says {shard.size}"
        if (state.inode, state.mtime_ns) == (shard.inode, shard.mtime_ns):
            raise ManifestError(f"{sizes}, though it has not changed since: the manifest is wrong")
        raise ShardChangedError(
            f"{sizes}: it was written again after the save was handed over (tag "
            f"{manifest.tag!r} saved again?); this save cannot be completed"
        )

    def _unreadable(self, path: str, error: OSError) -> ShardUnreadableError:
        full = f"{self._volume.path}/{path}"
        remedy = access.denied(error, self._volume.fs, full) or "it will be tried again"
        return ShardUnreadableError(f"cannot read {full}: {error.strerror}; {remedy}")

    def is_latest(self, manifest: NodeManifest) -> bool:
        """Whether DeepSpeed's own ``latest`` on the volume names the save's folder."""
        return self._latest(manifest.root) == manifest.tag.strip()

    def _latest(self, root: str) -> str:
        """What it names; empty if there is none. One that cannot be read may name anything.

        Raises:
            OSError: as the system says.
        """
        folder = self._volume.path if root == "." else f"{self._volume.path}/{root}"
        try:
            return self._volume.fs.read(f"{folder}/latest", 4096).decode(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError, ManifestError):
            return ""
        except PermissionError as error:
            why = access.barred(self._volume.fs, f"{folder}/latest")
            raise PermissionError(
                error.errno,
                f"{error.strerror}, and it may name what is to be removed: nothing is; {why}",
                f"{folder}/latest",
            ) from None

    # ---- removing

    def clear_up(self, now: float) -> list[str]:
        """Remove what killed writers have left; for the holder of the volume's lock, at start.

        Half-written files go at once where nobody but the holder writes, else when they are older
        than an hour: the hook or a restore may be at work. Files that were taken for a removal
        that nothing names any more (its manifest is gone) are set aside, not removed: nobody knows
        whether they are stored.

        Args:
            now: seconds since the epoch.

        Returns:
            A sentence for each thing done that a person should know.
        """
        volume, fs = self._volume, self._volume.fs
        for folder in (volume.status, volume.outbox, volume.own, volume.path):
            for path, target, written in fs.temporaries(folder):
                ours = folder == volume.status and target != "trainer.json"
                foreign = folder == volume.path and target != "latest"
                if ours or (not foreign and now - written > STALE_SECONDS):
                    fs.unlink(path)
        named = {name.split(".")[0] for name in volume.manifests()}
        with contextlib.suppress(InputError):
            if (restored := volume.restored_from()) is not None:
                named.add(restored.save_id)
        return [self._set_aside(name) for name in fs.names(volume.trash) if name not in named]

    def _set_aside(self, save_id: str) -> str:
        fs, taken = self._volume.fs, f"{self._volume.trash}/{save_id}"
        if fs.remove_folder(taken):
            return f"{taken} was empty; removed"
        fs.make_folder(self._volume.aside)
        number = 0
        while fs.stat(target := f"{self._volume.aside}/{save_id}-trash.{number}") is not None:
            number += 1
        fs.rename(taken, target)
        return f"{taken} holds files that no manifest names any more; moved to {target}"

    def remove(self, manifest: NodeManifest, *, links_only: bool = False) -> None:
        """Remove what is left of a save: names that have not changed, and the links.

        Names are those in the trainer's folder, and those that were set aside from it when the
        trainer resumed from another save.

        Args:
            manifest: the save's.
            links_only: leave the trainer's folder as it is: a later save lives in it.
        """
        shards = [*manifest.shards, *manifest.replicas]
        aside = f"{names.VOLUME_DIR}/aside/{manifest.save_id}/{manifest.tag}"
        own = [(self._own_path(manifest, shard, companion=False), shard) for shard in shards]
        expected = [(f"{aside}/{shard.path}", shard) for shard in shards] + own
        top = "" if manifest.root == "." else manifest.root
        left = {path for path, _ in own} if links_only else set()
        # Links first: on a full disk their folders give back the blocks that a trash folder needs.
        with self._removing(self._last_names(self._volume.link_folder(manifest.save_id))):
            self._volume.fs.remove_tree(self._volume.link_folder(manifest.save_id))
        self._remove_files(manifest.save_id, expected, top, left)

    def remove_restored(self, restored: Restored) -> bool:
        """Remove the checkpoint that the volume was restored from; False if ``latest`` names it.

        ``restored.json`` goes last, so that a run that dies on the way is repeated.
        """
        if self._latest(".") == restored.tag.strip():
            return False
        self._remove_files(restored.save_id, [(entry.path, entry) for entry in restored.files], "")
        self._volume.fs.unlink(self._volume.restored)
        return True

    def _remove_files(
        self,
        save_id: str,
        expected: Sequence[tuple[str, Shard | RestoredFile]],
        top: str,
        left: Collection[str] = (),
    ) -> None:
        """Remove files that are still as expected, and folders below ``top`` that this empties.

        Those in ``left`` stay, unless a removal that was killed had taken them already.
        """
        fs = self._volume.fs
        trash = f"{self._volume.trash}/{save_id}"
        fs.make_folder(trash)
        for number, (path, entry) in enumerate(expected):
            taken = f"{trash}/{number}"
            if fs.stat(taken) is None:
                if path in left:
                    continue
                with contextlib.suppress(ManifestError, FileNotFoundError, NotADirectoryError):
                    if not self._take(path, entry, taken):
                        continue
            state = fs.stat(taken)
            if state is None:
                continue
            if _is_same(state, entry):
                with self._removing([taken]):
                    fs.unlink(taken)
            else:
                self._put_back(taken, path, save_id)
        fs.remove_folder(trash)
        for folder in sorted({os.path.dirname(path) for path, _ in expected}, reverse=True):
            while folder not in ("", top) and fs.remove_folder_beneath(self._volume.path, folder):
                folder = os.path.dirname(folder)

    def _removing(self, paths: Iterable[str]) -> contextlib.AbstractContextManager[None]:
        """Around the removal of files, for whoever wants to know what is freed by it."""
        if self._unfreed is None:
            return contextlib.nullcontext()
        top = f"{self._volume.path}/"
        return self._unfreed.removing(path.removeprefix(top) for path in paths)

    def _last_names(self, folder: str) -> Iterator[str]:
        """Files in a folder of our own that have no other name."""
        with contextlib.suppress(OSError):
            for path, state in self._volume.fs.walk(folder):
                if state.links == 1:
                    yield f"{folder}/{path}"

    def _take(self, path: str, entry: Shard | RestoredFile, taken: str) -> bool:
        """Take a file into our own folder if it is still as expected."""
        fs, root = self._volume.fs, self._volume.path
        try:
            state = fs.stat_beneath(root, path)
            if state is None or not _is_same(state, entry):
                return False
            fs.take_beneath(root, path, taken)
        except PermissionError as error:
            folder = os.path.dirname(f"{root}/{path}")
            why = access.barred(fs, f"{folder}/")
            raise PermissionError(
                error.errno, f"{error.strerror}, nothing can be removed there; {why}", folder
            ) from None
        return True

    def _put_back(self, taken: str, path: str, save_id: str) -> None:
        fs = self._volume.fs
        try:
            fs.make_folder(os.path.dirname(f"{self._volume.path}/{path}"))
            fs.link(taken, f"{self._volume.path}/{path}")
        except FileExistsError:
            if not self._is_one_file(taken, f"{self._volume.path}/{path}"):
                fs.make_folder(self._volume.aside)
                fs.rename(taken, f"{self._volume.aside}/{save_id}-{os.path.basename(path)}")
                return
        fs.unlink(taken)

    def _is_one_file(self, first: str, second: str) -> bool:
        """Whether two names are one file: it was put back, and killed before the next line."""
        one, other = self._volume.fs.stat(first), self._volume.fs.stat(second)
        return one is not None and other is not None and one.identity == other.identity


def _is_same(state: FileStat, entry: Shard | RestoredFile) -> bool:
    return (state.size, state.inode, state.mtime_ns) == (entry.size, entry.inode, entry.mtime_ns)
