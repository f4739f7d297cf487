"""One of two agents dies. Run by tests as ``python -m tests.sidecar.crashes.dying_nodes``."""

from __future__ import annotations

import random
from collections.abc import Callable

from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.manifest import NodeIdentity
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.stores import open_store
from tests.sidecar.crashes import campaign, scene
from tests.sidecar.crashes.dying import (
    DyingFilesystem,
    DyingJournal,
    DyingStore,
    Fate,
    watch_system_calls,
)
from tests.sidecar.handoff import Files, Trainer, save_together

Child = Callable[[Callable[[], None]], int]
FILES: list[Files] = [
    {"zero_pp_rank_0_optim_states.pt": b"0" * 5000, "mp_rank_00_model_states.pt": b"model"},
    {"zero_pp_rank_1_optim_states.pt": b"1" * 5000},
]


class NodesCampaign:
    """Two saves over two nodes, of which one dies; the other comes by before it starts again."""

    remote = False
    dies_elsewhere = ".ds_ckpt/probe/"

    def __init__(self, base: str) -> None:
        self._mortal = {"first": 0, "second": 1}[base]
        self._rest: list[scene.Rest] = []

    def _build(self, folder: str) -> list[scene.Scene]:
        trainers = []
        for node in range(2):
            volume = Volume(f"{folder}/{node}")
            volume.fs.make_folder(volume.own)
            identity = NodeIdentity(node=str(node) * 32)
            volume.fs.write_atomic(f"{volume.own}/node.json", identity.to_bytes())
            trainers.append(Trainer(volume.path, seed=node))
        saves = [save_together(trainers, f"global_step{step}", FILES) for step in (1, 2)]
        url = f"file://{folder}/store"
        return [
            scene.Scene(trainer.volume.path, url, [save[node] for save in saves])
            for node, trainer in enumerate(trainers)
        ]

    def _live_or_die(self, here: scene.Scene, fate: Fate) -> None:
        watch_system_calls(fate)
        code, log = scene.run_agent(
            here,
            DyingStore(open_store(here.url), fate, remote=False),
            fs=DyingFilesystem(fate),
            journal=DyingJournal.with_fate(fate),
            seed=1,
        )
        scene.must(code == 0, f"exit code {code}: {log.troubles}")

    def _run(self, folder: str, fate: Fate, child: Child) -> list[scene.Scene]:
        nodes = self._build(folder)
        mortal, other = nodes[self._mortal], nodes[1 - self._mortal]
        if self._mortal == 1:
            self._start(other, nodes, 2)
        child(lambda: self._live_or_die(mortal, fate))
        self._check_always(nodes)
        for seed, node in enumerate((other, mortal, other, mortal), 3):
            self._start(node, nodes, seed)
        return nodes

    def _start(self, node: scene.Scene, nodes: list[scene.Scene], seed: int) -> None:
        code, log = scene.run_agent(node, open_store(node.url), seed=seed)
        scene.must(code == 0, f"a start ended with {code}: {log.troubles}")
        self._check_always(nodes)

    def _check_always(self, nodes: list[scene.Scene]) -> None:
        for node in nodes:
            scene.check_always(node, open_store(node.url))

    def rehearse(self, folder: str, fate: Fate, child: Child) -> None:
        nodes = self._run(folder, fate, child)
        self._rest = [scene.look(node, open_store(node.url)) for node in nodes]
        self._check_whole(folder, nodes)

    def die(self, folder: str, fate: Fate, child: Child) -> None:
        nodes = self._run(folder, fate, child)
        for node, expected in zip(nodes, self._rest, strict=True):
            scene.check_as(scene.look(node, open_store(node.url)), expected)
        self._check_whole(folder, nodes)

    def _check_whole(self, folder: str, nodes: list[scene.Scene]) -> None:
        store = open_store(nodes[0].url)
        states = [record.state for record in Catalog(store, random.Random(0)).records()]
        scene.must(states == ["deleted", "committed"], f"decisions are {states}")
        scene.restore_anew(store, f"{folder}/restored")
        volume = Volume(f"{folder}/restored")
        scene.check_restored(volume, "global_step2", {**FILES[0], **FILES[1]}, companions={})


if __name__ == "__main__":
    campaign.main(NodesCampaign)
