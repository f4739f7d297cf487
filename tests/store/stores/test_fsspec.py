"""The adapter over fsspec: what it says of URLs and options, and what it does when things break."""

from __future__ import annotations

import io
import json
import os
import random
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, known_implementations

from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.errors import (
    AccessError,
    CorruptionError,
    NotFoundError,
    RefusedError,
    SettingsError,
    ShardChangedError,
    TransientError,
    WeakStoreError,
)
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.check_then_put import CheckThenPut
from ds_ckpt_store.stores.fsspec import FsspecStore
from ds_ckpt_store.stores.fsspec.store import TEMPORARY
from ds_ckpt_store.stores.port import BytesSource, IfAbsent, Proof, Store
from ds_ckpt_store.stores.probe import fit, probe
from ds_ckpt_store.stores.retry import RetryPolicy, RetryStore
from tests.faultproxy import Fault, FaultProxy
from tests.project.test_imports import run
from tests.servers_azure import Azure
from tests.servers_ftp import Ftp
from tests.store.stores.openers import OPENERS

MIB = 1 << 20
SECRET = "open-sesame"


def opened(url: str, environ: dict[str, str] | None = None, **options: Any) -> FsspecStore:
    store = open_store(url, environ or {}, **options)
    assert isinstance(store, FsspecStore)
    return store


@pytest.fixture
def local(tmp_path: Path) -> FsspecStore:
    return opened(f"local://{tmp_path}/root")


@pytest.fixture(params=["fsspec-local", "fsspec-ftp", "fsspec-sftp", "fsspec-abfs"])
def whole(request: pytest.FixtureRequest) -> Store:
    """A store in which an object appears whole, or not at all."""
    return OPENERS[request.param](request)()


def left_in_temporary(store: Store) -> list[str]:
    assert isinstance(store, FsspecStore)
    access = store._instances.take()
    try:
        return [str(entry["name"]) for entry in access.entries(f"{store._root}/{TEMPORARY}")]
    except FileNotFoundError:
        return []
    finally:
        store._instances.give_back(access)


class StreamSource:
    """Many bytes that are nowhere in memory; calls ``at`` with how many were given so far."""

    crc32c = 0

    def __init__(self, size: int, at: Callable[[int], None] = lambda _: None) -> None:
        self.size = size
        self._at = at

    def open(self) -> BinaryIO:
        size, at = self.size, self._at
        view = memoryview(random.Random(1).randbytes(MIB))

        class Reader(io.RawIOBase):
            given = 0

            def read(self, amount: int | None = -1) -> Any:
                at(self.given)
                piece = view[: min(MIB, size - self.given)]
                self.given += len(piece)
                return piece

        return Reader()  # type: ignore[return-value]


# ---- URLs and options


def test_an_unknown_kind_is_called_unknown_with_fsspec_and_without() -> None:
    with pytest.raises(SettingsError, match=r"unknown kind of store 'gopher'.*s3://.*fsspec"):
        open_store("gopher://x", {})
    ran = run(
        """
        from ds_ckpt_store.errors import SettingsError
        from ds_ckpt_store.stores import open_store
        try:
            open_store("gopher://x")
        except SettingsError as error:
            print(error)
        """,
        without=("fsspec",),
    )
    assert "unknown kind of store 'gopher'" in ran.stdout, ran.stderr
    assert "ds-ckpt-sidecar[fsspec]" in ran.stdout


