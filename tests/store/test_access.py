"""What is said of a volume that takes no files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from ds_ckpt_sidecar.console import errors
from ds_ckpt_store.contract import access


@pytest.mark.parametrize(
    ("number", "inodes", "blocks", "said"),
    [
        (errno.EROFS, 5, 5, "mounted read-only: take readOnly: true out"),
        (errno.ENOSPC, 0, 5, "no inodes left"),
        (errno.ENOSPC, 5, 0, "is full"),
        (errno.ENOSPC, 0, 0, "is full"),
    ],
)
def test_a_volume_that_takes_no_files_is_told_with_what_to_do(
    number: int,
    inodes: int,
    blocks: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = SimpleNamespace(f_files=10, f_favail=inodes, f_bavail=blocks)
    monkeypatch.setattr(os, "statvfs", lambda _: left)
    with pytest.raises(typer.Exit) as ended, errors():
        raise OSError(number, os.strerror(number), str(tmp_path / "not" / "there"))
    assert ended.value.exit_code == 1
    assert said in capsys.readouterr().err


def test_a_filesystem_that_counts_no_inodes_has_not_run_out_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=0, f_favail=0, f_bavail=5))
    error = OSError(errno.ENOSPC, "no space", str(tmp_path))
    assert "inodes" not in access.unwritable(error)


def test_of_another_error_nothing_is_said(tmp_path: Path) -> None:
    assert access.unwritable(OSError(errno.EIO, "broken", str(tmp_path))) == ""
    assert access.unwritable(OSError(errno.ENOSPC, "no space")) == ""
