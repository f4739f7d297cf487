"""Settings, and the exchange of a process that is alone or not ready."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import ds_ckpt_hook
from ds_ckpt_hook.errors import ExchangeError
from ds_ckpt_hook.exchange import Alone, connect, values_of
from ds_ckpt_hook.settings import Settings, locate
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.errors import SettingsError
from tests.hook.standin import Engine, manifests


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ds_ckpt_hook, "_process", {})
    for name in ("DS_CKPT_DIR", "DS_CKPT_RUN_ID", "DS_CKPT_TIMEOUT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_everything_can_come_from_the_environment() -> None:
    settings = Settings.from_environ(
        {"DS_CKPT_DIR": "/v", "DS_CKPT_RUN_ID": "r", "DS_CKPT_TIMEOUT": "7.5"}
    )
    assert settings == Settings(directory="/v", run_id="r", exchange_timeout=7.5)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_wrong_time_names_its_variable(text: str) -> None:
    with pytest.raises(SettingsError, match="DS_CKPT_TIMEOUT"):
        Settings.from_environ({"DS_CKPT_TIMEOUT": text})


def test_a_volume_is_the_mounted_folder_or_else_the_save_dir(tmp_path: Path) -> None:
    inside = locate(tmp_path / "runs/a", Settings(directory=str(tmp_path)), Filesystem())
    assert (inside.volume.path, inside.root) == (str(tmp_path), "runs/a")
    assert inside.save_dir == str(tmp_path / "runs/a")
    outside = locate(tmp_path, Settings(directory=str(tmp_path / "runs")), Filesystem())
    assert (outside.volume.path, outside.root) == (str(tmp_path), ".")
    with pytest.raises(SettingsError, match="DS_CKPT_DIR"):
        locate(None, Settings(), Filesystem())
    with pytest.raises(SettingsError, match="reserved"):
        locate(tmp_path / ".ds_ckpt/x", Settings(directory=str(tmp_path)), Filesystem())


def test_a_wrong_setting_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DS_CKPT_TIMEOUT", "soon")
    monkeypatch.setenv("DS_CKPT_RUN_ID", "mine")
    engine = Engine(0)
    engine.save_checkpoint(tmp_path, "t")
    with caplog.at_level(logging.WARNING):
        ds_ckpt_hook.after_save(engine, "t", save_dir=tmp_path)
        assert ds_ckpt_hook._process["hook"].worker.drain(30)
    assert "DS_CKPT_TIMEOUT" in caplog.text
    report = ds_ckpt_hook.finalize(timeout=0.01)
    assert [manifest.run_id for manifest in manifests(tmp_path)] == ["mine"]
    assert [standing.tag for standing in report.not_durable] == ["t"]


def test_configure_overrides_the_environment_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_CKPT_RUN_ID", "from the pod")
    with pytest.raises(SettingsError, match="run_name"):
        ds_ckpt_hook.configure(run_name="x")
    ds_ckpt_hook.configure(run_id="from the script")
    assert ds_ckpt_hook.agree_on_resume(tmp_path / "new") is None
    with pytest.raises(SettingsError, match="too late"):
        ds_ckpt_hook.configure(run_id="y")
    engine = Engine(0)
    engine.save_checkpoint(tmp_path / "new", "t")
    ds_ckpt_hook.after_save(engine, "t", save_dir=tmp_path / "new")
    assert ds_ckpt_hook._process["hook"].worker.drain(30)
    ds_ckpt_hook.finalize(timeout=0.01)
    assert [m.run_id for m in manifests(tmp_path / "new")] == ["from the script"]


def test_ranks_that_cannot_talk_yet_are_told_what_to_call_first(tmp_path: Path) -> None:
    assert isinstance(connect(1, {}), Alone)
    with pytest.raises(SettingsError, match="init_distributed"):
        connect(1, {"WORLD_SIZE": "2"})


def test_ranks_in_different_calls_do_not_take_one_message_for_another() -> None:
    assert values_of([("save", 1), ("save", 2)]) == [1, 2]
    with pytest.raises(ExchangeError, match="rank 1 in 'finalize'"):
        values_of([("save", 1), ("finalize", {})])
