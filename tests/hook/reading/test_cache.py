"""The node's cache: one fetch for all, right bytes or none, a bound, and no way to hang anybody."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ds_ckpt_hook import cache as caches
from ds_ckpt_hook import room
from ds_ckpt_hook.cache import Cache, Wanted
from ds_ckpt_store.contract.digest import crc32c
from ds_ckpt_store.contract.filesystem import Filesystem, Space
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import TransientError
from ds_ckpt_store.records import Piece
from ds_ckpt_store.transfer.download import RemoteShard
from tests.hook.processes import PYTHONPATH
from tests.hook.standin import Job
from tests.hook.test_feedback import FakeTime

KIB = 1 << 10
SIZE = 40 * KIB


@dataclass
class Origin:
    """Pieces in some store, and how often each was fetched."""

    pieces: dict[str, bytes] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    before: Callable[[str], None] = lambda key: None
    written: Callable[[str], None] = lambda path: None

    def wanted(self, key: str, size: int = SIZE) -> Wanted:
        data = self.pieces.setdefault(key, random.Random(key).randbytes(size))
        return Wanted("s3://bucket/run", key, Piece(0, size, crc32c(data)))

    def fetch(self, shards: Sequence[RemoteShard], done: Callable[[RemoteShard], None]) -> None:
        for shard in shards:
            self.before(shard.key)
            self.fetched.append(shard.key)
            Path(shard.path).write_bytes(self.pieces[shard.key])
            self.written(shard.path)
            done(shard)


class Disk(Filesystem):
    """A disk with so many bytes free."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def space(self, path: str) -> Space:
        return Space(1 << 40, self.free)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "BLOCK", 16 * KIB)


def content(cache: Cache, wanted: Wanted) -> bytes | None:
    """What the cache hands out of a piece; None if it does not hold all of it as it was."""
    entry = cache.open(wanted)
    if entry is None:
        return None
    cut = caches.blocks(wanted.piece.size)
    found = [entry.block(number, length) for number, (_, length) in enumerate(cut)]
    entry.close()
    return None if None in found else b"".join(each for each in found if each is not None)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()} if folder.exists() else set()


def test_what_one_has_fetched_all_have(tmp_path: Path) -> None:
    origin = Origin()
    wanted = [origin.wanted(f"key{n}") for n in range(caches.BATCH + 3)]
    Cache(str(tmp_path / "cache")).bring(wanted, origin.fetch)
    other = Cache(str(tmp_path / "cache"))
    other.bring(wanted, origin.fetch)
    assert origin.fetched == [each.key for each in wanted]
    assert [content(other, each) for each in wanted] == list(origin.pieces.values())
    assert entries(tmp_path / "cache") == {each.name for each in wanted}


def test_two_that_want_the_same_fetch_it_once(tmp_path: Path) -> None:
    origin = Origin()
    wanted = [origin.wanted(f"key{n}") for n in range(5)]
    both = threading.Barrier(2)
    is_fetching = threading.Event()

    def slowly(key: str) -> None:
        if not is_fetching.is_set():
            is_fetching.set()
            both.wait(20)

    origin.before = slowly
    cache = Cache(str(tmp_path))
    first = threading.Thread(target=cache.bring, args=(wanted, origin.fetch))
    first.start()
    assert is_fetching.wait(20)
    second = threading.Thread(target=Cache(str(tmp_path)).bring, args=(wanted, origin.fetch))
    second.start()
    both.wait(20)
    first.join(20)
    second.join(20)
    assert sorted(origin.fetched) == [each.key for each in wanted]


def test_others_fetch_other_pieces_meanwhile(tmp_path: Path) -> None:
    origin = Origin()
    one, two = origin.wanted("one"), origin.wanted("two")
    seen: list[bytes | None] = []

    def meanwhile(key: str) -> None:
        if key == "one":
            other = Cache(str(tmp_path))
            other.bring([two], origin.fetch)
            seen.append(content(other, two))

    origin.before = meanwhile
    Cache(str(tmp_path)).bring([one], origin.fetch)
    assert seen == [origin.pieces["two"]]


