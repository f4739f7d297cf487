"""What every store promises, by one suite. A store joins with one entry in ``openers.OPENERS``."""

from __future__ import annotations

import io
import random
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import BinaryIO

import pytest

from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.digest import combine_all, crc32c
from ds_ckpt_store.errors import (
    CorruptionError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    StoreError,
)
from ds_ckpt_store.stores.port import (
    BytesSource,
    IfAbsent,
    IfVersion,
    Part,
    Proof,
    Store,
    Upload,
)
from tests.store.stores.openers import (
    COARSE,
    KEEPS_FOLDERS,
    LIMITED,
    OPENERS,
    PAGES,
    RACY,
    REMEMBERS_UPLOADS,
    Open,
)

MIB = 1 << 20


def all_but(some: set[str]) -> pytest.MarkDecorator:
    names = [name for name in OPENERS if name not in some]
    return pytest.mark.parametrize("another", names, indirect=True)


strong = all_but(LIMITED)


@pytest.fixture(params=OPENERS)
def another(request: pytest.FixtureRequest) -> Open:
    return OPENERS[request.param](request)


@pytest.fixture
def store(another: Open) -> Store:
    return another()


class LyingSource:
    """A body that does not have the checksum that it claims."""

    def __init__(self, data: bytes) -> None:
        self._honest = BytesSource(data)
        self.size = len(data)
        self.crc32c = self._honest.crc32c ^ 1

    def open(self) -> BinaryIO:
        return self._honest.open()


def put(store: Store, key: str, data: bytes = b"data") -> str:
    return store.put(key, BytesSource(data)).version


def read(store: Store, key: str, offset: int, length: int) -> bytes:
    found = bytearray()
    store.read(key, offset, length, found.extend)
    return bytes(found)


def keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


# ---- objects


def test_an_object_comes_back_as_it_was_put(store: Store) -> None:
    put_info = store.put("a/b", BytesSource(b"hello"))
    data, info = store.get("a/b")
    assert data == b"hello"
    head = store.head("a/b")
    assert (info.key, info.size, head.key, head.size) == ("a/b", 5, "a/b", 5)
    assert put_info.version == info.version == head.version != ""
    assert head.modified == pytest.approx(SystemClock().time(), abs=3600)
    assert head.crc32c in (None, crc32c(b"hello"))


def test_a_put_replaces_an_object_whole(store: Store) -> None:
    put(store, "k", b"a long value")
    put(store, "k", b"short")
    assert store.get("k")[0] == b"short"


def test_an_empty_object_is_an_object(store: Store) -> None:
    put(store, "empty", b"")
    assert store.get("empty")[0] == b""
    assert store.head("empty").size == 0
    assert read(store, "empty", 0, 0) == b""


@pytest.mark.parametrize("call", ["get", "head", "read"])
@pytest.mark.parametrize("key", ["absent", "folder", "folder/absent", "folder/k/absent"])
def test_what_is_not_there_is_not_found(store: Store, call: str, key: str) -> None:
    put(store, "folder/k")
    calls = {"get": store.get, "head": store.head, "read": lambda key: read(store, key, 0, 4)}
    with pytest.raises(NotFoundError):
        calls[call](key)


def test_an_empty_store_lists_nothing(store: Store) -> None:
    assert keys(store) == []
    assert list(store.uploads("")) == []


def test_delete_removes_one_object_and_may_be_repeated(store: Store) -> None:
    put(store, "folder/a")
    put(store, "folder/b")
    store.delete("folder/a")
    store.delete("folder/a")
    store.delete("never/was")
    assert keys(store) == ["folder/b"]
    store.delete("folder/b")
    assert keys(store) == []


@all_but(KEEPS_FOLDERS)
def test_a_key_may_take_the_name_that_a_folder_had(store: Store) -> None:
    put(store, "folder/a")
    store.delete("folder/a")
    put(store, "folder")
    assert keys(store) == ["folder"]


