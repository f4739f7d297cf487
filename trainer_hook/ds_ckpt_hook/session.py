"""One volume in one attempt, as this process sees it: who shares it, and the trainer's heartbeat.

A session begins with a handshake of all ranks, because nothing about a cluster can be guessed:
which ranks share a volume shows in its node id, and which times were used before shows only on
the volumes. Global rank 0 names run and attempt. The lowest rank on a volume is the node's
leader; before any rank may write, it clears what an earlier attempt left.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from ds_ckpt_hook import deepspeed_files, links
from ds_ckpt_hook.errors import NotPublishedError
from ds_ckpt_hook.exchange import Exchange
from ds_ckpt_hook.settings import Place, Settings
from ds_ckpt_store.contract import access, names
from ds_ckpt_store.contract.clock import Clock, fresh_token
from ds_ckpt_store.contract.manifest import END_OF_TIME_MS, Restored, TrainerStatus
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError

logger = logging.getLogger("ds_ckpt_hook")

HEARTBEAT_SECONDS = 5.0
_ROOM_MS = 1_000_000_000_000  # thirty years


@dataclass(frozen=True)
class Hello:
    """What one rank says when a session begins."""

    error: str = ""
    node: str = ""
    host: str = ""
    newest_ms: int = 0
    now_ms: int = 0
    run_id: str = ""
    attempt: str = ""
    token: str = ""


class Session:
    """This process's part in one volume; made by :func:`begin`.

    ``lets_in`` is the group that files of a checkpoint are opened to; None to leave them alone.
    ``last_bytes`` is what the last save took on this node's volume; 0 before the first. ``on_beat``
    is called by the thread of the heartbeat after each.
    """

    def __init__(
        self,
        volume: Volume,
        hellos: Sequence[Hello],
        rank: int,
        *,
        clock: Clock,
        younger_than_ns: int,
        widens: bool,
    ) -> None:
        self.volume = volume
        self.lets_in = volume.group() if widens else None
        self.rank = rank
        self.world_size = len(hellos)
        self.node = hellos[rank].node
        self.host = hellos[rank].host
        self.ranks = [other for other, hello in enumerate(hellos) if hello.node == self.node]
        self.neighbours = [other for other in self.ranks if hellos[other].host == self.host]
        self.nodes = sorted({hello.node for hello in hellos})
        self.leaders = {hello.node: rank for rank, hello in reversed(list(enumerate(hellos)))}
        self.run_id = hellos[0].run_id
        self.newest_ms = max(hello.newest_ms for hello in hellos)
        # Sorts after every earlier attempt and save, whatever rank 0's clock says.
        began_ms = max(hellos[0].now_ms, self.newest_ms + 1)
        self.attempt = hellos[0].attempt or f"{began_ms:012x}-{hellos[0].token}"
        self.younger_than_ns = younger_than_ns
        self.taken: dict[str, tuple[str, tuple[int, int, int, int]]] = {}
        self.parent: str | None = None
        self._clock = clock
        self.started = clock.time()
        self.last_bytes = 0
        self.on_beat: Callable[[], None] = lambda: None
        self._finished = False
        self._process = 0  # that says so when it ends: not a copy of it, made by a fork
        self._engine: Any = None
        self._step: int | None = None
        self._beat: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: str | None = None
        self._skipped = 0
        self._held_seconds = 0.0
        self._complained = False
        self._warned_of_users = False

    @property
    def is_leader(self) -> bool:
        """Whether this rank publishes for its node."""
        return self.rank == self.leader

    @property
    def leader(self) -> int:
        """The rank that publishes for this rank's node."""
        return self.ranks[0]

    @property
    def is_first_of_machine(self) -> bool:
        """Whether no lower rank is on this volume and this machine."""
        return self.rank == self.neighbours[0]

    def forget_what_is_there(self, token: str) -> None:
        """No file that lies on the volume now belongs to a save that is still to come.

        Raises:
            OSError: the volume cannot be written.
        """
        fs = self.volume.fs
        self.younger_than_ns = 1 + deepspeed_files.filesystem_now_ns(fs, self.volume.own, token)

    # ---- heartbeat

    def follow(self, engine: Any) -> None:
        """Report this engine's step from now on, without keeping it alive."""
        self._engine = weakref.ref(engine)

    def reached(self, step: int) -> None:
        """Report this step from now on, for a trainer without an engine."""
        self._step = step

    def announce(self) -> None:
        """Write this attempt over what an earlier one said, its finished mark included.

        Raises:
            OSError: it could not be written.
        """
        self.volume.write_trainer_status(self._status(finished=False))

    def start_heartbeat(self) -> None:
        """Say that the trainer lives, now and every few seconds; leaders only."""
        if not self.is_leader or (self._beat is not None and self._beat.is_alive()):
            return
        self._stop.clear()
        self._write()
        self._finished = False
        if self._process != os.getpid():
            self._process = os.getpid()
            atexit.register(self._finish_at_exit)
        self._beat = threading.Thread(target=self._run, name="ds_ckpt heartbeat", daemon=True)
        self._beat.start()

    def stop_heartbeat(self) -> None:
        """Say nothing more."""
        self._stop.set()
        if self._beat is not None:
            self._beat.join()

    def finish(self, *, by_itself: bool = False) -> None:
        """Say, durably, that this trainer makes no further save; leaders only.

        Args:
            by_itself: its process ends, and nobody has said that training is over.

        Raises:
            OSError: it could not be written.
        """
        if not self.is_leader:
            return
        self.stop_heartbeat()
        with self._lock:
            status = self._status(finished=True)
            self.volume.write_trainer_status(status.model_copy(update={"by_itself": by_itself}))
            self._finished = True

    def _finish_at_exit(self) -> None:
        """A process that ends, by an exception too, makes no further save."""
        if self._finished or self._process != os.getpid():
            return
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._error = f"the trainer ended by {type(error).__name__}: {error}"[:2000]
        try:
            self.finish(by_itself=True)
        except OSError as failure:
            logger.warning("the end of training could not be noted: %s", failure)

    def note_held(self, seconds: float) -> None:
        """Add to the time that saves held the training thread."""
        with self._lock:
            self._held_seconds += seconds

    def warn_if_unreadable(self, paths: Sequence[str]) -> None:
        """Say, once, that the sidecar's user cannot read what was handed over.

        Its user is that of the heartbeat that it writes. What it may read as a member of a group is
        believed of the volume's group.
        """
        if self._warned_of_users or not paths:
            return
        sidecar = self.volume.fs.stat(f"{self.volume.status}/sidecar.json")
        state = self.volume.fs.stat(paths[0])
        if sidecar is None or state is None or sidecar.uid in (0, state.uid):
            return
        if state.mode & 0o004 or (state.mode & 0o040 and state.gid == self.volume.group()):
            return
        self._warned_of_users = True
        logger.warning(
            "%s has mode %04o of uid %d and group %d, and the sidecar runs as uid %d and cannot "
            "read it: this save will not be stored; %s%s",
            paths[0],
            state.mode & 0o7777,
            state.uid,
            state.gid,
            sidecar.uid,
            "DS_CKPT_WIDEN_MODES=0 leaves it so; " if self.lets_in is None else "",
            access.REMEDY,
        )

    def note_skipped(self, reason: str) -> None:
        """A save was not published."""
        with self._lock:
            self._skipped += 1
            self._error = reason[:2000]

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self._write()
            try:
                self.on_beat()
            except Exception:
                logger.exception("the trainer could not be told where its saves stand")

    def _write(self) -> None:
        try:
            with self._lock:
                if not self._stop.is_set():
                    self.volume.write_trainer_status(self._status(finished=False))
            self._complained = False
        except OSError as error:
            if not self._complained:
                logger.warning("the trainer's heartbeat could not be written: %s", error)
            self._complained = True

    def _status(self, *, finished: bool) -> TrainerStatus:
        engine = self._engine() if self._engine is not None else None
        step = getattr(engine, "global_steps", self._step)
        return TrainerStatus(
            run_id=self.run_id,
            attempt=self.attempt,
            time=self._clock.time(),
            started=self.started,
            step=step if isinstance(step, int) else None,
            finished=finished,
            nodes=self.nodes,
            resumed_from=self.parent,
            error=self._error,
            skipped_saves=self._skipped,
            held_seconds=self._held_seconds,
        )


