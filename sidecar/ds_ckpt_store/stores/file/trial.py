"""Does the folder show what was written? Tried for real, before the first save."""

from __future__ import annotations

from collections.abc import Callable

from ds_ckpt_store.errors import CorruptionError
from ds_ckpt_store.stores.port import BytesSource, Part, Store, Upload

_BODY = b"a body that is changed on its way"


def shows_what_is_written(
    store: Store, later: Store, key: str, damage: Callable[[Upload], None]
) -> bool:
    """Whether the store returns the checksums of its bytes, and compares them at the end.

    Args:
        store: writes.
        later: another one over the same folder, as a later process opens it: it has not seen
            what was written.
        key: what is written, and removed again.
        damage: changes a byte of an unfinished upload on the disk.
    """
    lying = BytesSource(_BODY)
    honest, lying.crc32c = lying.crc32c, lying.crc32c ^ 1
    upload = store.begin(key, lying.size, {})
    try:
        part = store.put_part(upload, 1, lying)
        if not store.put(key, lying).crc32c == part.crc32c == honest:
            return False
        if not _refuses(store, upload, Part(1, part.size, honest ^ 1, part.token)):
            return False
        damage(upload)
        return _refuses(later, upload, part)
    finally:
        store.abort(upload)
        store.delete(key)


def _refuses(store: Store, upload: Upload, part: Part) -> bool:
    try:
        store.complete(upload, [part])
    except CorruptionError:
        return True
    return False