@pytest.mark.parametrize(
    "key",
    [
        "%2F%25%",
        "a+b",
        "q?x=1&y=2",
        "space in name ",
        "tag%2Fx@018f-00/zero@1",
        "ünï/çødé/日本/😀",
        "e\u0301-not-composed",
        "#hash;semi,comma:colon",
        "quote'\"<>|*!()[]{}^~`$",
        ".hidden/..double/...",
        "/".join(["x" * 124] * 4),
    ],
)
def test_keys_of_all_kinds_come_back_as_they_are(store: Store, key: str) -> None:
    put(store, key, key.encode())
    assert store.get(key)[0] == key.encode()
    assert read(store, key, 1, 1) == key.encode()[1:2]
    assert keys(store) == [key]
    assert keys(store, key[:-1]) == [key]
    store.delete(key)
    assert keys(store) == []


def test_a_listing_is_in_order_of_bytes_and_only_of_its_prefix(store: Store) -> None:
    names = ["a-b", "a.b", "a/b", "a/c/d", "a0", "aé/x", "b", "a/c-d", "A", "ab"]
    for name in names:
        put(store, name)
    assert keys(store) == sorted(names, key=str.encode)
    for prefix in ("a", "a/", "a/c", "a/c/", "ab", "nothing", "aé"):
        expected = sorted((n for n in names if n.startswith(prefix)), key=str.encode)
        assert keys(store, prefix) == expected


def test_a_listing_goes_over_all_pages(request: pytest.FixtureRequest, store: Store) -> None:
    count = PAGES.get(request.node.callspec.params["another"], 1000) + 5
    names = [f"many/{number:04d}" for number in range(count)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: put(store, name, b""), names))
    assert keys(store, "many/") == names


def test_a_listing_tells_what_head_tells(store: Store) -> None:
    put(store, "k", b"12345")
    (listed,) = store.list("")
    head = store.head("k")
    assert (listed.size, listed.version) == (head.size, head.version)
    assert listed.modified == pytest.approx(head.modified, abs=1)


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1), (0, 3 * MIB + 7), (MIB - 1, 2), (3 * MIB, 7), (5, 0)]
)
def test_a_range_is_exactly_what_was_asked_for(store: Store, offset: int, length: int) -> None:
    data = random.Random(1).randbytes(3 * MIB + 7)
    put(store, "big", data)
    assert read(store, "big", offset, length) == data[offset : offset + length]


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (9, 2), (10, 1), (100, 1)])
def test_a_range_beyond_the_end_is_refused(store: Store, offset: int, length: int) -> None:
    put(store, "k", b"0123456789")
    with pytest.raises(CorruptionError):
        read(store, "k", offset, length)


def test_an_error_of_the_sink_stops_a_read_and_leaves_the_store_usable(store: Store) -> None:
    put(store, "k", bytes(3 * MIB))

    def sink(_: memoryview) -> None:
        raise KeyError("stop")

    for _ in range(3):
        with pytest.raises(KeyError):
            store.read("k", 0, 3 * MIB, sink)
    assert read(store, "k", 0, 3) == bytes(3)


# ---- conditions


@strong
def test_create_fails_if_the_object_exists(store: Store) -> None:
    store.put("k", BytesSource(b"first"), condition=IfAbsent())
    with pytest.raises(PreconditionError):
        store.put("k", BytesSource(b"second"), condition=IfAbsent())
    assert store.get("k")[0] == b"first"


@strong
def test_create_fails_over_an_object_that_was_put_plainly(store: Store) -> None:
    put(store, "k", b"first")
    with pytest.raises(PreconditionError):
        store.put("k", BytesSource(b"second"), condition=IfAbsent())
    assert store.get("k")[0] == b"first"


@strong
def test_create_succeeds_after_a_delete(store: Store) -> None:
    store.put("k", BytesSource(b"first"), condition=IfAbsent())
    store.delete("k")
    store.put("k", BytesSource(b"second"), condition=IfAbsent())
    assert store.get("k")[0] == b"second"


@all_but(LIMITED | RACY)
def test_of_many_who_create_exactly_one_wins(another: Open) -> None:
    stores = [another(), another()]
    barrier = Barrier(8)

    def create(number: int) -> bytes | None:
        data = f"writer {number}".encode()
        barrier.wait()
        try:
            stores[number % 2].put("new/raced", BytesSource(data), condition=IfAbsent())
        except StoreError:
            return None
        return data

    with ThreadPoolExecutor(8) as pool:
        winners = [data for data in pool.map(create, range(8)) if data is not None]
    assert len(winners) == 1
    assert another().get("new/raced")[0] == winners[0]


