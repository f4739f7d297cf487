"""The hook with a real Accelerator, with DeepSpeed and without."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

import ds_ckpt_hook
from ds_ckpt_hook.integrations.accelerate import load_state, save_state
from ds_ckpt_store.errors import SettingsError
from tests.hook.integrations.life import Life
from tests.hook.standin import manifests

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world", [2, 1], ids=["zero2", "alone"])
def test_a_lost_pod_goes_on_from_the_store_with_the_same_losses(tmp_path: Path, world: int) -> None:
    run = Life(
        *("accelerate_loop.py", "--project-dir", ["--total-limit", 1]),
        *(tmp_path, (tmp_path / "store").as_uri()),
        world=world,
    )
    known = run.loses_its_pod()
    assert not (run.volume / "checkpoints/checkpoint_0").exists()  # rotated away by Accelerate
    record = run.record("checkpoints/checkpoint_0")
    assert record["step"] == 3
    assert record["metrics"] == {"loss": float.fromhex(known[3])}
    folder = tmp_path / "empty/checkpoints"
    assert run.goes_on(tmp_path / "empty", known) == folder / "checkpoint_1"
    (manifest,) = manifests(tmp_path / "empty")
    assert manifest.tag == "checkpoints/checkpoint_2"  # it goes on counting


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    monkeypatch.setattr(ds_ckpt_hook, "_process", {})
    made = Accelerator(cpu=True)
    made.prepare(torch.nn.Linear(2, 1))
    return made


def test_folders_that_the_user_names(accelerator: Accelerator, tmp_path: Path) -> None:
    assert load_state(accelerator, tmp_path, folders="step*") is None
    save = save_state(accelerator, tmp_path / "step1", step=1, strict=True)
    ds_ckpt_hook.finalize(0.1)
    (manifest,) = manifests(tmp_path)
    assert (manifest.save_id, manifest.tag, manifest.step) == (save.save_id, "step1", 1)
    assert {shard.path for shard in manifest.shards} == {"model.safetensors", "random_states_0.pkl"}
    (tmp_path / "step2").mkdir()
    (tmp_path / "step2/model.safetensors").write_bytes(b"torn")
    ds_ckpt_hook._process.clear()
    assert load_state(accelerator, tmp_path, folders="step*") == str(tmp_path / "step1")
    assert not (tmp_path / "step2").exists()


def test_a_folder_must_be_named_where_accelerate_has_none(accelerator: Accelerator) -> None:
    with pytest.raises(SettingsError, match="save_dir"):
        load_state(accelerator)


def test_a_writer_that_is_not_done_when_the_state_is_saved_is_refused(tmp_path: Path) -> None:
    config = {"zero_optimization": {}, "checkpoint": {"writer": {"decoupled": True}}}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    stand_in: Any = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    with pytest.raises(SettingsError, match="decoupled"):
        save_state(stand_in, tmp_path / "step1")
    assert list(tmp_path.iterdir()) == []
