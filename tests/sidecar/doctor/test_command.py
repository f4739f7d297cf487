"""``ds-ckpt doctor``, as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ds_ckpt_sidecar.commands import app
from ds_ckpt_sidecar.examine.users import ourselves
from ds_ckpt_store.stores import open_store
from tests.sidecar.doctor.support import (
    SIDECAR,
    STATES,
    own,
    share,
    umask,
)
from tests.sidecar.handoff import Trainer


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_the_command_takes_either_half_from_options_or_the_environment(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = (tmp_path / "store").as_uri()
    monkeypatch.setenv("DS_CKPT_VOLUME", trainer.volume.path)
    alone = run()
    assert alone.exit_code == 0
    assert trainer.volume.path in alone.stdout
    assert "all is well" in alone.stdout
    monkeypatch.delenv("DS_CKPT_VOLUME")
    monkeypatch.setenv("DS_CKPT_DESTINATION", url)
    store = run()
    assert store.exit_code == 0
    assert url in store.stdout
    both = json.loads(run("--volume", trainer.volume.path, "--json").stdout)
    assert both["counts"]["error"] == both["counts"]["warning"] == 0
    assert {each["what"] for each in both["findings"]} >= {trainer.volume.path, url}
    assert both["user"] == str(ourselves())


def test_the_command_exits_1_for_an_error_and_2_for_wrong_use(tmp_path: Path) -> None:
    missing = run("--volume", str(tmp_path / "none"))
    assert missing.exit_code == 1
    assert "do: mount the volume" in missing.stdout
    assert "1 error" in missing.stdout
    nothing = run()
    assert nothing.exit_code == 2
    assert "DS_CKPT_VOLUME" in nothing.output
    wrong = run("--volume", str(tmp_path), "--destination", "s3:///nothing")
    assert wrong.exit_code == 2
    assert "names no bucket" in wrong.stdout
    assert f"ok       {tmp_path}" in wrong.stdout, "the other half is looked at all the same"
    within = run("--volume", str(tmp_path), "--destination", (tmp_path / "s").as_uri())
    assert within.exit_code == 2
    assert "keep them apart" in within.stdout


def test_the_run_that_the_trainer_names_is_the_one_that_asks(
    trainer: Trainer, tmp_path: Path
) -> None:
    url = (tmp_path / "store").as_uri()
    store = open_store(url)
    own(store, "mine", unfinished=True)
    trainer.say()  # of the run "run"
    ran = run("--volume", trainer.volume.path, "--destination", url)
    assert ran.exit_code == 1
    assert "we are run 'run'" in ran.stdout
    same = run("--volume", trainer.volume.path, "--destination", url, "--run-id", "mine")
    assert same.exit_code == 0


def test_the_real_command_as_another_user_names_the_file(trainer: Trainer, tmp_path: Path) -> None:
    with umask(0o077):
        trainer.save("step1", {STATES: 100})
    share(trainer)
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    code = (
        "import os, ds_ckpt_sidecar.commands, ds_ckpt_store.stores.file\n"
        f"os.setgroups([]); os.setgid({SIDECAR}); os.setuid({SIDECAR})\n"
        "from ds_ckpt_sidecar.cli import main\nmain()"
    )
    command = [sys.executable, "-c", code, "doctor", "--volume", trainer.volume.path]
    command += ["--destination", (tmp_path / "store").as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1, ran.stderr
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("error"))
    assert STATES in line
    assert "mode 0600" in line
    assert f"doctor, as uid {SIDECAR}" in ran.stdout
