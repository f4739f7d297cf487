"""One rank of the soak's training: the real hook, real gloo, and an engine that only writes files.

It does what a training script does: agrees on what to resume from, loads it, steps, saves, hands
over, rotates its own old folders, and at the end finalizes. Shards are written in place, as
``torch.save`` does, so a tag that is saved again changes the bytes under the sidecar's links.
All decisions come from one seed, so the ranks take the same ones.

Each fact is one JSON line in the file of its rank, written before the next step is taken: what was
written before it is handed over, so a rank that is killed in between has told of it all the same.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import random
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import ds_ckpt_hook
from ds_ckpt_hook.core import LOST
from tests.hook.standin import Engine
from tests.soak.shards import Mark, content, mark_of, sha256_of

AGAIN = 75  # the ranks could not agree: all are to be started again
NO_MEETING = 76  # the ranks did not find each other, perhaps because a port was taken
MIB = 1 << 20
KEPT_FOLDERS = 3
SAVED_AGAIN = 0.15
LARGE = 0.25
PINNED = 0.05


class MarkedEngine(Engine):
    """Writes marked files of some size under DeepSpeed's names."""

    def write(self, save_dir: Path, tag: str, save: str, size: int) -> dict[str, str]:
        """All files of this rank; returns path to SHA-256.

        Raises:
            OSError: the disk is full; what was begun stays there.
        """
        (save_dir / tag).mkdir(exist_ok=True)
        names = [self._get_zero_ckpt_name(str(save_dir), tag)]
        if self.save_non_zero_checkpoint:
            names.append(self._get_ckpt_name(str(save_dir), tag))
        written = {}
        for name in names:
            path = os.path.basename(name)
            data = content(Mark(save, path, self.rank, self.global_steps), size)
            with open(name, "wb") as file:
                file.write(data)
            written[path] = hashlib.sha256(data).hexdigest()
            size = 10_000  # what the ranks differ in is the optimizer's shard
        return written

    def load(self, save_dir: Path, tag: str) -> dict[str, str]:
        """Take step and files of a checkpoint; returns path to ``<save>:<SHA-256>``."""
        names = [self._get_ckpt_name(str(save_dir), tag)]
        names.append(self._get_zero_ckpt_name(str(save_dir), tag))
        found = {}
        for name in names:
            mark = mark_of(Path(name))
            found[os.path.basename(name)] = f"{mark and mark.save}:{sha256_of(Path(name))}"
            if mark is not None:
                self.global_steps = mark.step
        return found


class Training:
    """One attempt, as this rank sees it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.volume = Path(options.volume)
        self.attempt = options.attempt
        self.stop_file = Path(options.stop)
        self.finalize_seconds = options.finalize_seconds
        self.interval = options.interval
        self.rank = int(os.environ["RANK"])
        self.is_first_of_node = options.first
        self.rng = random.Random(f"{options.seed}/{options.attempt}")
        self.engine = MarkedEngine(self.rank, writes_model=options.first)
        self.saves: list[Any] = []
        self.number = 0
        self._out = open(options.out, "a")  # noqa: SIM115 - open until the process ends

    def say(self, event: str, **facts: Any) -> None:
        line = {"event": event, "attempt": self.attempt, "rank": self.rank, **facts}
        print(json.dumps(line), file=self._out, flush=True)

    def gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, value)
        return answers

    def run(self) -> int:
        import torch.distributed as dist

        try:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
        except Exception as error:
            self.say("no meeting", reason=str(error))
            return NO_MEETING
        try:
            tag = ds_ckpt_hook.agree_on_resume(self.volume)
        except ds_ckpt_hook.AgreementError as error:
            self.say("no agreement", reason=str(error))
            return AGAIN
        files = self.engine.load(self.volume, tag) if tag is not None else {}
        self.say("resumed", tag=tag, step=self.engine.global_steps, files=files)
        if len(set(self.gather(tag))) > 1:
            self.say("torn", reason="the ranks resumed from different tags")
            return 1
        while not any(self.gather(self.stop_file.exists())):
            time.sleep(self.rng.uniform(0.5, 1.5) * self.interval)
            self.engine.global_steps += 1
            self.save()
            if self.rng.random() < SAVED_AGAIN:
                time.sleep(self.rng.choice((0, 0, 0.3)))
                self.save()
            self.follow()
        ds_ckpt_hook.finalize(self.finalize_seconds)
        self.follow()
        self.say("finished", open=[save.save_id for save in self.saves])
        dist.barrier()
        return 0

    def save(self) -> None:
        self.number += 1
        name = f"{self.attempt}.{self.number}"
        tag = f"global_step{self.engine.global_steps}"
        # Each rank draws all of it, so that they go on drawing the same.
        size, much = self.rng.randrange(200, 60_000), self.rng.randrange(5 * MIB, 13 * MIB)
        owner = self.rng.randrange(int(os.environ["WORLD_SIZE"]))
        large, pin = self.rng.random() < LARGE, self.rng.random() < PINNED
        if large and self.rank == owner:
            size = much
        try:
            files = self.engine.write(self.volume, tag, name, size)
            problem = ""
        except OSError as error:
            files, problem = {}, str(error)
        if not any(self.gather(problem)) and self.rank == 0:
            try:
                (self.volume / "latest").write_text(tag)
            except OSError as error:
                problem = str(error)
        problems = [text for text in self.gather(problem) if text]
        if problems:  # as a script does that goes on after a save that failed
            self.say("unwritten", tag=tag, reason=problems[0])
            return
        self.say("wrote", save=name, tag=tag, step=self.engine.global_steps, files=files)
        save = ds_ckpt_hook.after_save(self.engine, tag, save_dir=self.volume, pin=pin)
        self.say("saved", save=name, save_id=save.save_id, reason=save.status().reason)
        self.saves.append(save)
        if self.is_first_of_node:
            self.rotate()

    def follow(self) -> None:
        """Tell of each save once that it is durable, or will never be."""
        for save in list(self.saves):
            standing = save.status()
            if standing.durable:
                self.say("durable", save_id=save.save_id, tag=save.tag)
            elif standing.state in LOST:
                self.say("lost", save_id=save.save_id, tag=save.tag, state=standing.state)
            else:
                continue
            self.saves.remove(save)

    def rotate(self) -> None:
        """Keep the newest folders, as training frameworks do, whatever is uploaded by then."""
        folders = [path for path in self.volume.glob("global_step*") if path.is_dir()]
        folders.sort(key=lambda path: path.stat().st_mtime_ns)
        for folder in folders[:-KEPT_FOLDERS]:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: list[str], environ: dict[str, str], log: str) -> NoReturn:
    """The whole of one process, which was forked from one that has imported torch already.

    Args:
        arguments: see below.
        environ: its environment.
        log: where it prints.
    """
    os.environ.clear()
    os.environ.update(environ)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    parser = argparse.ArgumentParser()
    parser.add_argument("--volume", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--stop", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--finalize-seconds", type=float, required=True)
    parser.add_argument("--first", action="store_true", help="of the ranks of its node")
    code = 1
    try:
        code = Training(parser.parse_args(arguments)).run()
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
