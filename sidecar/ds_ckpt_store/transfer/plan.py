"""Part plan: how an object is cut, within what its provider allows.

Parts have one size, but for the last. The preferred size is kept as long as 10,000 parts suffice,
and then grown in whole MiB: 64 MiB parts reach 625 GiB, and a 5 TiB object is sent in parts of
525 MiB. Providers that take more parts get more only if these would become too large: what is
remembered of each part counts in memory, its size does not, since it is streamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_ckpt_store.errors import SettingsError
from ds_ckpt_store.stores.port import Capabilities, Limits

MIB = 1 << 20
MOST_PARTS = 10_000
PREFERRED_PART = 64 * MIB
"""A request costs as much as sending several MiB; beyond this it no longer shows."""


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
    needed = -(-size // min(limits.max_parts, MOST_PARTS))
    if needed > part_size:
        part_size = min(-(-needed // MIB) * MIB, limits.max_part)
    plan = PartPlan(size, part_size)
    if not plan.fits(limits):
        raise SettingsError(
            f"an object of {size} bytes: this store takes at most {limits.max_parts} parts of "
            f"{limits.max_part} bytes"
        )
    return plan


def sent_whole(size: int, capabilities: Capabilities, preferred: int = PREFERRED_PART) -> bool:
    """Whether an object is sent by one ``put``: a small one, or any if the store has no parts.

    Raises:
        SettingsError: the store has no parts, and takes no object of that size at once.
    """
    limits = capabilities.limits
    if capabilities.parts:
        return size <= min(preferred, limits.max_put)
    if size > min(limits.max_put, limits.max_object):
        raise SettingsError(
            f"an object of {size} bytes: this store takes objects whole, and at most "
            f"{min(limits.max_put, limits.max_object)} bytes at once; use another store, or more "
            "ranks, whose files are smaller"
        )
    return True


def check_preferred(preferred: int, capabilities: Capabilities) -> None:
    """Refuse a preferred size of parts that the store could never keep to.

    Raises:
        SettingsError: says what to set.
    """
    most = capabilities.limits.max_part
    if capabilities.parts and preferred > most:
        raise SettingsError(
            f"--part-mib {preferred // MIB} (or DS_CKPT_PART_MIB): this store takes parts of at "
            f"most {most // MIB} MiB; set that or less"
        )
