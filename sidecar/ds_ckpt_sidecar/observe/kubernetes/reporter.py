"""Sends reports by a thread of its own, whatever state the API server is in.

=================  ================================================================================
no answer, 5xx,    all rests for a growing time with some chance in it, or for as long as the
408, 429           server says; said once in the log when it lasts, and once when it is over
401                the same; the token file is read for each try, and the kubelet replaces it
403, 404, 410      this kind of report rests for ten minutes; the log names the right that is
                   missing, once
409                an event: it is there already. Annotations: somebody else writes, or another pod
                   has this name now; tried some times more
anything else      this report is given up, and the log says why, once for each reason
=================  ================================================================================

At the end what matters most is sent first, within the time that is left, and by another thread:
the first may be in the middle of a request that nobody answers.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ds_ckpt_sidecar.observe.kubernetes.api import ACCOUNT, Answer, Server, send, surroundings
from ds_ckpt_sidecar.observe.kubernetes.events import Commit, Pod
from ds_ckpt_sidecar.observe.kubernetes.pending import Pace, Pending, Report, Right
from ds_ckpt_sidecar.observe.log import Log
from ds_ckpt_store.contract.clock import Clock, SystemClock, system_random


@dataclass(frozen=True)
class Patience:
    """How long a server is waited for, in seconds.

    Attributes:
        answer: for a connection, and then for an answer.
        first, longest: the first and the longest rest after a failure.
        refused: the rest of a kind of report that is not allowed.
        asked: the longest rest that a server may ask for.
        end: between two tries at the end.
    """

    answer: float = 10.0
    first: float = 1.0
    longest: float = 120.0
    refused: float = 600.0
    asked: float = 600.0
    end: float = 0.2


LASTING = 3  # failures in a row that are worth a line
CONFLICTS = 5
_RULE: dict[Right, tuple[str, str]] = {
    "events": ('apiGroups: ["events.k8s.io"]', "resources: [events], verbs: [create]"),
    "annotations": ('apiGroups: [""]', "resources: [pods], verbs: [patch]"),
}


class PodReporter:
    """Events and annotations of the own pod.

    Its methods may be called from any thread and from a signal handler; they do not wait.

    Args:
        server: where to send.
        pod: the own pod.
        log: told what could not be sent, sparingly.
        pace: how much is sent.
        patience: how long is waited.
    """

    def __init__(
        self,
        server: Server,
        pod: Pod,
        log: Log,
        *,
        pace: Pace | None = None,
        patience: Patience | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._server = server
        self._pod = pod
        self._log = log
        self._patience = patience or Patience()
        self._clock = clock or SystemClock()
        self._rng = rng or system_random()
        self._pending = Pending(pod, pace or Pace(), self._clock, self._rng)
        # Reentrant: a signal may come in the middle of a report, and its handler report.
        self._changed = threading.Condition(threading.RLock())
        self._failures = 0
        self._rest_until = 0.0
        self._right_until: dict[Right, float] = {}
        self._refused: set[Right] = set()
        self._given_up: set[str] = set()
        self._ending: threading.Thread | None = None
        threading.Thread(target=self._work, name="reports", daemon=True).start()

    @classmethod
    def in_cluster(cls, log: Log) -> PodReporter:
        """Of the pod that this process runs in.

        Raises:
            SettingsError: this is no pod, or it lacks what reports need.
            MissingExtraError: urllib3 is not installed.
        """
        server, pod = surroundings(os.environ, ACCOUNT)
        log.info("kubernetes.reports", pod=pod.name, namespace=pod.namespace, server=server.url)
        return cls(server, pod, log)

    # ---- from the agent

    def committed(self, tag: str, folder: str, time_ms: int) -> None:
        """A save is durable."""
        self._hear(lambda: self._pending.committed(Commit(tag, folder, time_ms)))

    def failing(self, sentence: str) -> None:
        """Something fails again and again."""
        self._hear(lambda: self._pending.failing(sentence))

    def not_durable_at_exit(self, sentences: Sequence[str]) -> None:
        """The agent ends, and these saves are no checkpoints."""
        self._hear(lambda: self._pending.not_durable_at_exit(sentences))

    def _hear(self, what: Callable[[], None]) -> None:
        with self._changed:
            what()
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Send what is left within so many seconds, the most important first."""
        with self._changed:
            if self._ending is None:
                deadline = self._clock.monotonic() + timeout
                self._ending = threading.Thread(
                    target=self._finish, args=[deadline], name="last reports", daemon=True
                )
                self._ending.start()
                self._changed.notify_all()
        self._ending.join(timeout)

    # ---- by its thread

    def _work(self) -> None:
        while (report := self._next()) is not None:
            self._judge(report, self._send(report, self._patience.answer))

    def _next(self) -> Report | None:
        """Wait for what may be sent; None at the end."""
        with self._changed:
            while self._ending is None:
                wait: float | None = None
                for report in self._pending.waiting():
                    due = max(self._rests(report), self._pending.due(report))
                    if due <= 0:
                        self._pending.begun(report)
                        return report
                    wait = due if wait is None else min(wait, due)
                self._changed.wait(wait)
        return None

    def _rests(self, report: Report) -> float:
        until = max(self._rest_until, self._right_until.get(report.right, 0.0))
        return until - self._clock.monotonic()

    def _finish(self, deadline: float) -> None:
        """The last reports: no rest after older failures now, but nothing that is refused."""
        with self._changed:
            self._rest_until = 0.0
        while (report := self._last(deadline)) is not None:
            left = deadline - self._clock.monotonic()
            answer = self._send(report, max(0.1, min(left, self._patience.answer)))
            self._judge(report, answer, last=True)
        with self._changed:
            unsent = [report.document.get("reason", "annotations") for report in self._left()]
        if unsent:
            self._log.warning("kubernetes.unsent", reports=unsent)

    def _last(self, deadline: float) -> Report | None:
        """The most important that may be sent; None if there is none, or no time for it."""
        with self._changed:
            while reports := self._left():
                now = self._clock.monotonic()
                if max(now, self._rest_until) >= deadline:
                    return None
                if now >= self._rest_until:
                    self._pending.begun(reports[0])
                    return reports[0]
                self._changed.wait(self._rest_until - now)
        return None

    def _left(self) -> list[Report]:
        return [
            report
            for report in self._pending.waiting()
            if report.right not in self._refused
            and (report.tries or self._pending.due(report) <= 0)
        ]

    def _send(self, report: Report, seconds: float) -> Answer:
        return send(self._server, self._pod, report, seconds)

    # ---- what an answer means

    def _judge(self, report: Report, answer: Answer, *, last: bool = False) -> None:
        with self._changed:
            if self._ending is not None and not last and not 200 <= answer.status < 300:
                return  # the last reports have begun, and this one is among them
            line = self._took(report, answer)
        if line:
            self._log.warning(line[0], **line[1])

    def _took(self, report: Report, answer: Answer) -> tuple[str, dict[str, Any]] | None:
        """Take the answer; a line for the log."""
        status, right = answer.status, report.right
        now = self._clock.monotonic()
        if 200 <= status < 300 or (status == 409 and right == "events"):
            lasted, self._failures = self._failures, 0
            self._refused.discard(right)
            self._pending.over(report)
            return ("kubernetes.back", {"failures": lasted}) if lasted >= LASTING else None
        if answer.ending or status in (403, 404, 410):
            known = right in self._refused
            self._refused.add(right)
            self._right_until[right] = now + self._patience.refused
            remedy = _remedy(right, answer)
            return None if known else _unsent(right, answer, remedy=remedy)
        if status in (0, 401, 408, 429) or status >= 500:
            self._failures += 1
            self._rest_until = now + self._rest(self._failures, answer)
            return _unsent(right, answer) if self._failures == LASTING else None
        if status == 409 and report.tries < CONFLICTS:
            self._right_until[right] = now + self._rest(report.tries, answer)
            return None
        self._pending.over(report)
        reason = f"{right} {status}"
        known = reason in self._given_up
        self._given_up.add(reason)
        return None if known else _unsent(right, answer, remedy="given up; please report it")

    def _rest(self, failures: int, answer: Answer) -> float:
        if answer.retry_after:
            return min(answer.retry_after, self._patience.asked)
        if self._ending is not None:
            return self._patience.end
        most = min(self._patience.longest, self._patience.first * 2.0 ** min(failures - 1, 16))
        return most * self._rng.uniform(0.5, 1.0)


def _unsent(right: Right, answer: Answer, **more: str) -> tuple[str, dict[str, Any]]:
    return "kubernetes.unsent", {"reports": right, "reason": answer.message, **more}


def _remedy(right: Right, answer: Answer) -> str:
    if answer.ending:
        return "the namespace is being deleted; nothing to do"
    if answer.status == 403:
        groups, rest = _RULE[right]
        return (
            f"add to the Role of the pod's service account: {groups}, {rest}; or leave "
            "DS_CKPT_KUBERNETES out"
        )
    if right == "events":
        return "the cluster needs events.k8s.io/v1, of Kubernetes 1.19; or the namespace is gone"
    return "is POD_NAME, POD_NAMESPACE the name of this pod? If it was deleted, nothing to do"
