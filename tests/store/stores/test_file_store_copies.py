"""What a folder says of its bytes is what stands on the disk, whoever copied, whatever failed."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ds_ckpt_store.contract.digest import combine_all, crc32c
from ds_ckpt_store.errors import (
    CorruptionError,
    NotFoundError,
    PreconditionError,
    RefusedError,
    ShardChangedError,
    ShardUnreadableError,
    TransientError,
)
from ds_ckpt_store.stores.file import TEMPORARY, FileStore, copying, uploads
from ds_ckpt_store.stores.port import BytesSource, IfAbsent, IfVersion, Part, Proof, Upload
from ds_ckpt_store.transfer.source import FileSlice

KIB = 1 << 10
PART = 300 * KIB
SIZE = 3 * PART + 77


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def store(root: Path) -> Iterator[FileStore]:
    store = FileStore(str(root))
    yield store
    store.close()


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(random.Random(5).randbytes(SIZE))
    return path


@pytest.fixture
def fd(shard: Path) -> Iterator[int]:
    fd = os.open(shard, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Another filesystem, of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def pieces() -> list[tuple[int, int, int]]:
    return [(n + 1, n * PART, min(PART, SIZE - n * PART)) for n in range(4)]


def begin(store: FileStore, key: str = "big") -> Upload:
    return store.begin(key, SIZE, {"part_size": str(PART)})


def put_parts(store: FileStore, upload: Upload, fd: int) -> list[Part]:
    return [
        store.put_part(upload, number, FileSlice(fd, offset, length, "shard"))
        for number, offset, length in pieces()
    ]


def data_of(root: Path) -> Path:
    (path,) = (root / TEMPORARY).glob("*.data")
    return path


def left_over(root: Path) -> list[str]:
    return [path.name for path in (root / TEMPORARY).iterdir() if path.name != "lock"]


# ---- whose checksum it is


def test_the_source_is_not_read_for_a_checksum(store: FileStore, shard: Path, fd: int) -> None:
    class Unread(FileSlice):
        @property
        def crc32c(self) -> int:  # type: ignore[override]
            raise AssertionError("read")

    data = shard.read_bytes()
    info = store.put("k", Unread(fd, 7, PART, "shard"))
    assert info.crc32c == crc32c(data[7 : 7 + PART])
    upload = begin(store)
    parts = [store.put_part(upload, n, Unread(fd, at, size, "shard")) for n, at, size in pieces()]
    assert [part.crc32c for part in parts] == [
        crc32c(data[offset : offset + length]) for _, offset, length in pieces()
    ]
    assert store.complete(upload, parts).crc32c == crc32c(data)
    assert store.head("big").crc32c is None
    assert store.get("big")[0] == data


DAMAGING = ["copy_file_range", "pwrite"]


@pytest.mark.parametrize("call", DAMAGING)
def test_bytes_that_change_on_their_way_to_the_disk_show(
    store: FileStore, root: Path, shard: Path, fd: int, monkeypatch, call: str
) -> None:
    data, write = shard.read_bytes(), os.pwrite

    def copy(source, target, count, start, offset):
        piece = bytearray(os.pread(source, count, start))
        piece[0] ^= 1
        return write(target, piece, offset)

    def damaged(target, piece, offset):
        return write(target, bytes([piece[0] ^ 1]) + bytes(piece[1:]), offset)

    def refused(*_: object) -> int:
        raise OSError(errno.EXDEV, "another filesystem")

    fakes = {"copy_file_range": copy if call == "copy_file_range" else refused}
    if call == "pwrite":
        fakes["pwrite"] = damaged
    with monkeypatch.context() as patch:
        for name, fake in fakes.items():
            patch.setattr(os, name, fake)
        info = store.put("k", FileSlice(fd, 0, PART, "shard"))
        upload = begin(store)
        part = store.put_part(upload, 1, FileSlice(fd, 0, PART, "shard"))
    on_disk = (root / "k").read_bytes()
    assert on_disk != data[:PART]
    assert info.crc32c == part.crc32c == crc32c(on_disk)


def test_a_checksum_that_its_sender_made_up_is_not_believed(store: FileStore) -> None:
    source = BytesSource(b"data")
    source.crc32c ^= 1
    assert store.put("k", source).crc32c == crc32c(b"data")
    upload = store.begin("big", 4, {})
    part = store.put_part(upload, 1, source)
    assert part.crc32c == crc32c(b"data")
    with pytest.raises(CorruptionError):
        store.complete(upload, [Part(1, 4, source.crc32c, part.token)])
    assert [info.key for info in store.list("")] == ["k"]


def test_the_trial_finds_a_folder_that_repeats_what_it_was_told(
    store: FileStore, monkeypatch
) -> None:
    assert store.refuses_corruption(Proof.WRITTEN_CHECKSUM, "probe/k")
    copy = copying.Copier.copy

    def believing(self, source, fd, offset, lock, *, read_again):
        count, _ = copy(self, source, fd, offset, lock, read_again=read_again)
        return count, source.crc32c

    with monkeypatch.context() as patch:
        patch.setattr(copying.Copier, "copy", believing)
        assert not store.refuses_corruption(Proof.WRITTEN_CHECKSUM, "probe/k")
    with monkeypatch.context() as patch:
        patch.setattr(uploads, "_held_crc32c", lambda entry, part, part_size: part.crc32c)
        assert not store.refuses_corruption(Proof.WRITTEN_CHECKSUM, "probe/k")
    assert not store.refuses_corruption(Proof.STORED_CHECKSUM, "probe/k")
    assert list(store.list("")) == list(store.uploads("")) == []


def test_under_read_back_the_checksum_is_the_senders(store: FileStore) -> None:
    """Who reads back compares by himself; to read twice would prove no more."""
    store.use_proof(Proof.READ_BACK)
    source = BytesSource(b"data")
    source.crc32c ^= 1
    assert store.put("k", source).crc32c is None
    upload = store.begin("big", 4, {})
    part = store.put_part(upload, 1, source)
    assert part.crc32c == source.crc32c
    assert store.complete(upload, [part]).crc32c is None


# ---- how it is copied


def fails(number: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def short(source: int, target: int, count: int, start: int, offset: int) -> int:
    return os.pwrite(target, os.pread(source, min(count, 1001), start), offset)


def stopping(source: int, target: int, count: int, start: int, offset: int) -> int:
    """Copies the first half of a part and then no more."""
    if start % PART >= PART // 2:
        raise OSError(errno.EXDEV, "another filesystem")
    return os.pwrite(target, os.pread(source, PART // 2, start), offset)


KERNELS = {
    "another filesystem": fails(errno.EXDEV),
    "no such call": fails(errno.ENOSYS),
    "not supported": fails(errno.EOPNOTSUPP),
    "invalid": fails(errno.EINVAL),
    "forbidden by a filter": fails(errno.EPERM),
    "an input or output error": fails(errno.EIO),
    "a stale handle": fails(errno.ESTALE),
    "nothing is copied": lambda *_: 0,
    "little at a time": short,
    "some, and then no more": stopping,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_whatever_the_kernel_does_the_bytes_arrive(
    store: FileStore, shard: Path, fd: int, monkeypatch, kernel: str
) -> None:
    monkeypatch.setattr(os, "copy_file_range", KERNELS[kernel])
    upload = begin(store)
    info = store.complete(upload, put_parts(store, upload, fd))
    assert info.crc32c == crc32c(shard.read_bytes())
    assert store.get("big")[0] == shard.read_bytes()


@pytest.mark.parametrize("kernel", ["this one", "another filesystem", "little at a time"])
def test_each_byte_is_paced_once(store: FileStore, fd: int, monkeypatch, kernel: str) -> None:
    if kernel in KERNELS:
        monkeypatch.setattr(os, "copy_file_range", KERNELS[kernel])
    monkeypatch.setattr(copying, "PIECE", 100 * KIB)
    store.put("learns from where the kernel does not copy", FileSlice(fd, 0, PART, "shard"))
    paced: list[int] = []
    store.put("k", FileSlice(fd, 0, SIZE, "shard", paced.append))
    assert sum(paced) == SIZE
    assert max(paced) <= 1 << 20


def test_another_filesystem_gets_the_same_bytes(small_disk: Path, shard: Path, fd: int) -> None:
    store = FileStore(str(small_disk / "run"))
    upload = store.begin("k", PART + 5, {"part_size": str(PART)})
    parts = [
        store.put_part(upload, number, FileSlice(fd, offset, length, "shard"))
        for number, offset, length in ((1, 0, PART), (2, PART, 5))
    ]
    assert store.complete(upload, parts).crc32c == crc32c(shard.read_bytes()[: PART + 5])


@pytest.mark.parametrize("kernel", ["this one", "another filesystem"])
def test_a_shard_that_was_truncated_is_the_shards_fault(
    store: FileStore, root: Path, shard: Path, fd: int, monkeypatch, kernel: str
) -> None:
    if kernel in KERNELS:
        monkeypatch.setattr(os, "copy_file_range", KERNELS[kernel])
    monkeypatch.setattr(copying, "PIECE", 100 * KIB)
    upload = begin(store)
    done = 0

    def truncate(size: int) -> None:
        nonlocal done
        done += size
        if done > 100 * KIB:
            os.truncate(shard, 150 * KIB)

    with pytest.raises(ShardChangedError, match="truncated"):
        store.put_part(upload, 1, FileSlice(fd, 0, PART, "shard", truncate))
    with pytest.raises(ShardChangedError, match="truncated"):
        store.put("k", FileSlice(fd, 0, PART, "shard"))
    assert store.parts(upload) == {}
    store.abort(upload)
    assert list(store.list("")) == left_over(root) == []


def test_a_shard_that_cannot_be_read_is_the_shards_fault(
    store: FileStore, fd: int, monkeypatch
) -> None:
    """The kernel's copy tells the same for both sides; reading and writing tells them apart."""
    monkeypatch.setattr(os, "copy_file_range", fails(errno.EIO))
    source, read = FileSlice(fd, 0, PART, "shard"), os.preadv

    def broken(target: int, buffers, offset: int) -> int:
        if target == fd:
            raise OSError(errno.EIO, "Input/output error")
        return read(target, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(ShardUnreadableError):
            store.put("k", source)
    monkeypatch.setattr(os, "pwrite", fails(errno.EIO))
    with pytest.raises(TransientError, match="Input/output"):
        store.put("k", source)


def test_a_disk_that_fills_up_under_a_copy_says_so(small_disk: Path, shard: Path, fd: int) -> None:
    """Within one filesystem, where the kernel copies."""
    store, near = FileStore(str(small_disk / "run")), small_disk / "shard"
    near.write_bytes(shard.read_bytes()[: 2 * PART])
    here = os.open(near, os.O_RDONLY)
    upload = store.begin("k", 2 * PART, {"part_size": str(PART)})
    first = store.put_part(upload, 1, FileSlice(here, 0, PART, "shard"))
    for call in (
        lambda: store.put_part(upload, 2, FileSlice(here, PART, PART, "shard")),
        lambda: store.put("small", FileSlice(here, 0, PART, "shard")),
    ):
        with pytest.raises(TransientError, match=r"No space left.* of 1048576 bytes free"):
            call()
    assert store.parts(upload) == {1: (PART, first.token)}
    os.close(here)
    near.unlink()
    second = store.put_part(upload, 2, FileSlice(fd, PART, PART, "shard"))
    assert store.complete(upload, [first, second]).crc32c == crc32c(shard.read_bytes()[: 2 * PART])


# ---- what another process wrote


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def zero(path: Path) -> None:
    """As a power loss leaves what was never written."""
    with path.open("r+b") as file:
        file.seek(PART)
        file.write(bytes(PART))


DAMAGES = {
    "a flipped bit": lambda path: flip(path, PART + 99),
    "zeros": zero,
    "a file cut short": lambda path: os.truncate(path, PART + 99),
    "a file grown": lambda path: os.truncate(path, SIZE + 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_of_an_earlier_process_are_read_again(
    store: FileStore, root: Path, fd: int, damage: str
) -> None:
    upload = begin(store)
    parts = put_parts(store, upload, fd)
    DAMAGES[damage](data_of(root))
    later = FileStore(str(root))
    with pytest.raises(CorruptionError, match="send them again"):
        later.complete(upload, parts)
    assert list(later.list("")) == []
    later.abort(upload)
    assert left_over(root) == []


def test_parts_of_an_earlier_process_that_are_right_are_taken(
    store: FileStore, root: Path, shard: Path, fd: int
) -> None:
    upload = begin(store)
    parts = put_parts(store, upload, fd)
    later = FileStore(str(root))
    mended = later.put_part(upload, 2, FileSlice(fd, PART, PART, "shard"))
    assert mended == parts[1]
    assert later.complete(upload, parts).crc32c == crc32c(shard.read_bytes())


def test_a_part_that_was_half_replaced_is_read_again(
    store: FileStore, shard: Path, fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent again, and the sending failed: the list still names the earlier bytes."""
    monkeypatch.setattr(copying, "PIECE", 100 * KIB)
    upload = begin(store)
    parts = put_parts(store, upload, fd)
    other = tmp_path / "other"
    other.write_bytes(bytes(150 * KIB))
    short = os.open(other, os.O_RDONLY)
    with pytest.raises(ShardChangedError):
        store.put_part(upload, 1, FileSlice(short, 0, PART, "other"))
    os.close(short)
    with pytest.raises(CorruptionError, match=r"\[1\]"):
        store.complete(upload, parts)
    parts[0] = store.put_part(upload, 1, FileSlice(fd, 0, PART, "shard"))
    assert store.complete(upload, parts).crc32c == crc32c(shard.read_bytes())


def test_an_upload_that_was_closed_in_between_is_read_again(
    store: FileStore, root: Path, fd: int
) -> None:
    upload = begin(store)
    parts = put_parts(store, upload, fd)
    store.close()
    flip(data_of(root), 0)
    with pytest.raises(CorruptionError, match=r"\[1\]"):
        store.complete(upload, parts)


KILLED = """
import os, signal, sys
from ds_ckpt_store.stores.file import FileStore, copying
from ds_ckpt_store.stores.port import Upload
from ds_ckpt_store.transfer.source import FileSlice
root, path, size, part, call = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), sys.argv[5]
copying.PIECE = 100 << 10
store, fd = FileStore(root), os.open(path, os.O_RDONLY)
done = 0
def kill(count):
    global done
    done += count
    if done > 100 << 10:
        os.kill(os.getpid(), signal.SIGKILL)
if call == "put":
    store.put("big", FileSlice(fd, 0, size, "shard", kill))
upload = store.begin("big", size, {"part_size": str(part)})
part = store.put_part(upload, 1, FileSlice(fd, 0, part, "shard"))
print(upload.token, part.crc32c, flush=True)
store.put_part(upload, 2, FileSlice(fd, part.size, part.size, "shard", kill))
"""


def killed(root: Path, shard: Path, call: str) -> str:
    command = [sys.executable, "-c", KILLED, str(root), str(shard), str(SIZE), str(PART), call]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout


def test_after_a_kill_in_mid_part_another_process_goes_on(root: Path, shard: Path, fd: int) -> None:
    token, value = killed(root, shard, "put_part").split()
    store = FileStore(str(root))
    (upload,) = store.uploads("")
    assert upload == Upload("big", token)
    assert store.parts(upload) == {1: (PART, f"{int(value):08x}")}
    assert list(store.list("")) == []
    parts = [Part(1, PART, int(value), f"{int(value):08x}")]
    parts += [
        store.put_part(upload, number, FileSlice(fd, offset, length, "shard"))
        for number, offset, length in pieces()[1:]
    ]
    assert store.complete(upload, parts).crc32c == crc32c(shard.read_bytes())
    assert left_over(root) == []


def test_a_kill_in_mid_put_shows_nothing_and_is_swept(root: Path, shard: Path) -> None:
    killed(root, shard, "put")
    assert left_over(root) != []
    store = FileStore(str(root))
    assert list(store.list("")) == []
    store.put("other", BytesSource(b"x"))
    assert left_over(root) == []


# ---- what the disk did not take


def failing_once(monkeypatch, number: int) -> None:
    """The kernel tells of a lost write once; the next sync succeeds over what was lost."""
    sync, told = os.fsync, []

    def fsync(fd: int) -> None:
        if not told and os.readlink(f"/proc/self/fd/{fd}").endswith((".data", ".put")):
            told.append(fd)
            raise OSError(number, os.strerror(number))
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
def test_after_a_sync_that_failed_nothing_of_the_upload_is_trusted(
    store: FileStore, root: Path, fd: int, monkeypatch, number: int
) -> None:
    upload = begin(store)
    parts = put_parts(store, upload, fd)
    failing_once(monkeypatch, number)
    with pytest.raises(TransientError):
        store.complete(upload, parts)
    with pytest.raises(NotFoundError):
        store.complete(upload, parts)
    assert list(store.list("")) == list(store.uploads("")) == left_over(root) == []
    again = begin(store)
    store.complete(again, put_parts(store, again, fd))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_put_whose_sync_failed_is_no_object(
    store: FileStore, root: Path, monkeypatch, number: int
) -> None:
    store.put("before", BytesSource(b"x"))
    failing_once(monkeypatch, number)
    with pytest.raises(TransientError):
        store.put("k", BytesSource(b"x"))
    assert [info.key for info in store.list("")] == ["before"]
    assert left_over(root) == []


def test_the_disk_begins_early_and_the_cache_is_left_after_the_sync(
    store: FileStore, root: Path, fd: int, monkeypatch
) -> None:
    seen: list[tuple[object, ...]] = []
    advise, sync = os.posix_fadvise, os.fsync

    def name(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name

    def fadvise(fd: int, offset: int, length: int, advice: int) -> None:
        seen.append((name(fd), offset, length, advice == os.POSIX_FADV_DONTNEED))
        advise(fd, offset, length, advice)

    def fsync(fd: int) -> None:
        seen.append((name(fd), "sync"))
        sync(fd)

    upload = store.begin("big", 2 << 20, {"part_size": str(1 << 20)})
    data = f"{upload.token}.data"
    body = BytesSource(bytes(1 << 20))
    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    monkeypatch.setattr(os, "fsync", fsync)
    parts = [store.put_part(upload, number, body) for number in (1, 2)]
    store.complete(upload, parts)
    mib = 1 << 20
    expected = [(data, 0, mib, True), (data, mib, mib, True), (data, "sync"), ("big", 0, 0, True)]
    assert [each for each in seen if each[0] in (data, "big")] == expected
    seen.clear()
    store.put("k", body)
    store.put("small", BytesSource(b"read again soon"))
    assert [each for each in seen if len(each) > 2] == [("k", 0, 0, True)]


# ---- many at once


def test_uploads_at_once_do_not_mix(store: FileStore, shard: Path, fd: int) -> None:
    begun = {key: begin(store, key) for key in ("a", "b", "c")}

    def send(key: str, number: int, offset: int, length: int) -> tuple[str, Part]:
        return key, store.put_part(begun[key], number, FileSlice(fd, offset, length, key))

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(send, key, *piece) for piece in pieces() for key in begun]
        sent = [job.result() for job in jobs]
    for key, upload in begun.items():
        parts = [part for other, part in sent if other == key]
        assert store.complete(upload, parts[::-1]).crc32c == crc32c(shard.read_bytes())
        assert combine_all((part.crc32c, part.size) for part in parts) == crc32c(store.get(key)[0])


@pytest.mark.parametrize("who", ["this process", "another"])
def test_an_upload_that_is_aborted_under_a_part_stays_gone(
    store: FileStore, root: Path, fd: int, who: str
) -> None:
    upload = begin(store)
    aborts = store if who == "this process" else FileStore(str(root))
    source = FileSlice(fd, 0, PART, "shard", lambda _: aborts.abort(upload))
    with pytest.raises(NotFoundError):
        store.put_part(upload, 1, source)
    assert left_over(root) == []


def test_an_upload_that_is_aborted_under_its_completion_is_gone(
    store: FileStore, root: Path, fd: int, monkeypatch
) -> None:
    upload = begin(store)
    parts = put_parts(store, upload, fd)
    sync = os.fsync

    def fsync(fd: int) -> None:
        sync(fd)
        FileStore(str(root)).abort(upload)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(NotFoundError):
        store.complete(upload, parts)
    assert list(store.list("")) == left_over(root) == []


def opened(root: Path) -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return [link for link in links if str(root) in link]


def test_no_end_of_an_upload_leaves_a_file_open(store: FileStore, root: Path, fd: int) -> None:
    completed, aborted, abandoned, kept = (begin(store, key) for key in "abcd")
    parts = [put_parts(store, upload, fd) for upload in (completed, aborted, abandoned, kept)]
    assert len(opened(root)) == 4
    store.complete(completed, parts[0])
    store.abort(aborted)
    FileStore(str(root)).abort(abandoned)
    begin(store, "e")
    assert opened(root) == [str(root / TEMPORARY / f"{kept.token}.data")]
    store.close()
    assert opened(root) == []
    put_parts(store, kept, fd)
    assert len(opened(root)) == 1


# ---- as NFS does it


def test_a_link_whose_answer_was_lost_is_our_own(store: FileStore, root: Path, monkeypatch) -> None:
    link = os.link

    def lost(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "sent twice")

    monkeypatch.setattr(os, "link", lost)
    store.put("k", BytesSource(b"ours"), condition=IfAbsent())
    assert store.get("k")[0] == b"ours"
    with pytest.raises(PreconditionError):
        store.put("k", BytesSource(b"second"), condition=IfAbsent())
    assert left_over(root) == []


def test_a_link_that_another_host_made_first_is_not_ours(
    store: FileStore, root: Path, monkeypatch
) -> None:
    def raced(source: str, target: str) -> None:
        Path(target).write_bytes(b"theirs")
        raise FileExistsError(errno.EEXIST, "exists")

    monkeypatch.setattr(os, "link", raced)
    with pytest.raises(PreconditionError):
        store.put("k", BytesSource(b"ours"), condition=IfAbsent())
    assert store.get("k")[0] == b"theirs"


def test_a_rename_whose_answer_was_lost_is_done(store: FileStore, monkeypatch) -> None:
    store.put("k", BytesSource(b"before"))
    version = store.head("k").version
    replace = os.replace

    def lost(source: str, target: str) -> None:
        replace(source, target)
        raise FileNotFoundError(errno.ENOENT, "sent twice")

    monkeypatch.setattr(os, "replace", lost)
    info = store.put("k", BytesSource(b"after"), condition=IfVersion(version))
    assert (store.get("k")[0], store.head("k").version) == (b"after", info.version)


def test_a_rename_that_found_nothing_is_an_error(store: FileStore, monkeypatch) -> None:
    store.put("k", BytesSource(b"before"))
    monkeypatch.setattr(os, "replace", fails(errno.ENOENT))
    with pytest.raises(RefusedError):
        store.put("k", BytesSource(b"after"))
    assert store.get("k")[0] == b"before"


def test_what_nfs_keeps_of_a_removed_file_is_no_object(store: FileStore, root: Path) -> None:
    store.put("folder/k", BytesSource(b"x"))
    name = ".nfs00000000001a2b3c00000004"
    (root / "folder" / name).write_bytes(b"removed, and still open somewhere")
    assert [info.key for info in store.list("")] == ["folder/k"]
    for call in (store.get, store.head, store.delete, lambda key: store.put(key, BytesSource(b""))):
        with pytest.raises(RefusedError, match="NFS"):
            call(f"folder/{name}")
    store.put("folder/.nfs-of-mine", BytesSource(b"x"))
    assert len(list(store.list("folder/"))) == 2


def test_a_mount_without_locks_is_named(store: FileStore, root: Path, monkeypatch) -> None:
    monkeypatch.setattr(fcntl, "flock", fails(errno.ENOLCK))
    with pytest.raises(RefusedError, match="mount NFS with locks"):
        store.put("k", BytesSource(b"x"))
    assert list(store.list("")) == left_over(root) == []