def test_a_kind_whose_library_is_lacking_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking = {"class": "no_such_module.FileSystem", "err": "Install lackingfs to use lacking://"}
    monkeypatch.setitem(known_implementations, "lacking", lacking)
    with pytest.raises(SettingsError, match="Install lackingfs"):
        open_store("lacking://x/y", {})


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("memory://", "names no folder"),
        ("local:///", "names no folder"),
        ("local://folder/x", "three slashes"),
        ("memory://a/../b", "without '..'"),
        ("simplecache::memory://a/b", "chain"),
        ("memory://a?b=1", "no query"),
        ("ftp://host:port/x", "is no URL"),
    ],
)
def test_a_url_that_cannot_work_is_refused_at_once(url: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        open_store(url, {})


def test_a_password_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(SettingsError, match="DS_CKPT_FSSPEC_OPTIONS_FILE") as caught:
        open_store(f"ftp://user:{SECRET}@host/folder", {})
    assert SECRET not in str(caught.value)
    assert opened("ftp://user@host/folder/").url == "ftp://user@host/folder"


def test_options_come_from_the_environment_and_from_a_file(tmp_path: Path, ftp: Ftp) -> None:
    file = tmp_path / "options"
    file.write_text(json.dumps({"password": ftp.password}))
    environ = {
        "DS_CKPT_FSSPEC_OPTIONS": json.dumps({"password": "wrong", "encoding": "utf-8"}),
        "DS_CKPT_FSSPEC_OPTIONS_FILE": str(file),
    }
    assert list(opened(ftp.url(), environ).list("")) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DS_CKPT_FSSPEC_OPTIONS", f'{{"password": "{SECRET}"'),
        ("DS_CKPT_FSSPEC_OPTIONS", f'["{SECRET}"]'),
        ("DS_CKPT_FSSPEC_OPTIONS_FILE", "/no/such/file"),
        ("DS_CKPT_FSSPEC_BLOCK_MIB", "4"),
        ("DS_CKPT_FSSPEC_BLOCK_MIB", "2000"),
        ("DS_CKPT_FSSPEC_BLOCK_MIB", "8.5"),
    ],
)
def test_a_setting_that_cannot_work_is_named_and_no_option_shown(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name) as caught:
        open_store("memory://x/y", {name: value})
    assert SECRET not in str(caught.value)


def test_an_option_that_a_file_system_does_not_know_is_named_without_its_value() -> None:
    environ = {"DS_CKPT_FSSPEC_OPTIONS": json.dumps({"passwort": SECRET})}
    store = opened("abfs://container/run", environ)
    with pytest.raises(SettingsError, match="passwort") as caught:
        store.head("k")
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(store._options)


def test_a_message_of_a_file_system_shows_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    class Talkative(MemoryFileSystem):
        protocol = "talkative"

        def __init__(self, token: str = "", **options: Any) -> None:
            super().__init__(**options)
            self.token = token

        def info(self, path: str, **options: Any) -> Any:
            raise OSError(f"login with {self.token} failed")

    monkeypatch.setitem(_registry, "talkative", Talkative)
    environ = {"DS_CKPT_FSSPEC_OPTIONS": json.dumps({"token": SECRET})}
    with pytest.raises(TransientError, match="login with") as caught:
        opened("talkative://a/b", environ).head("k")
    assert SECRET not in str(caught.value)


def test_a_repository_without_a_revision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take what follows the @ in a checkpoint's folder for one."""

    class Repositories(MemoryFileSystem):
        protocol = "hf"

    monkeypatch.setitem(_registry, "hf", Repositories)
    with pytest.raises(SettingsError, match="hf://user/repo@main/folder"):
        open_store("hf://user/repo/folder", {})
    assert opened("hf://user/repo@main/folder").url == "hf://user/repo@main/folder"


def test_the_time_of_silence_is_given_to_what_takes_it() -> None:
    ftp = opened("ftp://host/x", stall_seconds=7.2)._options.arguments
    abfs = opened("abfs://host/x", stall_seconds=7.2)._options.arguments
    assert ftp["timeout"] == 8
    assert (abfs["connection_timeout"], abfs["read_timeout"]) == (8, 8)
    own = {"DS_CKPT_FSSPEC_OPTIONS": '{"timeout": 3}'}
    assert opened("ftp://host/x", own)._options.arguments["timeout"] == 3
    assert opened("local:///x")._options.arguments == {}


# ---- what is weaker


