"""The demo's result as a short table for people."""

from __future__ import annotations

from rich.filesize import decimal
from rich.table import Table

from ds_ckpt_sidecar.demo.demo import DemoResult


def table(result: DemoResult) -> Table:
    """What was seen, one line each; times are medians unless said otherwise."""
    drawn = Table(title=f"{result.store}:// store, ZeRO stage {result.zero_stage}")
    drawn.add_column("what", no_wrap=True)
    drawn.add_column("seen", justify="right", overflow="fold")
    for what, seen in _lines(result):
        drawn.add_row(what, seen)
    return drawn


def _lines(result: DemoResult) -> list[tuple[str, str]]:
    verdict = "identical" if result.losses_identical else "[bold red]DIFFERENT[/]"
    lines = [
        ("losses after the resume", f"{verdict} ({result.compared_steps} steps, bit for bit)"),
        ("resumed at step", str(result.resumed_global_steps)),
        ("checkpoints committed", f"{result.saves} ({decimal(result.bytes)})"),
        ("engine.save_checkpoint takes", f"{result.save_seconds:.3f} s"),
        (
            "after_save holds the trainer",
            f"{result.held_seconds:.3f} s (longest {result.held_seconds_max:.3f} s)",
        ),
        (
            "lag from save to commit",
            f"{result.lag_seconds:.2f} s (longest {result.lag_seconds_max:.2f} s)",
        ),
        ("ds-ckpt restore takes", f"{result.restore_seconds:.2f} s"),
    ]
    return [*lines, ("left to look at", result.kept)] if result.kept else lines
