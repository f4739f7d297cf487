"""How full the volume is: by its filesystem, and by what the pod may keep on it.

An emptyDir with a ``sizeLimit`` is no filesystem of its own: it shows the node's whole disk, and
the kubelet evicts the pod once the files on it take more than the limit. So where there is a limit,
what the files take is added up as the kubelet does it: blocks of everything that has a name, each
inode once, on this filesystem alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.usage import allocated_below
from ds_ckpt_store.contract.volume import Volume

EVERY_SECONDS = 30.0
SHARE = 0.05  # of all time that adding up may take at most


@dataclass(frozen=True)
class Space:
    """Bytes of a volume; all 0 as long as its filesystem has never answered.

    Attributes:
        free: what can still be written: before the filesystem is full, and before the limit.
        total: of the filesystem, or the limit if that is less.
        used: with a limit what the volume's files take; else what the filesystem has in use.
        high_water: the most that was seen in use.
        limit: what the volume may hold before the pod is evicted; 0: no limit.
    """

    free: int = 0
    total: int = 0
    used: int = 0
    high_water: int = 0
    limit: int = 0


class Usage:
    """Looks at one volume; for one thread.

    Args:
        volume: the volume.
        limit: bytes that it may hold before the pod is evicted; 0: no limit.
        clock: time.
    """

    def __init__(self, volume: Volume, limit: int, clock: Clock) -> None:
        self._volume = volume
        self._limit = limit
        self._clock = clock
        self._held = 0
        self._again = float("-inf")  # when the files are added up next, by the monotonic clock
        self._last = Space(limit=limit)

    def look(self) -> Space:
        """How full it is now. Never raises.

        The filesystem is asked each time. The files are added up every 30 seconds at most, and more
        rarely where it takes long; between that, what they take is as it was.
        """
        try:
            disk = self._volume.fs.space(self._volume.path)
        except OSError:
            return self._last
        free, total, used = disk.free, disk.total, max(0, disk.total - disk.free)
        if self._limit:
            used = self._held_by_files()
            total = min(total, self._limit)
            free = max(0, min(free, self._limit - used))
        self._last = Space(free, total, used, max(used, self._last.high_water), self._limit)
        return self._last

    def _held_by_files(self) -> int:
        began = self._clock.monotonic()
        if began >= self._again:
            self._held = allocated_below(self._volume)
            now = self._clock.monotonic()
            self._again = now + max(EVERY_SECONDS, (now - began) * (1 / SHARE - 1))
        return self._held
