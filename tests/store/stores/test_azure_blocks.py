"""Uploads as blocks of a blob: found again, kept apart, dropped without harm; on Azurite."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from awscrt import checksums
from azure.storage.blob import BlobBlock

from ds_ckpt_store.contract.digest import crc32c, to_hex
from ds_ckpt_store.errors import CorruptionError, NotFoundError, ShardChangedError
from ds_ckpt_store.stores.azure import AzureStore
from ds_ckpt_store.stores.azure.blocks import MARK, Block, check
from ds_ckpt_store.stores.port import BytesSource, Part, Proof, Upload
from ds_ckpt_store.stores.probe import probe
from ds_ckpt_store.transfer.source import FileSlice
from tests.faultproxy import Fault, FaultProxy
from tests.servers_azure import Azure

MIB = 1 << 20


@pytest.fixture
def container(azurite: Azure) -> str:
    return azurite.container()


@pytest.fixture
def store(azurite: Azure, container: str) -> AzureStore:
    return azurite.store(container)


@pytest.fixture
def proxy(azurite: Azure) -> Iterator[FaultProxy]:
    parts = urlsplit(azurite.origin)
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        yield proxy


def begin(store: AzureStore, key: str = "big") -> Upload:
    return store.begin(key, 0, {"part_size": "1"})


def send(store: AzureStore, upload: Upload, bodies: list[bytes]) -> list[Part]:
    return [
        store.put_part(upload, number, BytesSource(body)) for number, body in enumerate(bodies, 1)
    ]


# ---- proofs


def test_the_crc64_is_azures() -> None:
    """The check value of CRC-64/NVME, as Microsoft's own extension computes it."""
    assert checksums.crc64nvme(b"123456789") == 0xAE8B14860A799888
    headers = check(BytesSource(b"123456789"), Proof.CONTENT_CRC64).headers
    assert headers == {"x-ms-content-crc64": "iJh5CoYUi64="}


@pytest.mark.parametrize("proof", [Proof.CONTENT_CRC64, Proof.CONTENT_MD5])
def test_changed_bytes_are_refused_by_the_service(store: AzureStore, proof: Proof) -> None:
    assert store.refuses_corruption(proof, "probe/k")
    assert list(store.list("")) == []


def test_the_probe_finds_the_strongest_proof_conditions_and_swaps(store: AzureStore) -> None:
    findings = probe(store, random.Random(1))
    assert (findings.proof, findings.conditional_create, findings.swap, findings.notes) == (
        Proof.CONTENT_CRC64,
        True,
        True,
        (),
    )
    assert list(store.list("")) == []


def test_a_block_changed_on_its_way_is_refused_whatever_its_size(
    azurite: Azure, container: str, proxy: FaultProxy
) -> None:
    store = azurite.through(proxy.url).store(container)
    upload = begin(store)
    data = random.Random(1).randbytes(3 * MIB)
    for after in (0, MIB, 3 * MIB - 1):
        proxy.add(Fault("comp=block&", "flip", after=after))
        with pytest.raises(CorruptionError, match="Crc64Mismatch"):
            store.put_part(upload, 1, BytesSource(data))
    proxy.add(Fault("PUT", "flip", after=2 * MIB))
    with pytest.raises(CorruptionError):
        store.put("whole", BytesSource(data))


def test_the_crc32c_is_told_only_of_what_the_service_checked(
    azurite: Azure, container: str
) -> None:
    store = azurite.store(container)
    for proof, told in [
        (Proof.CONTENT_CRC64, crc32c(b"small")),
        (Proof.CONTENT_MD5, crc32c(b"small")),
        (Proof.READ_BACK, None),
    ]:
        store.use_proof(proof)
        assert store.put("k", BytesSource(b"small")).crc32c == told
        assert store.head("k").crc32c == store.get("k")[1].crc32c == told
        upload = begin(store)
        info = store.complete(upload, send(store, upload, [b"sm", b"all"]))
        assert store.head("big").crc32c == info.crc32c == told
        found = azurite.client(container).get_blob_client("run/big").get_blob_properties()
        assert found.metadata == {
            "crc32c": to_hex(crc32c(b"small")),
            "proof": proof.value,
            "partsize": "2",
        }


