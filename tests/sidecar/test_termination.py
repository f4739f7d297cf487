"""The termination message: what it says, how long it is, and that writing it harms nobody."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ds_ckpt_sidecar.observe import termination
from ds_ckpt_sidecar.observe.termination import MOST_BYTES, TerminationMessage, compose
from tests.sidecar.world import Lines


def lines_of(message: bytes) -> list[str]:
    return message.decode().splitlines()


def test_first_comes_what_is_durable_then_what_is_not_then_what_to_do() -> None:
    assert lines_of(compose("a", ["c: uploading, 1 of 2 MiB", "b: discovered, x"], "do this")) == [
        "durable: a",
        "not durable: c: uploading, 1 of 2 MiB",
        "not durable: b: discovered, x",
        "do this",
    ]


def test_it_has_no_more_bytes_than_the_kubelet_reads_and_counts_what_it_leaves_out() -> None:
    message = compose("a", [f"tag-{n}: uploading, {'x' * 60}" for n in range(200)], "do this")
    assert MOST_BYTES - 120 <= len(message) <= MOST_BYTES
    first, *middle, rest, last = lines_of(message)
    assert (first, last) == ("durable: a", "do this")
    assert middle[0].startswith("not durable: tag-0: "), "the newest stay"
    assert rest == f"and {200 - len(middle)} more that are not durable"


@pytest.mark.parametrize("text", ["x" * 5000, "ü" * 5000, "\U0001f4a5" * 5000])
def test_no_line_crowds_out_the_others_and_no_character_is_cut(text: str) -> None:
    message = compose(text, [text] * 50, text)
    assert len(message) <= MOST_BYTES
    first, *_, last = lines_of(message)
    assert first.startswith("durable: ")
    assert first.endswith("...")
    assert last.endswith("...")


def test_a_name_with_a_line_break_makes_no_line_of_its_own() -> None:
    message = compose("a\nnot durable: forged", ["b\r\ndurable: forged\x1b[2J"], "x\udcff")
    assert len(lines_of(message)) == 3


def test_it_is_written_over_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a much longer text than what comes after it\n")
    inode = path.stat().st_ino
    message = TerminationMessage(str(path), Lines())
    message.write(b"short\n")
    assert path.read_bytes() == b"short\n"
    assert path.stat().st_ino == inode, "it is a mount point and cannot be replaced"


def test_the_same_is_not_written_twice(tmp_path: Path) -> None:
    path = tmp_path / "log"
    message = TerminationMessage(str(path), Lines())
    message.write(b"one\n")
    path.unlink()
    message.write(b"one\n")
    assert not path.exists()
    message.write(b"two\n")
    assert path.read_bytes() == b"two\n"


def test_a_path_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    log = Lines()
    message = TerminationMessage(str(tmp_path / "no" / "log"), log)
    message.write(b"one\n")
    message.write(b"two\n")
    (said,) = log.of("termination.unwritten")
    assert said["error"] == f"{tmp_path}/no/log: No such file or directory"
    (tmp_path / "no").mkdir()
    message.write(b"three\n")
    assert (tmp_path / "no" / "log").read_bytes() == b"three\n"


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    log = Lines()
    TerminationMessage(str(path), log).write(b"one\n")
    assert len(log.of("termination.unwritten")) == 1
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_without_a_path_nothing_is_written() -> None:
    log = Lines()
    TerminationMessage("", log).write(b"one\n")
    assert not log.lines


def test_outside_a_pod_there_is_no_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination, "DEFAULT", str(tmp_path / "log"))
    assert termination.default_path() == ""
    (tmp_path / "log").touch()
    assert termination.default_path() == str(tmp_path / "log")


def test_a_long_reason_that_many_saves_share_is_said_once_so_that_all_are_named() -> None:
    reason = "discovered, " + "the store is away " * 20
    message = compose("nothing", [f"step{n}: {reason}" for n in range(69)], "do this").decode()
    assert len(message.encode()) <= MOST_BYTES
    lines = message.splitlines()
    assert lines[1].startswith("not durable: step0: discovered, the store")
    assert lines[2:-1] == [f"not durable: step{n}: the same" for n in range(1, 69)]
    assert lines[-1] == "do this"


def test_reasons_that_differ_are_each_said() -> None:
    long = "x" * 500
    told = [f"a: {long}", f"b: {long}", *(f"c{n}: {n}{long}" for n in range(9))]
    lines = compose("nothing", told, "do this").decode().splitlines()
    assert lines[2] == "not durable: b: the same"
    assert lines[3].startswith("not durable: c0: 0xxx")
    assert lines[-2].startswith("and ")
