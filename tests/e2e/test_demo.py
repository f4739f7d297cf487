"""The main job with real DeepSpeed: lose everything, restore, resume, and lose no bit.

The last tests prove that the comparison can fail: a checkpoint that says the wrong step, or whose
optimizer state was disturbed, changes the losses.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ckpt_sidecar.demo.demo import STEPS_AFTER_LOSS, DemoResult, run_demo
from ds_ckpt_sidecar.demo.evidence import Output, identical, restored_from
from ds_ckpt_sidecar.demo.processes import Group
from ds_ckpt_sidecar.demo.stage import HIDDEN, PATIENCE_SECONDS, Stage
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.digest import crc32c, to_hex
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import DemoError

ROOT = Path(__file__).resolve().parents[2]
SMALL = 32

pytestmark = pytest.mark.slow


def check(result: DemoResult, folder: Path) -> None:
    assert result.losses_identical
    assert result.compared_steps == STEPS_AFTER_LOSS
    assert result.saves >= 3
    assert result.bytes > 0
    assert result.resumed_global_steps >= 3
    assert result.loaded_folder.startswith(str(folder / "volume-2"))


@pytest.mark.parametrize("zero_stage", [0, 3])  # 1: by the command; 2: from the S3 server
def test_training_resumes_with_identical_losses(zero_stage: int, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    result = run_demo(store="file", zero_stage=zero_stage, workdir=folder, say=print, hidden=SMALL)
    check(result, folder)


def test_training_resumes_with_identical_losses_from_an_s3_server(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    result = run_demo(store="s3", zero_stage=2, workdir=folder, say=print, hidden=SMALL)
    check(result, folder)


@dataclasses.dataclass(frozen=True)
class Played:
    """A demo that has been played, with its store and outputs."""

    folder: Path
    result: DemoResult

    def resume(self, name: str, disturb: Callable[[Path], None], *, forge: bool) -> Output:
        """Restore the same checkpoint again, disturb it, and resume.

        Args:
            name: of the new volume.
            disturb: given the checkpoint's folder.
            forge: put the disturbed files' checksums into the volume's note of what was restored,
                without which the ranks do not agree to load them.
        """
        stage = Stage(self.folder, (self.folder / "store").as_uri(), {}, 1, HIDDEN, SystemClock())
        volume = stage.volume(name)
        stage.restore(volume, tag=f"global_step{self.result.resumed_global_steps}")
        disturb(volume / restored_from(volume).tag)
        if forge:
            forge_note(volume)
        with Group(stage.clock) as group:
            ranks, output = stage.trainer(
                group, f"trainer-{name}", volume, steps=self.last_step, resume=True, hook=False
            )
            group.wait(ranks, PATIENCE_SECONDS)
        return Output.read(output)

    @property
    def last_step(self) -> int:
        return self.result.resumed_global_steps + STEPS_AFTER_LOSS

    @property
    def reference(self) -> Output:
        return Output.read(self.folder / "reference.jsonl")


def forge_note(volume: Path) -> None:
    """Make ``restored.json`` say of each file what it is now."""
    note = restored_from(volume)
    files = []
    for entry in note.files:
        path = volume / entry.path
        state = path.stat()
        now = {
            "size": state.st_size,
            "crc32c": to_hex(crc32c(path.read_bytes())),
            "device": state.st_dev,
            "inode": state.st_ino,
            "mtime_ns": state.st_mtime_ns,
        }
        files.append(entry.model_copy(update=now))
    Path(Volume(str(volume)).restored).write_bytes(
        note.model_copy(update={"files": files}).to_bytes()
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """``ds-ckpt demo`` at ZeRO 1, by its command."""
    folder = tmp_path_factory.mktemp("played") / "demo"
    command = [sys.executable, "-m", "ds_ckpt_sidecar", "demo", "--store", "file"]
    command += ["--zero-stage", "1", "--json", "--keep", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr
    return Played(folder, DemoResult(**json.loads(ran.stdout)))


def test_the_command_prints_what_it_saw(played: Played) -> None:
    check(played.result, played.folder)
    assert played.result.restore_seconds > 0
    assert played.result.lag_seconds > 0
    assert played.result.held_seconds <= played.result.held_seconds_max


def test_the_commands_of_the_readme_work(played: Played) -> None:
    readme = (ROOT / "README.md").read_text()
    lines = re.findall(r"^ds-ckpt (.*?)(?:\s+#.*)?$", readme, re.MULTILINE)
    assert {line.split()[0] for line in lines} >= {"agent", "restore", "ls", "show", "verify"}
    for line in lines:
        arguments = (
            line.replace("s3://bucket/runs/my-run", (played.folder / "store").as_uri())
            .replace("TAG", f"global_step{played.result.resumed_global_steps}")
            .replace("/checkpoints", str(played.folder / "volume-2"))
            .split()
        )
        arguments += {"agent": ["--once"]}.get(arguments[0], ["--json"])
        ran = subprocess.run(
            [sys.executable, "-m", "ds_ckpt_sidecar", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ran.returncode == 0, (line, ran.stderr)
        if arguments[0] != "agent":
            json.loads(ran.stdout)


def load(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=False)
    return state


def nothing(_: Path) -> None:
    """Leave the checkpoint as it is."""


def wrong_step(folder: Path) -> None:
    """Make the checkpoint say that it is one step further than it is."""
    path = folder / "mp_rank_00_model_states.pt"
    state = load(path)
    state["global_steps"] += 1
    torch.save(state, path)


def disturbed_optimizer(folder: Path) -> None:
    """Change one value of one moment of one rank's optimizer."""
    path = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = load(path)
    inner = state["optimizer_state_dict"]["base_optimizer_state"]
    moments = inner["state"][0]["exp_avg"] if "state" in inner else inner[0]["exp_avg"]
    moments.view(-1)[0] += 1.0
    torch.save(state, path)


@pytest.mark.parametrize(
    ("disturb", "same"), [(nothing, True), (wrong_step, False), (disturbed_optimizer, False)]
)
def test_a_disturbed_checkpoint_changes_the_losses(
    played: Played, disturb: Callable[[Path], None], same: bool
) -> None:
    resumed = played.resume(disturb.__name__, disturb, forge=True)
    assert resumed.loaded
    assert len(resumed.losses) >= STEPS_AFTER_LOSS - 1
    start = min(resumed.losses) - 1
    assert identical(played.reference.losses, resumed.losses, start, played.last_step) is same


def test_a_checkpoint_that_was_disturbed_on_the_volume_is_not_loaded(played: Played) -> None:
    with pytest.raises(DemoError, match="a committed checkpoint is known"):
        played.resume("refused", disturbed_optimizer, forge=False)
