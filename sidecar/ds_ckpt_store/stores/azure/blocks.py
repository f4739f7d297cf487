"""Names of blocks, and the one pass over a body before it is sent.

A blob's blocks lie under their ids, from whomever they come. So an id says all that is needed to
find an upload again and to take only its own blocks:

    <nonce of the upload, 16 digits>-<number, 5 digits>-<proof, 1>-<CRC32C of the block, 8 digits>

All ids have one length, as the service asks for. A block sent again with other bytes, or a late
duplicate of it, is another id. The letter is the proof that the block was sent with, so that a
block that nobody checked is never taken for one that the service did. Number 0 marks that an
upload was begun; it never becomes part of a blob.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass

from awscrt import checksums

from ds_ckpt_store.contract.digest import to_hex
from ds_ckpt_store.stores.body import examine
from ds_ckpt_store.stores.port import Proof, Source

MARK = 0
_LETTERS = {Proof.CONTENT_CRC64: "c", Proof.CONTENT_MD5: "m", Proof.READ_BACK: "r"}
_PROOFS = {letter: proof for proof, letter in _LETTERS.items()}
_NAME = re.compile(r"([0-9a-f]{16})-([0-9]{5})-([cmr])-([0-9a-f]{8})")


@dataclass(frozen=True)
class Block:
    """What a block's id says.

    Attributes:
        nonce: of the upload.
        number: of the part, from 1; :data:`MARK` for the mark of an upload.
        proof: that it was sent with.
        crc32c: of its bytes.
    """

    nonce: str
    number: int
    proof: Proof
    crc32c: int

    @property
    def name(self) -> str:
        """The id."""
        return f"{self.nonce}-{self.number:05d}-{_LETTERS[self.proof]}-{to_hex(self.crc32c)}"

    @classmethod
    def parse(cls, name: str) -> Block | None:
        """The block of an id; None if it is none of ours."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        nonce, number, letter, checksum = found.groups()
        return cls(nonce, int(number), _PROOFS[letter], int(checksum, 16))

    def is_checked_as(self, proof: Proof) -> bool:
        """Whether it was sent with a proof as good as ``proof``."""
        return proof is Proof.READ_BACK or self.proof is not Proof.READ_BACK


@dataclass(frozen=True)
class Examined:
    """What one pass over a body found.

    Attributes:
        crc32c: of its bytes.
        headers: that let the service check the same bytes.
    """

    crc32c: int
    headers: dict[str, str]


def check(source: Source, proof: Proof) -> Examined:
    """Read a body once, for its CRC32C and for what the service checks.

    Both are of the same bytes. So if the service accepts a body under ``headers``, and the CRC32C
    is that of the manifest, then what the service holds is what the manifest names, even if the
    file was written to in between.
    """
    if proof is Proof.CONTENT_CRC64:
        crc64 = 0

        def update(piece: memoryview) -> None:
            nonlocal crc64
            crc64 = checksums.crc64nvme(piece, crc64)

        value = examine(source, update)
        # Azure's CRC64 is CRC-64/NVME, and is written as its bytes, the lowest first.
        return Examined(value, {"x-ms-content-crc64": _base64(crc64.to_bytes(8, "little"))})
    if proof is Proof.CONTENT_MD5:
        md5 = hashlib.md5(usedforsecurity=False)
        value = examine(source, md5.update)
        return Examined(value, {"Content-MD5": _base64(md5.digest())})
    return Examined(source.crc32c, {})


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
