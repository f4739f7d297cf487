"""What the demo's programs left behind, read and judged.

Losses are compared as the hexadecimal form of their floats: equal means equal to the last bit.
Equal losses alone prove nothing if the resumed run started from scratch, or from elsewhere, so
what was loaded is checked against what was restored.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_ckpt_store.contract.manifest import Restored, SaveStatus
from ds_ckpt_store.contract.names import VOLUME_DIR
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import DemoError


class Commits:
    """Watches which saves of a volume become durable, and when, by the sidecar's status files."""

    def __init__(self, volume: Path) -> None:
        self._volume = Volume(str(volume))
        self.seen: dict[str, SaveStatus] = {}

    def look(self) -> int:
        """Look again; how many saves have been seen committed so far."""
        for name in self._volume.fs.names(self._volume.status):
            save_id = name.removesuffix(".json")
            if save_id in self.seen or name in ("sidecar.json", "trainer.json"):
                continue
            status = self._volume.save_status(save_id)
            if status is not None and status.state in ("committed", "cleaned"):
                self.seen[save_id] = status
        return len(self.seen)

    def lags(self) -> list[float]:
        """Seconds from each save to its commit."""
        return [status.time - _save_time(save_id) for save_id, status in self.seen.items()]


def _save_time(save_id: str) -> float:
    return int(save_id.split("-")[0], 16) / 1000


@dataclasses.dataclass(frozen=True)
class Output:
    """What rank 0 of the example trainer wrote: one JSON object a line.

    Attributes:
        losses: step (1 for the first) to the hexadecimal form of the loss.
        loaded: the folder that DeepSpeed loaded, or empty.
        global_steps: DeepSpeed's count after that load.
        save: seconds that each ``save_checkpoint`` took.
        held: seconds that each ``after_save`` took.
        not_durable: what ``finalize`` said is not durable: tag to reason.
    """

    losses: dict[int, str]
    loaded: str
    global_steps: int
    save: list[float]
    held: list[float]
    not_durable: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Output:
        """Parse it; a last line that a kill cut off is left out."""
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
        saves = [entry for entry in entries if "saved" in entry]
        final: dict[str, Any] = next((entry for entry in entries if "not_durable" in entry), {})
        load: dict[str, Any] = next((entry for entry in entries if "loaded" in entry), {})
        return cls(
            losses={entry["step"]: entry["loss_hex"] for entry in entries if "loss_hex" in entry},
            loaded=load.get("loaded") or "",
            global_steps=load.get("global_steps") or 0,
            save=[entry["save_seconds"] for entry in saves],
            held=[entry["held_seconds"] for entry in saves],
            not_durable=final.get("not_durable") or {},
        )


def restored_from(volume: Path) -> Restored:
    """Which checkpoint a volume was restored from.

    Raises:
        DemoError: the restore left no such note.
    """
    restored = Volume(str(volume)).restored_from()
    if restored is None:
        raise DemoError(f"the restore ended well, but left no {VOLUME_DIR}/restored.json")
    return restored


def check_loaded(resumed: Output, volume: Path, restored: Restored) -> None:
    """Raise unless the resumed trainer loaded exactly what was restored.

    Raises:
        DemoError: it loaded nothing, from elsewhere, or another step.
    """
    if not resumed.loaded:
        raise DemoError("the resumed trainer loaded nothing: it started from scratch")
    folder = Path(resumed.loaded).resolve()
    if (volume.resolve() / restored.tag) not in (folder, *folder.parents):
        raise DemoError(f"the resumed trainer loaded {folder}, and {restored.tag} was restored")
    if restored.step is None or resumed.global_steps != restored.step:
        raise DemoError(
            f"the resumed trainer is at step {resumed.global_steps}, and the restored checkpoint "
            f"is of step {restored.step}"
        )


def check_durable(finished: Output) -> None:
    """Raise unless ``finalize`` told the trainer that all its saves are durable.

    Raises:
        DemoError: names those that are not.
    """
    if finished.not_durable:
        reasons = "; ".join(f"{tag}: {reason}" for tag, reason in finished.not_durable.items())
        raise DemoError(f"at its end the trainer was told that saves are not durable: {reasons}")


def identical(
    reference: Mapping[int, str], resumed: Mapping[int, str], resumed_at: int, last_step: int
) -> bool:
    """Whether each loss after ``resumed_at`` up to ``last_step`` is there and the same, bitwise."""
    steps = range(resumed_at + 1, last_step + 1)
    return len(steps) > 0 and all(
        step in reference and reference[step] == resumed.get(step) for step in steps
    )