@strong
def test_swap_succeeds_over_the_version_that_was_read(store: Store) -> None:
    store.put("k", BytesSource(b"1"), condition=IfAbsent())
    version = store.get("k")[1].version
    info = store.put("k", BytesSource(b"2"), condition=IfVersion(version))
    assert info.version not in ("", version)
    store.put("k", BytesSource(b"3"), condition=IfVersion(info.version))
    assert store.get("k")[0] == b"3"


@strong
def test_swap_over_an_object_that_was_put_plainly(store: Store) -> None:
    put(store, "k", b"1")
    store.put("k", BytesSource(b"2"), condition=IfVersion(store.get("k")[1].version))
    assert store.get("k")[0] == b"2"
    assert keys(store) == ["k"]


@strong
def test_swap_fails_over_an_older_version(store: Store) -> None:
    store.put("k", BytesSource(b"1"), condition=IfAbsent())
    old = store.get("k")[1].version
    store.put("k", BytesSource(b"2"), condition=IfVersion(old))
    with pytest.raises(PreconditionError):
        store.put("k", BytesSource(b"3"), condition=IfVersion(old))
    assert store.get("k")[0] == b"2"


@strong
def test_swap_fails_if_the_object_is_gone(store: Store) -> None:
    store.put("k", BytesSource(b"1"), condition=IfAbsent())
    version = store.get("k")[1].version
    store.delete("k")
    with pytest.raises(PreconditionError):
        store.put("k", BytesSource(b"2"), condition=IfVersion(version))
    assert keys(store) == []


@strong
def test_swap_fails_after_a_plain_put(store: Store) -> None:
    store.put("k", BytesSource(b"1"), condition=IfAbsent())
    version = store.get("k")[1].version
    put(store, "k", b"2")
    with pytest.raises(PreconditionError):
        store.put("k", BytesSource(b"3"), condition=IfVersion(version))
    assert store.get("k")[0] == b"2"


@all_but(LIMITED | RACY)
def test_of_many_who_swap_exactly_one_wins(another: Open) -> None:
    stores = [another(), another()]
    stores[0].put("k", BytesSource(b"start"), condition=IfAbsent())
    version = stores[0].get("k")[1].version
    barrier = Barrier(8)

    def swap(number: int) -> bytes | None:
        data = f"writer {number}".encode()
        barrier.wait()
        try:
            stores[number % 2].put("k", BytesSource(data), condition=IfVersion(version))
        except StoreError:
            return None
        return data

    with ThreadPoolExecutor(8) as pool:
        winners = [data for data in pool.map(swap, range(8)) if data is not None]
    assert len(winners) == 1
    assert another().get("k")[0] == winners[0]


@all_but(COARSE)
def test_no_version_comes_back(store: Store) -> None:
    """Contents differ, as they do in the protocol: each carries a fresh nonce."""
    versions = [put(store, "k", f"nonce {number}".encode()) for number in range(30)]
    assert len(set(versions)) == 30


# ---- what is not claimed


def test_what_a_store_does_not_claim_it_refuses(
    request: pytest.FixtureRequest, store: Store
) -> None:
    claims = store.capabilities
    put(store, "k", b"first")
    body, upload = BytesSource(b"second"), Upload("k", "token")
    refused = []
    if not claims.conditional_create:
        refused.append(lambda: store.put("new", body, condition=IfAbsent()))
    if not claims.swap:
        version = store.head("k").version
        refused.append(lambda: store.put("k", body, condition=IfVersion(version)))
    if not claims.parts:
        refused += [
            lambda: store.begin("new", 6, {"part_size": "6"}),
            lambda: store.put_part(upload, 1, body),
            lambda: store.parts(upload),
            lambda: store.complete(upload, [Part(1, 6, body.crc32c, "token")]),
            lambda: store.abort(upload),
        ]
    for call in refused:
        with pytest.raises(RefusedError):
            call()
    assert (keys(store), store.get("k")[0]) == (["k"], b"first")
    assert list(store.uploads("")) == []
    limited = request.node.callspec.params["another"] in LIMITED
    assert len(refused) == (7 if limited else 0), "it is tried for what it claims"


