"""How long a save holds the training thread: DeepSpeed alone, with us, and torch's own ways.

Real DeepSpeed (ZeRO stages 1 and 3, two ranks on the CPU), about 1 GiB of optimizer shard a rank.
The ways take turns in one process, on the same engine and the same state, in random order, and what
each wrote is removed, and the disk synced, before the next. No sidecar is needed.

    python bench/held.py [--gib-per-rank 1.0] [--rounds 5] [--stage 1] [--dir DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS = 2
PLAIN = "deepspeed"
OURS = "attach, save_checkpoint, after_save"


def width_for(gib_per_rank: float) -> int:
    # fp32: each rank's shard holds its part of the parameters and of AdamW's two moments,
    # 12 bytes a parameter over all ranks; two square layers make nearly all parameters.
    parameters = gib_per_rank * (1 << 30) * RANKS / 12
    return int(math.sqrt(parameters / 2))


def measure(folder: Path, stage: int, width: int, rounds: int) -> list[dict[str, object]]:
    """One row for each save: stage, way, round, held_s, done_s, bytes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rows = folder / "rows.jsonl"
    command = [sys.executable, str(Path(__file__).parent / "peers" / "held_worker.py")]
    command += [str(folder), str(stage), str(width), str(rounds)]
    processes = [
        subprocess.Popen(
            command,
            env=dict(
                os.environ,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(RANKS),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                OMP_NUM_THREADS="1",
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    said = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(text[-2000:] for text in said))
    return [json.loads(line) for line in rows.read_text().splitlines()]


def table(rows: list[dict[str, object]], stage: int) -> list[str]:
    """Medians over the rounds, and each way's held time over DeepSpeed's."""

    def median(way: object, what: str) -> float:
        return statistics.median(float(str(r[what])) for r in rows if r["way"] == way)

    gib = max(float(str(row["bytes"])) for row in rows) / (1 << 30)
    lines = [f"ZeRO {stage}, {gib:.2f} GiB a save, {RANKS} ranks", ""]
    lines.append(f"{'':40} {'held s':>8} {'done s':>8}  held / {PLAIN}")
    plain = median(PLAIN, "held_s")
    for way in dict.fromkeys(row["way"] for row in rows):
        held, done = median(way, "held_s"), median(way, "done_s")
        lines.append(f"{way!s:40} {held:8.3f} {done:8.3f} {held / plain:8.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib-per-rank", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, action="append", choices=range(4))
    parser.add_argument("--dir", help="work here; default: a temporary folder")
    parser.add_argument("--json", help="write one object for each save there")
    args = parser.parse_args()
    every = []
    for stage in args.stage or [1, 3]:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            rows = measure(Path(folder), stage, width_for(args.gib_per_rank), args.rounds)
        every += rows
        print("\n".join([*table(rows, stage), ""]), flush=True)
        ours = [float(str(r["held_s"])) for r in rows if r["way"] == OURS]
        plain = [float(str(r["held_s"])) for r in rows if r["way"] == PLAIN]
        ratio = statistics.median(ours) / statistics.median(plain)
        print(f"goal: ours / {PLAIN} at most 0.70: {ratio:.2f}\n", flush=True)
    if args.json:
        Path(args.json).write_text("".join(json.dumps(row) + "\n" for row in every))


if __name__ == "__main__":
    main()
