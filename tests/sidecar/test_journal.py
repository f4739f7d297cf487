"""The agent's memory is a cache: damaged, full or gone, it costs work and nothing else."""

from __future__ import annotations

import contextlib
import os
import pickle
import sqlite3
import stat
import tempfile
from pathlib import Path

import pytest

from ds_ckpt_sidecar.journal import Entry, Journal
from ds_ckpt_store.contract.manifest import SaveState
from ds_ckpt_store.stores.port import Part, Upload
from tests.store.transfer.support import TickingClock

SAVE = "018bcfe56800-0000000000000001"
GROUP = 65532


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "journal.db")


def filled(path: str) -> None:
    journal = Journal(path)
    for number in range(300):
        journal.set_state(f"{number:012x}-{number:016x}", "uploading", "x" * 50)
    log = journal.log(SAVE)
    log.begin("k", Upload("k", "token"), 5)
    log.add_part("k", Part(1, 5, 0xFFFFFFFF, "etag"))
    log.add_stored("other", "v1")
    journal.close()


def test_what_was_written_is_there_after_a_restart(path: str) -> None:
    filled(path)
    journal = Journal(path)
    assert len(journal.save_ids()) == 300
    log = journal.log(SAVE)
    assert log.upload("k") == (Upload("k", "token"), 5)
    assert log.parts("k") == [Part(1, 5, 0xFFFFFFFF, "etag")]
    assert log.stored("other") == "v1"
    log.add_stored("k", "v2")
    assert (log.upload("k"), log.parts("k")) == (None, [])
    journal.forget(SAVE)
    assert log.stored("k") is None
    journal.close()


@pytest.mark.parametrize("data", [b"", b"not a database at all" * 100, b"SQLite format 3\x00"])
def test_a_journal_that_is_no_database_is_begun_anew(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)
    warnings: list[str] = []
    journal = Journal(path, warnings.append)
    journal.set_state(SAVE, "stored")
    journal.close()
    assert bool(warnings) == bool(data)
    again = Journal(path)
    entry = again.entry(SAVE)
    assert entry is not None
    assert entry.state == "stored"
    again.close()


def test_a_journal_that_is_damaged_in_its_middle_is_begun_anew(path: str) -> None:
    filled(path)
    data = bytearray(Path(path).read_bytes())
    assert len(data) > 3 * 4096
    data[4096:] = b"\xa5" * (len(data) - 4096)  # all but the page that is read at opening
    Path(path).write_bytes(data)
    warnings: list[str] = []
    journal = Journal(path, warnings.append)
    assert journal.entry(SAVE) is None
    assert journal.save_ids() == []
    assert journal.uploads(SAVE) == []
    assert journal.log(SAVE).parts("k") == []
    journal.set_state(SAVE, "stored")
    assert journal.entry(SAVE) is not None
    journal.close()
    assert "nothing is lost" in warnings[0]


def test_a_journal_of_a_newer_version_is_set_aside(path: str) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version=99")
    database.close()
    warnings: list[str] = []
    Journal(path, warnings.append).close()
    assert "newer" in warnings[0]
    assert Path(f"{path}.damaged").exists()


def test_a_folder_that_is_not_there_leaves_the_memory(tmp_path: Path) -> None:
    warnings: list[str] = []
    journal = Journal(str(tmp_path / "no/such/journal.db"), warnings.append)
    journal.set_state(SAVE, "stored")
    assert journal.entry(SAVE) is not None
    assert not journal.durable
    assert "in memory" in warnings[0]
    journal.close()


@pytest.mark.parametrize("killed", [True, False])
def test_an_agent_of_another_user_of_the_group_goes_on_with_it(killed: bool) -> None:
    """``sidecar.runAsUser`` was changed on a volume that stays; the first agent was killed."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory(prefix="journal-") as folder:
        os.chown(folder, 0, GROUP)
        os.chmod(folder, 0o2775)
        path = f"{folder}/journal.db"
        assert _as_user(1001, path, "uploading", killed=killed) == []
        assert os.stat(path).st_uid == 1001
        modes = {stat.S_IMODE(each.stat().st_mode) for each in Path(folder).iterdir()}
        assert modes == {0o664}
        assert len(os.listdir(folder)) == (3 if killed else 1)
        assert _as_user(1002, path, "stored", killed=killed) == []
        journal = Journal(path)
        entry = journal.entry(SAVE)
        assert entry is not None
        assert (entry.state, journal.entry("1001")) == ("stored", Entry("uploading", ""))
        journal.close()


def _as_user(uid: int, path: str, state: SaveState, *, killed: bool) -> list[str]:
    """What a journal says of itself that a process of another user writes with umask 022."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        warnings = ["it has died"]
        with contextlib.suppress(BaseException):
            os.umask(0o022)
            os.setgroups([GROUP])
            os.setgid(GROUP)
            os.setuid(uid)
            warnings.clear()
            journal = Journal(path, warnings.append)
            journal.set_state(SAVE, state)
            journal.set_state(str(uid), state)
            if not killed:
                journal.close()
        os.write(writer, pickle.dumps(warnings))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        said: list[str] = pickle.load(file)
    os.waitpid(child, 0)
    return said


