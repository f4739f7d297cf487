"""The agent dies. Run by tests as ``python -m tests.sidecar.crashes.dying_agent``."""

from __future__ import annotations

import os
from collections.abc import Callable

from ds_ckpt_store.stores import open_store
from tests.sidecar.crashes import campaign, scene
from tests.sidecar.crashes.dying import (
    DyingFilesystem,
    DyingJournal,
    DyingStore,
    Fate,
    share_clients,
    watch_requests,
    watch_system_calls,
)

Child = Callable[[Callable[[], None]], int]


class AgentCampaign:
    """Two starts of an agent, of which one dies; then two more that nobody kills.

    The second start finds what the first has given up for long enough, and deletes it.
    """

    dies_elsewhere = ""

    def __init__(self, base: str) -> None:
        self.remote = not base.startswith("file:")
        self._base = base
        self._rest: scene.Rest | None = None

    def _build(self, folder: str) -> scene.Scene:
        prefix = f"{os.path.basename(os.path.dirname(folder))}-{os.path.basename(folder)}"
        url = f"{self._base}/{prefix}" if self.remote else f"file://{folder}/store"
        return scene.build(f"{folder}/volume", url)

    def _live_or_die(self, here: scene.Scene, fate: Fate) -> None:
        if self.remote:
            watch_requests(fate)
        else:
            watch_system_calls(fate)
        for seed in (1, 2):
            code, log = scene.run_agent(
                here,
                DyingStore(open_store(here.url), fate, remote=self.remote),
                fs=DyingFilesystem(fate),
                journal=DyingJournal.with_fate(fate),
                seed=seed,
            )
            scene.must(code == 0, f"exit code {code}: {log.troubles}")

    def rehearse(self, folder: str, fate: Fate, child: Child) -> None:
        here = self._build(folder)
        child(lambda: self._live_or_die(here, fate))
        store = open_store(here.url)
        self._rest = scene.look(here, store)
        scene.check_always(here, store)
        scene.check_rest(here, store, self._rest, f"{folder}/restored")
        store.close()

    def die(self, folder: str, fate: Fate, child: Child) -> None:
        assert self._rest is not None
        here = self._build(folder)
        child(lambda: self._live_or_die(here, fate))
        store = open_store(here.url)
        scene.check_always(here, store)
        for seed in (3, 4):
            code, log = scene.run_agent(here, store, seed=seed)
            scene.must(code == 0, f"the next start ended with {code}: {log.troubles}")
            scene.check_always(here, store)
        scene.check_rest(here, store, self._rest, f"{folder}/restored")
        store.close()


if __name__ == "__main__":
    share_clients()
    campaign.main(AgentCampaign)
