"""A process of another user that does what it is told, line by line: JSON in, JSON out."""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_ckpt_hook import resume, saving
from ds_ckpt_hook.core import Hook
from ds_ckpt_sidecar import cli as command
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.volume import Volume
from tests.hook.standin import Engine, Job

_CAPABILITIES = 0x20080522  # linux/capability.h: _LINUX_CAPABILITY_VERSION_3


class Careful(Engine):
    """An engine that leaves folders and files as umask 077 and ``tempfile`` make them."""

    def save_checkpoint(self, save_dir: Path, tag: str, content: str = "") -> None:
        super().save_checkpoint(save_dir, tag, content)
        deeper = save_dir / tag / "offloaded_tensors/rank0"
        deeper.mkdir(parents=True, exist_ok=True)
        (deeper / "x.pt").write_text(f"offloaded {tag}")
        outside = save_dir / ".incoming"
        outside.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=outside, delete=False) as file:
            file.write(f"renamed {tag}".encode())
        os.replace(file.name, save_dir / tag / "layer_00-model_states.pt")
        script = save_dir / "zero_to_fp32.py"
        script.write_text("# a script that DeepSpeed copies anew with each save")


class NoLinks(Filesystem):
    def link(self, source: str, target: str) -> None:
        raise PermissionError(1, "Operation not permitted", source)


class Trainer:
    """One start of a training job after another, in one process."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ds_ckpt_hook").addHandler(handler)

    def start(self, volume: str, save_dir: str, *, links: bool = True, **settings: bool) -> None:
        """A new attempt."""
        self.said.clear()
        job = Job([Path(save_dir)], directory=volume, **settings)
        job.engines = [Careful(0)]
        if not links:
            for hook in job.hooks:
                hook.fs = NoLinks()
        self.job = job

    def _hook(self) -> tuple[Job, Hook]:
        assert self.job is not None
        return self.job, self.job.hooks[0]

    def save(self, tag: str) -> list[Any]:
        """What came of it: save id, what it said, protection of the newest manifest."""
        job, hook = self._hook()
        (engine,) = job.engines
        engine.global_steps += 1
        engine.save_checkpoint(job.volumes[0], tag)
        save = saving.after_save(hook, engine, tag, save_dir=job.volumes[0])
        job.drain()
        place, _ = hook.locate(job.volumes[0])
        assert place is not None
        volume = Volume(place.volume.path)
        names = volume.manifests()
        protection = volume.manifest(names[-1]).protection if names else ""
        return [save.save_id, hook.saves[-1].reason, list(self.said), protection]

    def resume(self, destination: str | None) -> list[Any]:
        """The tag, and what its files hold; or what was raised."""
        job, hook = self._hook()
        try:
            tag = resume.agree_on_resume(hook, job.volumes[0], destination=destination)
        except Exception as error:
            return [None, f"{type(error).__name__}: {error}"]
        for session in hook.sessions.values():
            session.stop_heartbeat()
        if tag is None:
            return [None, {}]
        folder = job.volumes[0] / tag
        files = {
            str(path.relative_to(folder)): path.read_text()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        return [tag, files]

    def torn(self, save_dir: str, tag: str) -> None:
        """A save that was never handed over."""
        Careful(0).save_checkpoint(Path(save_dir), tag)


def run(*arguments: str) -> list[Any]:
    """A command, in a process of its own: its exit code and what it said."""
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                sys.argv = ["ds-ckpt", *arguments]
                command.main()
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 71
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        return [code, output.read()]


def become(uid: int, gid: int, groups: list[int], umask: int, *, capabilities: bool) -> None:
    """Be another user from now on."""
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    os.umask(umask)
    if not capabilities:
        header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
        none = (ctypes.c_uint32 * 6)()
        if ctypes.CDLL(None, use_errno=True).capset(header, none):
            raise OSError(ctypes.get_errno(), "capset")


def main() -> None:
    # Whatever is needed later: the interpreter may lie where only root reads.
    for name in ("ds_ckpt_hook.remote", "ds_ckpt_sidecar.commands", "ds_ckpt_store.stores.file"):
        importlib.import_module(name)
    for name in ("ds_ckpt_store.stores.probe", "ds_ckpt_store.stores.retry", "watchdog.observers"):
        importlib.import_module(name)
    become(**json.loads(sys.argv[1]))
    trainer = Trainer()
    calls: dict[str, Callable[..., Any]] = {
        name: getattr(trainer, name) for name in ("start", "save", "resume", "torn")
    }
    calls["run"] = run
    print(json.dumps(None), flush=True)
    for line in sys.stdin:
        name, arguments, options = json.loads(line)
        try:
            answer = {"answer": calls[name](*arguments, **options)}
        except BaseException:
            answer = {"raised": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
