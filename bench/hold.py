"""How long ``after_save`` holds the training thread, beside ``save_checkpoint`` itself.

Real DeepSpeed (ZeRO stage 2, two ranks on the CPU) with about 1 GiB of optimizer shard a rank and
the model's own file; no sidecar is needed. Prints one line for each save and the medians.

    python bench/hold.py [--gib-per-rank 1.0] [--saves 3] [--dir DIR]
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


def width_for(gib_per_rank: float, ranks: int) -> int:
    # fp32: each rank's shard holds its part of the parameters and of AdamW's two moments,
    # 12 bytes a parameter over all ranks; two square layers make nearly all parameters.
    parameters = gib_per_rank * (1 << 30) * ranks / 12
    return int(math.sqrt(parameters / 2))


def train(folder: Path, width: int, saves: int, ranks: int) -> list[dict[str, float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = folder / "out.jsonl"
    command = [
        *(sys.executable, "-m", "ds_ckpt_hook.example"),
        *("--save-dir", str(folder / "volume"), "--steps", str(saves), "--save-every", "1"),
        *("--hidden", str(width), "--out", str(out), "--finalize-timeout", "1"),
    ]
    processes = [
        subprocess.Popen(
            command,
            env=dict(
                os.environ,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                OMP_NUM_THREADS="1",
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("a rank failed: run the example by hand to see why")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [line for line in lines if "saved" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib-per-rank", type=float, default=1.0)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--dir", help="work here; default: a temporary folder")
    args = parser.parse_args()
    ranks = 2
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        saves = train(Path(folder), width_for(args.gib_per_rank, ranks), args.saves, ranks)
        tag = Path(folder) / "volume" / saves[-1]["saved"]
        sizes = {path.name: path.stat().st_size for path in sorted(tag.iterdir())}
    for name, size in sizes.items():
        print(f"{name}: {size / (1 << 30):.2f} GiB")
    for save in saves:
        print(
            f"{save['saved']}: save_checkpoint {save['save_seconds']:.3f} s, "
            f"after_save held {save['held_seconds'] * 1000:.1f} ms"
        )
    saved = statistics.median(save["save_seconds"] for save in saves)
    held = statistics.median(save["held_seconds"] for save in saves)
    print(f"median: held / save_checkpoint = {held / saved:.4f}")


if __name__ == "__main__":
    main()
