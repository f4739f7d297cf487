"""The files of saves: may we read each, and make and remove names where they lie?

What a manifest names comes first, then what lies in folders of checkpoints and was not handed over
yet. Files with the same owner, mode and trouble are one finding, which names the first of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ds_ckpt_sidecar.examine.finding import Finding, Severity
from ds_ckpt_sidecar.examine.users import (
    CHANGE,
    READ,
    User,
    blocked_by,
    owner,
    remedy,
    why,
)
from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.manifest import NodeManifest
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import InputError, ManifestError, UnknownSchemaError

DEPTH = 6  # folders below the volume in which a tag is looked for
DECIDED = ("committed", "cleaned", "superseded", "abandoned")
_CHECKPOINT = "_states.pt"
_UPGRADE = "run a sidecar that is as new as the hook in the trainer's image"
_FILE_SYSTEMS = "lost+found"  # root's alone on each ext4, and no save_dir


@dataclass
class Looked:
    """What was seen on a volume, counted.

    Attributes:
        left: how many more paths may be looked at.
        saves: manifests that were read.
        files: shards and others that can be read.
        newest: bytes of the newest save here.
        newest_files: files of the newest save here.
        hook_version: of the newest manifest.
        nested: folders below the volume that a hook takes for a volume.
        loose: folders of checkpoints of which no manifest tells.
    """

    left: int
    saves: int = 0
    files: int = 0
    newest: int = 0
    newest_files: int = 0
    hook_version: str = ""
    nested: list[str] = field(default_factory=list)
    loose: list[str] = field(default_factory=list)


@dataclass
class _Trouble:
    """Paths with the same owner and mode, and what is wrong with them."""

    severity: Severity
    sentence: str
    state: os.stat_result
    need: str
    paths: dict[str, None] = field(default_factory=dict)  # in order


class Files:
    """Looks at the files of one volume.

    Args:
        volume: it exists.
        us: who looks.
        most: paths to look at.
    """

    def __init__(self, volume: Volume, us: User, most: int) -> None:
        self.looked = Looked(most)
        self._volume = volume
        self._us = us
        self._seen: set[str] = set()
        self._named: set[str] = set()  # tag folders of manifests, absolute
        self._troubles: dict[object, _Trouble] = {}
        self._said: list[Finding] = []

    def look(self) -> list[Finding]:
        """Look at all of it."""
        self._own_files()
        for manifest in self._manifests():
            self._save(manifest)
        self._rest(self._volume.path, DEPTH)
        return [*self._said, *(self._finding(each) for each in self._troubles.values())]

    # ---- our own

    def _own_files(self) -> None:
        volume = self._volume
        for path in (volume.own, volume.outbox, volume.links, volume.status):
            self._need_change(path, "error", "the agent makes and removes names in it")
        for path in (volume.aside, volume.trash, volume.restoring):
            self._need_change(path, "warning", "the agent makes and removes names in it")
        self._need_change(
            volume.path,
            "warning",
            "what is stored cannot be removed from it, so that the volume fills up",
        )
        for path in (volume.lock, volume.cleaning_lock, volume.restore_lock):
            self._need_open(path, os.O_RDONLY, "error", "the agent locks it")
        for suffix in ("", "-wal", "-shm"):
            purpose = "the agent remembers there what it has sent, and else sends it again"
            self._need_open(f"{volume.journal}{suffix}", os.O_RDWR, "warning", purpose)
        for path in (f"{volume.own}/node.json", f"{volume.status}/trainer.json", volume.restored):
            self._need_open(path, os.O_RDONLY, "error", "the agent reads it")
        self._identity()
        self._need_open(volume.limits, os.O_RDONLY, "warning", "its limits do not hold")

    def _identity(self) -> None:
        try:
            self._volume.known_node()
        except UnknownSchemaError as error:
            self._said.append(Finding("error", self._volume.path, str(error), _UPGRADE))
        except ManifestError as error:
            self._said.append(
                Finding(
                    "warning",
                    self._volume.path,
                    f"the id of this node cannot be read: {error}",
                    "start the agent: it puts the file aside, and takes the id that the saves in "
                    "the outbox name, or a new one",
                )
            )
        except OSError:
            return  # said of the file already

    def _manifests(self) -> Iterator[NodeManifest]:
        volume = self._volume
        try:
            listed = volume.manifests()
        except OSError:
            return  # said of the folder already
        for name in reversed(listed):
            path = f"{volume.outbox}/{name}"
            if self.looked.left <= 0:
                return
            if not self._need_open(path, os.O_RDONLY, "error", "a save that was handed over"):
                continue
            try:
                manifest = volume.manifest(name)
            except UnknownSchemaError as error:
                self._said.append(Finding("error", path, str(error), _UPGRADE))
            except InputError as error:
                self._said.append(
                    Finding(
                        "error",
                        path,
                        f"it is no manifest, so its save is not stored: {error}",
                        "find out what wrote it, and move it out of the outbox; if it was a save "
                        f"of the hook's, its shards stay in {volume.links}/{name.split('.')[0]} "
                        "until then: copy them first if you need them",
                    )
                )
            except OSError:
                continue  # gone since
            else:
                yield manifest

    # ---- saves

    def _save(self, manifest: NodeManifest) -> None:
        volume, looked = self._volume, self.looked
        looked.saves += 1
        shards = [*manifest.shards, *manifest.companions]
        if not looked.newest:
            looked.newest = sum(each.size for each in (*shards, *manifest.replicas))
            looked.newest_files = len(shards) + len(manifest.replicas)
            looked.hook_version = manifest.hook_version
        folder = f"{volume.path}/{volume.tag_folder(manifest)}"
        self._named.add(folder)
        links = volume.link_folder(manifest.save_id)
        decided = self._state(manifest) in DECIDED
        for shard in (*manifest.shards, *manifest.replicas):
            if not decided:
                self._shard((f"{links}/{shard.path}", f"{folder}/{shard.path}"))
            self._removable(f"{folder}/{shard.path}")
            self._removable(f"{links}/{shard.path}")
        beside = os.path.dirname(folder[: len(folder) - len(manifest.tag)])
        for shard in () if decided else manifest.companions:
            link = f"{links}/{names.COMPANIONS_DIR}/{shard.path}"
            self._shard((link, f"{beside}/{shard.path}"))

    def _state(self, manifest: NodeManifest) -> str:
        try:
            status = self._volume.save_status(manifest.save_id)
        except (InputError, OSError):
            return ""
        return status.state if status else ""

    def _shard(self, paths: Iterable[str]) -> None:
        """The first of its names that is there is what the agent opens."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._readable(path, "error", "a save that was handed over needs it")
                return

    def _removable(self, path: str) -> None:
        """All folders between the volume and a file, which its removal may empty."""
        folder = os.path.dirname(path)
        while len(folder) > len(self._volume.path) and folder not in self._seen:
            self._need_change(
                folder,
                "warning",
                "what is stored cannot be removed from it, so that the volume fills up",
            )
            folder = os.path.dirname(folder)

    # ---- what was not handed over, or not to us

    def _rest(self, folder: str, depth: int) -> None:
        try:
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if folder in self._named or self._holds_checkpoints(folder):
                self._need_change(folder, "warning", "what is saved in it cannot be seen")
            elif folder not in self._seen and os.path.basename(folder) != _FILE_SYSTEMS:
                self._unseen(folder, error)
            return
        files = [entry for entry in found if entry.is_file(follow_symlinks=False)]
        if any(entry.name.endswith(_CHECKPOINT) for entry in files):
            self._tag_folder(folder, files)
        for entry in found:
            if self.looked.left <= 0:
                return
            if not entry.is_dir(follow_symlinks=False):
                continue
            if entry.name == names.VOLUME_DIR:
                if folder != self._volume.path:
                    self.looked.nested.append(folder)
            elif depth:
                self.looked.left -= 1
                self._rest(entry.path, depth - 1)

    def _unseen(self, folder: str, error: OSError) -> None:
        """A folder that may be anybody's, or a save_dir that a hook took for a volume."""
        try:
            state = os.lstat(folder)
        except OSError:
            return  # gone since
        self._said.append(
            Finding(
                "warning",
                folder,
                f"it cannot be looked into by {self._us}: {error.strerror}; it has "
                f"{owner(state)}{why(state)}. If it holds the trainer's save_dir, its saves are "
                "not seen and not stored",
                f"if it does, set DS_CKPT_DIR={self._volume.path} in the trainer (where it has "
                "mounted that), and let the agent in: "
                f"{remedy([folder], state, self._us, CHANGE)}",
            )
        )

    def _holds_checkpoints(self, folder: str) -> bool:
        """Whether a folder that we may not look into is named by a ``latest`` beside it."""
        try:
            with open(f"{os.path.dirname(folder)}/{names.LATEST}", "rb") as file:
                return file.read(4096).decode(errors="replace").strip() == os.path.basename(folder)
        except OSError:
            return False

    def _tag_folder(self, folder: str, files: Iterable[os.DirEntry[str]]) -> None:
        known = folder in self._named
        if not known:
            self.looked.loose.append(folder)
            self._removable(f"{folder}/x")
        size = count = 0
        for entry in files:
            with contextlib.suppress(FileNotFoundError):
                size += entry.stat(follow_symlinks=False).st_size
                count += 1
                if not known:
                    self._readable(entry.path, "warning", "a save that holds it will not be stored")
        if not self.looked.saves and size > self.looked.newest:
            self.looked.newest, self.looked.newest_files = size, count

    # ---- one path

    def _readable(self, path: str, severity: Severity, purpose: str) -> None:
        """Open a file of the trainer's as the agent does, beneath the volume.

        Raises:
            FileNotFoundError, NotADirectoryError: it is not there.
        """
        if path in self._seen or self.looked.left <= 0:
            return
        self._seen.add(path)
        self.looked.left -= 1
        relative = path[len(self._volume.path) + 1 :]
        try:
            os.close(self._volume.fs.open_beneath(self._volume.path, relative))
            self.looked.files += 1
        except ManifestError:
            pass  # a link or a device: the agent says so, of that save
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            self._trouble(severity, path, READ, f"{purpose}, and it cannot be read", error)

    def _need_open(self, path: str, flags: int, severity: Severity, purpose: str) -> bool:
        """Open a file of our own; one that is not there needs nothing."""
        try:
            os.close(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            verb = "read" if flags == os.O_RDONLY else "written"
            self._trouble(
                severity,
                path,
                READ if flags == os.O_RDONLY else CHANGE,
                f"{purpose}, and it cannot be {verb}",
                error,
            )
            return False
        return True

    def _need_change(self, folder: str, severity: Severity, purpose: str) -> None:
        if folder in self._seen:
            return
        self._seen.add(folder)
        try:
            state = os.lstat(folder)
        except OSError:
            return  # not there, or what lies above it was said already
        if not stat.S_ISDIR(state.st_mode):
            return
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._trouble(
                severity, folder, CHANGE, f"{purpose}, and names in it cannot be changed", denied
            )
        elif self._sticks(state):
            self._said.append(
                Finding(
                    severity,
                    folder,
                    f"{purpose}, and it has the sticky bit ({owner(state)}): of {self._us} only "
                    "the names of its own files can be removed",
                    f"chmod -t {folder}, as uid {state.st_uid}",
                )
            )

    def _sticks(self, state: os.stat_result) -> bool:
        return bool(state.st_mode & stat.S_ISVTX) and self._us.uid not in (0, state.st_uid)

    def _trouble(
        self, severity: Severity, path: str, need: str, sentence: str, error: OSError
    ) -> None:
        if error.errno == errno.ELOOP:
            sentence = f"{sentence}: it is a link, and no link is followed here"
            advice = f"see where it leads (ls -l {path}), find out who made it, and remove it"
            self._said.append(Finding(severity, path, sentence, advice))
            return
        if error.errno not in (errno.EACCES, errno.EPERM):
            self._said.append(
                Finding(severity, path, f"{sentence}: {error.strerror}", "look at its disk")
            )
            return
        above = blocked_by(path)
        if above:  # the folder is the trouble, and one finding is enough for all that lies in it
            within = f"{above}/".startswith(f"{self._volume.path}/")
            path, need = above, CHANGE if within else READ
            sentence = f"what lies in it cannot be reached: {sentence}"
        try:
            state = os.lstat(path)
        except OSError:
            return
        key = (need, sentence, state.st_uid, state.st_gid, state.st_mode, above)
        sentence = f"{sentence} by {self._us}; it has {owner(state)}{why(state)}"
        trouble = self._troubles.setdefault(key, _Trouble(severity, sentence, state, need))
        trouble.paths[path] = None

    def _finding(self, trouble: _Trouble) -> Finding:
        more = len(trouble.paths) - 1
        also = f" ({more} more {'is' if more == 1 else 'are'} like it)" if more else ""
        paths = list(trouble.paths)
        what = remedy(paths, trouble.state, self._us, trouble.need)
        return Finding(trouble.severity, paths[0], trouble.sentence + also, what)
