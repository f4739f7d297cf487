"""One sidecar process: builds the parts, runs passes until told to stop, drains, and exits.

Start: lock the volume (a second agent stands by), probe the store until it answers, then pass
after pass, woken by the outbox or by the clock. SIGTERM, or the notice of a preStop hook: what can
become durable in the time that is left comes first, and then the newest; what is left is continued
by a later start.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from threading import get_ident
from typing import Protocol

from ds_ckpt_sidecar import __version__
from ds_ckpt_sidecar.ending import (
    NOTICE_SECONDS,
    OVER,
    Ending,
    Impatient,
    Patience,
    TrainerWatch,
    Verdict,
)
from ds_ckpt_sidecar.journal import Journal
from ds_ckpt_sidecar.lifecycle import DECIDED, Lifecycle, Save
from ds_ckpt_sidecar.limits import LimitsWatch, describe_rate
from ds_ckpt_sidecar.local import LocalFiles
from ds_ckpt_sidecar.observe.health import Health
from ds_ckpt_sidecar.observe.log import Growing, Log
from ds_ckpt_sidecar.observe.report import AgentState, Reporter
from ds_ckpt_sidecar.observe.tally import Tally
from ds_ckpt_sidecar.observe.termination import TerminationMessage
from ds_ckpt_sidecar.observe.view import View, look, why_unready
from ds_ckpt_sidecar.order import Rate, first_in_hurry
from ds_ckpt_sidecar.outbox import Found, Outbox, watch
from ds_ckpt_sidecar.settings import AgentSettings
from ds_ckpt_sidecar.syncer import LONGEST_BACKOFF, Syncer
from ds_ckpt_sidecar.telling import Reports, Telling
from ds_ckpt_sidecar.unfreed import Unfreed
from ds_ckpt_sidecar.usage import Usage
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract import access
from ds_ckpt_store.contract.clock import Clock, SystemClock, system_random
from ds_ckpt_store.contract.manifest import FRESH_SECONDS, RECOVERY, DocumentT, SidecarStatus
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import (
    CkptError,
    CorruptionError,
    InputError,
    OwnershipError,
    PausedError,
    SettingsError,
    StoreError,
    TransientError,
    WeakStoreError,
)
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.probe import fit, probe
from ds_ckpt_store.stores.retry import Retry, RetryPolicy, RetryStore
from ds_ckpt_store.transfer.budget import Budget, Stall, streams_within
from ds_ckpt_store.transfer.plan import MIB, check_preferred
from ds_ckpt_store.transfer.upload import Uploader

ONCE_TRIES = 3
SILENT_SECONDS = 240.0
"""What a healthy agent may be silent beyond twice the patience with a request; see Health."""

SEEN_SECONDS = 20.0
"""In which the heartbeat is renewed while there is nothing to do."""

LAST_SECONDS = 3.0
"""So near to its end an agent tells the cluster what is not durable: it may be killed."""

MAKE_WAY_SECONDS = 0.5
"""Between two looks at what should be uploaded instead, while there is little time."""

TELL_SECONDS = 0.5
"""Between two lists of all that is not durable, while something is under way."""

_SHARED = (
    "run trainer and agent as the same user, or give both a common group (fsGroup) and let the "
    "group write (umask 0002)"
)


class Examiner(Protocol):
    """Looks at what the agent stands on, and says what it finds; raises nothing."""

    def volume(self) -> None:
        """The volume is locked."""

    def store(self) -> None:
        """The store was reached; must not wait for it."""


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
        message: the container's termination message, if there is one.
        reports: to the cluster, if there are any.
        examiner: asked at start, if there is one.

    Attributes:
        tally: what it counts; from any thread.

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
        message: TerminationMessage | None = None,
        reports: Reports | None = None,
        examiner: Examiner | None = None,
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
        self._reporter.facts = self._facts
        self._limits = LimitsWatch(
            volume,
            self._budget,
            bandwidth=settings.bandwidth,
            streams=settings.streams,
            log=log,
            clock=self._clock,
        )
        self._rate = Rate(self._budget, self._clock)
        # Only an agent that is watched keeps an eye on what others keep.
        self._unfreed = Unfreed(volume) if settings.listen else None
        self._local = LocalFiles(volume, self._unfreed)
        self._usage = Usage(volume, settings.volume_limit, self._clock)
        self._health = Health(self._clock, SILENT_SECONDS + 2 * settings.stall_seconds)
        self._main: int | None = None
        self.tally = Tally()
        self.tally.sent_bytes = lambda: self._budget.moved
        self._telling = Telling(message, reports)
        self._examiner = examiner
        self._ending = Ending(self._clock, settings.drain_seconds)
        self._trainer = TrainerWatch(self._clock, settings.trainer_gone_seconds)
        self._patience = Patience(self._clock, settings.drain_seconds)
        self._wake = threading.Event()
        self._refused = False
        self._noticed = False
        self._began_hurried = False
        self._rested = False
        self._make_way_due = 0.0
        self._tell_due = 0.0
        self._find_due = 0.0
        self._failed_passes = 0
        self._said: Verdict = ""
        self._state: AgentState = "starting"
        self._syncer: Syncer | None = None
        self._journal: Journal | None = None
        self._undecided: Callable[[], list[Found]] = list
        self._in_the_way = ""  # of all saves

    # ---- from other threads

    def stop(self) -> None:
        """Ask it to drain and exit."""
        self._ending.stop()
        self._limits.lift()
        self._wake.set()

    @property
    def stopping(self) -> bool:
        """Whether it was asked to."""
        return self._ending.stopping

    def seconds_to_exit(self, most: float) -> float:
        """Seconds that its last reports may take: ``most``, or what is left of a drain."""
        return self._ending.seconds_to_exit(most)

    def notice(self) -> str:
        """Tell it that the pod is going to end; it answers nothing."""
        self._ending.notice()
        self._limits.lift()
        self._wake.set()
        return ""

    def answers(self) -> dict[str, Callable[[], str]]:
        """What its page says: path to a function that gives why not, or nothing if all is well."""
        return {
            "/healthz": self._health.why_dead,
            "/startedz": self._health.why_not_started,
            "/readyz": self._why_unready,
            "/prestop": self.notice,
        }

    def look(self) -> View:
        """What a person wants to know of it."""
        said, saves = self._heartbeat(), self._reporter.saves()
        if not said.time and (other := self._readable(self._volume.sidecar_status)) is not None:
            # It stands by, or has not begun: what the agent before it knew is the best there is.
            said = other.model_copy(update={"state": said.state, "unready": said.unready})
        return look(
            said,
            self._readable(self._volume.trainer_status),
            saves,
            self._clock.time(),
            self._readable(self._volume.restored_from),
        )

    def _heartbeat(self) -> SidecarStatus:
        """Its last heartbeat, with what is known since; without a time if there was none yet."""
        said = self._reporter.said()
        if said is None:
            state: AgentState = "standby" if self._health.started else "starting"
            said = SidecarStatus(time=0.0, pid=os.getpid(), version=__version__, state=state)
        return said.model_copy(update={"unready": self._health.unready})

    def _why_unready(self) -> str:
        return why_unready(self._heartbeat(), self._clock.time())

    @staticmethod
    def _readable(read: Callable[[], DocumentT | None]) -> DocumentT | None:
        """A document of the volume, if there is one that can be read."""
        with contextlib.suppress(InputError, OSError):
            return read()
        return None

    def cut_short(self) -> None:
        """It ends at once, in the middle of something: tell others what is not durable."""
        for sentence in self._telling.not_durable:
            self._log.error("save.left", reason=sentence)
        self._telling.ended()

    # ---- the process

    def run(self, *, once: bool = False) -> int:
        """Work until stopped, or with ``once`` until nothing is left to do.

        Returns:
            Exit code: 0 done, 1 something is not stored.
        """
        try:
            return self._run(once)
        except Exception as error:
            known = isinstance(error, (CkptError, OSError))
            self._telling.ended(str(error) if known else f"{type(error).__name__}: {error}")
            raise

    def _run(self, once: bool) -> int:
        self._main = get_ident()
        begun = self._begin(once)
        if begun is None:
            return 1 if once else 0
        lock, node = begun
        self._health.started = True
        stop_watching: Callable[[], None] = lambda: None  # noqa: E731
        journal: Journal | None = None
        try:
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
            if self._examiner is not None:
                self._examiner.volume()
            self._clear_up()
            if self._settings.listen:
                self._reporter.recall()
            path = self._settings.journal or self._volume.journal
            journal = self._journal = self._open_journal(path, self._warn_journal, self._clock)
            outbox = Outbox(self._volume, node)
            self._undecided = lambda: _undecided(outbox, journal)
            store = self._connect(once, node)
            if store is None:
                return self._unreached(once, _tags(self._undecided()))
            if self._examiner is not None and not once:
                self._examiner.store()
            self._syncer = self._build(store, journal, node)
            self._syncer.look_up_committed()
            self._beat("running", now=True)
            self._health.unready = ""
            if not once:
                stop_watching = watch(self._volume.outbox, self._wake, self._warn_watch)
            code = self._once() if once else self._loop()
        finally:
            stop_watching()
            self._executor.shutdown(wait=True, cancel_futures=True)
            if journal is not None:
                journal.close()
            self._store.close()
            if self._unfreed is not None:
                self._unfreed.close()
            os.close(lock)
        return code

    def _begin(self, once: bool) -> tuple[int, str] | None:
        """The volume's lock and its node id; None if it should exit instead."""
        with contextlib.ExitStack() as undo:
            try:
                self._volume.prepare()
                lock = self._lock(once)
                if lock is None:
                    return None
                undo.callback(os.close, lock)
                damaged = self._volume.drop_damaged_identity()
                node = self._volume.node_id()
                if damaged:
                    self._log.warning("volume.identity_renewed", node=node, reason=damaged)
            except PermissionError as error:
                raise SettingsError(
                    f"{error.filename}: {error.strerror}: the agent runs as uid {os.geteuid()}; "
                    f"{_SHARED}"
                ) from None
            except OSError as error:
                remedy = access.unwritable(error) or "look at its disk"
                raise SettingsError(
                    f"{error.filename}: {error.strerror}: the agent cannot begin its work on "
                    f"{self._volume.path}; {remedy}, and start it again"
                ) from None
            undo.pop_all()
        return lock, node

    def _build(self, store: Store, journal: Journal, node: str) -> Syncer:
        catalog = Catalog(store, self._rng)
        uploader = Uploader(
            store,
            self._executor,
            budget=self._budget,
            part_size=self._settings.part_bytes,
            clock=self._clock,
            keep_cached=self._settings.page_cache == "keep",
            unlike=self._say_unlike,
        )
        lifecycle = Lifecycle(
            volume=self._volume,
            local=self._local,
            catalog=catalog,
            uploader=uploader,
            journal=journal,
            reporter=self._reporter,
            log=self._log,
            clock=self._clock,
            tally=self.tally,
            abandon_seconds=self._settings.abandon_seconds,
        )
        return Syncer(
            self._settings,
            volume=self._volume,
            local=self._local,
            node=node,
            catalog=catalog,
            lifecycle=lifecycle,
            journal=journal,
            reporter=self._reporter,
            log=self._log,
            failures=self._failures,
            clock=self._clock,
            rng=self._rng,
            tally=self.tally,
            heard=self._telling.heard,
            hurried=self._is_hurried,
        )

    def _lock(self, once: bool) -> int | None:
        """The volume's lock; None if it should exit instead."""
        said = False
        while True:
            lock = self._volume.fs.try_lock(self._volume.lock)
            if lock is not None:
                return lock
            if not said:
                reason = f"another agent works on {self._volume.path} (it holds "
                reason += f"{self._volume.lock})" + ("" if once else "; taking over when it ends")
                self._log.warning("agent.standby", reason=reason)
                self._health.started, self._health.unready = True, f"standing by: {reason}"
                said = True
            if once or self._wait(self._settings.rescan_seconds):
                return None

    def _clear_up(self) -> None:
        """Remove what an agent that was killed has left on the volume."""
        try:
            for sentence in self._local.clear_up(self._clock.time()):
                self._log.warning("volume.cleared_up", reason=sentence)
        except OSError as error:
            self._log.error("volume.not_cleared_up", error=str(error))

    def _connect(self, once: bool, node: str) -> Store | None:
        """Learn what the store really does, until it answers; None if it should exit instead."""
        tries, undecided = 0, self._undecided
        self._tell_unreached("the store has not answered yet", undecided())
        self._beat("starting", now=True)
        # This loop is patient and says what is wrong; calls within it are to fail soon.
        clock = Impatient(self._clock, self._is_hurried, lambda: self._ending.over, self._stay_seen)
        listed, lock = list[str](), threading.Lock()

        def say(retry: Retry) -> None:
            self._say_retry(retry)
            with lock:  # from any thread, so without the journal
                self._health.unready = f"starting: {retry.error}"
                self._telling.unreached(str(retry.error), listed)

        policy = RetryPolicy(tries=3)
        seen = self._stay_seen
        brief = RetryStore(self._store, clock, self._rng, policy=policy, on_retry=say, on_call=seen)
        retrying = RetryStore(self._store, clock, self._rng, on_retry=self._say_retry, on_call=seen)
        self._health.other_signs = lambda: max(brief.went_well, retrying.went_well)
        while True:
            listed = _tags(undecided())
            try:
                findings = probe(brief, self._rng, node)
                fitted = fit(retrying, findings, allow_weak=self._settings.allow_weak_store)
            except PausedError:
                return None
            except (StoreError, WeakStoreError) as error:
                tries += 1
                last = isinstance(error, WeakStoreError) or (once and tries >= ONCE_TRIES)
                longest = 1.0 if self._ending.hurried else 60.0
                delay = min(longest, 2.0**tries) * self._rng.uniform(0.5, 1.0)
                kind = type(error).__name__
                self._failures.error(
                    "probe",
                    "store.unavailable",
                    destination=self._settings.destination,
                    error=str(error),
                    kind=kind,
                    **({} if last else {"next_try_seconds": round(delay, 1)}),
                )
                self._reporter.error(str(error), kind)
                self.tally.failed(getattr(error, "operation", "probe"), kind)
                self._refused = last and not once
                self._health.unready = f"{'refused' if last else 'starting'}: {error}"
                self._telling.failing(str(error), tries)
                self._failed_passes = tries
                self._tell_unreached(str(error), undecided())
                self._beat("refused" if last else "starting", now=True)
                if last or self._is_vain(_tags(undecided())):
                    return None
                self._wait(delay)
            else:
                self._failed_passes = 0
                self._failures.clear("probe")
                self._log.info("store.probed", findings=findings.describe())
                if findings.doubt() is not None:
                    self._log.warning("store.weak_proof", reason=findings.doubt())
                return fitted

    def _tell_unreached(self, why: str, undecided: Sequence[Found]) -> None:
        """What lies on the volume while the store cannot be reached."""
        self._telling.unreached(why, _tags(undecided))
        for each in undecided:
            if each.manifest is not None:
                save = Save(each.manifest, each.name, each.written, reason=why)
                self._reporter.save(save.status(self._clock.time()))

    def _is_vain(self, saves: list[str]) -> bool:
        """Whether to ask the store no more, which has not answered so far."""
        self._look_around()
        if self._ending.stopping:
            return self._ending.over or not saves
        verdict = self._verdict()
        return bool(verdict) and (not saves or self._patience.is_over(len(saves)))

    def _unreached(self, once: bool, saves: list[str]) -> int:
        """The end of an agent that has never reached the store; its exit code."""
        for tag in saves:
            self._log.error("save.left", tag=tag, reason="the store was never reached")
        self._telling.ended()
        self._log.info("agent.stopped", left=len(saves))
        return 1 if once or saves or self._refused or self._said == "gone" else 0

    # ---- passes

    def _loop(self) -> int:
        syncer = self._need_syncer()
        self._state = "running"
        failed = 0
        while True:
            verdict, heard = self._verdict(), self._trainer.last
            passed = self._pass()
            # A pass may take long, and the trainer may have begun and finished anew meanwhile.
            same = self._verdict() == verdict and self._trainer.last == heard
            if (same or self._ending.over) and self._may_end(verdict, passed=passed):
                break
            failed = 0 if passed else failed + 1
            self._wait(self._pause(syncer, failed))
        if self._ending.stopping and passed and not syncer.unfinished():
            self._rested = True  # all is decided: what is left of the time is for order
            self._pass()
        return self._end(gone=verdict == "gone")

    def _pause(self, syncer: Syncer, failed: int) -> float:
        """Seconds until the next pass."""
        due = syncer.next_due()
        pause = self._settings.rescan_seconds
        if self._is_hurried():
            pause = min(pause, 1.0)
        elif failed:  # no save was even tried: leave the store, or the run that has it, in peace
            return min(pause * 2.0 ** min(failed - 1, 10), max(pause, LONGEST_BACKOFF))
        if due is not None:
            pause = min(pause, max(due - self._clock.monotonic(), 0.05))
        return pause

    def _pass(self) -> bool:
        """One pass; False if it failed as a whole."""
        syncer = self._need_syncer()
        self._look_around()
        self._began_hurried = self._is_hurried()
        passed, trouble = False, ""
        try:
            syncer.discover()
            self._tell(syncer)  # a call may hang from here on, and what was told must be true
            syncer.sync(pick=self._pick, check=self._check)
            self._refused = False
            self._failures.clear("pass")
            self._failed_passes = 0
            passed, trouble = True, syncer.trouble
        except PausedError:
            passed, trouble = True, self._health.unready
        except (CkptError, OSError) as error:
            self._refused = self._refused or isinstance(error, OwnershipError)
            self._report(error)
            trouble = str(error)
        self._in_the_way = "" if passed else trouble
        self._health.unready = trouble
        self._beat("refused" if self._refused else self._state, now=True)
        self._tell(syncer)
        return passed

    def _tell(self, syncer: Syncer) -> None:
        """Say what is durable; and to the cluster what is not, while there is time for it."""
        self._telling.refresh(syncer, self._in_the_way)
        if self._ending.stopping and self._ending.seconds_left() <= LAST_SECONDS:
            self._telling.ending()

    def _report(self, error: Exception) -> None:
        kind = type(error).__name__
        self._failures.error("pass", "pass.failed", error=str(error), kind=kind)
        self._reporter.error(str(error), kind)
        self.tally.failed(getattr(error, "operation", "pass"), kind)
        self._failed_passes += 1
        self._telling.failing(str(error), self._failed_passes)

    def _pick(self, saves: list[Save]) -> Save:
        """The one of some saves that goes first now."""
        if self._ending.hurried:
            left, current = self._ending.seconds_left(), self._need_syncer().current
            return first_in_hurry(saves, self._rate, left, current)
        choose = max if self._settings.order == "newest" else min
        urgent = [save for save in saves if save.manifest.kind == RECOVERY]
        return choose(urgent or saves, key=lambda save: save.save_id)

    def _check(self) -> None:
        """Called between parts and steps: signs of life, limits, lease, and whether to stop."""
        syncer = self._need_syncer()
        self._look_around()
        if self._journal is not None:
            self._journal.flush()
        self._beat(self._state)
        now = self._clock.monotonic()
        if now >= self._tell_due:
            self._tell_due = now + TELL_SECONDS
            self._tell(syncer)
        found = now >= self._find_due
        if found:
            self._find_due = now + self._settings.rescan_seconds
            syncer.find()
        try:
            syncer.renew()
        except OwnershipError:
            raise
        except StoreError as error:
            self._failures.error("lease", "lease.not_renewed", error=str(error))
        if self._ending.over:
            self._budget.cut()
            raise PausedError(OVER)
        if self._is_hurried() or (found and syncer.has_urgent()):
            self._make_way(syncer)

    def _make_way(self, syncer: Syncer) -> None:
        """Let what is under way go on only if nothing is to come before it.

        Raises:
            PausedError: something is.
        """
        if syncer.current is None:
            if not self._began_hurried:
                raise PausedError("saves come before what is cleared up")
            return
        now = self._clock.monotonic()
        if now >= self._make_way_due:
            self._make_way_due = now + MAKE_WAY_SECONDS
            if syncer.must_make_way(self._pick):
                raise PausedError("another save goes first now")

    # ---- the end

    def _look_around(self) -> None:
        """Show life, and heed what others have set or asked for."""
        self._health.beat()
        self._limits.look()
        self._rate.look()
        noticed = self._ending.noticed
        if self._ending.stopping:
            self._say_draining()
        elif noticed != self._noticed:
            if noticed:
                self._log.info(
                    "agent.noticed",
                    reason="the pod is going to end: the newest save goes first, and clearing up "
                    "waits",
                )
            else:
                self._log.warning(
                    "agent.notice_expired",
                    reason=f"no SIGTERM came within {NOTICE_SECONDS:.0f} s: going on as before",
                )
        self._noticed = noticed
        if self._limits.hurry(self._ending.hurried):
            self._rate.forget()

    def _say_draining(self) -> None:
        if self._state == "draining":
            return
        self._state = "draining"
        saves = self._undecided() if self._syncer is None else self._syncer.unfinished()
        self._log.info("agent.draining", saves=len(saves), seconds=self._settings.drain_seconds)

    def _is_hurried(self) -> bool:
        return self._ending.hurried and not self._rested

    def _verdict(self) -> Verdict:
        """Whether the trainer is over, for an agent that is to end with it."""
        if not self._settings.exit_when_finished:
            return ""
        trainer, newest = self._readable(self._volume.trainer_status), ""
        if trainer is None:
            with contextlib.suppress(OSError):
                newest = max(self._volume.manifests(), default="")
        verdict = self._trainer.look(trainer, newest)
        if verdict != self._said:
            self._said = verdict
            self._log.info("trainer.over" if verdict else "trainer.back", how=verdict)
            self._patience.renew()
        return verdict

    def _may_end(self, verdict: Verdict, *, passed: bool) -> bool:
        """Whether this is the end: all is decided, or there is no time, or nothing moves."""
        unfinished = self._need_syncer().worth_staying_for()
        if self._ending.stopping:
            if self._refused or self._ending.over:
                return True
            # A trainer that is told to end at the same time may save once more.
            late = self._settings.exit_when_finished and self._trainer.lives
            return not unfinished and not late
        if not verdict:
            return False
        if passed and not unfinished:
            return True
        return self._patience.is_over(sum(save.bytes_left + 1 for save in unfinished))

    def _once(self) -> int:
        """``--once``: until everything on the volume is decided, or waits for others."""
        syncer = self._need_syncer()
        self._state = "running"
        for _ in range(ONCE_TRIES):
            self._pass()
            open_saves = [s for s in syncer.unfinished() if not s.waiting_for]
            if self._ending.stopping or self._refused or not open_saves:
                break
            due = syncer.next_due() or 0.0
            self._wait(max(0.0, due - self._clock.monotonic()))
        return self._end()

    def _end(self, *, gone: bool = False) -> int:
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
        if gone:
            self._log.error(
                "trainer.gone",
                reason=f"it was silent for {self._trainer.patience:.0f} s and has not said that it "
                "finished",
            )
        self._beat("refused" if self._refused else "stopped", now=True)
        self._telling.refresh(syncer, self._in_the_way)
        self._telling.ended()
        self._log.info("agent.stopped", left=len(left), not_stored=len(troubles))
        return 1 if left or troubles or gone or self._refused else 0

    # ---- small things

    def _wait(self, seconds: float) -> bool:
        """Wait for the outbox, a signal, a notice, or the time; returns whether to stop."""
        seconds = min(seconds, max(0.0, self._ending.seconds_to_over()))
        self._health.beat(seconds)
        while seconds > 0 and not self._wake.wait(min(seconds, SEEN_SECONDS)):
            seconds -= SEEN_SECONDS
            self._stay_seen()
        self._wake.clear()
        return self._ending.stopping

    def _beat(self, state: AgentState, *, now: bool = False) -> None:
        """The heartbeat; of the main thread alone."""
        if self._syncer is not None:
            self._syncer.beat(state, now=now)
        else:
            told = {"destination": self._settings.destination, "run_id": self._settings.run_id}
            self._reporter.beat(state, now=now, **told)

    def _stay_seen(self) -> None:
        """Say again what it said last, so that it counts as alive however long it waits.

        From any thread: parts are sent while the main one beats by itself.
        """
        said = self._reporter.current
        if said is not None and get_ident() == self._main:
            self._beat(said.state)

    def _facts(self) -> dict[str, object]:
        """What each heartbeat says beside what stands in the syncer."""
        syncer = self._syncer
        uploading = syncer is not None and syncer.current is not None
        failures = syncer.failures() if syncer is not None else 0
        space = self._usage.look()
        if self._unfreed is not None:
            self._unfreed.look(self._clock.monotonic())
        return {
            # One request to a store that hangs: for its connection, and for its answer.
            "silent_after": FRESH_SECONDS + 2 * self._settings.stall_seconds,
            "free_bytes": space.free,
            "total_bytes": space.total,
            "used_bytes": space.used,
            "high_water_bytes": space.high_water,
            "limit_bytes": space.limit,
            "unfreed_bytes": self._unfreed.bytes if self._unfreed is not None else 0,
            "credentials_expiry": self._store.credentials_expiry(),
            "streams": self._budget.most,
            "bandwidth": self._budget.bandwidth,
            "rate": self._rate.current if uploading else 0.0,
            "unready": self._health.unready,
            "failures": max(failures, self._failed_passes),
        }

    def _need_syncer(self) -> Syncer:
        if self._syncer is None:
            raise RuntimeError("the agent was not started")
        return self._syncer

    def _warn_journal(self, sentence: str) -> None:
        self._log.warning("journal.degraded", reason=sentence)

    def _warn_watch(self, sentence: str) -> None:
        self._log.warning("outbox.unwatched", reason=sentence)

    def _warn_stall(self, stall: Stall) -> None:
        requests = f"{stall.requests} request{'' if stall.requests == 1 else 's'} under way"
        still = f"no byte moved for {stall.seconds:.0f} s, with {requests}"
        self._log.warning(
            "transfer.stalled",
            requests=stall.requests,
            seconds=round(stall.seconds),
            reason=f"{still}; each is given up by its own timeout and made again: look at the "
            "network and the store",
        )
        self._reporter.error(still, TransientError.__name__)

    def _say_unlike(self, error: CorruptionError) -> None:
        """From any thread: bytes arrived changed, and are sent again."""
        self.tally.unlike()
        kind = type(error).__name__
        self._reporter.error(f"{error}; sent again", kind)
        self._failures.warning("unlike", "transfer.changed", error=str(error), kind=kind)

    def _say_retry(self, retry: Retry) -> None:
        """From any thread: a call to the store will be made again."""
        error = retry.error
        self._budget.heed(error)
        kind = type(error).__name__
        self._reporter.error(f"{error}; tried again", kind)
        self.tally.failed(error.operation, kind)
        self._failures.warning(
            f"retry {error.operation} {kind}",
            "store.retried",
            error=str(error),
            kind=kind,
            tries=retry.tries,
            next_try_seconds=round(retry.wait, 1),
        )


def _undecided(outbox: Outbox, journal: Journal) -> list[Found]:
    """What the trainer has handed over and is not known to be decided, the newest first.

    As far as it can be seen.
    """
    found = []
    with contextlib.suppress(OSError):
        found = outbox.scan()
    undecided = []
    for each in reversed(found):
        known = journal.entry(each.manifest.save_id) if each.manifest is not None else None
        if known is None or known.state not in DECIDED:
            undecided.append(each)
    return undecided


def _tags(undecided: Sequence[Found]) -> list[str]:
    """What is no manifest goes by the name of its file."""
    return [each.name if each.manifest is None else each.manifest.tag for each in undecided]
