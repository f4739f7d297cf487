"""What tests of ``ds-ckpt doctor`` have in common: another user's eyes, and a hand that heals."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from ds_ckpt_sidecar import doctor
from ds_ckpt_sidecar.doctor import Finding
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import system_random
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.stores.port import Store
from tests.sidecar.handoff import Trainer

SIDECAR = 65532
STATES = "mp_rank_00_model_states.pt"


def seen(
    volume: str | os.PathLike[str],
    uid: int = SIDECAR,
    groups: Sequence[int] = (SIDECAR,),
    **options: Any,
) -> list[Finding]:
    """What another user finds on a volume, in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setgroups(list(groups))
            os.setgid(groups[0])
            os.setuid(uid)
            found = doctor.check_volume(Volume(os.fspath(volume)), **options)
            os.write(writer, pickle.dumps(found))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        found = pickle.load(file)
    os.waitpid(child, 0)
    return found


def matter(found: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(each.severity, each.what) for each in doctor.that_matter(found)]


def only(found: Sequence[Finding], severity: str) -> Finding:
    (one,) = (each for each in found if each.severity == severity)
    return one


def carry_out(remedy: str) -> None:
    """Do now what a remedy says is to be done now."""
    command = remedy
    if remedy.startswith("now"):
        match = re.search(r"now, as uid \d+: (.*?)\. For good", remedy)
        assert match is not None, remedy
        command = match[1]
    assert command.startswith(("chmod", "chgrp")), remedy
    subprocess.run(["sh", "-c", command], check=True)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def share(trainer: Trainer) -> None:
    """Let the group of the volume do all, but read and write what is in folders of saves."""
    for folder, _, files in os.walk(trainer.volume.own):
        os.chown(folder, 0, SIDECAR)
        os.chmod(folder, 0o2775)
        if "/links" not in folder:
            for name in files:
                os.chown(f"{folder}/{name}", 0, SIDECAR)
                os.chmod(f"{folder}/{name}", 0o664)


def own(store: Store, run_id: str, *, unfinished: bool) -> None:
    catalog = Catalog(store, system_random())
    catalog.own(run_id, "attempt", "a" * 32, finished=not unfinished)
