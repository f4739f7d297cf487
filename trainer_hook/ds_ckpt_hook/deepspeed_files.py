"""Which files a rank, and a node, wrote for one save.

DeepSpeed tells nobody what it wrote, and it overwrites in place: the folder of a tag may hold
shards of a larger earlier world beside those of this save. So a rank asks its engine for the
names of its own shards, and the node's leader adds what else lies in the folder (layers of a
pipeline, experts, offloaded tensors), as far as it is younger than this process.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import re
from collections.abc import Mapping
from typing import Any

from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.filesystem import FileStat, Filesystem

SLACK_SECONDS = 2.0
MAX_COMPANION = 1 << 20
_NAMES = (
    ("save_non_zero_checkpoint", "_get_ckpt_name"),
    ("save_zero_checkpoint", "_get_zero_ckpt_name"),
)
_STATES = re.compile(r"_(model|optim)_states\.pt$|^layer_.*-model_states\.pt$")
_OWN_TO_A_RANK = re.compile(r"(^|/)(bf16_)?zero_pp_rank_|(^|/)expp_rank_")
_FRAGMENT = re.compile(r"-\d+\.\d+$")


def expected(engine: Any, save_dir: str, tag: str) -> set[str]:
    """Paths in the tag's folder that this rank must have written, by DeepSpeed's own naming.

    What a DeepSpeed of another age does not tell is left to the leader's listing. A model with
    experts names its files by layer: those are left to the listing too.
    """
    folder = os.path.join(save_dir, tag)
    return {
        os.path.relpath(getattr(engine, name)(save_dir, tag), folder)
        for wrote, name in _NAMES
        if getattr(engine, wrote, False) and hasattr(engine, name)
    }


def claim(
    fs: Filesystem, folder: str, paths: set[str], younger_than_ns: int
) -> tuple[dict[str, FileStat], list[str]]:
    """Look at the files that a rank must have written.

    Returns:
        Path to state of those that are there, and a sentence for each that is not.
    """
    found: dict[str, FileStat] = {}
    missing: list[str] = []
    for path in sorted(paths):
        state = fs.stat(f"{folder}/{path}")
        if state is not None and state.is_regular and state.mtime_ns >= younger_than_ns:
            found[path] = state
        elif state is not None and not state.is_regular:
            missing.append(f"{folder}/{path} is not a regular file")
        elif not _in_fragments(fs, folder, path):
            what = "is missing" if state is None else "is older than this process"
            missing.append(f"{folder}/{path} {what}")
    return found, missing


def _in_fragments(fs: Filesystem, folder: str, path: str) -> bool:
    # DeepSpeed's parallel "fast" writer leaves <name>-<writer>.<writers> instead of <name>.
    parent, _, leaf = f"{folder}/{path}".rpartition("/")
    return any(
        name.startswith(leaf) and _FRAGMENT.fullmatch(name[len(leaf) :])
        for name in fs.names(parent)
    )


def listing(
    fs: Filesystem,
    folder: str,
    younger_than_ns: int,
    taken: Mapping[str, tuple[str, tuple[int, int, int, int]]],
    tag: str,
) -> dict[str, FileStat]:
    """Every file of this save in the tag's folder.

    Args:
        fs: the volume's filesystem.
        folder: absolute path of the tag's folder.
        younger_than_ns: older files belong to an earlier attempt.
        taken: absolute path to (tag, identity) of files that earlier saves of this process took:
            the folder of tag ``a`` also holds that of tag ``a/b``.
        tag: of this save.

    Raises:
        ManifestError: a name cannot be handed over.
    """
    found: dict[str, FileStat] = {}
    for path, state in fs.walk(folder):
        other, identity = taken.get(f"{folder}/{path}", (tag, state.identity))
        nested = other != tag and other.startswith(f"{tag}/") and identity == state.identity
        if state.mtime_ns >= younger_than_ns and not nested:
            found[names.check_relative_path(path)] = state
    return found


def companions(fs: Filesystem, save_dir: str, younger_than_ns: int) -> dict[str, FileStat]:
    """The scripts that DeepSpeed leaves beside the tags (``zero_to_fp32.py`` and others)."""
    found: dict[str, FileStat] = {}
    for name in fs.names(save_dir):
        if name.endswith(".py"):
            state = fs.stat(f"{save_dir}/{name}")
            if (
                state is not None
                and state.is_regular
                and state.size <= MAX_COMPANION
                and state.mtime_ns >= younger_than_ns
            ):
                found[name] = state
    return found


def is_own_to_a_rank(path: str) -> bool:
    """Whether only the rank that wrote a file reads it on load: a ZeRO or expert shard."""
    return _OWN_TO_A_RANK.search(path) is not None


def looks_like_tag_folder(fs: Filesystem, folder: str) -> bool:
    """Whether DeepSpeed saved a checkpoint right into this folder."""
    return any(_STATES.search(name) for name in fs.names(folder))


def tag_folders(
    fs: Filesystem, save_dir: str, pattern: str | None = None, depth: int = 6
) -> list[str]:
    """Tags of all checkpoints below save_dir, sorted; tags with slashes are found too.

    Args:
        fs: the volume's filesystem.
        save_dir: absolute.
        pattern: of further folders that are checkpoints, whatever is in them; see :func:`fits`.
        depth: how many folders within each other are looked into.
    """
    tags: list[str] = []

    def look(prefix: str, left: int) -> None:
        for name in fs.names(f"{save_dir}/{prefix}" if prefix else save_dir):
            tag = f"{prefix}/{name}" if prefix else name
            state = fs.stat(f"{save_dir}/{tag}")
            if tag == names.VOLUME_DIR or state is None or not state.is_folder:
                continue
            if pattern is not None and fits(tag, pattern):
                tags.append(tag)
                continue
            if looks_like_tag_folder(fs, f"{save_dir}/{tag}"):
                tags.append(tag)
            if left:
                look(tag, left - 1)

    look("", depth)
    return tags


def fits(tag: str, pattern: str) -> bool:
    """Whether each component of a tag matches its component of a pattern as shells have them."""
    components, patterns = tag.split("/"), pattern.split("/")
    return len(components) == len(patterns) and all(map(fnmatch.fnmatchcase, components, patterns))


def filesystem_now_ns(fs: Filesystem, folder: str, token: str) -> int:
    """The time, in nanoseconds, that a file written in ``folder`` now is stamped with.

    A network filesystem stamps files by its server's clock, not by ours.

    Raises:
        OSError: nothing can be written there.
    """
    path = f"{folder}/.clock.{token}"
    fs.write_atomic(path, b"", durable=False)
    try:
        state = fs.stat(path)
    finally:
        fs.unlink(path)
    if state is None:
        raise FileNotFoundError(errno.ENOENT, "vanished while its time was read", path)
    return state.mtime_ns
