"""How ranks talk: everybody tells everybody one object, on the calling thread, within a timeout.

The hook must not disturb the trainer's own communication, so it has a gloo group of its own, and
it must not hang training, so every exchange ends after a timeout. Once one has failed, the state
of the group is unknown on the other ranks: the hook then says so and does without exchanges for
the rest of the run. Each object carries the name of the step it is for. Ranks that are in
different steps all see that they are, instead of taking one message for another.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ds_ckpt_hook.errors import ExchangeError
from ds_ckpt_store.errors import SettingsError

logger = logging.getLogger("ds_ckpt_hook")


PATIENT_SECONDS = 1800.0
"""For a rank that is busy between two steps: torch's own timeout over gloo."""


class Exchange(Protocol):
    """The ranks of one training job."""

    @property
    def rank(self) -> int:
        """This process's global rank."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    def gather(self, step: str, value: Any, *, timeout: float | None = None) -> list[Any]:
        """Tell all ranks ``value``, and get what each said, in order of rank.

        Args:
            step: what this exchange is for; must be the same on all ranks.
            value: anything that can be pickled.
            timeout: seconds, the same on all ranks; None for the usual timeout.

        Raises:
            ExchangeError: a rank did not come in time or was in another step.
        """

    def ask_any(self, yes: bool) -> Callable[[], bool]:
        """Begin to ask whether any rank says yes, without waiting; each rank as often.

        Returns:
            Gives the answer. It waits for the ranks that have not asked yet, at most for
            :data:`PATIENT_SECONDS` since this one did, and raises ExchangeError then.
        """


class Alone:
    """The exchange of a job with one rank."""

    rank = 0
    world_size = 1

    def gather(self, step: str, value: Any, *, timeout: float | None = None) -> list[Any]:  # noqa: ARG002
        """What the only rank said."""
        return [value]

    def ask_any(self, yes: bool) -> Callable[[], bool]:
        """What the only rank says."""
        return lambda: yes


class Gloo:
    """The exchange over torch.distributed.

    Args:
        timeout: seconds, the usual timeout of one exchange.
    """

    def __init__(self, timeout: float) -> None:
        import torch.distributed

        self._dist = torch.distributed
        self._timeout = timeout
        self._groups: dict[float, Any] = {}
        self._broken = ""
        self.rank = int(self._dist.get_rank())
        self.world_size = int(self._dist.get_world_size())

    def gather(self, step: str, value: Any, *, timeout: float | None = None) -> list[Any]:
        """See :meth:`Exchange.gather`."""
        if self._broken:
            raise ExchangeError(f"{step}: the ranks no longer talk ({self._broken})")
        answers: list[Any] = [None] * self.world_size
        try:
            group = self._group(self._timeout if timeout is None else timeout)
            self._dist.all_gather_object(answers, (step, value), group=group)
        except Exception as error:
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
            self._broken = f"{step} failed: {type(error).__name__}: {first_line[:200]}"
            logger.warning(
                "rank %d: not every rank took part in %r within %.0f s, or the connection broke. "
                "The hook does without exchanges for the rest of this run: nothing more is "
                "published. Call the hook on every rank. (%s)",
                self.rank,
                step,
                self._timeout if timeout is None else timeout,
                self._broken,
            )
            raise ExchangeError(self._broken) from error
        return values_of(answers)

    def ask_any(self, yes: bool) -> Callable[[], bool]:
        """See :meth:`Exchange.ask_any`."""
        import torch

        step = "a notice of preemption"
        if self._broken:
            raise ExchangeError(f"{step}: the ranks no longer talk ({self._broken})")
        try:
            # A group of its own: an answer that is still on its way must not meet an exchange.
            group = self._group(PATIENT_SECONDS)
            said = torch.tensor([yes], dtype=torch.int32)
            work = self._dist.all_reduce(
                said, op=self._dist.ReduceOp.MAX, group=group, async_op=True
            )
        except Exception as error:
            raise ExchangeError(f"{step}: {type(error).__name__}: {error}") from error

        def answer() -> bool:
            try:
                work.wait()
            except Exception as error:
                raise ExchangeError(f"{step}: {type(error).__name__}: {error}") from error
            return bool(said.item())

        return answer

    def _group(self, timeout: float) -> Any:
        if timeout not in self._groups:
            self._groups[timeout] = self._dist.new_group(
                backend="gloo", timeout=datetime.timedelta(seconds=timeout)
            )
        return self._groups[timeout]


def values_of(answers: Sequence[tuple[str, Any]]) -> list[Any]:
    """What the ranks said, if all said it in the same step.

    Raises:
        ExchangeError: they are in different steps; lists them.
    """
    steps = [step for step, _ in answers]
    if len(set(steps)) > 1:
        listed = ", ".join(f"rank {rank} in {step!r}" for rank, step in enumerate(steps))
        raise ExchangeError(f"the ranks are in different calls of the hook: {listed[:500]}")
    return [value for _, value in answers]


def connect(timeout: float, environ: Mapping[str, str] | None = None) -> Exchange:
    """The exchange of this job.

    Raises:
        SettingsError: there are several ranks, and torch.distributed is not initialized yet.
    """
    environ = os.environ if environ is None else environ
    expected = int(environ.get("WORLD_SIZE") or 1)
    try:
        import torch.distributed as dist
    except ModuleNotFoundError:
        initialized = False
    else:
        initialized = dist.is_available() and dist.is_initialized()
    if initialized:
        return Gloo(timeout) if dist.get_world_size() > 1 else Alone()
    if expected > 1:
        raise SettingsError(
            f"WORLD_SIZE is {expected}, but the ranks cannot talk yet: call "
            "deepspeed.init_distributed() before ds_ckpt_hook"
        )
    return Alone()
