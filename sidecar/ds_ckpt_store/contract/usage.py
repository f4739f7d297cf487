"""What a volume's files take on its disk, as the kubelet adds it up for an emptyDir's limit."""

from __future__ import annotations

from ds_ckpt_store.contract.filesystem import FileStat
from ds_ckpt_store.contract.volume import Volume


def allocated_below(volume: Volume) -> int:
    """Bytes on the disk of all that has a name on a volume; hard links count once.

    No link is followed and no other filesystem entered. What vanishes meanwhile, or may not be
    looked at, is not counted.
    """
    top = _stat(volume, volume.path)
    if top is None:
        return 0
    total, seen, folders = top.allocated, set(), [volume.path]
    while folders:
        folder = folders.pop()
        for name in _names(volume, folder):
            state = _stat(volume, f"{folder}/{name}")
            if state is None or state.device != top.device or state.inode in seen:
                continue
            if state.is_folder:
                folders.append(f"{folder}/{name}")
            elif state.links > 1:
                seen.add(state.inode)
            total += state.allocated
    return total


def _names(volume: Volume, folder: str) -> list[str]:
    try:
        return volume.fs.names(folder)
    except OSError:
        return []


def _stat(volume: Volume, path: str) -> FileStat | None:
    try:
        return volume.fs.stat(path)
    except OSError:
        return None
