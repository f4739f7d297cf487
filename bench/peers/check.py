"""Whether a client did what it was to do: all bytes, and the right ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ds_ckpt_store.contract import digest
from peers.measure import FailedError
from peers.servers import BUCKET, Server
from peers.source import MIB, Case

SAMPLES = 4


def uploaded(server: Server, case: Case, sums: Mapping[str, str]) -> None:
    """All files are in the store with their sizes, and some of them are read back.

    Raises:
        FailedError: they are not.
    """
    if server.received is not None:
        _compare("bytes received", server.received(), case.total)
        return
    sizes = stored_sizes(server)
    _compare("files stored", sorted(PurePosixPath(key).name for key in sizes), sorted(sums))
    _compare("their sizes", set(sizes.values()), {case.size})
    for key in list(sizes)[:SAMPLES]:
        _compare(f"CRC32C of {key}", _crc32c(server, key), sums[PurePosixPath(key).name])


def downloaded(folder: Path, case: Case, sums: Mapping[str, str]) -> None:
    """All files are there, and byte for byte if their checksums are known.

    Raises:
        FailedError: they are not.
    """
    paths = sorted(path for path in folder.rglob("*.pt") if path.is_file())
    _compare("files fetched", [path.name for path in paths], case.file_names())
    for path in paths:
        _compare(f"size of {path.name}", path.stat().st_size, case.size)
        if path.name in sums:
            _compare(f"CRC32C of {path.name}", _crc32c_of_file(path), sums[path.name])


def stored_sizes(server: Server) -> dict[str, int]:
    """Keys, or paths below the folder, of all shards in the store, with their sizes."""
    if server.folder is not None:
        paths = (path for path in server.folder.rglob("*.pt") if path.is_file())
        return {str(path.relative_to(server.folder)): path.stat().st_size for path in paths}
    pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return {
        item["Key"]: item["Size"]
        for page in pages
        for item in page.get("Contents", ())
        if item["Key"].endswith(".pt")
    }


def _crc32c(server: Server, key: str) -> str:
    if server.folder is not None:
        return _crc32c_of_file(server.folder / key)
    value = 0
    body = server.client().get_object(Bucket=BUCKET, Key=key)["Body"]
    for piece in body.iter_chunks(MIB):
        value = digest.crc32c(piece, value)
    return digest.to_hex(value)


def _crc32c_of_file(path: Path) -> str:
    with path.open("rb") as file:
        value, _ = digest.crc32c_of_fd(file.fileno(), 0, path.stat().st_size)
    return digest.to_hex(value)


def _compare(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise FailedError(f"{what}: {str(found)[:300]}, expected {str(expected)[:300]}")