def begin(
    place: Place | None,
    problem: str,
    exchange: Exchange,
    settings: Settings,
    *,
    attempt: str,
    clock: Clock,
    rng: random.Random,
    started: float,
) -> Session:
    """Shake hands with all ranks.

    Args:
        place: where this rank saves; None if it does not know, and ``problem`` says why.
        problem: see ``place``.
        exchange: the ranks.
        settings: of this process.
        attempt: the id of this start of the training if an earlier session made it, else empty.
        clock: this machine's.
        rng: source of ids.
        started: when this process started, in seconds since the epoch.

    Raises:
        NotPublishedError: a rank has no usable volume; the same on all ranks.
        ExchangeError: not all ranks took part.
    """
    hello, younger_than_ns = _hello(place, problem, settings, attempt, clock, rng, started)
    hellos: list[Hello] = exchange.gather("handshake", hello)
    problems = [f"rank {rank}: {hello.error}" for rank, hello in enumerate(hellos) if hello.error]
    if problems or place is None:
        raise NotPublishedError("; ".join(problems[:8]))
    session = Session(
        place.volume,
        hellos,
        exchange.rank,
        clock=clock,
        younger_than_ns=younger_than_ns,
        widens=settings.widen_modes,
    )
    error = ""
    if session.is_leader:
        try:
            clear_leftovers(session.volume)
            if session.lets_in is not None:
                links.widen_earlier(session.volume, session.lets_in)
            session.announce()
        except Exception as failure:  # noqa: BLE001 - the other ranks wait for this one's answer
            error = f"what an earlier attempt left on {place.volume.path} cannot be cleared: "
            error += _with_remedy(failure, place.volume)
    errors = exchange.gather("handshake: volumes are clear", error)
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
    if problems:
        raise NotPublishedError("; ".join(problems[:8]))
    session.start_heartbeat()
    return session


