"""In the background: checksums, one piece from each rank, one manifest from each node.

Ranks of a node hand their part over by files on the volume, because communication between ranks
belongs to the training thread. The node's leader publishes the manifest when the pieces of all
its ranks are there; if one of them says that it failed, or does not come, nothing is published.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
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
    """

    session: Session
    plan: Plan
    root: str
    files: Sequence[Kept] = ()
    companions: Sequence[Kept] = ()
    error: str = ""
    done: Callable[[str], None] = field(default=lambda _reason: None)


class Worker:
    """Runs jobs one after another on a thread of its own.

    The thread is a daemon, so that nothing can keep a finished trainer alive for long; an exit
    that was not preceded by ``finalize`` waits a minute for what is still being hashed.
    """

    def __init__(self, clock: Clock, publish_timeout: float) -> None:
        self._clock = clock
        self._timeout = publish_timeout
        self._jobs: queue.Queue[Job] = queue.Queue()
        self._idle = threading.Condition()
        self._left = 0
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Hand a job over; returns at once."""
        with self._idle:
            self._left += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="ds_ckpt publishing", daemon=True
                )
                self._thread.start()
                atexit.register(self.drain, EXIT_SECONDS)
        self._jobs.put(job)

    def drain(self, timeout: float | None) -> bool:
        """Wait until nothing is left to do; False if ``timeout`` seconds were not enough."""
        with self._idle:
            return self._idle.wait_for(lambda: self._left == 0, timeout)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            reason = ""
            try:
                perform(job, self._clock, self._timeout)
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


def perform(job: Job, clock: Clock, timeout: float) -> None:
    """Hash this rank's part, hand it over, and publish if this rank leads its node.

    Raises:
        NotPublishedError: a rank of this node failed, or its piece did not come in time.
        ShardError, OSError: this rank's own part failed.
    """
    session, fs, save_id = job.session, job.session.volume.fs, job.plan.save_id
    folder = f"{session.volume.pieces}/{save_id}"
    failure: Exception | None = None
    try:
        if job.error:
            raise NotPublishedError(f"rank {session.rank}: {job.error}")
        piece = _piece(job)
    except (CkptError, OSError) as error:
        failure = error
        piece = Piece(rank=session.rank, error=str(error) or type(error).__name__)
    if session.is_leader:
        try:
            pieces = _collect(job, piece, clock, timeout)
            session.volume.publish(_manifest(job, pieces))
        except BaseException:
            with contextlib.suppress(OSError):
                fs.remove_tree(session.volume.link_folder(save_id))
            raise
        finally:
            with contextlib.suppress(OSError):
                fs.remove_tree(folder)
    else:
        fs.make_folder(folder)
        fs.write_atomic(f"{folder}/{session.rank}.json", piece.to_bytes(), durable=False)
    if failure is not None:
        raise failure


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


def _collect(job: Job, own: Piece, clock: Clock, timeout: float) -> list[Piece]:
    volume = job.session.volume
    pieces = {own.rank: own}
    deadline = clock.monotonic() + timeout
    pause = 0.01
    while True:
        for rank in job.session.ranks:
            if rank not in pieces:
                path = f"{volume.pieces}/{job.plan.save_id}/{rank}.json"
                piece = volume.read(path, Piece)
                if piece is not None:
                    pieces[rank] = piece
        failed = [f"rank {p.rank}: {p.error}" for p in pieces.values() if p.error]
        if failed:
            raise NotPublishedError("; ".join(failed[:8]))
        waiting = [rank for rank in job.session.ranks if rank not in pieces]
        if not waiting:
            return [pieces[rank] for rank in job.session.ranks]
        if clock.monotonic() >= deadline:
            raise NotPublishedError(
                f"no checksums came from ranks {waiting[:8]} within {timeout:.0f} s"
            )
        clock.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL)


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
        hook_version=HOOK_VERSION,
    )