def test_the_probe_says_what_is_weaker_and_needs_leave(local: FsspecStore) -> None:
    findings = probe(local, random.Random(1))
    assert (findings.proof, findings.conditional_create, findings.swap) == (
        Proof.READ_BACK,
        False,
        False,
    )
    with pytest.raises(WeakStoreError) as caught:
        fit(local, findings)
    for words in ("no conditional create", "no uploads in parts", "read back", "one node alone"):
        assert words in str(caught.value)
    assert "If-None-Match was accepted" not in str(caught.value)
    assert isinstance(fit(local, findings, allow_weak=True), CheckThenPut)
    assert list(local.list("")) == []


# ---- objects appear whole


@pytest.mark.parametrize("error", [ShardChangedError("changed"), KeyError("odd")])
def test_a_source_that_fails_leaves_the_object_as_it_was(whole: Store, error: Exception) -> None:
    def fail(given: int) -> None:
        if given > 12 * MIB:
            raise error

    whole.put("old", BytesSource(b"before"))
    for key in ("old", "new"):
        with pytest.raises(type(error)) as caught:
            whole.put(key, StreamSource(20 * MIB, fail))
        assert caught.value is error
    assert whole.get("old")[0] == b"before"
    assert [info.key for info in whole.list("")] == ["old"]
    assert left_in_temporary(whole) == []


def test_a_source_that_is_shorter_than_it_says_makes_no_object(whole: Store) -> None:
    class Short(StreamSource):
        def open(self) -> BinaryIO:
            return StreamSource(self.size - 1).open()

    for size in (1000, 9 * MIB):
        with pytest.raises(CorruptionError, match="put 'new'"):
            whole.put("new", Short(size))
    assert list(whole.list("")) == []


def test_a_reader_sees_the_old_object_while_a_new_one_is_written(whole: Store) -> None:
    seen = set()

    def look(given: int) -> None:
        if given in (0, 10 * MIB, 19 * MIB):
            seen.add(whole.get("k")[0])
            seen.update(info.key.encode() for info in whole.list(""))

    whole.put("k", BytesSource(b"before"))
    info = whole.put("k", StreamSource(20 * MIB, look))
    assert seen == {b"before", b"k"}
    assert (info.size, whole.head("k").version) == (20 * MIB, info.version)


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    folder = tmp_path / "root" / TEMPORARY
    folder.mkdir(parents=True)
    for name, age in (("old.whole", 25), ("young.whole", 23), ("lock", 48)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age * 3600,) * 2)
    store = opened(f"local://{tmp_path}/root")
    assert list(store.list("")) == []
    store.put("k", BytesSource(b"data"))
    assert {path.name for path in folder.iterdir()} == {"young.whole", "lock"}
    with pytest.raises(RefusedError):
        store.get(f"{TEMPORARY}/young.whole")


def test_a_file_is_not_moved_into_a_folder_of_its_name(local: FsspecStore) -> None:
    local.put("folder/a", BytesSource(b"data"))
    with pytest.raises(RefusedError, match="a folder of that name"):
        local.put("folder", BytesSource(b"data"))
    assert [info.key for info in local.list("")] == ["folder/a"]


def test_a_destination_whose_parent_is_not_there_is_refused(tmp_path: Path) -> None:
    store = opened(f"local://{tmp_path}/mount/run")
    with pytest.raises(RefusedError, match=f"no folder {tmp_path}/mount"):
        store.put("k", BytesSource(b"data"))
    with pytest.raises(RefusedError, match=f"no folder {tmp_path}/mount"):
        list(store.list(""))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_somebody_removed_is_made_again(local: FsspecStore, tmp_path: Path) -> None:
    local.put("a/k", BytesSource(b"1"))
    (tmp_path / "root/a/k").unlink()
    (tmp_path / "root/a").rmdir()
    patient = RetryStore(local, SystemClock(), random.Random(1), policy=RetryPolicy(base=0.01))
    patient.put("a/k", BytesSource(b"2"))
    assert local.get("a/k")[0] == b"2"


