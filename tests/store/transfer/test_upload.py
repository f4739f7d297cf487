"""Uploads as stories. Files, threads and checksums are real; the faults are scripted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ckpt_store.contract.digest import crc32c
from ds_ckpt_store.errors import (
    AccessError,
    AmbiguousError,
    CorruptionError,
    NotFoundError,
    PausedError,
    SettingsError,
    ShardChangedError,
    ShardUnreadableError,
    TransientError,
)
from ds_ckpt_store.stores.faulty import FaultyStore, Rule
from ds_ckpt_store.stores.memory import MemoryStore
from ds_ckpt_store.stores.port import Capabilities, Limits, Part, Proof, Upload
from ds_ckpt_store.transfer.upload import LocalShard, MemoryUploadLog
from tests.store.transfer.support import (
    PART,
    Crash,
    InlineExecutor,
    Scene,
    memory_store,
)

PROOFS = list(Proof)


def crash_at_part(number: int) -> Callable[[], None]:
    """An action that dies at its n-th call."""
    calls = iter(range(1, 1_000_000))

    def action() -> None:
        if next(calls) == number:
            raise Crash

    return action


# ---- all well


@pytest.mark.parametrize("proof", PROOFS)
@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 5 * PART, 5 * PART + 17])
def test_a_shard_of_any_size_arrives_under_every_proof(
    scene: Scene, proof: Proof, size: int
) -> None:
    scene.store = FaultyStore(memory_store(scene.bucket, proof))
    shard = scene.shard("rank0.pt", size)
    [stored] = scene.upload(shard)
    assert scene.holds(shard)
    assert (stored.size, stored.crc32c, stored.proof) == (size, shard.crc32c, proof)
    assert stored.version == scene.bucket.objects[shard.key].version
    assert scene.sent == size
    assert scene.stored == [stored]


def test_results_come_in_the_order_of_the_shards_whatever_ends_first(scene: Scene) -> None:
    shards = [scene.shard(f"{i}.pt", size) for i, size in enumerate((9 * PART, 10, 0, 3 * PART))]
    assert [stored.key for stored in scene.upload(*shards)] == [shard.key for shard in shards]
    assert scene.holds(*shards)


def test_what_is_stored_already_is_not_sent_again(scene: Scene) -> None:
    shards = [scene.shard("large.pt", 4 * PART), scene.shard("small.pt", 100)]
    scene.upload(*shards)
    scene.store.calls.clear()
    again = scene.upload(*shards)
    assert [stored.key for stored in again] == ["large.pt", "small.pt"]
    assert {call.operation for call in scene.store.calls} == {"head"}
    assert scene.sent == 0


def test_what_is_stored_already_is_found_without_the_log_unless_it_is_small(scene: Scene) -> None:
    shards = [scene.shard("large.pt", 4 * PART), scene.shard("small.pt", 100)]
    scene.upload(*shards)
    scene.store.calls.clear()
    scene.upload(*shards, log=MemoryUploadLog())
    assert [(call.operation, call.key) for call in scene.store.calls if call.key == "large.pt"] == [
        ("head", "large.pt")
    ]
    assert scene.sent == 100
    assert scene.holds(*shards)


def test_a_small_shard_costs_one_request_where_its_answer_is_the_proof(scene: Scene) -> None:
    shards = [scene.shard(f"{number}.pt", 100 + number) for number in range(20)]
    scene.upload(*shards)
    assert [call.operation for call in scene.store.calls] == ["put"] * 20
    assert scene.holds(*shards)


@pytest.mark.parametrize("proof", [Proof.SIGNED_PAYLOAD, Proof.CONTENT_CRC64, Proof.CONTENT_MD5])
def test_a_small_shard_is_looked_at_where_the_answer_tells_no_checksum(
    scene: Scene, proof: Proof
) -> None:
    scene.store = FaultyStore(memory_store(scene.bucket, proof))
    scene.upload(scene.shard("rank0.pt", 100))
    assert [call.operation for call in scene.store.calls] == ["put", "head"]


def test_a_store_without_parts_gets_large_shards_whole_and_is_looked_at_first(
    scene: Scene,
) -> None:
    scene.store = FaultyStore(
        MemoryStore(scene.bucket, Capabilities(parts=False, limits=Limits(min_part=1)))
    )
    shards = [scene.shard("large.pt", 4 * PART), scene.shard("small.pt", 100)]
    scene.upload(*shards)
    assert scene.holds(*shards)
    assert not scene.store.asked("begin")
    scene.store.calls.clear()
    scene.upload(*shards, log=MemoryUploadLog())
    assert len(scene.store.asked("put", "large")) == 0
    assert scene.sent == 100


def test_a_store_without_parts_that_takes_less_at_once_refuses_with_a_sentence(
    scene: Scene,
) -> None:
    limits = Limits(max_put=3 * PART)
    scene.store = FaultyStore(MemoryStore(scene.bucket, Capabilities(parts=False, limits=limits)))
    with pytest.raises(SettingsError, match="whole"):
        scene.upload(scene.shard("large.pt", 4 * PART))
    assert not scene.bucket.objects


@pytest.mark.parametrize("proof", [Proof.SIGNED_PAYLOAD, Proof.CONTENT_MD5, Proof.READ_BACK])
def test_a_store_that_tells_no_checksum_is_believed_only_for_a_version_verified_before(
    scene: Scene, proof: Proof
) -> None:
    scene.store = FaultyStore(memory_store(scene.bucket, proof))
    shard = scene.shard("rank0.pt", 3 * PART)
    scene.upload(shard)
    scene.upload(shard)
    assert scene.sent == 0
    scene.upload(shard, log=MemoryUploadLog())
    # What checks nothing can only be read: then it is, and what is right is not written over.
    assert scene.sent == (0 if proof is Proof.READ_BACK else shard.size)


def test_one_wrong_reading_is_no_reason_to_write_over_what_a_receipt_may_vouch_for(
    scene: Scene,
) -> None:
    scene.store = FaultyStore(memory_store(scene.bucket, Proof.READ_BACK))
    shard = scene.shard("rank0.pt", 3 * PART)
    scene.upload(shard)
    scene.store.script.append(Rule("read", "corrupt"))
    scene.upload(shard, log=MemoryUploadLog())
    assert scene.sent == 0


def test_an_object_with_other_bytes_of_the_same_size_is_replaced(scene: Scene) -> None:
    shard = scene.shard("rank0.pt", 3 * PART)
    scene.bucket_put(shard.key, bytes(shard.size))
    scene.upload(shard)
    assert scene.holds(shard)


def test_an_inline_executor_gives_the_same_calls_each_time(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        scene = Scene(tmp_path / name, InlineExecutor())
        shards = [scene.shard(f"{i}.pt", i * PART // 2) for i in range(8)]
        scene.upload(*shards, streams=3)
        assert scene.holds(*shards)
        runs.append(scene.store.calls)
    assert runs[0] == runs[1]


# ---- the process dies


def test_after_a_crash_only_missing_parts_are_sent(tmp_path: Path) -> None:
    scene = Scene(tmp_path, InlineExecutor())
    shard = scene.shard("rank0.pt", 10 * PART)
    scene.fault(Rule("put_part", "call", action=crash_at_part(7), count=None))
    with pytest.raises(Crash):
        scene.upload(shard, streams=1)
    assert scene.parts_sent() == [1, 2, 3, 4, 5, 6, 7]

    scene.store = FaultyStore(memory_store(scene.bucket))
    [stored] = scene.upload(shard)
    assert sorted(scene.parts_sent()) == [7, 8, 9, 10]
    assert stored.resumed_parts == 6
    assert scene.sent == 4 * PART
    assert scene.holds(shard)
    assert not scene.store.asked("begin")


def test_the_sums_of_all_parts_are_told_also_of_those_that_an_earlier_start_sent(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, InlineExecutor())
    shard, small = scene.shard("rank0.pt", 3 * PART + 5), scene.shard("small.pt", PART)
    data = (tmp_path / shard.key).read_bytes()
    scene.fault(Rule("put_part", "call", action=crash_at_part(3), count=None))
    with pytest.raises(Crash):
        scene.upload(shard, streams=1)
    scene.fault()
    stored, whole = scene.upload(shard, small)
    assert stored.resumed_parts == 2
    assert stored.part_size == PART
    assert stored.part_sums == tuple(
        crc32c(data[offset : offset + PART]) for offset in range(0, len(data), PART)
    )
    assert whole.part_sums == ()
    [found] = scene.upload(shard)
    assert found.part_sums == (), "nobody remembers them"


def test_after_a_crash_with_the_log_lost_the_object_is_still_right(tmp_path: Path) -> None:
    scene = Scene(tmp_path, InlineExecutor())
    shard = scene.shard("rank0.pt", 10 * PART)
    scene.fault(Rule("put_part", "call", action=crash_at_part(7), count=None))
    with pytest.raises(Crash):
        scene.upload(shard, streams=1)
    scene.fault()
    [stored] = scene.upload(shard, log=MemoryUploadLog())
    assert stored.resumed_parts == 0
    assert scene.bucket.objects[shard.key].crc32c == shard.crc32c


def test_a_crash_between_complete_and_its_note_sends_nothing_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, InlineExecutor())
    shard = scene.shard("rank0.pt", 4 * PART)
    scene.fault(Rule("head", "call", action=crash_at_part(1), skip=1))
    with pytest.raises(Crash):
        scene.upload(shard)
    scene.fault()
    [stored] = scene.upload(shard)
    assert scene.sent == 0
    assert stored.crc32c == shard.crc32c


def test_a_remembered_upload_with_another_part_size_is_continued_with_that(scene: Scene) -> None:
    shard = scene.shard("rank0.pt", 4 * PART)
    upload = scene.store.begin(shard.key, shard.size, {})
    scene.log.begin(shard.key, upload, 3 * PART)
    scene.upload(shard)
    assert sorted(scene.parts_sent()) == [1, 2]
    assert scene.holds(shard)


@pytest.mark.parametrize("part_size", [0, 1])
def test_a_remembered_part_size_that_the_store_refuses_begins_anew(
    scene: Scene, part_size: int
) -> None:
    shard = scene.shard("rank0.pt", 4 * PART)
    store = MemoryStore(scene.bucket)
    store._capabilities = memory_store(scene.bucket).capabilities.__class__(
        limits=Limits(min_part=PART, max_parts=100)
    )
    scene.store = FaultyStore(store)
    scene.log.begin(shard.key, store.begin(shard.key, shard.size, {}), part_size)
    scene.upload(shard)
    assert scene.holds(shard)


# ---- the store forgets, loses, lies


def test_an_upload_that_the_store_has_lost_is_begun_anew(scene: Scene) -> None:
    shard = scene.shard("rank0.pt", 4 * PART)
    scene.log.begin(shard.key, Upload(shard.key, "long-gone"), PART)
    scene.log.add_part(shard.key, Part(1, PART, 1234, "gone-too"))
    scene.upload(shard)
    assert sorted(scene.parts_sent()) == [1, 2, 3, 4]
    assert scene.holds(shard)


def test_an_upload_aborted_while_its_parts_are_sent_is_begun_anew(scene: Scene) -> None:
    shard = scene.shard("rank0.pt", 8 * PART)
    scene.fault(Rule("put_part", "call", action=scene.bucket.unfinished.clear, skip=3))
    scene.upload(shard)
    assert len(scene.store.asked("begin")) == 2
    assert scene.holds(shard)


def test_an_upload_that_is_lost_each_time_is_given_up(scene: Scene) -> None:
    shard = scene.shard("rank0.pt", 4 * PART)
    scene.fault(Rule("complete", "fail-before", error=NotFoundError, count=None))
    with pytest.raises(NotFoundError):
        scene.upload(shard)
    assert len(scene.store.asked("complete")) == 3


def test_a_part_in_the_log_that_the_store_does_not_have_is_sent(tmp_path: Path) -> None:
    scene = Scene(tmp_path, InlineExecutor())
    shard = scene.shard("rank0.pt", 6 * PART)
    scene.fault(Rule("put_part", "call", action=crash_at_part(5), count=None))
    with pytest.raises(Crash):
        scene.upload(shard, streams=1)
    [unfinished] = scene.bucket.unfinished.values()
    del unfinished.parts[2]  # the store lost one part
    unfinished.parts[3] = (unfinished.parts[3][0], "other-token")  # and has another third one
    scene.store = FaultyStore(memory_store(scene.bucket))
    [stored] = scene.upload(shard)
    assert sorted(scene.parts_sent()) == [2, 3, 5, 6]
    assert stored.resumed_parts == 2
    assert scene.holds(shard)


@pytest.mark.parametrize("proof", PROOFS)
def test_a_complete_whose_answer_was_lost_after_it_was_applied_is_done(
    scene: Scene, proof: Proof
) -> None:
    scene.store = FaultyStore(memory_store(scene.bucket, proof))
    shard = scene.shard("rank0.pt", 4 * PART)
    scene.fault(Rule("complete", "fail-after"))
    scene.upload(shard)
    assert len(scene.store.asked("complete")) == 1
    assert scene.sent == shard.size
    assert scene.holds(shard)


@pytest.mark.parametrize("proof", PROOFS)
def test_a_complete_whose_answer_was_lost_unapplied_is_repeated_without_sending_again(
    scene: Scene, proof: Proof
) -> None:
    scene.store = FaultyStore(memory_store(scene.bucket, proof))
    shard = scene.shard("rank0.pt", 4 * PART)
    scene.fault(Rule("complete", "fail-before", error=AmbiguousError))
    [stored] = scene.upload(shard)
    assert len(scene.store.asked("complete")) == 2
    assert (scene.sent, stored.resumed_parts) == (shard.size, 4)
    assert scene.holds(shard)


def test_a_complete_that_lands_late_harms_nothing(scene: Scene) -> None:
    shard = scene.shard("rank0.pt", 4 * PART)
    scene.fault(Rule("complete", "late"))
    scene.upload(shard)
    assert scene.store.apply_late() == 1
    assert scene.holds(shard)


@pytest.mark.parametrize("what", ["fail-after", "late"])
def test_a_small_put_whose_answer_was_lost_is_looked_at_and_sent_again_if_need_be(
    scene: Scene, what: str
) -> None:
    shard = scene.shard("rank0.pt", 100)
    scene.fault(Rule("put", what))  # type: ignore[arg-type]
    scene.upload(shard)
    assert len(scene.store.asked("put")) == (1 if what == "fail-after" else 2)
    scene.store.apply_late()
    assert scene.holds(shard)


def test_an_error_of_the_store_keeps_the_parts_for_the_next_start(scene: Scene) -> None:
    shard = scene.shard("rank0.pt", 8 * PART)
    scene.fault(Rule("put_part", "fail-before", skip=5, count=None))
    with pytest.raises(TransientError):
        scene.upload(shard)
    scene.fault()
    [stored] = scene.upload(shard)
    assert stored.resumed_parts == 5
    assert scene.holds(shard)


# ---- bytes change on their way


@pytest.mark.parametrize(
    ("operation", "size"), [("put", 1000), ("put_part", 4 * PART)], ids=["whole", "part"]
)
def test_bytes_corrupted_on_their_way_are_sent_again(
    scene: Scene, operation: str, size: int
) -> None:
    shard = scene.shard("rank0.pt", size)
    scene.fault(Rule(operation, "corrupt", count=2))
    scene.upload(shard)
    assert scene.holds(shard)
    pieces = 4 if operation == "put_part" else 1
    assert len(scene.store.asked(operation)) == pieces + 2


@pytest.mark.parametrize(
    ("operation", "size"), [("put", 1000), ("put_part", 4 * PART)], ids=["whole", "part"]
)
def test_bytes_corrupted_again_and_again_are_given_up(
    scene: Scene, operation: str, size: int
) -> None:
    shard = scene.shard("rank0.pt", size)
    scene.fault(Rule(operation, "corrupt", count=None))
    with pytest.raises(CorruptionError):
        scene.upload(shard)
    assert shard.key not in scene.bucket.objects
    assert len(scene.store.asked(operation)) <= 16


@pytest.mark.parametrize("size", [1000, 4 * PART])
def test_a_store_that_checks_nothing_is_read_back_and_caught(scene: Scene, size: int) -> None:
    scene.store = FaultyStore(memory_store(scene.bucket, Proof.READ_BACK))
    shard = scene.shard("rank0.pt", size)
    scene.fault(Rule("put" if size == 1000 else "put_part", "corrupt"))
    scene.upload(shard)
    assert scene.holds(shard)


@pytest.mark.parametrize("size", [1000, 4 * PART])
def test_a_store_that_keeps_other_bytes_than_it_took_is_never_believed(
    scene: Scene, size: int
) -> None:
    scene.store = FaultyStore(
        MemoryStore(scene.bucket, memory_store(scene.bucket).capabilities, refuses_corruption=False)
    )
    shard = scene.shard("rank0.pt", size)
    scene.fault(Rule("put" if size == 1000 else "put_part", "corrupt", count=None))
    with pytest.raises(CorruptionError):
        scene.upload(shard)
    assert scene.stored == []


def test_a_store_that_no_longer_tells_checksums_is_not_believed(scene: Scene) -> None:
    capabilities = memory_store(scene.bucket).capabilities
    scene.store = FaultyStore(MemoryStore(scene.bucket, capabilities, returns_crc32c=False))
    with pytest.raises(CorruptionError, match="CRC32C none"):
        scene.upload(scene.shard("rank0.pt", 10))


# ---- the file changes


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


CHANGES = [grow, truncate, overwrite]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [1000, 8 * PART])
def test_a_shard_changed_before_the_upload_is_never_stored(
    scene: Scene, change: Callable[[Path], None], size: int
) -> None:
    shard = scene.shard("rank0.pt", size)
    change(scene.folder / shard.key)
    with pytest.raises(ShardChangedError, match=r"rank0\.pt"):
        scene.upload(shard)
    assert not scene.bucket.objects
    assert not scene.bucket.unfinished


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_changed_while_it_is_sent_is_never_completed(
    scene: Scene, change: Callable[[Path], None]
) -> None:
    shard = scene.shard("rank0.pt", 40 * PART)
    path = scene.folder / shard.key
    scene.fault(Rule("put_part", "call", action=lambda: change(path), skip=10))
    with pytest.raises(ShardChangedError, match=r"rank0\.pt"):
        scene.upload(shard)
    assert not scene.store.asked("complete")
    assert not scene.bucket.objects
    assert not scene.bucket.unfinished
    assert scene.log.upload(shard.key) is None


@pytest.mark.parametrize("change", CHANGES)
def test_a_shard_changed_between_two_starts_is_caught_though_its_parts_are_stored(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    scene = Scene(tmp_path, InlineExecutor())
    shard = scene.shard("rank0.pt", 6 * PART)
    scene.fault(Rule("complete", "fail-before"))
    with pytest.raises(TransientError):
        scene.upload(shard)
    assert len(scene.log.parts(shard.key)) == 6
    change(scene.folder / shard.key)
    scene.fault()
    with pytest.raises(ShardChangedError):
        scene.upload(shard)
    assert not scene.bucket.objects
    assert not scene.bucket.unfinished


def test_a_changed_shard_is_what_is_raised_whatever_else_fails(tmp_path: Path) -> None:
    scene = Scene(tmp_path, InlineExecutor())
    first, second = scene.shard("a.pt", 100), scene.shard("b.pt", 4 * PART)
    overwrite(tmp_path / "b.pt")
    scene.fault(Rule("put", "fail-before", key="a.pt", count=None))
    with pytest.raises(ShardChangedError, match=r"b\.pt"):
        scene.upload(first, second)


# ---- several shards


def test_a_failing_shard_hides_no_other_that_was_begun(tmp_path: Path) -> None:
    scene = Scene(tmp_path, InlineExecutor())
    shards = [scene.shard(f"{i}.pt", 3 * PART) for i in range(4)]
    scene.fault(Rule("put_part", "fail-before", key=r"1\.pt", error=AccessError, count=None))
    with pytest.raises(AccessError):
        scene.upload(*shards, streams=4)
    assert sorted(stored.key for stored in scene.stored) == ["0.pt", "2.pt", "3.pt"]
    scene.fault()
    scene.upload(*shards)
    assert scene.sent == 3 * PART
    assert scene.holds(*shards)


def test_after_a_failure_no_further_shard_is_begun(tmp_path: Path) -> None:
    scene = Scene(tmp_path, InlineExecutor())
    shards = [scene.shard(f"{i:02}.pt", 10) for i in range(50)]
    scene.fault(Rule("put", "fail-before", key=r"05\.pt"))
    with pytest.raises(TransientError):
        scene.upload(*shards, streams=2)
    assert len(scene.store.asked("put")) <= 8


def test_a_shard_that_cannot_be_opened_is_named(scene: Scene) -> None:
    def refuse() -> int:
        raise ShardUnreadableError("rank1.pt: permission denied, as uid 1000")

    good = scene.shard("rank0.pt", 3 * PART)
    for size in (10, 3 * PART):
        with pytest.raises(ShardUnreadableError, match="uid 1000"):
            scene.upload(good, LocalShard("rank1.pt", size, 0, refuse))
    assert [stored.key for stored in scene.stored] == ["rank0.pt", "rank0.pt"]


@pytest.mark.parametrize("size", [20, PART + 1], ids=["whole", "in parts"])
def test_three_thousand_shards_need_a_handful_of_descriptors(scene: Scene, size: int) -> None:
    count = 3000 if size < PART else 100
    shards = [scene.shard(f"{i}.pt", size) for i in range(count)]
    lock, opened = threading.Lock(), set[int]()
    most = 0

    def counting(shard: LocalShard) -> LocalShard:
        def open_() -> int:
            nonlocal most
            with lock:
                fd = shard.open()
                opened.add(fd)
                still = sum(os.path.exists(f"/proc/self/fd/{fd}") for fd in opened)
                most = max(most, still)
                return fd

        return LocalShard(shard.key, shard.size, shard.crc32c, open_)

    stored = scene.upload(*[counting(shard) for shard in shards], streams=4)
    assert len(stored) == count
    assert scene.holds(*shards)
    assert most <= 4


def test_no_more_than_the_streams_are_busy_and_none_is_idle(scene: Scene) -> None:
    busy, most, lock = 0, 0, threading.Lock()
    full = threading.Event()
    inner = memory_store(scene.bucket)

    class Watched(MemoryStore):
        def put_part(self, upload, number, source):  # type: ignore[no-untyped-def]
            nonlocal busy, most
            with lock:
                busy += 1
                most = max(most, busy)
                if busy == 3:
                    full.set()
            full.wait(10)  # only goes on when three parts are under way at once
            try:
                return inner.put_part(upload, number, source)
            finally:
                with lock:
                    busy -= 1

    scene.store = FaultyStore(Watched(scene.bucket, inner.capabilities))
    shard = scene.shard("rank0.pt", 12 * PART)
    scene.upload(shard, streams=3)
    assert full.is_set()
    assert most == 3


def test_a_shard_that_was_begun_earlier_is_finished_first(tmp_path: Path) -> None:
    scene = Scene(tmp_path, InlineExecutor())
    shards = [scene.shard(f"{i}.pt", 5 * PART) for i in range(3)]
    scene.upload(*shards, streams=3)
    assert [stored.key for stored in scene.stored] == ["0.pt", "1.pt", "2.pt"]
    assert [call.key for call in scene.store.asked("put_part")][:5] == ["0.pt"] * 5


# ---- pausing


@pytest.mark.parametrize("streams", [1, 4])
def test_a_pause_keeps_what_is_done_and_the_next_call_continues(scene: Scene, streams: int) -> None:
    shards = [scene.shard(f"{i}.pt", 8 * PART) for i in range(3)]

    def pause_after_ten_parts() -> None:
        if len(scene.store.asked("put_part")) >= 10:
            raise PausedError("asked to stop")

    with pytest.raises(PausedError):
        scene.upload(*shards, check=pause_after_ten_parts, streams=streams)
    sent_before = len(scene.store.asked("put_part"))
    assert 10 <= sent_before < 10 + streams
    assert scene.sent == sent_before * PART
    scene.upload(*shards, streams=streams)
    assert len(scene.store.asked("put_part")) == 24
    assert scene.sent == (24 - sent_before) * PART
    assert scene.holds(*shards)


def test_a_pause_is_noticed_while_every_stream_waits_for_the_store(scene: Scene) -> None:
    stuck, asked = threading.Event(), threading.Event()

    def wait_for_the_pause() -> None:
        stuck.set()
        assert asked.wait(20)

    def check() -> None:
        if stuck.is_set():
            asked.set()
            raise PausedError("asked to stop")

    scene.fault(Rule("put_part", "call", action=wait_for_the_pause, count=None))
    shard = scene.shard("rank0.pt", 4 * PART)
    with pytest.raises(PausedError):
        scene.upload(shard, check=check, streams=1)
    assert len(scene.log.parts(shard.key)) == 1


def test_a_pause_before_anything_sends_nothing(scene: Scene) -> None:
    def check() -> None:
        raise PausedError("asked to stop")

    with pytest.raises(PausedError):
        scene.upload(scene.shard("rank0.pt", 10), check=check)
    assert scene.store.calls == []


def test_callbacks_happen_in_the_calling_thread(scene: Scene) -> None:
    threads = set()

    class Log(MemoryUploadLog):
        def add_part(self, key: str, part: Part) -> None:
            threads.add(threading.get_ident())
            super().add_part(key, part)

    scene.upload(
        scene.shard("a.pt", 9 * PART),
        log=Log(),
        check=lambda: threads.add(threading.get_ident()),
    )
    assert threads == {threading.get_ident()}
