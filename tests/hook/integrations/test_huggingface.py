"""The hook in Hugging Face's Trainer: the real one, with DeepSpeed and without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import HfDeepSpeedConfig

import ds_ckpt_hook
from ds_ckpt_hook.integrations.huggingface import CheckpointCallback, newest_evaluation
from ds_ckpt_store.contract.volume import Volume
from tests import servers
from tests.hook.integrations.life import Life
from tests.hook.standin import manifests

pytestmark = pytest.mark.slow


def life(folder: Path, destination: str, **options: Any) -> Life:
    rotating = ["--save-total-limit", 1]
    return Life("huggingface.py", "--output-dir", rotating, folder, destination, **options)


def test_a_lost_pod_goes_on_from_the_store_with_the_same_losses(
    seaweed: servers.S3, tmp_path: Path
) -> None:
    run = life(tmp_path, f"s3://{seaweed.bucket()}/run", environ=seaweed.environ)
    known = run.loses_its_pod()
    assert run.goes_on(tmp_path / "empty", known) == tmp_path / "empty/checkpoint-6"

    # Rotated away by the Trainer before it was uploaded, and stored whole all the same.
    assert not (run.volume / "checkpoint-3").exists()
    record = run.record("checkpoint-3")
    assert record["step"] == 3
    assert record["metrics"]["eval_loss"] > 0
    assert {file["path"] for file in record["files"]} >= {
        "global_step3/mp_rank_00_model_states.pt",
        "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "latest",
        "model.safetensors",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "trainer_state.json",
        "training_args.bin",
    }


def test_the_same_without_deepspeed(tmp_path: Path) -> None:
    run = life(tmp_path, (tmp_path / "store").as_uri(), world=1)
    run.goes_on(tmp_path / "empty", run.loses_its_pod())


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, fails_at: int | None) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.fails_at:
            raise ValueError("a broken record")
        return {"x": torch.full((2,), float(index))}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., CheckpointCallback]:
    monkeypatch.setattr(ds_ckpt_hook, "_process", {})

    def run(fails_at: int | None = None) -> CheckpointCallback:
        callback = CheckpointCallback(finalize_timeout=0.1)
        args = TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            max_steps=4,
            save_steps=2,
            per_device_train_batch_size=1,
            report_to=[],
            train_sampling_strategy="sequential",
        )
        Trainer(Model(), args, train_dataset=Numbers(fails_at), callbacks=[callback]).train()
        return callback

    return run


def test_the_end_of_training_is_told_with_what_is_not_durable(
    train: Callable[..., CheckpointCallback], tmp_path: Path
) -> None:
    callback = train()
    assert callback.report is not None
    assert [each.tag for each in callback.report.not_durable] == ["checkpoint-2", "checkpoint-4"]
    status = Volume(str(tmp_path)).trainer_status()
    assert status is not None
    assert status.finished
    assert [manifest.step for manifest in manifests(tmp_path)] == [2, 4]


def test_an_exception_is_no_end_of_training(
    train: Callable[..., CheckpointCallback], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="a broken record"):
        train(fails_at=3)
    assert ds_ckpt_hook._process["hook"].worker.drain(20)
    status = Volume(str(tmp_path)).trainer_status()
    assert status is not None
    assert not status.finished
    assert [manifest.tag for manifest in manifests(tmp_path)] == ["checkpoint-2"]


def test_a_writer_that_is_not_done_when_the_trainer_has_saved_is_refused(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    config = HfDeepSpeedConfig({"checkpoint": {"writer": {"type": "python", "decoupled": True}}})
    args: Any = SimpleNamespace(output_dir=str(tmp_path), hf_deepspeed_config=config)
    with caplog.at_level(logging.WARNING):
        CheckpointCallback().on_save(args, TrainerState(global_step=3), TrainerControl())
    assert "checkpoint-3 is not published" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_the_newest_evaluation_is_what_was_measured_last() -> None:
    history = [
        {"eval_loss": 2.0, "step": 1},
        {"eval_loss": 1.0, "eval_f1": 0.5, "epoch": 1.0, "step": 2},
        {"loss": 3.0, "step": 3},
    ]
    assert newest_evaluation(history) == {"eval_loss": 1.0, "eval_f1": 0.5}
    assert newest_evaluation([{"loss": 3.0}]) == {}