def test_a_blob_that_somebody_else_wrote_tells_no_crc32c(
    azurite: Azure, container: str, store: AzureStore
) -> None:
    store.put("k", BytesSource(b"ours"))
    blob = azurite.client(container).get_blob_client("run/k")
    blob.upload_blob(b"theirs", overwrite=True)
    assert store.head("k").crc32c is None


def test_blocks_that_nobody_checked_are_sent_again_when_the_service_can_check(
    store: AzureStore,
) -> None:
    store.use_proof(Proof.READ_BACK)
    upload = begin(store)
    part = store.put_part(upload, 1, BytesSource(b"data"))
    assert store.parts(upload) == {1: (4, part.token)}
    store.use_proof(Proof.CONTENT_CRC64)
    assert store.parts(upload) == {}
    with pytest.raises(CorruptionError, match="without a checksum"):
        store.complete(upload, [part])
    again = store.put_part(upload, 1, BytesSource(b"data"))
    store.complete(upload, [again])
    assert store.get("big")[0] == b"data"


def test_a_file_that_changes_after_its_sum_was_taken_is_no_object(
    store: AzureStore, tmp_path: Path
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(2 * MIB))
    fd = os.open(path, os.O_RDWR)
    try:
        source = FileSlice(fd, 0, 2 * MIB, "shard")
        before = source.crc32c
        os.pwrite(fd, b"changed", MIB)
        with pytest.raises(CorruptionError, match="changed"):
            store.put("k", source)
        part = store.put_part(begin(store), 1, source)
        assert part.crc32c == crc32c(path.read_bytes()) != before
    finally:
        os.close(fd)


@pytest.mark.parametrize("write", ["put", "put_part"])
def test_a_file_that_was_cut_is_told_apart_from_a_bad_connection(
    store: AzureStore, tmp_path: Path, write: str
) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(3 * MIB))
    fd = os.open(path, os.O_RDWR)
    try:
        source = FileSlice(fd, 0, 3 * MIB, "shard")
        assert source.crc32c
        os.ftruncate(fd, MIB)
        with pytest.raises(ShardChangedError, match="truncated"):
            store.put("k", source) if write == "put" else store.put_part(begin(store), 1, source)
    finally:
        os.close(fd)


def test_only_what_is_sent_waits_for_bandwidth(store: AzureStore, tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(3 * MIB))
    fd = os.open(path, os.O_RDONLY)
    moved: list[int] = []
    try:
        store.put_part(begin(store), 1, FileSlice(fd, 0, 3 * MIB, "shard", moved.append))
    finally:
        os.close(fd)
    assert sum(moved) == 3 * MIB


# ---- ids


def test_ids_have_one_length_and_say_all() -> None:
    blocks = [
        Block("0123456789abcdef", number, proof, crc)
        for number in (MARK, 1, 9, 10, 50_000)
        for proof in (Proof.CONTENT_CRC64, Proof.CONTENT_MD5, Proof.READ_BACK)
        for crc in (0, 0xFFFFFFFF)
    ]
    assert len({len(block.name) for block in blocks}) == 1
    assert len(blocks[0].name) <= 64
    assert [Block.parse(block.name) for block in blocks] == blocks
    for foreign in ("", "BlockId0000001", blocks[0].name + "0", blocks[0].name.upper()):
        assert Block.parse(foreign) is None


def test_eleven_blocks_sent_at_once_become_one_object(store: AzureStore) -> None:
    """A tenth block with a longer id would be refused, and the upload with it."""
    rng = random.Random(3)
    bodies = [rng.randbytes(100_000 + number) for number in range(11)]
    upload = begin(store)
    with ThreadPoolExecutor(11) as pool:
        parts = list(
            pool.map(lambda n: store.put_part(upload, n, BytesSource(bodies[n - 1])), range(1, 12))
        )
    assert store.parts(upload).keys() == set(range(1, 12))
    store.complete(upload, parts)
    assert store.get("big")[0] == b"".join(bodies)


