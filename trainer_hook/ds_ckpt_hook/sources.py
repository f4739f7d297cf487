"""Where the files of a save come from: a DeepSpeed engine, or a folder that is handed over whole.

An engine knows the names of its own shards, and the folder of a tag may hold older ones beside
them. A folder that anybody wrote says nothing: all that is in it belongs to the save. So there the
ranks first wait for each other, or one would list what another is still writing; and a file that
no save can have, such as a link, is refused instead of left out in silence.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ds_ckpt_hook import deepspeed_files, engines
from ds_ckpt_hook.errors import NotPublishedError
from ds_ckpt_hook.session import Session
from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.filesystem import MAX_DEPTH, FileStat, Filesystem


@dataclass(frozen=True)
class Found:
    """Files of a save in its folder, as one rank sees them; path to state.

    Attributes:
        claims: those that this rank itself wrote.
        listed: all, if this rank lists for others.
        old: paths of ``listed`` that were there before this attempt wrote anything.
    """

    claims: dict[str, FileStat]
    listed: dict[str, FileStat] | None = None
    old: frozenset[str] = frozenset()


class Source(Protocol):
    """What a save is made of."""

    @property
    def is_deepspeeds(self) -> bool:
        """Whether DeepSpeed wrote it: with scripts beside its folder, and ``latest``."""

    def is_finished(self) -> bool:
        """Whether all of this rank's files are in place, or never will be."""

    def call_when_finished(self, take: Callable[[], bool]) -> None:
        """Call ``take`` now and then until it says True; for a source that is not finished."""

    def follow(self, session: Session) -> None:
        """Let the heartbeat tell how far this trainer is."""

    def find(self, session: Session, save_dir: str, tag: str) -> Found:
        """Look for the files.

        Raises:
            CkptError, OSError: this rank cannot vouch for its part.
        """


@dataclass(frozen=True)
class EngineSource:
    """What ``engine.save_checkpoint`` wrote."""

    engine: Any
    is_deepspeeds = True

    def is_finished(self) -> bool:
        """See :meth:`Source.is_finished`."""
        return bool(engines.refusal(self.engine)) or engines.is_finished(self.engine)

    def call_when_finished(self, take: Callable[[], bool]) -> None:
        """See :meth:`Source.call_when_finished`."""
        engines.call_before_forward(self.engine, take)

    def follow(self, session: Session) -> None:
        """See :meth:`Source.follow`."""
        session.follow(self.engine)

    def find(self, session: Session, save_dir: str, tag: str) -> Found:
        """See :meth:`Source.find`."""
        if refused := engines.refusal(self.engine):
            raise NotPublishedError(refused)
        folder = f"{save_dir}/{tag}"
        fs, cutoff = session.volume.fs, session.younger_than_ns
        wanted = deepspeed_files.expected(self.engine, save_dir, tag)
        claims, missing = deepspeed_files.claim(fs, folder, wanted, cutoff)
        if missing:
            raise NotPublishedError("; ".join(missing[:4]))
        if not session.is_leader:
            return Found(claims)
        return Found(claims, deepspeed_files.listing(fs, folder, cutoff, session.taken, tag))


@dataclass(frozen=True)
class FolderSource:
    """All that is in a folder, as it is at that step."""

    step: int | None
    is_deepspeeds = False

    def is_finished(self) -> bool:
        """See :meth:`Source.is_finished`; whoever hands a folder over has written it."""
        return True

    def call_when_finished(self, take: Callable[[], bool]) -> None:
        """See :meth:`Source.call_when_finished`."""
        take()

    def follow(self, session: Session) -> None:
        """See :meth:`Source.follow`."""
        if self.step is not None:
            session.reached(self.step)

    def find(self, session: Session, save_dir: str, tag: str) -> Found:
        """See :meth:`Source.find`."""
        if not session.is_first_of_machine:
            return Found({})
        fs, folder = session.volume.fs, f"{save_dir}/{tag}"
        state = fs.stat(folder)
        if state is not None and not state.is_folder:
            raise NotPublishedError(
                f"{folder} is {_what(state)}: give each checkpoint a folder, and pass that"
            )
        listed = dict(_files(fs, folder))
        old = {path for path, s in listed.items() if s.mtime_ns < session.younger_than_ns}
        return Found({}, listed, frozenset(old))


def folder_of(
    path: str | os.PathLike[str], tag: object, volume: str | None
) -> tuple[str | None, str, str]:
    """What the path of a folder says: (save_dir, tag, why it says nothing).

    Args:
        path: of the folder.
        tag: its last components; None for the last one.
        volume: ``DS_CKPT_DIR``, if it is set.
    """
    try:
        whole = os.path.abspath(os.fsdecode(path))
    except TypeError:
        return None, str(tag), f"a folder's path is needed, and not {path!r}"
    if volume is not None and os.path.realpath(whole) == os.path.realpath(volume):
        return None, str(tag), f"{whole} is the volume: write each checkpoint into a folder in it"
    name = os.path.basename(whole) if tag is None else str(tag)
    if not name or not whole.endswith(f"/{name}"):
        return None, name, f"the tag of {whole} must be how its path ends, and {name!r} is not"
    return whole[: -len(name) - 1] or "/", name, ""


def _files(fs: Filesystem, folder: str, depth: int = MAX_DEPTH) -> Iterator[tuple[str, FileStat]]:
    """Every file below a folder: (relative path, state), sorted.

    Raises:
        ManifestError: a name cannot be handed over.
        NotPublishedError: there is something else than files and folders.
    """
    for name in fs.names(folder):
        state = fs.stat(f"{folder}/{name}")
        if state is None:  # a temporary file of another process
            continue
        if state.is_folder and depth:
            for path, inner in _files(fs, f"{folder}/{name}", depth - 1):
                yield names.check_relative_path(f"{name}/{path}"), inner
        elif state.is_regular:
            yield names.check_relative_path(name), state
        else:
            raise NotPublishedError(
                f"{folder}/{name} is {_what(state)}, and only files can be stored: put the file "
                "itself there, or remove it before the folder is handed over"
            )


def _what(state: FileStat) -> str:
    return {stat.S_IFREG: "a file", stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder"}.get(
        stat.S_IFMT(state.mode), "a device, pipe or socket"
    )