def test_a_state_that_we_do_not_know_is_no_state(path: str) -> None:
    Journal(path).close()
    database = sqlite3.connect(path)
    database.execute("INSERT INTO saves VALUES (?, 'dancing', '')", (SAVE,))
    database.commit()
    database.close()
    journal = Journal(path)
    assert journal.entry(SAVE) is None
    journal.close()


# ---- what is written when


def seen_by_another(path: str) -> int:
    """Parts and objects that are written, as a process that starts now finds them."""
    other = sqlite3.connect(path)
    try:
        return int(
            other.execute(
                "SELECT (SELECT count(*) FROM parts) + (SELECT count(*) FROM stored)"
            ).fetchone()[0]
        )
    finally:
        other.close()


def test_a_burst_of_small_shards_is_written_by_the_half_second(path: str) -> None:
    clock = TickingClock()
    journal = Journal(path, clock=clock)
    log = journal.log(SAVE)
    log.add_stored("0", "v")
    assert seen_by_another(path) == 1, "a single one is written at once"
    for number in range(1, 100):
        log.add_stored(str(number), "v")
    assert seen_by_another(path) == 1
    assert log.stored("99") == "v", "and known at once"
    clock.sleep(0.6)
    journal.flush()
    assert seen_by_another(path) == 100
    journal.close()


def test_parts_that_come_slowly_are_each_written_at_once(path: str) -> None:
    clock = TickingClock()
    journal = Journal(path, clock=clock)
    log = journal.log(SAVE)
    log.begin("k", Upload("k", "token"), 5)
    for number in range(1, 5):
        clock.sleep(3)
        log.add_part("k", Part(number, 5, 0, "etag"))
        assert seen_by_another(path) == number
    journal.close()


def test_a_state_takes_along_what_is_not_written_yet(path: str) -> None:
    journal = Journal(path, clock=TickingClock())
    log = journal.log(SAVE)
    for number in range(10):
        log.add_stored(str(number), "v")
    journal.set_state(SAVE, "stored")
    assert seen_by_another(path) == 10
    for number in range(10, 20):
        log.add_stored(str(number), "v")
    journal.close()
    assert seen_by_another(path) == 20


def test_a_shard_that_is_new_costs_one_statement(path: str) -> None:
    journal = Journal(path, clock=TickingClock())
    log = journal.log(SAVE)
    log.add_stored("first", "v")
    statements: list[str] = []
    journal._db.set_trace_callback(statements.append)
    for number in range(100):
        assert log.stored(str(number)) is None
        log.add_stored(str(number), "v")
    assert len([line for line in statements if not line.startswith("BEGIN")]) == 100
    journal.close()


def test_two_logs_of_one_save_know_the_same(path: str) -> None:
    journal = Journal(path)
    one, other = journal.log(SAVE), journal.log(SAVE)
    assert other.stored("k") is None
    one.add_stored("k", "v")
    assert other.stored("k") == "v"
    other.forget("k")
    assert one.stored("k") is None
    journal.forget(SAVE)
    assert journal.log(SAVE).stored("k") is None
    journal.close()


def test_a_journal_that_another_process_holds_locked_is_left_for_memory_and_not_waited_for(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two agents on a volume whose lock does not hold."""
    filled(path)
    warnings: list[str] = []
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda name, **options: connect(name, timeout=0.05, **options)
    )
    journal = Journal(path, warnings.append)
    other = connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    journal.set_state(SAVE, "stored")
    assert "going on in memory" in warnings[0]
    entry = journal.entry(SAVE)
    assert entry is not None
    assert entry.state == "stored"
    journal.close()
    other.close()
