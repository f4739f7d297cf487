"""Parts as temporary objects that are composed: for servers without the XML API.

Under the store's prefix, out of sight of its listings::

    .ds_ckpt-parts/<nonce>/00001      a part
    .ds_ckpt-parts/<nonce>/c1-00001   up to 32 parts put together, on the way to the whole
    .ds_ckpt-parts/<nonce>/upload     the upload exists; written first, removed first

Each carries the key of the object to be, so that whatever a killed process left is found by that
key and can be removed. The service checks each part as it checks any object, and says the CRC32C
of whatever it put together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.clock import fresh_token, system_random
from ds_ckpt_store.errors import AmbiguousError, CorruptionError, NotFoundError, StoreError
from ds_ckpt_store.stores.gcs.objects import Objects, Stored, refuse_other_bytes
from ds_ckpt_store.stores.port import BytesSource, Part, Source

FOLDER = ".ds_ckpt-parts/"
AT_ONCE = 32  # objects that one request puts together
MARKER = "upload"


@dataclass(frozen=True)
class _Held:
    """What is stored of one upload."""

    marker: Stored | None
    parts: Mapping[int, Stored]
    between: Sequence[Stored]

    def everything(self) -> list[Stored]:
        """All of it, the marker first."""
        marker = [self.marker] if self.marker is not None else []
        return [*marker, *self.parts.values(), *self.between]


class ComposedParts:
    """Uploads under one prefix of one bucket.

    Args:
        objects: where the parts lie.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def begin(self, key: str, metadata: Mapping[str, str], *, checked: bool) -> str:
        """Mark that an upload exists; its nonce."""
        nonce = fresh_token(system_random())
        self._put(
            key, nonce, MARKER, BytesSource(b""), metadata, checked=checked, operation="begin"
        )
        return nonce

    def put_part(self, key: str, nonce: str, number: int, source: Source, *, checked: bool) -> Part:
        """Store one part; its token is its generation.

        Raises:
            NotFoundError: the upload is gone.
            CorruptionError: the bytes did not arrive as they were sent.
        """
        self._marker("put_part", key, nonce)
        name = f"{number:05d}"
        part = self._put(key, nonce, name, source, {}, checked=checked, operation="put_part")
        if checked:
            refuse_other_bytes(self._objects, "put_part", part, source.crc32c, source.size, key)
        return Part(number, part.size, source.crc32c, part.generation)

    def parts(self, key: str, nonce: str) -> dict[int, tuple[int, str]]:
        """What is stored of an upload.

        Raises:
            NotFoundError: the upload is gone.
        """
        held = self._held("parts", nonce)
        self._check_marker("parts", key, nonce, held)
        return {number: (each.size, each.generation) for number, each in held.parts.items()}

    def complete(self, key: str, nonce: str, parts: Sequence[Part], *, checked: bool) -> Stored:
        """Put exactly these parts together, and remove what was on the way.

        Raises:
            NotFoundError: the upload is gone.
            CorruptionError: other parts are stored, or the whole differs; it was removed again.
        """
        held = self._held("complete", nonce)
        marker = self._check_marker("complete", key, nonce, held)
        chosen = [_chosen(key, part, held.parts.get(part.number), checked) for part in parts]
        kept = {name: value for name, value in marker.metadata.items() if name != "key"}
        whole = self._compose(key, nonce, chosen, kept, checked=checked)
        with contextlib.suppress(StoreError):  # the object is there; uploads() shows what is left
            self._remove(nonce)
        return whole

    def abort(self, key: str, nonce: str) -> None:
        """Remove all that is stored of an upload; no error if there is nothing."""
        del key
        self._remove(nonce)

    def uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Key and nonce of whatever is stored of uploads of keys under a prefix."""
        found = {
            each.key.removeprefix(FOLDER).partition("/")[0]: each.metadata.get("key", "")
            for each in self._objects.list(FOLDER, "uploads")
        }
        for nonce, key in found.items():
            if key.startswith(prefix):
                yield key, nonce

    # ---- how

    def _put(
        self,
        key: str,
        nonce: str,
        name: str,
        source: Source,
        metadata: Mapping[str, str],
        *,
        checked: bool,
        operation: str,
    ) -> Stored:
        return self._objects.put(
            f"{FOLDER}{nonce}/{name}",
            source,
            checked=checked,
            metadata={**metadata, "key": key},
            part_of=key,
            operation=operation,
        )

    def _marker(self, operation: str, key: str, nonce: str) -> None:
        try:
            self._objects.head(f"{FOLDER}{nonce}/{MARKER}", operation, part_of=key)
        except NotFoundError as error:
            raise NotFoundError(operation, key, f"no upload {nonce}") from error

    def _held(self, operation: str, nonce: str) -> _Held:
        inside = f"{FOLDER}{nonce}/"
        marker = None
        parts: dict[int, Stored] = {}
        between = []
        for each in self._objects.list(inside, operation):
            name = each.key.removeprefix(inside)
            if name == MARKER:
                marker = each
            elif name.isdecimal():
                parts[int(name)] = each
            else:
                between.append(each)
        return _Held(marker, parts, between)

    def _check_marker(self, operation: str, key: str, nonce: str, held: _Held) -> Stored:
        if held.marker is None:
            raise NotFoundError(operation, key, f"no upload {nonce}")
        return held.marker

    def _compose(
        self,
        key: str,
        nonce: str,
        pieces: Sequence[Stored],
        metadata: Mapping[str, str],
        *,
        checked: bool,
    ) -> Stored:
        level = 0
        while len(pieces) > AT_ONCE:
            level += 1
            groups = [pieces[at : at + AT_ONCE] for at in range(0, len(pieces), AT_ONCE)]
            between = []
            for index, group in enumerate(groups):
                name = f"{FOLDER}{nonce}/c{level}-{index:05d}"
                made = self._objects.compose(name, group, {"key": key}, part_of=key, consume=False)
                if checked:
                    refuse_other_bytes(self._objects, "complete", made, *_sum(group), key)
                between.append(made)
            pieces = between
        try:
            return self._objects.compose(key, pieces, metadata, part_of=key, consume=True)
        except AmbiguousError:
            found = self._found(key)
            if found is None or (found.crc32c, found.size) != _sum(pieces):
                raise
            return found  # it was applied, and only its answer was lost

    def _found(self, key: str) -> Stored | None:
        try:
            return self._objects.head(key, "complete")
        except NotFoundError:
            return None

    def _remove(self, nonce: str) -> None:
        """Remove what is stored of an upload, each in the generation that was seen, for good."""
        for each in self._held("abort", nonce).everything():
            self._objects.delete(each.key, each.generation)


def _sum(pieces: Sequence[Stored]) -> tuple[int, int]:
    """CRC32C and size that these have together, as the service said of each."""
    crc32c = digest.combine_all((each.crc32c or 0, each.size) for each in pieces)
    return crc32c, sum(each.size for each in pieces)


def _chosen(key: str, part: Part, stored: Stored | None, checked: bool) -> Stored:
    """The temporary object of a part, if it is the one that was sent."""
    if stored is None or (stored.size, stored.generation) != (part.size, part.token):
        raise CorruptionError("complete", key, f"part {part.number} is another one")
    if checked and stored.crc32c != part.crc32c:
        raise CorruptionError("complete", key, f"part {part.number} has another CRC32C")
    return stored