@pytest.mark.parametrize("key", ["", "a//b", "/a", "../a", "a/.", "a\r\nDELE b", "a\0"])
def test_a_key_that_is_no_path_below_the_folder_is_refused(local: FsspecStore, key: str) -> None:
    with pytest.raises(RefusedError):
        local.put(key, BytesSource(b"data"))


def test_a_request_holds_no_more_memory_than_it_says(whole: Store) -> None:
    whole.put("warm", StreamSource(9 * MIB))
    tracemalloc.start()
    try:
        whole.put("k", StreamSource(48 * MIB))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MIB + whole.capabilities.request_memory + MIB // 2
    assert whole.head("k").size == 48 * MIB


def test_an_object_that_needs_too_many_blocks_is_refused_before_it_is_sent() -> None:
    store = opened("abfs://container/run", {"DS_CKPT_FSSPEC_BLOCK_MIB": "5"})
    limit = store.capabilities.limits.max_put
    assert limit == 50_000 * MIB
    with pytest.raises(RefusedError, match="DS_CKPT_FSSPEC_BLOCK_MIB"):
        store.put("k", StreamSource(limit + 1))


# ---- FTP: one connection, and answers that must not be misread


@pytest.fixture
def ftp_store(ftp: Ftp) -> Iterator[FsspecStore]:
    store = opened(ftp.url(), ftp.environ)
    yield store
    store.close()


def test_many_threads_use_connections_of_their_own(ftp_store: FsspecStore) -> None:
    barrier = Barrier(8)

    def work(number: int) -> bool:
        data = random.Random(number).randbytes(2 * MIB + number)
        found = bytearray()
        barrier.wait()
        ftp_store.put(f"many/{number}", BytesSource(data))
        ftp_store.read(f"many/{number}", 5, 2 * MIB - 5, found.extend)
        return ftp_store.get(f"many/{number}")[0] == data and found == data[5 : 2 * MIB]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert len(list(ftp_store.list("many/"))) == 8


@pytest.mark.parametrize("command", ["MLSD", "MLST", "RETR", "STOR"])
@pytest.mark.parametrize("answer", ["425 Cannot open a data connection.", ""])
def test_a_failure_is_never_taken_for_absence(
    ftp: Ftp,
    ftp_store: FsspecStore,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    answer: str,
) -> None:
    """Without an answer the connection is closed."""
    ftp_store.put("a/k", BytesSource(b"data"))

    def fail(handler: Any, _: str, mode: str = "w") -> None:
        if answer:
            handler.respond(answer)
        else:
            handler.close()

    calls = {
        "MLSD": [lambda: list(ftp_store.list("")), lambda: list(ftp_store.list("a/"))],
        "MLST": [lambda: ftp_store.head("a/k"), lambda: ftp_store.get("a/k")],
        "RETR": [lambda: ftp_store.get("a/k"), lambda: ftp_store.read("a/k", 1, 2, print)],
        "STOR": [lambda: ftp_store.put("a/k", BytesSource(b"new"))],
    }
    with monkeypatch.context() as patch:
        patch.setattr(ftp.handler, f"ftp_{command}", fail)
        for call in calls[command]:
            with pytest.raises(TransientError):
                call()
    assert ftp_store.get("a/k")[0] == b"data"
    assert [info.key for info in ftp_store.list("")] == ["a/k"]


