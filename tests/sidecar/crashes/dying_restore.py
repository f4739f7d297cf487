"""A restore dies. Run by tests as ``python -m tests.sidecar.crashes.dying_restore``."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping

from ds_ckpt_sidecar.local import LocalFiles
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.restore import Restore, is_restored
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.transfer.budget import Budget
from tests.sidecar.crashes import campaign, scene
from tests.sidecar.crashes.dying import (
    DyingFilesystem,
    DyingStore,
    Fate,
    Inline,
    StillClock,
    watch_system_calls,
)
from tests.sidecar.crashes.scene import must

Child = Callable[[Callable[[], None]], int]
TAG, WANTED = scene.SAVES[-1]
FORMER: Mapping[str, bytes] = {
    "mp_rank_00_model_states.pt": b"torn",  # not what the store holds
    "sub/optim.pt": b"3",  # what the store holds: taken over, not fetched
    "more.pt": b"not in the record",
}


class RestoreCampaign:
    """A restore onto a volume that is empty, or ``occupied`` by another state of the same tag."""

    remote = False
    dies_elsewhere = ""

    def __init__(self, base: str) -> None:
        self._occupied = base == "occupied"
        self._store = ""
        self._save_id = ""

    def _prepare(self, folder: str) -> None:
        """One store with one committed checkpoint, for all deaths."""
        here = scene.build(f"{folder}/source", f"file://{folder}/store")
        code, log = scene.run_agent(here, open_store(here.url), seed=1)
        must(code == 0, f"nothing to restore: {log.troubles}")
        self._store, self._save_id = here.url, here.saves[-1].save_id

    def _volume(self, folder: str) -> Volume:
        volume = Volume(f"{folder}/target")
        os.mkdir(volume.path)
        if self._occupied:
            for path, data in FORMER.items():
                os.makedirs(os.path.dirname(f"{volume.path}/{TAG}/{path}"), exist_ok=True)
                _write(f"{volume.path}/{TAG}/{path}", data)
            _write(f"{volume.path}/latest", TAG.encode())
        return volume

    def _restore(self, volume: Volume, store: Store, fs: Filesystem, seed: int) -> None:
        clock, rng = StillClock(2_000_000_000), random.Random(seed)
        budget = Budget(clock, streams=2)
        restore = Restore(store, Inline(), budget=budget, clock=clock, rng=rng)
        restore.run(Volume(volume.path, fs))

    def _live_or_die(self, volume: Volume, fate: Fate) -> None:
        watch_system_calls(fate)
        store = DyingStore(open_store(self._store), fate, remote=False)
        self._restore(volume, store, DyingFilesystem(fate), 1)

    def rehearse(self, folder: str, fate: Fate, child: Child) -> None:
        self._prepare(folder)
        volume = self._volume(folder)
        child(lambda: self._live_or_die(volume, fate))
        self._check_whole(volume)

    def die(self, folder: str, fate: Fate, child: Child) -> None:
        volume = self._volume(folder)
        child(lambda: self._live_or_die(volume, fate))
        self._check_dead(volume)
        self._restore(volume, open_store(self._store), Filesystem(), 2)
        self._check_whole(volume)

    def _check_dead(self, volume: Volume) -> None:
        """Nothing that is not whole looks so: no folder, or the former one, or all of the new."""
        found = _files(f"{volume.path}/{TAG}")
        if found and not (self._occupied and found == FORMER):
            must(found == WANTED, f"{TAG} is half restored: {sorted(found)}")
        latest = volume.fs.stat(f"{volume.path}/latest")
        if latest is not None and not self._occupied:
            must(found == WANTED, f"latest is there, and of {TAG} there is {sorted(found)}")
        must(
            not is_restored(volume, self._save_id) or found == WANTED,
            "restored.json says that it is whole, and it is not",
        )
        self._check_former(volume)

    def _check_whole(self, volume: Volume) -> None:
        scene.check_restored(volume, TAG, WANTED)
        must(is_restored(volume, self._save_id), "restored.json does not say so")
        self._check_former(volume)
        LocalFiles(volume).clear_up(4_000_000_000)
        every = {path for path, _ in volume.fs.walk(volume.path)}
        known = {f"{TAG}/{path}" for path in WANTED} | {"latest", *scene.COMPANIONS}
        known |= {".ds_ckpt/restored.json", ".ds_ckpt/restore.lock"}
        left = {path for path in every - known if not path.startswith(".ds_ckpt/aside/")}
        must(not left, f"left over: {left}")
        must(not volume.fs.names(volume.restoring), "the staging folder is left over")
        sets = len(volume.fs.names(volume.aside))
        must(sets == (1 if self._occupied else 0), f"{sets} folders were set aside")

    def _check_former(self, volume: Volume) -> None:
        """What stood there before is never lost."""
        if not self._occupied:
            return
        places = [f"{volume.path}/{TAG}"]
        places += [f"{volume.aside}/{name}" for name in volume.fs.names(volume.aside)]
        must(any(_files(place) == FORMER for place in places), "the former folder is lost")


def _files(folder: str) -> dict[str, bytes]:
    found = {}
    for path, _ in Filesystem().walk(folder):
        with open(f"{folder}/{path}", "rb") as file:
            found[path] = file.read()
    return found


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


if __name__ == "__main__":
    campaign.main(RestoreCampaign)
