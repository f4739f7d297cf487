"""The hook in Lightning's Trainer: the real one, with DeepSpeed and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import ds_ckpt_hook
from ds_ckpt_hook.integrations.lightning import CheckpointCallback, checkpoint_to_resume
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import SettingsError
from tests.hook.integrations.life import Life
from tests.hook.standin import manifests

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world", [2, 1], ids=["zero2", "alone"])
def test_a_lost_pod_goes_on_from_the_store_with_the_same_losses(tmp_path: Path, world: int) -> None:
    run = Life(
        *("lightning_fit.py", "--dirpath", ["--save-top-k", 1]),
        *(tmp_path, (tmp_path / "store").as_uri()),
        world=world,
    )
    known = run.loses_its_pod()
    first = run.volume / "epoch=0-step=3.ckpt"
    assert not any(path.is_file() for path in first.rglob("*"))  # removed by Lightning
    record = run.record("epoch=0-step=3.ckpt")
    assert record["step"] == 3
    assert record["metrics"] == {"train_loss": float.fromhex(known[3])}
    found = run.goes_on(tmp_path / "empty", known)
    folder = tmp_path / "empty/epoch=0-step=6.ckpt"
    assert found == (folder if world > 1 else folder / "model.ckpt")


class Model(LightningModule):
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, _batch: torch.Tensor, index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise ValueError("a broken record")
        loss: torch.Tensor = self.layer(torch.ones(1, 1)).square().mean()
        self.log("loss/train", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Call(Callback):
    """Something else that saves, after the last step."""

    def __init__(self, call: Callable[[Trainer], None]) -> None:
        self.call = call

    def on_train_end(self, trainer: Trainer, _module: LightningModule) -> None:
        self.call(trainer)


Fit = Callable[..., CheckpointCallback]


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fit:
    monkeypatch.setattr(ds_ckpt_hook, "_process", {})

    def run(
        filename: str = "{step}.ckpt/model",
        *callbacks: Callback,
        fails_at: int | None = None,
        plugins: Any = None,
    ) -> CheckpointCallback:
        callback = CheckpointCallback(tmp_path / "run", finalize_timeout=0.1)
        saves = ModelCheckpoint(tmp_path / "run", filename, every_n_train_steps=2, save_top_k=-1)
        trainer = Trainer(
            accelerator="cpu",
            max_steps=4,
            callbacks=[callback, saves, *callbacks],
            plugins=plugins,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(Model(fails_at), torch.utils.data.DataLoader(range(8)))  # type: ignore[arg-type]
        finally:
            assert ds_ckpt_hook._process == {} or ds_ckpt_hook._process["hook"].worker.drain(20)
        return callback

    return run


def test_the_end_of_training_is_told_with_what_is_not_durable(fit: Fit, tmp_path: Path) -> None:
    report = fit().report
    assert report is not None
    assert [each.tag for each in report.not_durable] == ["step=2.ckpt", "step=4.ckpt"]
    status = Volume(str(tmp_path / "run")).trainer_status()
    assert status is not None
    assert (status.finished, status.step) == (True, 4)


def test_an_exception_is_no_end_of_training(fit: Fit, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a broken record"):
        fit(fails_at=3)
    status = Volume(str(tmp_path / "run")).trainer_status()
    assert status is not None
    assert not status.finished
    assert [manifest.tag for manifest in manifests(tmp_path / "run")] == ["step=2.ckpt"]


def test_the_tag_is_all_of_the_name_below_the_folder_that_is_resumed_from(
    fit: Fit, tmp_path: Path
) -> None:
    fit("{step}-{loss/train:.0f}.ckpt/model")
    tags = [manifest.tag for manifest in manifests(tmp_path / "run")]
    assert [tag.split("=", 2)[:2] for tag in tags] == [
        ["step", "2-loss/train"],
        ["step", "4-loss/train"],
    ]


def test_weights_alone_and_what_lies_elsewhere_are_no_checkpoints(
    fit: Fit, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def save(trainer: Trainer) -> None:
        trainer.save_checkpoint(tmp_path / "run/weights.ckpt/model.ckpt", weights_only=True)
        trainer.save_checkpoint(tmp_path / "elsewhere.ckpt")
        trainer.save_checkpoint(tmp_path / "run/mine.ckpt/model.ckpt")

    fit("{step}.ckpt/model", Call(save))
    tags = [manifest.tag for manifest in manifests(tmp_path / "run")]
    assert tags == ["step=2.ckpt", "step=4.ckpt", "mine.ckpt"]
    assert f"elsewhere.ckpt is not published: it lies outside of {tmp_path}/run" in caplog.text


def test_a_file_beside_others_is_not_published_and_the_way_out_is_told(
    fit: Fit, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fit("{step}")
    assert (tmp_path / "run/step=4.ckpt").is_file()
    assert manifests(tmp_path / "run") == []
    assert "step=4.ckpt is a file: give each checkpoint a folder" in caplog.text
    assert 'ModelCheckpoint(filename="{epoch}-{step}.ckpt/model")' in caplog.text


def test_a_writer_that_is_not_done_when_the_trainer_has_saved_is_refused(
    fit: Fit, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    fit(plugins=[AsyncCheckpointIO()])
    assert manifests(tmp_path / "run") == []
    assert "AsyncCheckpointIO has not written it" in caplog.text


class Decoupled:
    """A trainer whose DeepSpeed writes its files at the next step."""

    def __init__(self) -> None:
        writer = SimpleNamespace(is_decoupled=lambda: True, get_commit_info=lambda: "to come")
        engine = SimpleNamespace(checkpoint_engine=writer)
        self.strategy = SimpleNamespace(checkpoint_io=None, deepspeed_engine=engine)

    def save_checkpoint(self, filepath: Path, weights_only: bool | None) -> None:
        pass


def test_deepspeeds_decoupled_writer_is_refused(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    trainer: Any = Decoupled()
    module: Any = None
    CheckpointCallback(tmp_path).setup(trainer, module, "fit")
    trainer.save_checkpoint(tmp_path / "t.ckpt")
    assert "leave checkpoint.writer out" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_lightning_starts_itself_cannot_agree_before_the_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False)
    with pytest.raises(SettingsError, match="torchrun"):
        checkpoint_to_resume(trainer, tmp_path)
