"""A trainer of few words: hands saves to a sidecar as the hook does, with real files and links.

A :class:`Trainer` stands for the ranks of one node on one volume. For several nodes, make one on
each volume and call :func:`save_together`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence

from ds_ckpt_store.contract import digest, names
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.manifest import NodeManifest, Protection, Shard, TrainerStatus
from ds_ckpt_store.contract.volume import Volume

START_MS = 1_700_000_000_000
Files = Mapping[str, bytes | int]


class Trainer:
    """The ranks of one node.

    Args:
        path: the shared volume; made if absent.
        run_id: the run.
        attempt: id of the attempt; a new one if None.
        time_ms: save time of the first save; each later one is a second after the one before.
        seed: of the bytes of files given by size, and of ids.
        started: when the attempt began, in seconds since the epoch; None as of an older hook.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        run_id: str = "run",
        attempt: str | None = None,
        time_ms: int = START_MS,
        seed: int | None = None,
        started: float | None = None,
    ) -> None:
        os.makedirs(path, exist_ok=True)
        self.volume = Volume(os.fspath(path))
        self.volume.prepare()
        self.node = self.volume.node_id()
        self.rng = random.Random(seed)
        self.run_id = run_id
        self.time_ms = time_ms
        self.started = started
        self.attempt = attempt or names.new_save_id(time_ms - 1000, self.rng)

    def save(
        self,
        tag: str,
        files: Files,
        *,
        companions: Files | None = None,
        replicas: Files | None = None,
        save_id: str | None = None,
        nodes: Sequence[str] | None = None,
        time_ms: int | None = None,
        step: int | None = None,
        root: str = ".",
        pin: bool = False,
        kind: str = "checkpoint",
        parent: str | None = None,
        destination: str | None = None,
        protection: Protection = "hardlink",
        in_place: bool = False,
        latest: bool = True,
        publish: bool = True,
    ) -> NodeManifest:
        """Write a tag's folder, link it, publish its manifest and move ``latest``.

        Args:
            tag: the folder's name.
            files: path under the tag's folder to its bytes, or to a size of random bytes.
            companions: the same, for files beside the folder.
            replicas: the same, for files of the folder that another node uploads.
            save_id: of the save; made from its time if None.
            nodes: ids of the nodes that upload a shard; this one alone if None.
            time_ms: save time; a second after the last one if None.
            step: as DeepSpeed counts.
            root: save_dir relative to the volume.
            pin: protected from retention.
            kind: why it was made.
            parent: the save that was resumed from.
            destination: where the trainer asks to upload to.
            protection: anything but ``hardlink`` leaves out the links.
            in_place: write over files that exist, as ``torch.save`` does; else on new inodes.
            latest: move the volume's ``latest``.
            publish: False hands nothing over.
        """
        time_ms = self.time_ms if time_ms is None else time_ms
        self.time_ms = max(self.time_ms, time_ms) + 1000
        save_id = save_id or names.new_save_id(time_ms, self.rng)
        top = self.volume.path if root == "." else f"{self.volume.path}/{root}"
        links = self.volume.link_folder(save_id) if protection == "hardlink" else None

        def write(group: Files, folder: str, link_folder: str | None) -> list[Shard]:
            return [
                self._write(path, content, rank, folder, link_folder, in_place=in_place)
                for rank, (path, content) in enumerate(group.items())
            ]

        beside = f"{links}/{names.COMPANIONS_DIR}" if links else None
        shards = write(files, f"{top}/{tag}", links)
        manifest = NodeManifest(
            run_id=self.run_id,
            attempt=self.attempt,
            save_id=save_id,
            tag=tag,
            time_ms=time_ms,
            step=step,
            pin=pin,
            kind=kind,
            parent=parent,
            nodes=list(nodes) if nodes is not None else [self.node],
            node=self.node,
            root=root,
            ranks=list(range(len(files))),
            protection=protection,
            shards=shards,
            replicas=write(replicas or {}, f"{top}/{tag}", links),
            companions=write(companions or {}, top, beside),
            destination=destination,
            started=self.started,
        )
        if latest:
            self.volume.fs.write_atomic(f"{top}/latest", tag.encode())
        if publish:
            self.volume.publish(manifest)
        return manifest

    def _write(
        self,
        path: str,
        content: bytes | int,
        rank: int,
        folder: str,
        links: str | None,
        *,
        in_place: bool,
    ) -> Shard:
        data = self.rng.randbytes(content) if isinstance(content, int) else content
        full = f"{folder}/{path}"
        os.makedirs(os.path.dirname(full), exist_ok=True)
        if not in_place and os.path.lexists(full):
            os.unlink(full)
        with open(full, "wb") as file:
            file.write(data)
        if links is not None:
            link = f"{links}/{path}"
            self.volume.fs.make_folder(os.path.dirname(link))
            os.link(full, link)
        state = os.stat(full)
        return Shard(
            path=path,
            size=len(data),
            crc32c=digest.to_hex(digest.crc32c(data)),
            device=state.st_dev,
            inode=state.st_ino,
            mtime_ns=state.st_mtime_ns,
            rank=rank,
        )

    def rewrite(self, manifest: NodeManifest, path: str, data: bytes) -> None:
        """Write a shard again in place: other bytes, same inode, so the link changes with it."""
        with open(f"{self.folder(manifest)}/{path}", "r+b") as file:
            file.truncate()
            file.write(data)

    def folder(self, manifest: NodeManifest) -> str:
        """Absolute path of the trainer's own folder of a save."""
        return f"{self.volume.path}/{self.volume.tag_folder(manifest)}"

    def say(
        self,
        *,
        finished: bool = False,
        resumed_from: str | None = None,
        nodes: Sequence[str] | None = None,
    ) -> None:
        """The trainer's heartbeat."""
        self.volume.write_trainer_status(
            TrainerStatus(
                run_id=self.run_id,
                attempt=self.attempt,
                time=SystemClock().time(),
                started=self.started,
                finished=finished,
                nodes=list(nodes) if nodes is not None else [self.node],
                resumed_from=resumed_from,
            )
        )


def save_together(
    trainers: Sequence[Trainer], tag: str, files: Sequence[Files], *, latest: bool = True
) -> list[NodeManifest]:
    """One save over several nodes: the attempt, id, time and list of nodes are the first one's.

    ``files[i]`` is what ``trainers[i]`` uploads.
    """
    first = trainers[0]
    time_ms = max(trainer.time_ms for trainer in trainers)
    save_id = names.new_save_id(time_ms, first.rng)
    nodes = [trainer.node for trainer, group in zip(trainers, files, strict=True) if len(group) > 0]
    for trainer in trainers:
        trainer.attempt = first.attempt
    return [
        trainer.save(tag, group, save_id=save_id, nodes=nodes, time_ms=time_ms, latest=latest)
        for trainer, group in zip(trainers, files, strict=True)
    ]