def test_a_part_under_another_number_or_of_another_upload_is_refused(store: AzureStore) -> None:
    first, second = begin(store), begin(store)
    one, two = send(store, first, [b"one", b"two"])
    other = store.put_part(second, 2, BytesSource(b"two"))
    for wrong in (
        [two, one],
        [one, other],
        [one, Part(2, one.size, one.crc32c, one.token)],
        [one, Part(2, two.size, two.crc32c ^ 1, two.token)],
        [one, Part(2, two.size, two.crc32c, "BlockId01")],
    ):
        numbered = [Part(n, p.size, p.crc32c, p.token) for n, p in enumerate(wrong, 1)]
        with pytest.raises(CorruptionError, match="is not the block"):
            store.complete(first, numbered)
    store.complete(first, [one, two])
    assert store.get("big")[0] == b"onetwo"


# ---- other writers, crashes, aborts


def test_two_writers_of_one_key_do_not_mix_whoever_is_last(azurite: Azure, container: str) -> None:
    mine, theirs = azurite.store(container), azurite.store(container)
    first, second = begin(mine), begin(theirs)
    parts = send(mine, first, [b"mine-1", b"mine-2"])
    others = send(theirs, second, [b"their-1", b"their-2"])
    mine.complete(first, parts)
    assert mine.get("big")[0] == b"mine-1mine-2"
    with pytest.raises(NotFoundError):
        theirs.complete(second, others)
    assert mine.get("big")[0] == b"mine-1mine-2"


def test_aborting_one_upload_leaves_the_blocks_of_another(azurite: Azure, container: str) -> None:
    mine, theirs = azurite.store(container), azurite.store(container)
    first, second = begin(mine), begin(theirs)
    parts = send(mine, first, [b"1", b"2"])
    send(theirs, second, [b"x"])
    theirs.abort(second)
    with pytest.raises(NotFoundError):
        theirs.parts(second)
    assert [upload.token for upload in theirs.uploads("")] == [first.token]
    mine.complete(first, parts)
    assert mine.get("big")[0] == b"12"


def test_an_abort_never_harms_what_was_committed(store: AzureStore) -> None:
    store.put("big", BytesSource(b"precious"))
    version = store.head("big").version
    upload = begin(store)
    store.put_part(upload, 1, BytesSource(b"x"))
    store.abort(upload)
    assert (store.get("big")[0], store.head("big").version) == (b"precious", version)
    with pytest.raises(NotFoundError):
        store.parts(upload)


@pytest.mark.parametrize("line", ["comp=blocklist", "DELETE"])
def test_an_abort_whose_answers_are_lost_leaves_nothing_when_repeated(
    azurite: Azure, container: str, proxy: FaultProxy, line: str
) -> None:
    store = azurite.through(proxy.url).store(container)
    upload = begin(store)
    store.put_part(upload, 1, BytesSource(b"x"))
    fault = proxy.add(Fault(f"^(PUT|DELETE) .*{line}|^{line}", "drop_response"))
    with pytest.raises(Exception, match="connection"):
        store.abort(upload)
    assert proxy.hits(fault) == 1
    store.abort(upload)
    client = azurite.client(container)
    assert list(client.list_blobs(include=["uncommittedblobs"])) == []


