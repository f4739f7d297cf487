"""The demo leaves no process behind, and says why one failed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from ds_ckpt_sidecar.demo.processes import Group, Process, clean_environment
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.errors import DemoError

WITH_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def python(name: str, code: str, folder: Path) -> Process:
    return Process(name, ["-c", code], dict(os.environ), folder)


def ends(process: psutil.Process, seconds: float) -> bool:
    """Whether a process that is not our child ends in time; one that nobody reaps has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_leaving_the_group_kills_children_too(tmp_path: Path) -> None:
    with Group(SystemClock()) as group:
        process = group.add(python("parent", WITH_CHILD, tmp_path))
        group.wait_until(lambda: process.log.read_text().endswith("\n"), 30, "the child")
        child = psutil.Process(int(process.log.read_text()))
        assert not ends(child, 0.1)
    assert process.exit_code() == -9
    assert ends(child, 10)


def test_the_failure_of_one_ends_the_wait_and_shows_its_log(tmp_path: Path) -> None:
    with Group(SystemClock()) as group:
        group.add(python("bystander", "import time; time.sleep(60)", tmp_path))
        group.add(python("loser", "raise SystemExit('no such luck')", tmp_path))
        with pytest.raises(DemoError, match="loser ended with exit code 1:\nno such luck"):
            group.wait_until(lambda: False, 30, "never")


def test_a_wait_in_vain_says_for_what(tmp_path: Path) -> None:
    with Group(SystemClock()) as group:
        group.add(python("idler", "import time; time.sleep(60)", tmp_path))
        with pytest.raises(DemoError, match="in vain for better times"):
            group.wait_until(lambda: False, 0.1, "better times")


def test_settings_and_credentials_of_the_user_are_kept_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "production")
    monkeypatch.setenv("DS_CKPT_DESTINATION", "s3://production")
    environ = clean_environment({"DS_CKPT_RUN_ID": "demo"})
    assert "AWS_PROFILE" not in environ
    assert "DS_CKPT_DESTINATION" not in environ
    assert environ["DS_CKPT_RUN_ID"] == "demo"
    assert environ["PATH"] == os.environ["PATH"]
