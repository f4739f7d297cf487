"""Train, lose everything, restore, resume, and compare with a run that lost nothing.

Nothing here is simulated. The trainer is real DeepSpeed with two ranks on the CPU, the sidecar,
the restore and every rank are processes of their own, and the store is a folder or an S3 server.
What is lost is lost as in real life: SIGKILL, and the volume is gone.

The claim that is put to the test: training that resumes from the restored checkpoint computes,
to the last bit, the losses of a run that was never interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_ckpt_sidecar.demo.evidence import (
    Commits,
    Output,
    check_durable,
    check_loaded,
    identical,
    restored_from,
)
from ds_ckpt_sidecar.demo.processes import Group
from ds_ckpt_sidecar.demo.s3_server import S3Server
from ds_ckpt_sidecar.demo.stage import (
    HIDDEN,
    PATIENCE_SECONDS,
    RANKS,
    RUN_ID,
    SAVE_EVERY,
    Stage,
)
from ds_ckpt_store.contract.clock import Clock, SystemClock
from ds_ckpt_store.errors import DemoError, MissingExtraError, SettingsError

SAVES_BEFORE_LOSS = 3
STEPS_AFTER_LOSS = 15
ENDLESS = 1_000_000
BUCKET = "demo"
STORES = ("file", "s3")
ZERO_STAGES = (0, 1, 2, 3)

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class DemoResult:
    """What the demo saw.

    Attributes:
        store: ``file`` or ``s3``.
        zero_stage: DeepSpeed's ZeRO stage, 0 to 3.
        losses_identical: every loss after the resume equals the reference's, bit for bit.
        compared_steps: how many losses were compared.
        saves: checkpoints that became durable before and after the loss.
        bytes: size of those checkpoints together.
        save_seconds: ``engine.save_checkpoint``, median.
        held_seconds: how long ``after_save`` held the training thread, median.
        held_seconds_max: the longest of those.
        lag_seconds: from ``after_save`` to the commit, median.
        lag_seconds_max: the longest of those.
        restore_seconds: the whole ``ds-ckpt restore`` command.
        loaded_folder: what DeepSpeed says that it loaded.
        resumed_global_steps: DeepSpeed's ``global_steps`` after the load.
        kept: folder with volumes, store and logs, or empty if it was removed.
    """

    store: str
    zero_stage: int
    losses_identical: bool
    compared_steps: int
    saves: int
    bytes: int
    save_seconds: float
    held_seconds: float
    held_seconds_max: float
    lag_seconds: float
    lag_seconds_max: float
    restore_seconds: float
    loaded_folder: str
    resumed_global_steps: int
    kept: str

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return dataclasses.asdict(self)


def run_demo(
    *,
    store: str,
    zero_stage: int,
    workdir: Path | None,
    say: Say,
    hidden: int = HIDDEN,
    clock: Clock | None = None,
) -> DemoResult:
    """Run the demo.

    Args:
        store: ``file`` or ``s3`` (a server that the demo starts itself).
        zero_stage: DeepSpeed's ZeRO stage, 0 to 3.
        workdir: folder to work in, absent or empty; it is kept. None: a temporary one, removed
            when all went well.
        say: told one line for each thing that happens.
        hidden: width of the model.
        clock: for waiting and for the times in the result.

    Raises:
        SettingsError: an argument cannot work.
        MissingExtraError: torch, deepspeed or the S3 server is not installed.
        DemoError: a process failed, or nothing was loaded; names the log.
    """
    if store not in STORES or zero_stage not in ZERO_STAGES:
        raise SettingsError("the demo's store is file or s3, and its ZeRO stage 0, 1, 2 or 3")
    for module in ("torch", "deepspeed"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError("ds-ckpt demo", "demo")
    if workdir is not None and workdir.exists() and any(workdir.iterdir()):
        raise SettingsError(f"{workdir} is not empty: name a new folder")
    folder = workdir or Path(tempfile.mkdtemp(prefix="ds-ckpt-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _opened(store, folder) as (url, environ):
            stage = Stage(folder, url, environ, zero_stage, hidden, clock or SystemClock())
            result = _play(stage, store, say)
    except DemoError as error:
        raise DemoError(f"{error}\n(volumes, store and logs are left in {folder})") from error
    if workdir is not None or not result.losses_identical:
        return dataclasses.replace(result, kept=str(folder))
    shutil.rmtree(folder)
    return result


@contextlib.contextmanager
def _opened(store: str, folder: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The destination's URL, and what the environment must say to reach it."""
    if store == "file":
        target = folder / "store"
        target.mkdir()
        yield target.resolve().as_uri(), {}
        return
    data = folder / "s3"
    data.mkdir()
    with S3Server(data) as server:
        server.create_bucket(BUCKET)
        yield f"s3://{BUCKET}/{RUN_ID}", server.environ


def _play(stage: Stage, store: str, say: Say) -> DemoResult:
    say(f"training with DeepSpeed, {RANKS} ranks on the CPU, a save every {SAVE_EVERY} steps")
    first = stage.volume("volume-1")
    before = Commits(first)
    with Group(stage.clock) as group:
        stage.agent(group, "agent-1", first)
        _, lost_output = stage.trainer(group, "trainer-1", first, steps=ENDLESS)
        group.wait_until(
            lambda: before.look() >= SAVES_BEFORE_LOSS, PATIENCE_SECONDS, "the first commits"
        )
    say(f"{len(before.seen)} checkpoints are committed; trainer and sidecar are killed (SIGKILL)")
    lost = Output.read(lost_output)
    before.look()
    shutil.rmtree(first)
    say(f"the volume is gone; restoring from {stage.url} to a new one")

    second = stage.volume("volume-2")
    restore_seconds = stage.restore(second)
    restored = restored_from(second)
    say(f"restored and verified {restored.tag} in {restore_seconds:.2f} s; training resumes")

    after = Commits(second)
    last_step = (restored.step or 0) + STEPS_AFTER_LOSS
    with Group(stage.clock) as group:
        agent = stage.agent(group, "agent-2", second)
        ranks, resumed_output = stage.trainer(
            group, "trainer-2", second, steps=last_step, resume=True
        )
        group.wait(ranks, PATIENCE_SECONDS)
        after.look()
        agent.terminate()
        group.wait([agent], PATIENCE_SECONDS)
    resumed = Output.read(resumed_output)
    check_loaded(resumed, second, restored)
    check_durable(resumed)
    say(f"resumed from {resumed.loaded} at step {resumed.global_steps}, up to step {last_step}")

    say("the same training once more, never interrupted and with no hook, to compare with")
    with Group(stage.clock) as group:
        ranks, reference_output = stage.trainer(
            group, "reference", stage.volume("volume-reference"), steps=last_step, hook=False
        )
        group.wait(ranks, PATIENCE_SECONDS)
    reference = Output.read(reference_output)

    compared = resumed.losses.keys()
    lags = before.lags() + after.lags()
    held = lost.held + resumed.held
    return DemoResult(
        store=store,
        zero_stage=stage.zero_stage,
        losses_identical=identical(reference.losses, resumed.losses, restored.step or 0, last_step),
        compared_steps=len(compared),
        saves=len(lags),
        bytes=sum(each.bytes_total for each in (*before.seen.values(), *after.seen.values())),
        save_seconds=statistics.median(lost.save + resumed.save),
        held_seconds=statistics.median(held),
        held_seconds_max=max(held),
        lag_seconds=statistics.median(lags),
        lag_seconds_max=max(lags),
        restore_seconds=restore_seconds,
        loaded_folder=resumed.loaded,
        resumed_global_steps=resumed.global_steps,
        kept="",
    )
