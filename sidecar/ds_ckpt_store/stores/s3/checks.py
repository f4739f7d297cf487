"""What is sent with a body so that the server can check it, under each proof."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass

from ds_ckpt_store.contract import digest
from ds_ckpt_store.stores.body import examine
from ds_ckpt_store.stores.port import Proof, Source


@dataclass(frozen=True)
class Checks:
    """What was found by reading a body once.

    Attributes:
        crc32c: of the bytes that the server checks.
        parameters: of the call.
        sha256: in hexadecimal, for the signature.
    """

    crc32c: int
    parameters: dict[str, str]
    sha256: str | None = None


def check(proof: Proof, source: Source, *, locked: bool) -> Checks:
    """Read a body once, for its CRC32C and for what the server checks.

    Args:
        proof: by which the server shows that it holds the body.
        source: the body.
        locked: the object is going to be locked, which S3 does only if a checksum comes with it.
    """
    if proof is Proof.STORED_CHECKSUM:
        encoded = digest.to_base64(source.crc32c)
        return Checks(source.crc32c, {"ChecksumAlgorithm": "CRC32C", "ChecksumCRC32C": encoded})
    sha256 = hashlib.sha256() if proof is Proof.SIGNED_PAYLOAD else None
    md5 = hashlib.md5(usedforsecurity=False) if proof is Proof.CONTENT_MD5 or locked else None
    hashes = [each.update for each in (sha256, md5) if each is not None]
    return Checks(
        examine(source, *hashes) if hashes else source.crc32c,
        {"ContentMD5": base64.b64encode(md5.digest()).decode()} if md5 else {},
        sha256.hexdigest() if sha256 else None,
    )