@pytest.mark.parametrize("harm", ["flip", "flip sum", "truncate", "empty", "longer"])
def test_a_damaged_entry_is_fetched_again(tmp_path: Path, harm: str) -> None:
    origin = Origin()
    wanted = origin.wanted("key")
    cache = Cache(str(tmp_path))
    cache.bring([wanted], origin.fetch)
    path = tmp_path / wanted.name
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[20 * KIB] ^= 1
    elif harm == "flip sum":
        data[-1] ^= 1
    else:
        data = data[: {"truncate": -1, "empty": 0, "longer": None}[harm]] + b"x" * (
            harm == "longer"
        )
    path.write_bytes(data)
    assert content(cache, wanted) is None
    if harm == "flip":  # found in the middle of reading: whoever reads drops it
        cache.drop(wanted)
    assert not path.exists()
    cache.bring([wanted], origin.fetch)
    assert content(cache, wanted) == origin.pieces["key"]
    assert origin.fetched == ["key", "key"]


def test_what_the_disk_garbled_while_it_was_written_is_never_handed_out(tmp_path: Path) -> None:
    origin = Origin()
    wanted = origin.wanted("key")

    def garble(path: str) -> None:
        with open(path, "r+b") as file:
            file.write(b"garbled")

    origin.written = garble
    cache = Cache(str(tmp_path))
    cache.bring([wanted], origin.fetch)
    assert content(cache, wanted) is None


def test_a_store_that_is_away_leaves_no_entry_and_no_lock(tmp_path: Path) -> None:
    origin = Origin()
    wanted = [origin.wanted("one"), origin.wanted("two")]

    def fails(key: str) -> None:
        raise TransientError("read", key, "away")

    origin.before = fails
    cache = Cache(str(tmp_path))
    with pytest.raises(TransientError):
        cache.bring(wanted, origin.fetch)
    assert [content(cache, each) for each in wanted] == [None, None]
    origin.before = lambda key: None
    Cache(str(tmp_path)).bring(wanted, origin.fetch)
    assert [content(cache, each) for each in wanted] == list(origin.pieces.values())


KILLED = """
import sys, time
from ds_ckpt_hook.cache import Cache, Wanted
from ds_ckpt_store.records import Piece

def fetch(shards, done):
    open(shards[0].path, "wb").write(b"half of it")
    print("fetching", flush=True)
    time.sleep(600)

size, crc32c = int(sys.argv[2]), int(sys.argv[3])
Cache(sys.argv[1]).bring([Wanted("s3://bucket/run", "key", Piece(0, size, crc32c))], fetch)
"""


def test_a_killed_fetcher_holds_up_nobody_and_a_stopped_one_not_for_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin, time = Origin(), FakeTime()
    wanted = origin.wanted("key")
    arguments = [str(tmp_path), str(SIZE), str(wanted.piece.crc32c)]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "fetching\n"
        began = time.now
        Cache(str(tmp_path), clock=time).bring([wanted], origin.fetch)
        assert (origin.fetched, time.now - began >= caches.PATIENCE_SECONDS) == ([], True)
        assert "no byte came for 60 s" in caplog.text
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    cache = Cache(str(tmp_path), clock=time)
    cache.bring([wanted], origin.fetch)
    assert content(cache, wanted) == origin.pieces["key"]
    assert entries(tmp_path) == {wanted.name}


def test_a_lock_on_the_room_that_is_never_given_back_hangs_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin = Origin()
    (tmp_path / "locks").mkdir()
    with (tmp_path / "locks/room").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cache = Cache(str(tmp_path), clock=FakeTime())
        cache.bring([origin.wanted("key")], origin.fetch)
    assert origin.fetched == []
    assert "held by a process that does nothing" in caplog.text


def test_it_keeps_to_its_limit_and_drops_what_was_not_used_for_longest(tmp_path: Path) -> None:
    origin = Origin()
    a, b, c, d = (origin.wanted(key) for key in "abcd")
    cache = Cache(str(tmp_path), limit=2 * a.entry_size)
    cache.bring([a], origin.fetch)
    cache.bring([b], origin.fetch)
    for age, each in ((200, a), (100, b)):
        os.utime(tmp_path / each.name, (age, age))
    assert content(cache, a)  # used just now
    cache.bring([c], origin.fetch)
    assert entries(tmp_path) == {a.name, c.name}
    open_entry = cache.open(a)
    assert open_entry is not None
    os.utime(tmp_path / a.name, (1, 1))
    cache.bring([d], origin.fetch)
    assert entries(tmp_path) == {a.name, d.name}, "what is open stays"
    open_entry.close()


