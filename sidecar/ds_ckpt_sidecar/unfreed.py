"""What was removed from the volume, and still takes room there.

A file's blocks are freed when its last name is gone and nobody has it open. Other containers'
open files cannot be listed from here, but the kernel tells of one file whether others have it open:
it refuses a write lease on it. It does so for files of our own user alone, and on a local
filesystem; of others it is only known whether they have another name.

A descriptor is needed to ask, and keeps a file from being freed itself. So one is kept only for
files that others keep too, and only until the next look. Where a file that is open gets a hidden
name instead of none (NFS), nothing is opened and nothing is known.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import ManifestError

MOST = 64  # descriptors
EVERY_SECONDS = 5.0


class Unfreed:
    """Files that were removed from one volume and are kept by others; for one thread.

    Args:
        volume: the volume.

    Attributes:
        bytes: on the disk, as of the last look; of 64 files at most.
    """

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._kept: list[int] = []
        self._works: bool | None = None
        self._again = float("-inf")
        self.bytes = 0

    @contextlib.contextmanager
    def removing(self, paths: Iterable[str]) -> Iterator[None]:
        """Around a removal of files, to see afterwards which of them are not freed.

        Args:
            paths: of the files, relative to the volume. One that cannot be opened is left out, and
                no link is followed.
        """
        opened: list[int] = []
        try:
            for path in paths:
                if len(self._kept) + len(opened) >= MOST or not self._can_be_told():
                    break
                with contextlib.suppress(OSError, ManifestError):
                    opened.append(self._volume.fs.open_beneath(self._volume.path, path))
            yield
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        self._keep(self._kept, opened)

    def look(self, now: float) -> None:
        """Let go of what others have let go of; every 5 seconds at most. Never raises.

        Args:
            now: by the monotonic clock.
        """
        if now >= self._again:
            self._again = now + EVERY_SECONDS
            self._keep([], self._kept)

    def close(self) -> None:
        """Let go of all."""
        for fd in self._kept:
            os.close(fd)
        self._kept, self.bytes = [], 0

    def _can_be_told(self) -> bool:
        """Whether opening a file does not itself keep its removal from being one."""
        if self._works is None:
            with contextlib.suppress(OSError):
                self._works = self._volume.fs.removes_open_files(self._volume.own)
        return bool(self._works)

    def _keep(self, known: list[int], others: list[int]) -> None:
        """Keep what is known, and of the others those that somebody else keeps too."""
        self._kept = list(known)
        for fd in others:
            if self._volume.fs.is_kept(fd):
                self._kept.append(fd)
            else:
                os.close(fd)
        with contextlib.suppress(OSError):
            self.bytes = sum(self._volume.fs.fstat(fd).allocated for fd in self._kept)
