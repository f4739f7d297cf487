"""Sub-checkpoints with real DeepSpeed: two ranks in one long-lived pair of processes."""
from __future__ import annotations
from pathlib import Path
import sys
from tests.hook.processes import run_ranks

if __name__ == "__main__":
    folder = Path(sys.argv[1]); folder.mkdir(exist_ok=True); (folder/"tmp").mkdir(exist_ok=True)
    out = run_ranks(lambda r: ["-m", "tests.hook.workers.pieces", str(folder)], environ=lambda r: {"TMPDIR": str(folder/"tmp"), "DS_CKPT_TIMEOUT":"20"})