def test_what_is_forbidden_is_not_taken_for_absent(
    ftp: Ftp, ftp_store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers answer 550 to both."""
    ftp_store.put("a/k", BytesSource(b"data"))
    for command in ("MLSD", "DELE", "RETR", "STOR"):
        monkeypatch.setattr(
            ftp.handler, f"ftp_{command}", lambda handler, *_: handler.respond("550 No.")
        )
    for call in (
        lambda: list(ftp_store.list("a/")),
        lambda: ftp_store.delete("a/k"),
        lambda: ftp_store.get("a/k"),
        lambda: ftp_store.put("a/k", BytesSource(b"new")),
    ):
        with pytest.raises(AccessError):
            call()
    ftp_store.delete("a/absent")
    assert list(ftp_store.list("absent/")) == []


def test_a_server_that_does_not_replace_is_helped(
    ftp: Ftp, ftp_store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = ftp.handler.ftp_RNTO

    def careful(handler: Any, path: str) -> None:
        if os.path.lexists(path):
            handler.respond("553 Exists.")
        else:
            replace(handler, path)

    monkeypatch.setattr(ftp.handler, "ftp_RNTO", careful)
    for data in (b"one", b"two"):
        ftp_store.put("k", BytesSource(data))
    assert ftp_store.get("k")[0] == b"two"


def test_a_wrong_password_is_told_without_it(ftp: Ftp) -> None:
    store = opened(ftp.url(), {"DS_CKPT_FSSPEC_OPTIONS": json.dumps({"password": SECRET})})
    with pytest.raises(AccessError, match="DS_CKPT_FSSPEC_OPTIONS") as caught:
        store.head("k")
    assert SECRET not in str(caught.value)


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        store = opened(f"ftp://127.0.0.1:{port}/x", stall_seconds=1)
        started = time.monotonic()
        with pytest.raises(TransientError):
            store.head("k")
    assert time.monotonic() - started < 10
    with pytest.raises(TransientError):  # and nobody listens any more
        store.head("k")


def test_versions_of_ftp_are_as_fine_as_a_second(ftp_store: FsspecStore) -> None:
    first = ftp_store.put("k", BytesSource(b"one")).version
    time.sleep(1.1)
    assert ftp_store.put("k", BytesSource(b"two")).version != first


# ---- an object store: its errors come through two libraries


def test_what_an_object_store_refuses_is_not_taken_for_absent(azurite: Azure) -> None:
    """And one that was not there is, however it is asked for."""
    container = azurite.container()

    def opened_at(server: Azure) -> FsspecStore:
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={server.account};"
            f"AccountKey={server.key};BlobEndpoint={server.endpoint};"
        )
        options = json.dumps({"connection_string": connection})
        return opened(f"abfs://{container}/run", {"DS_CKPT_FSSPEC_OPTIONS": options})

    opened_at(azurite).put("a/k", BytesSource(b"data"))
    address = urlsplit(azurite.origin)
    with FaultProxy(str(address.hostname), address.port or 0) as proxy:
        store = opened_at(azurite.through(proxy.url))
        calls: dict[str, Callable[[], object]] = {
            "GET .*comp=list": lambda: list(store.list("")),
            "HEAD ": lambda: store.head("a/k"),
            "PUT ": lambda: store.put("a/k", BytesSource(b"new")),
            "DELETE ": lambda: store.delete("a/k"),
        }
        for match, call in calls.items():
            fault = proxy.add(Fault(match, "status", status=403, times=1))
            with pytest.raises(AccessError):
                call()
            assert proxy.hits(fault) == 1
        assert store.get("a/k")[0] == b"data"
        store.delete("a/k")
        store.delete("a/k")
        assert list(store.list("")) == []


def test_a_container_that_is_not_there_is_not_made(azurite: Azure) -> None:
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={azurite.account};"
        f"AccountKey={azurite.key};BlobEndpoint={azurite.endpoint};"
    )
    options = json.dumps({"connection_string": connection})
    store = opened("abfs://no-such-container/run", {"DS_CKPT_FSSPEC_OPTIONS": options})
    for size in (10, 2 * MIB):
        with pytest.raises(RefusedError, match="make the bucket or container"):
            store.put("k", StreamSource(size))
    assert "no-such-container" not in [each.name for each in azurite.service().list_containers()]


# ---- conditions for one writer


def test_conditions_are_judged_before_the_write(local: FsspecStore) -> None:
    store = CheckThenPut(local)
    with pytest.raises(RefusedError):
        local.put("k", BytesSource(b"1"), condition=IfAbsent())
    with pytest.raises(NotFoundError):
        store.get("k")
    store.put("k", BytesSource(b"1"), condition=IfAbsent())
    assert store.get("k")[0] == b"1"
