"""In the background: checksums, one piece from each rank, one manifest from each node.

Ranks of a node hand their part over by files on the volume, because communication between ranks
belongs to the training thread. The node's leader publishes the manifest when the pieces of all
its ranks are there; if one of them says that it failed, or does not come, nothing is published.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from ds_ckpt_hook.errors import NotPublishedError
from ds_ckpt_hook.links import Kept, hash_kept, weakest
from ds_ckpt_hook.plan import Plan
from ds_ckpt_hook.session import Session
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.digest import to_hex
from ds_ckpt_store.contract.manifest import Document, NodeManifest, Protection, Shard
from ds_ckpt_store.errors import CkptError

logger = logging.getLogger("ds_ckpt_hook")

HOOK_VERSION = "0.1.0"
EXIT_SECONDS = 60.0
_SHORTEST_POLL = 0.01
_LONGEST_POLL = 0.5


class Piece(Document):
    """``pieces/<save_id>/<rank>.json``: what one rank contributes; ``error`` if it cannot."""

    rank: int
    protection: Protection = "hardlink"
    shards: list[Shard] = []
    companions: list[Shard] = []
    error: str = ""


@dataclass(frozen=True)
class Job:
    """One save of one rank, from the moment that its files are protected.

    Attributes:
        session: this process's.
        plan: what all ranks agreed on.
        root: save_dir relative to the volume.
        files: this rank's part.
        companions: files beside the tag's folder; global rank 0 only.
        error: why this rank has no part to give; empty if it has.
        moves_latest: whether nobody but the hook lets ``latest`` follow what is saved.
    """

    session: Session
    plan: Plan
    root: str
    files: Sequence[Kept] = ()
    companions: Sequence[Kept] = ()
    error: str = ""
    moves_latest: bool = False
    done: Callable[[str], None] = field(default=lambda _reason: None)


class Worker:
    """Hashes jobs one after another, and hands each over, on a thread of its own.

    A job whose other ranks are late waits aside, so that one rank's trouble with one save does not
    keep back the saves after it. The thread is a daemon, so that nothing can keep a finished
    trainer alive for long; an exit that was not preceded by ``finalize`` waits a minute for what
    is still being hashed.
    """

    def __init__(self, clock: Clock, publish_timeout: float) -> None:
        self._clock = clock
        self._timeout = publish_timeout
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._idle = threading.Condition()
        self._left = 0
        self._thread: threading.Thread | None = None
        self._process = 0

    def submit(self, job: Job) -> None:
        """Hand a job over; returns at once."""
        with self._idle:
            self._left += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="ds_ckpt publishing", daemon=True
                )
                self._thread.start()
                self._process = os.getpid()
                atexit.register(self._leave)
        self._jobs.put(job)

    def _leave(self) -> None:
        if self._process == os.getpid():  # a fork of this process has no thread to wait for
            self.drain(EXIT_SECONDS)

    def drain(self, timeout: float | None) -> bool:
        """Wait until nothing is left to do; False if ``timeout`` seconds were not enough."""
        with self._idle:
            return self._idle.wait_for(lambda: self._left == 0, timeout)

    def _run(self) -> None:
        waiting: list[_Handover] = []
        pause = _SHORTEST_POLL
        while True:
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=pause if waiting else None)
                waiting.append(_Handover(job, self._clock.monotonic() + self._timeout))
                pause = _SHORTEST_POLL
            waiting = [handover for handover in waiting if not self._advance(handover)]
            pause = min(2 * pause, _LONGEST_POLL)

    def _advance(self, handover: _Handover) -> bool:
        """Take a job as far as it goes now; whether it is over."""
        job, reason = handover.job, ""
        try:
            if not handover.step(self._clock.monotonic()):
                return False
        except (CkptError, OSError, ValidationError) as error:
            reason = str(error) or type(error).__name__
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.exception("unexpected error while publishing %s", job.plan.tag)
        if reason:
            job.session.note_skipped(f"{job.plan.tag}: {reason}")
            logger.warning("tag %r is not published: %s", job.plan.tag, reason)
        job.done(reason)
        with self._idle:
            self._left -= 1
            self._idle.notify_all()
        return True


class _Handover:
    """One job on its way: hashed at the first step, handed over when it can be.

    Args:
        job: of this rank.
        deadline: on the monotonic clock; then other ranks, or a full disk, are given up.
    """

    def __init__(self, job: Job, deadline: float) -> None:
        self.job = job
        self._deadline = deadline
        self._folder = f"{job.session.volume.pieces}/{job.plan.save_id}"
        self._own: Piece | None = None
        self._pieces: dict[int, Piece] = {}

    def step(self, now: float) -> bool:
        """Go on; False while something is still to come.

        Raises:
            NotPublishedError: a rank of this node failed, or its piece did not come in time.
            OSError: the manifest or this rank's piece could not be written.
        """
        if self._own is None:
            self._own = self._hash()
            self._pieces[self._own.rank] = self._own
        return self._lead(now) if self.job.session.is_leader else self._tell(now, self._own)

    def _hash(self) -> Piece:
        job = self.job
        try:
            if job.error:
                raise NotPublishedError(job.error)
            return _piece(job)
        except (CkptError, OSError) as error:
            return Piece(rank=job.session.rank, error=str(error) or type(error).__name__)

    def _tell(self, now: float, own: Piece) -> bool:
        """Write this rank's piece. Failure too has to be told, if need be once there is room."""
        fs = self.job.session.volume.fs
        try:
            fs.make_folder(self._folder)
            path = f"{self._folder}/{own.rank}.json"
            fs.write_atomic(path, own.to_bytes(), durable=False)
        except OSError:
            if now < self._deadline:
                return False
            raise
        if own.error:
            raise NotPublishedError(f"rank {own.rank}: {own.error}")
        return True

    def _lead(self, now: float) -> bool:
        """Publish when all pieces of the node are there."""
        session = self.job.session
        try:
            if not self._collect(now):
                return False
            pieces = [self._pieces[rank] for rank in session.ranks]
            manifest = _manifest(self.job, pieces)
            if not self._publish(now, manifest):
                return False
        except BaseException:
            self._clear(session.volume.link_folder(self.job.plan.save_id))
            self._clear(self._folder)
            raise
        self._clear(self._folder)
        if self.job.moves_latest or 0 not in session.ranks:
            _follow_with_latest(session, manifest)
        return True

    def _publish(self, now: float, manifest: NodeManifest) -> bool:
        """A full disk may get room when the sidecar has stored an earlier save."""
        try:
            self.job.session.volume.publish(manifest)
        except OSError:
            if now < self._deadline:
                return False
            raise
        return True

    def _clear(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            self.job.session.volume.fs.remove_tree(folder)

    def _collect(self, now: float) -> bool:
        volume, ranks = self.job.session.volume, self.job.session.ranks
        for rank in ranks:
            if rank not in self._pieces:
                piece = volume.read(f"{self._folder}/{rank}.json", Piece)
                if piece is not None:
                    self._pieces[rank] = piece
        failed = [f"rank {p.rank}: {p.error}" for p in self._pieces.values() if p.error]
        if failed:
            raise NotPublishedError("; ".join(failed[:8]))
        missing = [rank for rank in ranks if rank not in self._pieces]
        if missing and now >= self._deadline:
            raise NotPublishedError(
                f"no checksums came from ranks {missing[:8]} in time (DS_CKPT_PUBLISH_TIMEOUT)"
            )
        return not missing


def _follow_with_latest(session: Session, manifest: NodeManifest) -> None:
    """Let ``latest`` follow where DeepSpeed does not write it.

    DeepSpeed writes it on global rank 0's node alone, and other trainers nowhere. It would go on
    naming what was once resumed from, and the sidecar never removes what it names.
    """
    fs, volume = session.volume.fs, session.volume
    path = f"{volume.path}/latest"
    if manifest.root != ".":
        path = f"{volume.path}/{manifest.root}/latest"
    with contextlib.suppress(OSError):
        state = fs.stat(path)
        if state is not None and state.is_regular:
            fs.write_atomic(path, manifest.tag.encode(), durable=False)


def _piece(job: Job) -> Piece:
    fs = job.session.volume.fs
    found: list[Protection] = []

    def shard(kept: Kept) -> Shard:
        kept, value = hash_kept(fs, kept)
        found.append(kept.protection)
        return Shard(
            path=kept.path,
            size=kept.state.size,
            crc32c=to_hex(value),
            device=kept.state.device,
            inode=kept.state.inode,
            mtime_ns=kept.state.mtime_ns,
            rank=job.session.rank,
        )

    shards = [shard(kept) for kept in job.files]
    protection = weakest(found)
    return Piece(
        rank=job.session.rank,
        protection=protection,
        shards=shards,
        companions=[shard(kept) for kept in job.companions],
    )


def _manifest(job: Job, pieces: Sequence[Piece]) -> NodeManifest:
    session, plan = job.session, job.plan
    held = [shard for piece in pieces for shard in piece.shards]
    return NodeManifest(
        run_id=session.run_id,
        attempt=session.attempt,
        save_id=plan.save_id,
        tag=plan.tag,
        time_ms=plan.time_ms,
        step=plan.about.step,
        kind=plan.about.kind,
        metrics=dict(plan.about.metrics),
        pin=plan.about.pin,
        destination=plan.about.destination,
        parent=session.parent,
        world_size=session.world_size,
        nodes=plan.nodes,
        node=session.node,
        root=job.root,
        ranks=session.ranks,
        protection=weakest([piece.protection for piece in pieces if piece.shards]),
        shards=[shard for shard in held if plan.owners[shard.path] == session.node],
        replicas=[shard for shard in held if plan.owners[shard.path] != session.node],
        elsewhere=plan.elsewhere(session.node),
        companions=[shard for piece in pieces for shard in piece.companions],
        started=session.started,
        hook_version=HOOK_VERSION,
    )
