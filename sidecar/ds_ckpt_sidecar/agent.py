"""One sidecar process: builds the parts, runs passes until told to stop, drains, and exits.

Start: lock the volume (a second agent stands by), probe the store until it answers, then pass
after pass, woken by the outbox or by the clock. SIGTERM: the newest save first, until all is
stored or the deadline comes; what is left is continued by a later start.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from ds_ckpt_sidecar import __version__
from ds_ckpt_sidecar.journal import Journal
from ds_ckpt_sidecar.lifecycle import Lifecycle
from ds_ckpt_sidecar.limits import LimitsWatch, describe_rate
from ds_ckpt_sidecar.local import LocalFiles
from ds_ckpt_sidecar.observe.log import Growing, Log
from ds_ckpt_sidecar.observe.report import AgentState, Reporter
from ds_ckpt_sidecar.outbox import watch
from ds_ckpt_sidecar.priority import stand_back
from ds_ckpt_sidecar.settings import AgentSettings
from ds_ckpt_sidecar.syncer import LONGEST_BACKOFF, Syncer
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import Clock, SystemClock, system_random
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import (
    CkptError,
    OwnershipError,
    PausedError,
    SettingsError,
    StoreError,
    WeakStoreError,
)
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.probe import fit, probe
from ds_ckpt_store.stores.retry import Retry, RetryPolicy, RetryStore
from ds_ckpt_store.transfer.budget import Budget, Stall, streams_within
from ds_ckpt_store.transfer.plan import MIB, check_preferred
from ds_ckpt_store.transfer.upload import Uploader

ONCE_TRIES = 3
_SHARED = (
    "run trainer and agent as the same user, or give both a common group (fsGroup) and let the "
    "group write (umask 0002)"
)


class Agent:
    """One sidecar process.

    Args:
        settings: what it is told.
        store: the destination, as opened by its URL.
        volume: the shared volume.
        log: one line per step.
        clock: time.
        rng: randomness.
        open_journal: makes the journal once the volume is locked.
        executor: where parts are sent; its own pool of threads if None.

    Raises:
        SettingsError: a setting cannot work with this store.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        store: Store,
        volume: Volume,
        log: Log,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        open_journal: Callable[[str, Callable[[str], None], Clock], Journal] = Journal,
        executor: Executor | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._volume = volume
        self._log = log
        self._clock = clock or SystemClock()
        self._rng = rng or system_random()
        self._open_journal = open_journal
        check_preferred(settings.part_bytes, store.capabilities)
        self._budget = Budget(
            self._clock,
            streams=settings.streams,
            fit=streams_within(settings.memory_mib * MIB, store.capabilities),
            bandwidth=settings.bandwidth,
            stall_seconds=settings.stall_seconds,
            on_stall=self._warn_stall,
        )
        self._executor = executor or ThreadPoolExecutor(self._budget.fit, "part")
        self._failures = Growing(log, self._clock)
        self._reporter = Reporter(volume, self._clock, self._failures, __version__)
        self._reporter.limits = lambda: {
            "streams": self._budget.most,
            "bandwidth": self._budget.bandwidth,
        }
        self._limits = LimitsWatch(
            volume,
            self._budget,
            bandwidth=settings.bandwidth,
            streams=settings.streams,
            log=log,
            clock=self._clock,
        )
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._refused = False
        self._state: AgentState = "starting"
        self._deadline: float | None = None
        self._syncer: Syncer | None = None
        self._journal: Journal | None = None

    def stop(self) -> None:
        """Ask it to drain and exit; safe to call from a signal handler."""
        self._stopping.set()
        self._wake.set()

    # ---- the process

    def run(self, *, once: bool = False) -> int:
        """Work until stopped, or with ``once`` until nothing is left to do.

        Returns:
            Exit code: 0 done, 1 something is not stored.
        """
        try:
            self._volume.prepare()
            lock = self._lock(once)
        except PermissionError as error:
            raise SettingsError(
                f"{error.filename}: {error.strerror}: the agent runs as uid {os.geteuid()}; "
                f"{_SHARED}"
            ) from None
        except OSError as error:
            raise SettingsError(
                f"{error.filename}: {error.strerror}: the agent cannot begin its work on "
                f"{self._volume.path}; make room there, or look at its disk, and start it again"
            ) from None
        if lock is None:
            return 1 if once else 0
        if self._settings.priority == "low":
            stand_back(self._log)
        stop_watching: Callable[[], None] = lambda: None  # noqa: E731
        journal: Journal | None = None
        try:
            node = self._volume.node_id()
            self._log.info(
                "agent.started",
                version=__version__,
                volume=self._volume.path,
                destination=self._settings.destination,
                node=node,
                uid=os.geteuid(),
                streams=self._budget.most,
                bandwidth=describe_rate(self._budget.bandwidth),
            )
            self._limits.look()
            self._say_unchangeable()
            self._clear_up()
            store = self._connect(once, node)
            if store is None:
                return 1
            path = self._settings.journal or self._volume.journal
            journal = self._journal = self._open_journal(path, self._warn_journal, self._clock)
            self._syncer = self._build(store, journal, node)
            self._syncer.look_up_committed()
            self._syncer.beat("running", now=True)
            if not once:
                stop_watching = watch(self._volume.outbox, self._wake, self._warn_watch)
            code = self._drain_once() if once else self._loop()
        finally:
            stop_watching()
            self._executor.shutdown(wait=True, cancel_futures=True)
            if journal is not None:
                journal.close()
            self._store.close()
            os.close(lock)
        return code

    def _build(self, store: Store, journal: Journal, node: str) -> Syncer:
        catalog = Catalog(store, self._rng)
        uploader = Uploader(
            store,
            self._executor,
            budget=self._budget,
            part_size=self._settings.part_bytes,
            clock=self._clock,
            keep_cached=self._settings.page_cache == "keep",
        )
        lifecycle = Lifecycle(
            volume=self._volume,
            catalog=catalog,
            uploader=uploader,
            journal=journal,
            reporter=self._reporter,
            log=self._log,
            clock=self._clock,
            abandon_seconds=self._settings.abandon_seconds,
        )
        return Syncer(
            self._settings,
            volume=self._volume,
            node=node,
            catalog=catalog,
            lifecycle=lifecycle,
            journal=journal,
            reporter=self._reporter,
            log=self._log,
            failures=self._failures,
            clock=self._clock,
            rng=self._rng,
        )

    def _lock(self, once: bool) -> int | None:
        """The volume's lock; None if it should exit instead."""
        said = False
        while True:
            lock = self._volume.fs.try_lock(self._volume.lock)
            if lock is not None:
                return lock
            if not said:
                self._log.warning(
                    "agent.standby",
                    reason=f"another agent works on {self._volume.path} (it holds "
                    f"{self._volume.lock})" + ("" if once else "; taking over when it ends"),
                )
                said = True
            if once or self._wait(self._settings.rescan_seconds):
                return None

    def _say_unchangeable(self) -> None:
        """Say at start what would else show only when the first save is to be removed."""
        for path in self._volume.unchangeable():
            state = self._volume.fs.stat(path)
            self._log.warning(
                "volume.not_writable",
                path=path,
                uid=os.geteuid(),
                owner_uid=state.uid if state else None,
                mode=f"{state.mode & 0o7777:04o}" if state else None,
                reason=f"names in it cannot be made or removed; {_SHARED}",
            )

    def _clear_up(self) -> None:
        """Remove what an agent that was killed has left on the volume."""
        try:
            for sentence in LocalFiles(self._volume).clear_up(self._clock.time()):
                self._log.warning("volume.cleared_up", reason=sentence)
        except OSError as error:
            self._log.error("volume.not_cleared_up", error=str(error))

    def _connect(self, once: bool, node: str) -> Store | None:
        """Learn what the store really does, until it answers; None if it should exit instead."""
        tries = 0
        self._reporter.beat("starting", now=True, destination=self._settings.destination)
        while True:
            # This loop is patient and says what is wrong; calls within it are to fail soon.
            brief = RetryStore(self._store, self._clock, self._rng, policy=RetryPolicy(tries=3))
            retrying = RetryStore(self._store, self._clock, self._rng, on_retry=self._say_retry)
            try:
                findings = probe(brief, self._rng, node)
                fitted = fit(retrying, findings, allow_weak=self._settings.allow_weak_store)
            except (StoreError, WeakStoreError) as error:
                tries += 1
                last = isinstance(error, WeakStoreError) or (once and tries >= ONCE_TRIES)
                delay = min(60.0, 2.0**tries) * self._rng.uniform(0.5, 1.0)
                self._failures.error(
                    "probe",
                    "store.unavailable",
                    destination=self._settings.destination,
                    error=str(error),
                    kind=type(error).__name__,
                    **({} if last else {"next_try_seconds": round(delay, 1)}),
                )
                self._reporter.error(str(error))
                self._reporter.beat(
                    "refused" if last else "starting",
                    now=True,
                    destination=self._settings.destination,
                )
                if last or self._wait(delay):
                    return None
            else:
                self._failures.clear("probe")
                self._log.info("store.probed", findings=findings.describe())
                if findings.doubt() is not None:
                    self._log.warning("store.weak_proof", reason=findings.doubt())
                return fitted

    # ---- passes

    def _loop(self) -> int:
        syncer = self._need_syncer()
        self._state = "running"
        failed = 0
        while not self._stopping.is_set():
            passed = self._pass(newest_first=self._settings.order == "newest")
            failed = 0 if passed else failed + 1
            due = syncer.next_due()
            pause = self._settings.rescan_seconds
            if failed:  # no save was even tried: leave the store, or the run that has it, in peace
                pause = min(pause * 2 ** min(failed - 1, 10), max(pause, LONGEST_BACKOFF))
            elif due is not None:
                pause = min(pause, max(due - self._clock.monotonic(), 0.05))
            self._wait(pause)
        return self._drain()

    def _pass(self, *, newest_first: bool) -> bool:
        """One pass; False if it failed as a whole."""
        syncer = self._need_syncer()
        self._limits.look()
        passed = False
        try:
            syncer.sync(newest_first=newest_first, check=self._check)
            self._refused = False
            self._failures.clear("pass")
            passed = True
        except PausedError:
            passed = True
        except OwnershipError as error:
            self._refused = True
            self._report(error)
        except (CkptError, OSError) as error:
            self._report(error)
        syncer.beat("refused" if self._refused else self._state, now=True)
        return passed

    def _report(self, error: Exception) -> None:
        self._failures.error("pass", "pass.failed", error=str(error), kind=type(error).__name__)
        self._reporter.error(str(error))

    def _check(self) -> None:
        """Called between parts and steps: heartbeat, limits, lease, and whether to stop."""
        syncer = self._need_syncer()
        self._limits.look()
        if self._journal is not None:
            self._journal.flush()
        syncer.beat(self._state)
        try:
            syncer.renew()
        except OwnershipError:
            raise
        except StoreError as error:
            self._failures.error("lease", "lease.not_renewed", error=str(error))
        if self._stopping.is_set():
            if self._deadline is None:
                raise PausedError("told to stop: the newest save goes first now")
            if self._clock.monotonic() >= self._deadline:
                raise PausedError("the time for draining is over")

    def _drain(self) -> int:
        """After SIGTERM: newest first, until nothing more can be done or the time is over."""
        syncer = self._need_syncer()
        self._state = "draining"
        self._deadline = self._clock.monotonic() + self._settings.drain_seconds
        self._log.info(
            "agent.draining",
            saves=len(syncer.unfinished()),
            seconds=self._settings.drain_seconds,
        )
        while True:
            self._pass(newest_first=True)
            open_saves = [s for s in syncer.unfinished() if not s.waiting_for]
            if not open_saves or self._refused or self._clock.monotonic() >= self._deadline:
                break
            self._clock.sleep(0.2)
        return self._end()

    def _drain_once(self) -> int:
        """``--once``: until everything on the volume is decided, or waits for others."""
        syncer = self._need_syncer()
        self._state = "running"
        for _ in range(ONCE_TRIES):
            self._pass(newest_first=self._settings.order == "newest")
            open_saves = [s for s in syncer.unfinished() if not s.waiting_for]
            if self._stopping.is_set() or self._refused or not open_saves:
                break
            due = syncer.next_due() or 0.0
            self._wait(max(0.0, due - self._clock.monotonic()))
        return self._end()

    def _end(self) -> int:
        syncer = self._need_syncer()
        left = [save for save in syncer.unfinished() if not save.waiting_for]
        for save in syncer.waiting():
            self._log.warning(
                "save.left_waiting",
                save_id=save.save_id,
                tag=save.manifest.tag,
                waiting_for=list(save.waiting_for),
                reason="this node has stored all of it; whichever node comes last commits it",
            )
        for save in left:
            self._log.error(
                "save.left",
                save_id=save.save_id,
                tag=save.manifest.tag,
                state=save.state,
                reason=save.reason or "not finished in time; a later start continues",
            )
        troubles = syncer.troubles()
        for sentence in troubles:
            self._log.error("save.not_stored", reason=sentence)
        syncer.beat("refused" if self._refused else "stopped", now=True)
        self._log.info("agent.stopped", left=len(left))
        return 1 if left or troubles or self._refused else 0

    # ---- small things

    def _wait(self, seconds: float) -> bool:
        """Wait for the outbox, a signal, or the time; returns whether to stop."""
        self._wake.wait(seconds)
        self._wake.clear()
        return self._stopping.is_set()

    def _need_syncer(self) -> Syncer:
        if self._syncer is None:
            raise RuntimeError("the agent was not started")
        return self._syncer

    def _warn_journal(self, sentence: str) -> None:
        self._log.warning("journal.degraded", reason=sentence)

    def _warn_watch(self, sentence: str) -> None:
        self._log.warning("outbox.unwatched", reason=sentence)

    def _warn_stall(self, stall: Stall) -> None:
        self._log.warning(
            "transfer.stalled",
            requests=stall.requests,
            seconds=round(stall.seconds),
            reason=f"no byte moved for {stall.seconds:.0f} s while {stall.requests} requests are "
            "under way; each is given up by its own timeout and made again: look at the network "
            "and the store",
        )
        self._reporter.error(
            f"no byte moved for {stall.seconds:.0f} s, {stall.requests} requests are under way"
        )

    def _say_retry(self, retry: Retry) -> None:
        """From any thread: a call to the store will be made again."""
        error = retry.error
        self._budget.heed(error)
        self._reporter.error(f"{error}; tried again")
        kind = type(error).__name__
        self._failures.warning(
            f"retry {error.operation} {kind}",
            "store.retried",
            error=str(error),
            kind=kind,
            tries=retry.tries,
            next_try_seconds=round(retry.wait, 1),
        )