def test_what_does_not_fit_is_left_out_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin = Origin()
    wanted = [origin.wanted(key) for key in "abcd"]
    cache = Cache(str(tmp_path), limit=2 * wanted[0].entry_size)
    cache.bring(wanted, origin.fetch)
    cache.bring(wanted, origin.fetch)
    assert origin.fetched == ["a", "b"], "none of them goes for another"
    assert sum(path.stat().st_size for path in tmp_path.glob("*-*")) <= 2 * wanted[0].entry_size
    assert caplog.text.count("cannot hold all") == 1


def test_what_others_are_about_to_take_counts(tmp_path: Path) -> None:
    origin = Origin()
    a, b = origin.wanted("a"), origin.wanted("b")

    def meanwhile(key: str) -> None:
        if key == "a":
            Cache(str(tmp_path), limit=SIZE * 3 // 2).bring([b], origin.fetch)

    origin.before = meanwhile
    Cache(str(tmp_path), limit=SIZE * 3 // 2).bring([a], origin.fetch)
    assert origin.fetched == ["a"]


def test_what_others_evict_at_once_is_not_fetched_for_ever(tmp_path: Path) -> None:
    origin = Origin()
    wanted = origin.wanted("key")

    def fetch(shards: Sequence[RemoteShard], done: Callable[[RemoteShard], None]) -> None:
        assert origin.fetched == []
        origin.fetch(shards, done)
        (tmp_path / wanted.name).unlink()

    Cache(str(tmp_path)).bring([wanted], fetch)
    assert origin.fetched == ["key"]


def test_leftovers_of_killed_fetchers_go_first_if_room_is_needed(tmp_path: Path) -> None:
    origin = Origin()
    a, b = origin.wanted("a"), origin.wanted("b")
    (tmp_path / f"{a.name}.part").write_bytes(bytes(SIZE))
    (tmp_path / f"{a.name}.ranges").write_bytes(b"")
    Cache(str(tmp_path), limit=SIZE * 3 // 2).bring([b], origin.fetch)
    assert entries(tmp_path) == {b.name}


def test_a_disk_that_is_nearly_full_is_left_alone(tmp_path: Path) -> None:
    origin = Origin()
    cache = Cache(str(tmp_path), fs=Disk(caches.HEADROOM + SIZE))
    cache.bring([origin.wanted("key")], origin.fetch)
    assert origin.fetched == []


def test_a_disk_that_fills_up_meanwhile_gets_its_room_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin = Origin()
    wanted = [origin.wanted(key) for key in "ab"]

    def full(path: str) -> None:
        if len(origin.fetched) == 2:
            raise OSError(errno.ENOSPC, "no space left", path)

    origin.written = full
    cache = Cache(str(tmp_path))
    cache.bring(wanted, origin.fetch)
    assert entries(tmp_path) == {wanted[0].name}
    assert "no space left" in caplog.text
    assert content(cache, wanted[0]) == origin.pieces["a"], "what is there can be read"
    cache.bring([wanted[1]], origin.fetch)
    assert origin.fetched == ["a", "b"], "it is not tried again by this process"


def test_a_folder_that_cannot_be_written_costs_speed_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin = Origin()
    (tmp_path / "file").write_text("")
    cache = Cache(str(tmp_path / "file/cache"))
    cache.bring([origin.wanted("key")], origin.fetch)
    assert cache.open(origin.wanted("key")) is None
    assert origin.fetched == []
    assert "slow" in caplog.text


def test_a_save_that_lacks_room_gets_that_of_the_cache(tmp_path: Path) -> None:
    origin = Origin()
    job = Job([tmp_path])
    volume = Volume(str(tmp_path))
    wanted = [origin.wanted(key) for key in "ab"]
    cache = Cache(volume.cache)
    cache.bring(wanted, origin.fetch)
    job.hooks[0].fs = disk = Disk(100)
    assert room.ready_to_save(job.hooks[0], 100, save_dir=tmp_path, policy="skip")
    assert len(list(Path(volume.cache).glob("*-*"))) == 2, "there was room"
    held = cache.open(wanted[1])
    assert held is not None
    disk.free = 99
    assert not room.ready_to_save(job.hooks[0], 100, save_dir=tmp_path, policy="skip")
    assert [path.name for path in Path(volume.cache).glob("*-*")] == [wanted[1].name]
    held.close()
