"""Limits that are changed while the agent runs: ``.ds_ckpt/limits.json`` on the volume.

``ds-ckpt limit`` writes it, or the trainer, or a person; the agent looks at it once a second. What
it does not say is as the settings say, and so is all once it is gone. It is hostile input like
everything on the volume: a file that is not what it should be changes nothing and is said once.
"""

from __future__ import annotations

from ds_ckpt_sidecar.observe.log import Log
from ds_ckpt_store.contract.clock import Clock
from ds_ckpt_store.contract.manifest import TransferLimits
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import InputError
from ds_ckpt_store.transfer.budget import Budget

LOOK_SECONDS = 1.0


def describe_rate(rate: int) -> str:
    """A bandwidth for people."""
    return f"{rate / (1 << 20):.4g} MiB/s" if rate else "no limit"


class LimitsWatch:
    """Keeps a budget as the file on the volume says. Used from one thread, but for :meth:`lift`.

    Args:
        volume: where the file lies.
        budget: what it bounds.
        bandwidth: as the settings say, bytes per second; 0 for no limit.
        streams: as the settings say.
        log: told of each change.
        clock: time.
    """

    def __init__(
        self,
        volume: Volume,
        budget: Budget,
        *,
        bandwidth: int,
        streams: int,
        log: Log,
        clock: Clock,
    ) -> None:
        self._volume = volume
        self._budget = budget
        self._bandwidth = bandwidth
        self._streams = streams
        self._log = log
        self._clock = clock
        self._due = 0.0
        self._seen: tuple[int, int, int, int] | None = None
        self._found = TransferLimits()
        self._hurried = False
        self._complaint = ""

    def lift(self) -> None:
        """Free at once, from any thread, the bandwidth that the settings alone bound.

        Requests under way go on with it, before the agent's next look at how things stand.
        """
        self._budget.set_bandwidth(self._found.bandwidth or 0)

    def hurry(self, hurried: bool) -> bool:
        """Use all that the file on the volume does not forbid, or go back; whether that is new."""
        if hurried == self._hurried:
            return False
        self._hurried = hurried
        self._apply(self._found)
        return True

    def look(self) -> None:
        """Look at the file, at most once a second, and do what it says if it has changed."""
        now = self._clock.monotonic()
        if now < self._due:
            return
        self._due = now + LOOK_SECONDS
        try:
            state = self._volume.fs.stat(self._volume.limits)
            identity = state.identity if state is not None else None
            if identity == self._seen:
                return
            found = self._volume.transfer_limits() if state is not None else None
        except (InputError, OSError) as error:
            self._complain(str(error))
            return
        self._seen, self._complaint = identity, ""
        self._found = found or TransferLimits()
        self._apply(self._found)

    def _apply(self, limits: TransferLimits) -> None:
        usual = 0 if self._hurried else self._bandwidth
        rate = usual if limits.bandwidth is None else limits.bandwidth
        wanted = limits.streams or self._streams
        self._budget.set_bandwidth(rate)
        streams = self._budget.set_streams(wanted)
        if self._hurried:
            self._budget.rush()
        short = {"reason": f"memory has room for {streams}"} if streams < wanted else {}
        self._log.info("limits.changed", bandwidth=describe_rate(rate), streams=streams, **short)

    def _complain(self, sentence: str) -> None:
        if sentence != self._complaint:
            self._complaint = sentence
            self._log.warning(
                "limits.ignored",
                error=sentence,
                reason="what is in force stays (after a start: the settings); correct the file",
            )
