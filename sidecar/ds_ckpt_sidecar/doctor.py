"""``ds-ckpt doctor``, and what the agent asks at its start: does all that we stand on hold?

Nothing here prints or raises. :func:`check_volume` takes milliseconds (a few files of its own are
made and removed; of the trainer's at most some thousands are looked at), so the agent can run it
at start. :func:`check_store` calls the store some twenty times, so the agent runs it in a thread
of its own; it may run beside agents, restores and gc. Both look at the real system: a simulation
must not call them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from ds_ckpt_sidecar import __version__
from ds_ckpt_sidecar.examine.files import Files, Looked
from ds_ckpt_sidecar.examine.finding import Finding, Severity, that_matter
from ds_ckpt_sidecar.examine.mount import look_at_mount, look_at_room, look_at_work
from ds_ckpt_sidecar.examine.prefix import look_at_owner, look_at_promises
from ds_ckpt_sidecar.examine.processes import look_at_processes
from ds_ckpt_sidecar.examine.rights import Rights
from ds_ckpt_sidecar.examine.rules import judge
from ds_ckpt_sidecar.examine.users import CHANGE, READ, User, blocked_by, ourselves, owner, remedy
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError, InputError
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.rules import bucket_rules

__all__ = [
    "Finding",
    "Severity",
    "check_processes",
    "check_promises",
    "check_store",
    "check_volume",
    "that_matter",
]

MOST_PATHS = 5000  # that are looked at, at the start of an agent


def check_volume(volume: Volume, *, most: int = MOST_PATHS) -> list[Finding]:
    """What this process finds on the shared volume, and what to do about it.

    Args:
        volume: need not exist, nor have been used.
        most: paths of the trainer's that are looked at.
    """
    return _safely(volume.path, lambda: _volume(volume, most))


def check_processes(volume: Volume) -> list[Finding]:
    """What agent and trainer last said on the volume, and who holds its locks."""
    return _safely(volume.path, lambda: look_at_processes(volume))


def check_store(store: Store, *, run_id: str = "") -> list[Finding]:
    """What this process may do in the store, whose it is, and what the bucket's rules do to it.

    Writes and removes some small objects under ``.ds_ckpt/probe/``.

    Args:
        store: as opened by its URL; its calls may be retried.
        run_id: the run that asks; empty if it is not known.
    """
    return _safely(store.url, lambda: _store(store, run_id))


def check_promises(store: Store, *, allow_weak: bool = False) -> list[Finding]:
    """Which changed bytes the store refuses, and which of two writers it lets win.

    The agent tries that itself at its start, and says it.

    Args:
        store: as opened by its URL; its calls may be retried.
        allow_weak: accept a store without conditional create.
    """
    return _safely(store.url, lambda: look_at_promises(store, allow_weak=allow_weak))


def _safely(what: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """All findings; what nobody expected is one of them, and holds nobody up."""
    found: list[Finding] = []
    try:
        found.extend(look())  # what came before an error stays
    except Exception as error:  # noqa: BLE001 - an agent must start all the same
        found.append(Finding("warning", what, f"it could not all be looked at: {error!r}"))
    return found


# ---- the volume


def _volume(volume: Volume, most: int) -> Iterator[Finding]:
    us, path = ourselves(), volume.path
    refusal = _no_volume(path, us)
    if refusal is not None:
        yield refusal
        return
    try:
        volume.refuse_links()
    except InputError as error:
        yield Finding("error", volume.own, str(error), "remove what lies there in its place")
        return
    files = Files(volume, us, most)
    troubles = files.look()
    looked = files.looked
    trainer = volume.fs.stat(f"{volume.status}/trainer.json")
    yield from look_at_mount(path, shared=trainer is not None or looked.saves > 0)
    yield from look_at_work(volume, us)
    yield from look_at_room(path, looked.newest, looked.newest_files)
    yield from troubles
    yield _users(path, us, trainer.uid if trainer is not None else None)
    yield from _hook(volume, looked, trainer is not None)
    if not any(each.severity == "error" for each in troubles):
        saves = f"{looked.saves} save{'' if looked.saves == 1 else 's'} handed over"
        yield Finding("ok", path, f"{saves}, {looked.files} files of checkpoints can be read")
    if looked.left <= 0:
        yield Finding("note", path, f"the first {most} files and folders were looked at")


def _no_volume(path: str, us: User) -> Finding | None:
    try:
        os.scandir(path).close()
    except (FileNotFoundError, NotADirectoryError) as error:
        return Finding(
            "error",
            path,
            f"the volume cannot be used: {error.strerror}",
            "mount the volume that trainer and sidecar share there (volumeMounts of the sidecar's "
            "container), or set DS_CKPT_VOLUME to where it is mounted",
        )
    except OSError as error:
        at = blocked_by(path) or path
        try:
            state = os.stat(at)
        except OSError:
            return Finding("error", path, f"the volume cannot be used: {error.strerror}")
        return Finding(
            "error",
            at,
            f"the volume {path} cannot be used by {us}: {error.strerror}; it has {owner(state)}",
            remedy([at], state, us, CHANGE if at == path else READ),
        )
    return None


def _users(path: str, us: User, trainer: int | None) -> Finding:
    if trainer is None:
        return Finding("ok", path, f"we are {us}")
    if trainer == us.uid:
        return Finding("ok", path, f"trainer and sidecar are one user: {us}")
    return Finding(
        "note",
        path,
        f"the trainer is uid {trainer}, and we are {us}: that works as long as they have a group "
        "in common, which may read the files of each save and write its folders",
    )


def _hook(volume: Volume, looked: Looked, seen: bool) -> Iterator[Finding]:
    """Whether the trainer hands its saves over, here, and by which version."""
    for folder in looked.nested:
        below = Volume(folder, volume.fs)
        if below.manifests() or volume.fs.stat(f"{below.status}/trainer.json") is not None:
            yield Finding(
                "error",
                folder,
                f"the trainer hands its saves over in {below.own}, and this sidecar looks into "
                f"{volume.own}: nothing of it is stored",
                f"set DS_CKPT_DIR in the trainer to where it has mounted {volume.path}, or "
                f"DS_CKPT_VOLUME={folder} here",
            )
    above = Volume(os.path.dirname(volume.path), volume.fs)
    if volume.fs.names(above.outbox):
        yield Finding(
            "error",
            volume.path,
            f"saves are handed over in {above.own}, above this volume: nothing of it is stored",
            f"set DS_CKPT_VOLUME={above.path} here",
        )
    restored = volume.fs.stat(volume.restored) is not None
    if looked.loose and not seen and not looked.saves and not restored and not looked.nested:
        yield Finding(
            "warning",
            looked.loose[0],
            "a checkpoint lies here, and no trainer has handed anything over on this volume",
            "call ds_ckpt_hook.after_save(engine, tag, save_dir=...) on every rank after each "
            "save_checkpoint; if save_dir lies below the mount, set DS_CKPT_DIR in the trainer",
        )
    if looked.hook_version not in ("", "unknown", __version__):
        yield Finding(
            "note",
            volume.outbox,
            f"the trainer's hook is version {looked.hook_version}, and this sidecar {__version__}: "
            "neighbouring versions work together",
        )


# ---- the store


def _store(store: Store, run_id: str) -> Iterator[Finding]:
    rights = Rights(store)
    yield from rights.look()
    if not rights.tried.answered:
        return
    yield from look_at_owner(store, run_id, rights.tried.store_time)
    try:
        rules = bucket_rules(store)
    except CkptError as error:
        yield Finding("note", store.url, f"the bucket's rules could not be read: {error}")
        return
    if rules is not None:
        yield from judge(rules)
