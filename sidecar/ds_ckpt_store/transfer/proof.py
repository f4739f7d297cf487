"""Does the store hold what was sent? The answer rests on the proof in use, never on an ETag."""

from __future__ import annotations

from collections.abc import Callable

from ds_ckpt_store.contract.digest import crc32c, to_hex
from ds_ckpt_store.errors import CorruptionError, NotFoundError
from ds_ckpt_store.stores.port import ObjectInfo, Proof, Store


def find_stored(
    store: Store, key: str, size: int, checksum: int, known: str | None
) -> ObjectInfo | None:
    """The object, if the store holds it already; None if it has to be sent.

    Args:
        store: where to look.
        key: the object's.
        size: bytes it must have.
        checksum: CRC32C it must have.
        known: version that was verified before; counts only if the store tells no checksum.
    """
    try:
        info = store.head(key)
    except NotFoundError:
        return None
    if info.size != size:
        return None
    if info.crc32c is None:
        if known is not None and info.version == known:
            return info
        # A receipt may vouch for it: it is not written over because one reading went wrong.
        is_right = store.proof is Proof.READ_BACK and any(
            read_crc32c(store, key, 0, size, lambda _: None) == checksum for _ in range(2)
        )
        return info if is_right else None
    return info if info.crc32c == checksum else None


def check_head(store: Store, key: str, size: int, checksum: int) -> ObjectInfo:
    """What the store says of an object just written.

    Under STORED_CHECKSUM it must tell the right CRC32C. Under other proofs the size must be
    right (the bytes were checked on their way in or as they were written, or are read back next),
    and a CRC32C too if it tells one.

    Raises:
        NotFoundError: there is no such object.
        CorruptionError: it is another one.
    """
    info = store.head(key)
    if info.size != size:
        raise CorruptionError("head", key, f"has {info.size} bytes, {size} were sent")
    may_be_silent = store.proof is not Proof.STORED_CHECKSUM
    if info.crc32c != checksum and not (info.crc32c is None and may_be_silent):
        told = "none" if info.crc32c is None else to_hex(info.crc32c)
        raise CorruptionError("head", key, f"has CRC32C {told}, {to_hex(checksum)} was sent")
    return info


def tells_all(store: Store, info: ObjectInfo, size: int, checksum: int) -> bool:
    """Whether the answer to a put is the proof itself, so that no second question is needed.

    Under STORED_CHECKSUM and WRITTEN_CHECKSUM that is the CRC32C of the object as the store
    computed or checked it, if the answer holds it. Under all other proofs, look again: what was
    checked on its way in may have been stored with another size.

    Raises:
        CorruptionError: the answer tells another CRC32C.
    """
    if store.proof not in (Proof.STORED_CHECKSUM, Proof.WRITTEN_CHECKSUM) or info.crc32c is None:
        return False
    if (info.size, info.crc32c) != (size, checksum):
        raise CorruptionError(
            "put",
            info.key,
            f"the store holds {info.size} bytes of CRC32C {to_hex(info.crc32c)}; {size} bytes of "
            f"{to_hex(checksum)} were to be sent",
        )
    return True


def check_read_back(key: str, value: int, checksum: int) -> None:
    """Compare what was read back.

    Raises:
        CorruptionError: it differs.
    """
    if value != checksum:
        raise CorruptionError(
            "read", key, f"reads back as CRC32C {to_hex(value)}, {to_hex(checksum)} was sent"
        )


def read_crc32c(
    store: Store, key: str, offset: int, length: int, pace: Callable[[int], None]
) -> int:
    """CRC32C of a range as the store returns it; nothing of it is kept.

    Args:
        store: where from.
        key: the object's.
        offset: first byte.
        length: bytes.
        pace: called with the size of each piece that came; may wait.
    """
    value = 0

    def sink(view: memoryview) -> None:
        nonlocal value
        pace(len(view))
        value = crc32c(view, value)

    if length:
        store.read(key, offset, length, sink)
    return value
