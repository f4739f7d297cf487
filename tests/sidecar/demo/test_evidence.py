"""The demo's judgement must be able to fail: each way of being wrong is told apart from right."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from ds_ckpt_sidecar.demo.evidence import Output, check_durable, check_loaded, identical
from ds_ckpt_store.contract.manifest import Restored
from ds_ckpt_store.errors import DemoError

LOSSES = {step: (1.0 / step).hex() for step in range(1, 13)}
RESUMED = {step: LOSSES[step] for step in range(7, 13)}


def test_equal_losses_are_identical() -> None:
    assert identical(LOSSES, RESUMED, 6, 12)


def test_one_bit_in_one_loss_is_a_difference() -> None:
    off = {**RESUMED, 9: math.nextafter(1.0 / 9, 1.0).hex()}
    assert not identical(LOSSES, off, 6, 12)


@pytest.mark.parametrize("missing", [7, 10, 12])
def test_a_step_that_is_missing_is_a_difference(missing: int) -> None:
    short = {step: loss for step, loss in RESUMED.items() if step != missing}
    assert not identical(LOSSES, short, 6, 12)


def test_a_step_that_the_reference_lacks_is_a_difference() -> None:
    reference = {step: loss for step, loss in LOSSES.items() if step != 8}
    assert not identical(reference, RESUMED, 6, 12)


def test_nothing_to_compare_is_no_success() -> None:
    assert not identical(LOSSES, {}, 12, 12)


def restored(step: int | None) -> Restored:
    return Restored(
        source="file:///store",
        run_id="demo",
        save_id="0123456789ab-0123456789abcdef",
        tag="global_step6",
        time_ms=1,
        epoch=1,
        step=step,
    )


def output(volume: Path) -> Output:
    loaded = str(volume / "global_step6" / "mp_rank_00_model_states.pt")
    return Output(RESUMED, loaded=loaded, global_steps=6, save=[], held=[])


def test_what_was_restored_was_loaded(tmp_path: Path) -> None:
    check_loaded(output(tmp_path), tmp_path, restored(6))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"loaded": ""}, "loaded nothing"),
        ({"loaded": "/elsewhere/global_step6/x.pt"}, "global_step6 was restored"),
        ({"global_steps": 5}, "at step 5"),
    ],
)
def test_a_trainer_that_loaded_something_else_fails(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    wrong = dataclasses.replace(output(tmp_path), **change)  # type: ignore[arg-type]
    with pytest.raises(DemoError, match=complaint):
        check_loaded(wrong, tmp_path, restored(6))


def test_a_folder_whose_name_only_begins_alike_is_something_else(tmp_path: Path) -> None:
    alike = dataclasses.replace(output(tmp_path), loaded=str(tmp_path / "global_step66" / "x.pt"))
    with pytest.raises(DemoError, match="global_step6 was restored"):
        check_loaded(alike, tmp_path, restored(6))


def test_a_record_without_a_step_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="step None"):
        check_loaded(output(tmp_path), tmp_path, restored(None))


def test_a_save_that_is_not_durable_at_the_end_fails(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"durable": false, "not_durable": {"global_step9": "no sidecar"}}\n')
    with pytest.raises(DemoError, match="global_step9: no sidecar"):
        check_durable(Output.read(path))
    check_durable(output(tmp_path))


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(
        '{"loaded": "/v/global_step3", "global_steps": 3}\n'
        '{"step": 4, "loss": 1.0, "loss_hex": "0x1.0p+0"}\n'
        '{"saved": "global_step4", "save_seconds": 0.5, "held_seconds": 0.1, "save_id": "x"}\n'
        '{"step": 5, "lo'
    )
    read = Output.read(path)
    assert read == Output({4: "0x1.0p+0"}, "/v/global_step3", 3, [0.5], [0.1])
