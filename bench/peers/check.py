"""Whether a client did what it was to do: all bytes, and the right ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from ds_ckpt_store.contract import digest
from peers.measure import FailedError
from peers.servers import BUCKET, Server
from peers.source import MIB, Case

SAMPLES = 4
PIECE = 16 * MIB


def uploaded(server: Server, case: Case, folder: Path) -> None:
    """All files of the folder are in the store, and pieces of some are read back.

    Raises:
        FailedError: they are not.
    """
    if server.received is not None:
        _compare("bytes received", server.received(), case.total)
        return
    sizes = stored_sizes(server)
    _compare("files stored", sorted(map(_name, sizes)), case.file_names())
    _compare("their sizes", set(sizes.values()), {case.size})
    last = max(0, case.size - PIECE)
    for key in list(sizes)[:SAMPLES]:
        for offset in {0, last // 2, last}:
            with (folder / _name(key)).open("rb") as file:
                sent = os.pread(file.fileno(), PIECE, offset)
            if _stored(server, key, offset, len(sent)) != sent:
                raise FailedError(f"{key}: other bytes are stored at {offset} than were sent")


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


def _name(key: str) -> str:
    return PurePosixPath(key).name


def _stored(server: Server, key: str, offset: int, size: int) -> bytes:
    if server.folder is not None:
        with (server.folder / key).open("rb") as file:
            return os.pread(file.fileno(), size, offset)
    wanted = f"bytes={offset}-{offset + size - 1}"
    answer = server.client().get_object(Bucket=BUCKET, Key=key, Range=wanted)
    return bytes(answer["Body"].read())


def _crc32c_of_file(path: Path) -> str:
    with path.open("rb") as file:
        value, _ = digest.crc32c_of_fd(file.fileno(), 0, path.stat().st_size)
    return digest.to_hex(value)


def _compare(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise FailedError(f"{what}: {str(found)[:300]}, expected {str(expected)[:300]}")