def test_what_a_crash_loop_left_does_not_hurt_and_can_be_dropped(
    azurite: Azure, container: str
) -> None:
    crashed = azurite.store(container)

    def crash(number: int) -> None:
        crashed.put_part(begin(crashed), 1, BytesSource(b"left behind %d" % number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(crash, range(60)))
    store = azurite.store(container)
    assert len(list(store.uploads("big"))) == 60
    upload = begin(store)
    parts = send(store, upload, [b"good", b"bytes"])
    assert store.parts(upload).keys() == {1, 2}
    store.complete(upload, parts)
    assert store.get("big")[0] == b"goodbytes"
    assert list(store.uploads("")) == []
    for number in range(3):
        process = azurite.store(container)
        process.put_part(begin(process, "other"), 1, BytesSource(b"%d" % number))
    collector = azurite.store(container)
    for upload in list(collector.uploads("other")):
        collector.abort(upload)
    assert list(azurite.store(container).uploads("")) == []
    assert [info.key for info in store.list("")] == ["big"]


def test_foreign_blocks_are_left_alone_and_out_of_sight(
    azurite: Azure, container: str, store: AzureStore
) -> None:
    blob = azurite.client(container).get_blob_client("run/big")
    blob.stage_block("somebody-elses-block-of-29-ch", b"theirs")
    assert list(store.uploads("")) == []
    with pytest.raises(NotFoundError):
        store.parts(Upload("big", "0" * 16))
    store.abort(Upload("big", "0" * 16))
    blob.commit_block_list([BlobBlock("somebody-elses-block-of-29-ch")])
    assert store.get("big")[0] == b"theirs"


PROCESS = """
import sys
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import BytesSource
store = open_store(sys.argv[1])
upload = store.begin("big", 0, {"part_size": "1000000"})
for number in (1, 2):
    part = store.put_part(upload, number, BytesSource(bytes([number]) * 1_000_000))
    print(upload.token, part.number, part.size, part.crc32c, part.token, flush=True)
store.put_part(upload, 3, type("Endless", (BytesSource,), {"open": lambda self: Slow()})(b"x"))
"""
SLOW = """
import time
class Slow:
    def read(self, _=-1):
        print("killed me", flush=True)
        time.sleep(600)
    def seek(self, *_): return 0
    def tell(self): return 0
    def close(self): pass
"""


def test_another_process_goes_on_after_kill_9(
    azurite: Azure, container: str, store: AzureStore
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW + PROCESS, f"az://{container}/run"],
        stdout=subprocess.PIPE,
        env={**os.environ, **azurite.environ},
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline().split() for _ in range(3)]
        assert lines[2][0] == "killed", lines
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    [upload] = store.uploads("")
    assert upload == Upload("big", lines[0][0])
    parts = [Part(int(n), int(size), int(crc), token) for _, n, size, crc, token in lines[:2]]
    assert store.parts(upload) == {part.number: (part.size, part.token) for part in parts}
    parts.append(store.put_part(upload, 3, BytesSource(b"the end")))
    store.complete(upload, parts)
    assert store.get("big")[0] == b"\1" * 1_000_000 + b"\2" * 1_000_000 + b"the end"


# ---- memory and requests


def test_a_range_is_one_request_and_neither_way_holds_a_part(
    azurite: Azure, container: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    store = azurite.through(proxy.url).store(container)
    path = tmp_path / "shard"
    path.write_bytes(random.Random(1).randbytes(24 * MIB))
    fd = os.open(path, os.O_RDONLY)
    sizes: list[int] = []
    value = 0

    def sink(view: memoryview) -> None:
        nonlocal value
        sizes.append(len(view))
        value = crc32c(view, value)

    try:
        store.put("warm", BytesSource(b"up"))
        tracemalloc.start()
        upload = begin(store)
        part = store.put_part(upload, 1, FileSlice(fd, 0, 24 * MIB, "shard"))
        store.complete(upload, [part])
        store.read("big", 0, 24 * MIB, sink)
        # The proxy lives in this process too, and holds pieces of 256 KiB.
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        os.close(fd)
    assert value == part.crc32c
    assert max(sizes) <= MIB
    assert len(proxy.lines(r"^GET [^?]*/big$")) == 1
    assert peak < 6 * MIB


def test_an_object_of_one_request_is_held_once(store: AzureStore, tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(random.Random(1).randbytes(MIB))
    fd = os.open(path, os.O_RDONLY)
    try:
        store.put("warm", BytesSource(b"up"))
        tracemalloc.start()
        store.put("k", FileSlice(fd, 0, MIB, "shard"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        os.close(fd)
    assert store.get("k")[0] == path.read_bytes()
    assert peak < store.capabilities.request_memory + MIB // 2