def _hello(
    place: Place | None,
    problem: str,
    settings: Settings,
    attempt: str,
    clock: Clock,
    rng: random.Random,
    started: float,
) -> tuple[Hello, int]:
    if place is None:
        return Hello(error=problem), 0
    try:
        volume = place.volume
        if settings.directory is None:
            volume.fs.make_folder(volume.path)
        volume.prepare()
        token = fresh_token(rng)
        age = clock.time() - started + deepspeed_files.SLACK_SECONDS
        now_ns = deepspeed_files.filesystem_now_ns(volume.fs, volume.own, token)
        restored = restored_on(place)
        stamps = [entry.mtime_ns + 1 for found in restored for entry in found.files]
        younger_than_ns = max(now_ns - int(age * 1e9), *stamps, 0)
        hello = Hello(
            node=volume.node_id(durable=False),
            host=socket.gethostname(),
            newest_ms=max(newest_known_ms(volume), *(found.time_ms for found in restored), 0),
            now_ms=int(clock.time() * 1000),
            run_id=settings.run_id or os.path.basename(place.save_dir) or "run",
            attempt=attempt,
            token=token,
        )
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's word
        said = _with_remedy(error, place.volume)
        return Hello(error=f"the volume {place.volume.path} cannot be used: {said}"), 0
    return hello, younger_than_ns


def _with_remedy(error: Exception, volume: Volume) -> str:
    remedy = access.denied(error, volume.fs)
    return f"{error}; {remedy}" if remedy else str(error)


def newest_known_ms(volume: Volume) -> int:
    """The newest save time that outbox or sidecar tell of, in milliseconds; 0 if none.

    What leaves no room for later saves is no save's time: one such file would stop all nodes.
    """
    told = [newest_committed_ms(volume)]
    for name in volume.manifests():
        save_id = name.split(".", 1)[0]
        if names.is_save_id(save_id):
            told.append(int(save_id.split("-")[0], 16))
    return max((each for each in told if each < END_OF_TIME_MS - _ROOM_MS), default=0)


def restored_on(place: Place) -> list[Restored]:
    """What restores noted on a volume; a restore into a save_dir below it notes it there."""
    found = []
    for path in sorted({place.volume.path, place.save_dir}):
        volume = Volume(path, place.volume.fs)
        try:
            restored = volume.restored_from()
        except CkptError as error:
            logger.warning("%s is not readable, and is passed over: %s", volume.restored, error)
            continue
        if restored is not None:
            found.append(restored)
    return found


def newest_committed_ms(volume: Volume) -> int:
    """The newest save time that this volume's sidecar saw committed; 0 if it says nothing."""
    try:
        status = volume.sidecar_status()
    except (CkptError, OSError):
        return 0
    return status.newest_committed_ms if status is not None else 0


def clear_leftovers(volume: Volume) -> None:
    """Remove what an earlier attempt began and can no longer finish.

    Its heartbeat and finished mark go when the new heartbeat is written over them.

    Raises:
        OSError: as the system says.
    """
    published = {name.split(".", 1)[0] for name in volume.manifests()}
    for save_id in volume.fs.names(volume.pieces):
        volume.fs.remove_tree(f"{volume.pieces}/{save_id}")
    for save_id in volume.fs.names(volume.links):
        if save_id not in published:
            volume.fs.remove_tree(volume.link_folder(save_id))


def process_started(clock: Clock) -> float:
    """When this process started, in seconds since the epoch; now, if the system's answer is odd."""
    now = clock.time()
    try:
        return min(now, psutil.Process().create_time())
    except psutil.Error:
        return now