# ---- multipart uploads


@pytest.fixture
def bodies(store: Store) -> list[BytesSource]:
    """Two parts, the last one short, as small as the store allows."""
    size = max(store.capabilities.limits.min_part, 1000)
    rng = random.Random(2)
    return [BytesSource(rng.randbytes(length)) for length in (size, 777)]


def whole(bodies: list[BytesSource]) -> bytes:
    return b"".join(body.open().read() for body in bodies)


def begin(store: Store, bodies: list[BytesSource], key: str = "big"):
    size = sum(body.size for body in bodies)
    return store.begin(key, size, {"part_size": str(bodies[0].size)})


def put_parts(store: Store, upload, bodies: list[BytesSource]) -> list[Part]:
    return [store.put_part(upload, number, body) for number, body in enumerate(bodies, 1)]


@strong
def test_an_upload_shows_nothing_until_it_is_completed(store: Store, bodies) -> None:
    upload = begin(store, bodies)
    parts = put_parts(store, upload, bodies)
    assert keys(store) == []
    with pytest.raises(NotFoundError):
        store.head("big")
    info = store.complete(upload, parts)
    head = store.head("big")
    assert (info.size, info.version) == (head.size, head.version)
    assert head.size == sum(body.size for body in bodies)
    assert store.get("big")[0] == whole(bodies)
    total = combine_all((body.crc32c, body.size) for body in bodies)
    if store.proof is Proof.STORED_CHECKSUM:
        assert head.crc32c == total
    elif store.proof in (Proof.CONTENT_CRC64, Proof.CONTENT_MD5):
        assert head.crc32c in (None, total)
    else:
        assert head.crc32c is None


@strong
def test_parts_may_come_in_any_order_and_at_once(store: Store, bodies) -> None:
    upload = begin(store, bodies)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(store.put_part, upload, n, bodies[n - 1]) for n in (2, 1)]
        parts = sorted((job.result() for job in jobs), key=lambda part: part.number)
    store.complete(upload, parts)
    assert store.get("big")[0] == whole(bodies)


@strong
def test_a_part_sent_again_replaces_the_earlier(store: Store, bodies) -> None:
    upload = begin(store, bodies)
    store.put_part(upload, 1, BytesSource(bytes(bodies[0].size)))
    parts = put_parts(store, upload, bodies)
    store.complete(upload, parts)
    assert store.get("big")[0] == whole(bodies)


@strong
def test_another_process_goes_on_with_an_upload(another: Open, store: Store, bodies) -> None:
    upload = begin(store, bodies)
    last = store.put_part(upload, 2, bodies[1])
    second = another()
    assert list(second.uploads("bi")) == [upload]
    assert second.parts(upload) == {2: (last.size, last.token)}
    first = second.put_part(upload, 1, bodies[0])
    assert second.parts(upload).keys() == {1, 2}
    second.complete(upload, [first, last])
    assert another().get("big")[0] == whole(bodies)
    assert list(second.uploads("")) == []


@strong
def test_an_upload_replaces_an_object(store: Store, bodies) -> None:
    put(store, "big", b"before")
    upload = begin(store, bodies)
    store.complete(upload, put_parts(store, upload, bodies))
    assert store.get("big")[0] == whole(bodies)


@strong
def test_two_uploads_of_one_key_do_not_mix(store: Store, bodies) -> None:
    other = [BytesSource(bytes(body.size)) for body in bodies]
    first, second = begin(store, bodies), begin(store, other)
    assert {upload.token for upload in store.uploads("big")} == {first.token, second.token}
    parts = put_parts(store, first, bodies)
    put_parts(store, second, other)
    store.complete(first, parts)
    store.abort(second)
    assert store.get("big")[0] == whole(bodies)


