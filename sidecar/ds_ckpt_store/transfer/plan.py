"""Part plan: how an object is cut, within what its provider allows.

Parts have one size, but for the last. The preferred size is kept as long as the provider's
number of parts suffices, and then grown in whole MiB: 16 MiB parts reach 156 GiB at 10,000 parts,
and a 5 TiB object is sent in parts of 525 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_ckpt_store.errors import SettingsError
from ds_ckpt_store.stores.port import Limits

MIB = 1 << 20
PREFERRED_PART = 16 * MIB


@dataclass(frozen=True)
class PartPlan:
    """The parts of one object; bytes.

    Attributes:
        size: of the object.
        part_size: of each part but the last, which may be shorter.
    """

    size: int
    part_size: int

    @property
    def count(self) -> int:
        """Number of parts; at least one, which is empty if the object is."""
        return max(1, -(-self.size // self.part_size))

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """``(number, offset, length)`` of each part in order; numbers count from 1."""
        for index in range(self.count):
            offset = index * self.part_size
            yield index + 1, offset, min(self.part_size, self.size - offset)

    def fits(self, limits: Limits) -> bool:
        """Whether a provider takes an object cut like this."""
        return (
            self.size <= limits.max_object
            and self.count <= limits.max_parts
            and self.part_size <= limits.max_part
            and (self.count == 1 or self.part_size >= limits.min_part)
        )


def plan_parts(size: int, limits: Limits, preferred: int = PREFERRED_PART) -> PartPlan:
    """Cut an object of ``size`` bytes into parts of ``preferred`` bytes, or more if need be.

    Raises:
        SettingsError: the provider takes no object of that size, in whatever parts.
    """
    if size > limits.max_object:
        raise SettingsError(
            f"an object of {size} bytes: this store takes at most {limits.max_object}"
        )
    part_size = min(max(preferred, limits.min_part, 1), limits.max_part)
    needed = -(-size // limits.max_parts)
    if needed > part_size:
        part_size = min(-(-needed // MIB) * MIB, limits.max_part)
    plan = PartPlan(size, part_size)
    if not plan.fits(limits):
        raise SettingsError(
            f"an object of {size} bytes: this store takes at most {limits.max_parts} parts of "
            f"{limits.max_part} bytes"
        )
    return plan


def sent_whole(size: int, limits: Limits, preferred: int = PREFERRED_PART) -> bool:
    """Whether an object is small enough to be sent by one ``put``."""
    return size <= min(preferred, limits.max_put)
