"""The agent as a process: what it is made of, its signals, and how it ends.

Only here are threads begun that are no part of an upload (the HTTP page, reports to the cluster,
the look at the bucket's rules), so the agent itself can be simulated.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn, Protocol

from ds_ckpt_sidecar import doctor
from ds_ckpt_sidecar.agent import Agent
from ds_ckpt_sidecar.observe.log import Growing, Log, make_log
from ds_ckpt_sidecar.observe.termination import TerminationMessage, compose, default_path
from ds_ckpt_sidecar.priority import stand_back
from ds_ckpt_sidecar.settings import AgentSettings, misspelt
from ds_ckpt_sidecar.telling import Reports
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError
from ds_ckpt_store.stores import open_store

OVERTIME_SECONDS = 5.0
REPORT_SECONDS = 2.0
ENDING = frozenset({signal.SIGTERM, signal.SIGINT})
_M_ARENA_MAX = -8  # of malloc.h


class ClosableReports(Reports, Protocol):
    """Reports that are sent by a thread."""

    def close(self, timeout: float) -> None:
        """Send what is left within so many seconds."""


def run_agent(settings: AgentSettings, *, once: bool) -> int:
    """Run an agent in this process until it ends; its exit code.

    Raises:
        CkptError, OSError: it cannot begin, or cannot go on.
    """
    log = make_log(settings.log_format)
    for variable, setting in misspelt(os.environ).items():
        log.warning("setting.unknown", variable=variable, reason=f"did you mean {setting}?")
    volume = Volume(settings.volume, Filesystem())
    if settings.priority == "low":
        stand_back(log)  # before any thread begins: each inherits it
    with contextlib.ExitStack() as stack:
        stack.enter_context(_signals_held())
        with explained(settings.termination_log):
            reports = _reports(settings, log)
            agent = Agent(
                settings,
                store=open_store(settings.destination, stall_seconds=settings.stall_seconds),
                volume=volume,
                log=log,
                message=TerminationMessage(settings.termination_log or default_path(), log),
                reports=reports,
                examiner=Examiner(settings, volume, log),
            )
            if reports is not None:
                stack.callback(lambda: reports.close(agent.seconds_to_exit(REPORT_SECONDS)))
            _share_memory()
            _stop_on_signal(agent, settings.drain_seconds, reports)
            if settings.listen:
                log.info("page.listening", address=_listen(settings.listen, agent, log))
        return agent.run(once=once)


def _listen(listen: str, agent: Agent, log: Log) -> str:
    """Answer probes and show what goes on; the address."""
    from ds_ckpt_sidecar.observe.metrics import Metrics
    from ds_ckpt_sidecar.observe.page import Page
    from ds_ckpt_sidecar.observe.web import Web

    failures = Growing(log, SystemClock())

    def broken(path: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        failures.error(path, "page.broken", path=path, error=reason)

    web = Web(agent.look)
    documents = {
        "/": web.html,
        "/status": web.json,
        "/metrics": Metrics(agent.look, agent.tally).render,
    }
    return Page(listen, agent.answers(), documents, broken).address


@contextlib.contextmanager
def explained(termination_log: str | None) -> Iterator[None]:
    """What keeps an agent from beginning stands in the container's termination message too."""
    try:
        yield
    except (CkptError, OSError) as error:
        path = termination_log or os.environ.get("DS_CKPT_TERMINATION_LOG") or default_path()
        message = compose("unknown, the agent has not begun", [], f"what to do: {error}")
        TerminationMessage(path, make_log("text")).write(message)
        raise


def _reports(settings: AgentSettings, log: Log) -> ClosableReports | None:
    if not settings.kubernetes:
        return None
    from ds_ckpt_sidecar.observe.kubernetes import PodReporter

    return PodReporter.in_cluster(log)


class Examiner:
    """Asks the doctor at start, and logs what matters with its remedy."""

    def __init__(self, settings: AgentSettings, volume: Volume, log: Log) -> None:
        self._settings = settings
        self._volume = volume
        self._log = log

    def volume(self) -> None:
        """The volume, now: that takes milliseconds."""
        self._say(doctor.check_volume(self._volume))

    def store(self) -> None:
        """The store, by a thread and a client of their own."""
        threading.Thread(target=self._look_at_store, name="doctor", daemon=True).start()

    def _look_at_store(self) -> None:
        settings = self._settings
        store = open_store(settings.destination, stall_seconds=settings.stall_seconds)
        try:
            self._say(doctor.check_store(store, run_id=settings.run_id))
        finally:
            store.close()

    def _say(self, findings: list[doctor.Finding]) -> None:
        for found in doctor.that_matter(findings):
            say = self._log.error if found.severity == "error" else self._log.warning
            say(
                "doctor.found",
                severity=found.severity,
                what=found.what,
                reason=found.sentence,
                remedy=found.remedy,
            )


def _share_memory() -> None:
    """Let threads share what they freed: glibc keeps a heap for each of many, which adds up."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Keep the signals that end an agent for :func:`_stop_on_signal`, in all threads begun here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_on_signal(agent: Agent, drain_seconds: float, reports: ClosableReports | None) -> None:
    """Drain on SIGTERM and SIGINT, and end in time even if a request never comes back.

    A store that accepts connections and then says nothing holds a thread in a read for minutes.
    What was done is in the store and in the journal, so ending there costs a repetition. SIGTERM
    may come more than once, and is one; a person who types Ctrl-C again wants the end now.

    A thread waits for them. A handler would run in the midst of the main loop, and wait for ever
    for what that loop holds.
    """

    def end(why: str) -> NoReturn:
        print(f"ds-ckpt: {why}. A later start continues", file=sys.stderr, flush=True)
        agent.cut_short()
        if reports is not None:
            reports.close(REPORT_SECONDS)
        os._exit(1)

    def listen() -> None:
        while True:
            number = signal.sigwait(ENDING)
            if agent.stopping:
                if number == signal.SIGINT:
                    end("interrupted again; ending in the middle of it")
                continue
            agent.stop()
            why = (
                f"a request did not come back within {drain_seconds:.0f} s of draining and "
                f"{OVERTIME_SECONDS:.0f} s more; ending"
            )
            timer = threading.Timer(drain_seconds + OVERTIME_SECONDS, end, [why])
            timer.daemon = True
            timer.start()

    threading.Thread(target=listen, name="signals", daemon=True).start()