@strong
def test_an_aborted_upload_is_gone(store: Store, bodies) -> None:
    upload = begin(store, bodies)
    part = store.put_part(upload, 1, bodies[0])
    store.abort(upload)
    store.abort(upload)
    assert list(store.uploads("")) == []
    assert keys(store) == []
    for call in (
        lambda: store.parts(upload),
        lambda: store.put_part(upload, 2, bodies[1]),
        lambda: store.complete(upload, [part]),
    ):
        with pytest.raises(NotFoundError):
            call()


@strong
def test_a_completed_upload_is_gone_and_its_object_stays(
    request: pytest.FixtureRequest, store: Store, bodies
) -> None:
    upload = begin(store, bodies)
    parts = put_parts(store, upload, bodies)
    info = store.complete(upload, parts)
    if request.node.callspec.params["another"] in REMEMBERS_UPLOADS:
        assert store.complete(upload, parts) == info
    else:
        with pytest.raises(NotFoundError):
            store.parts(upload)
    assert list(store.uploads("")) == []
    store.abort(upload)
    assert store.get("big")[0] == whole(bodies)


@strong
def test_uploads_are_listed_by_prefix(store: Store, bodies) -> None:
    begun = {key: begin(store, bodies, key) for key in ("x/1", "x/2", "y/1", "xy")}
    assert {upload.key for upload in store.uploads("x/")} == {"x/1", "x/2"}
    assert {upload.key for upload in store.uploads("")} == set(begun)
    assert {upload.key for upload in store.uploads("x/2")} == {"x/2"}


@strong
def test_completing_with_a_part_that_is_not_held_is_refused(store: Store, bodies) -> None:
    upload = begin(store, bodies)
    last = store.put_part(upload, 2, bodies[1])
    missing = Part(1, bodies[0].size, bodies[0].crc32c, last.token)
    with pytest.raises(CorruptionError):
        store.complete(upload, [missing, last])
    assert keys(store) == []


# ---- proofs


def test_a_wrong_checksum_is_refused_where_the_proof_promises_it(store: Store, bodies) -> None:
    if store.proof in (Proof.CONTENT_CRC64, Proof.CONTENT_MD5):
        with pytest.raises(CorruptionError):
            store.put("k", LyingSource(b"data"))
        assert keys(store) == []
        part = store.put_part(begin(store, bodies), 1, LyingSource(b"data"))
        assert part.crc32c == crc32c(b"data"), "of the bytes that the service checked"
        return
    if store.proof is not Proof.STORED_CHECKSUM:
        others = (Proof.WRITTEN_CHECKSUM, Proof.SIGNED_PAYLOAD, Proof.READ_BACK)
        assert store.proof in others, "refuses_corruption tells"
        return
    with pytest.raises(CorruptionError):
        store.put("k", LyingSource(b"data"))
    assert keys(store) == []
    upload = begin(store, bodies)
    with pytest.raises(CorruptionError):
        store.put_part(upload, 1, LyingSource(bytes(bodies[0].size)))
    parts = put_parts(store, upload, bodies)
    wrong = Part(2, parts[1].size, parts[1].crc32c ^ 1, parts[1].token)
    with pytest.raises(CorruptionError):
        store.complete(upload, [parts[0], wrong])
    assert keys(store) == []


def test_the_proof_in_use_holds_and_its_trial_leaves_nothing(store: Store) -> None:
    assert store.refuses_corruption(store.proof, "probe/k")
    assert keys(store) == []
    assert list(store.uploads("")) == []


class ViewSource(BytesSource):
    """Hands out views of one buffer, whatever it is asked for, as the source of a shard does."""

    def open(self):
        reader = super().open()

        class Views(io.RawIOBase):
            buffer = bytearray(MIB)

            def read(self, amount=-1):
                return memoryview(self.buffer)[: reader.readinto(self.buffer)]

            def seek(self, offset, whence=0):
                return reader.seek(offset, whence)

            def tell(self):
                return reader.tell()

        return Views()


def test_every_proof_that_may_be_tried_can_be_used(store: Store) -> None:
    data = random.Random(3).randbytes(3 * MIB + 5)
    for proof in store.capabilities.proofs:
        store.use_proof(proof)
        assert store.proof is proof
        store.delete("k")
        store.put("k", ViewSource(data))
        assert store.get("k")[0] == data
