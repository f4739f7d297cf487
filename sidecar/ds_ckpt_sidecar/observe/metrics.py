"""Metrics for Prometheus: one table says what there is, what it means and what to do about it.

Gauges are read from a :class:`~ds_ckpt_sidecar.observe.view.View` at each scrape, counters and
histograms from the :class:`~ds_ckpt_sidecar.observe.tally.Tally`. Each sample carries the label
``run``; no label holds a tag, a save's id or a path, so that series stay few however long a run is.
Where a value is not known there is no sample.

``python -m ds_ckpt_sidecar.observe.metrics`` prints docs/metrics.md.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ds_ckpt_sidecar import __version__
from ds_ckpt_sidecar.observe.report import AgentState
from ds_ckpt_sidecar.observe.tally import ENDS, PHASES, SECONDS, Histogram, PartOutcome, Tally
from ds_ckpt_sidecar.observe.view import View
from ds_ckpt_store.contract.manifest import SaveState

PREFIX = "ds_ckpt_"
_STATES = tuple(state for state in get_args(SaveState) if state != "cleaned")

Sample = float | int | Histogram | None
Samples = Sample | Mapping[tuple[str, ...], Sample]
"""One sample, or several by the values of their labels; None for what is not known."""


@dataclass(frozen=True)
class Described:
    """One metric.

    Attributes:
        name: without :data:`PREFIX`, and without the ``_total`` of a counter.
        kind: as Prometheus has it.
        help: what it is, in one line.
        act: how to read it, and what to do.
        read: the samples.
        labels: beside ``run``.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    act: str
    read: Callable[[View, Tally], Samples]
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """As Prometheus has it, without the suffixes of a histogram."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


METRICS: tuple[Described, ...] = (
    Described(
        "upload_lag_seconds",
        "gauge",
        "Age of the oldest save that is not durable and can become so; 0 if there is none.",
        "Above a few save intervals: uploads do not keep up. Look at throughput and errors.",
        lambda view, _: view.lag_seconds,
    ),
    Described(
        "exposure_seconds",
        "gauge",
        "Training that would be lost if the pod died now, from the newest durable save to now.",
        "Swings between the save interval and twice that. Above: saves do not become durable,"
        " or none are made. A save counts from its hand-over on this node at the latest, should the"
        " clock of the node that named its time be ahead.",
        lambda view, _: view.exposure_seconds,
    ),
    Described(
        "exposure_steps",
        "gauge",
        "The same in steps; no sample if steps are not known.",
        "As the seconds.",
        lambda view, _: view.exposure_steps,
    ),
    Described(
        "save_interval_seconds",
        "gauge",
        "Median time between the last saves; 0 before the third.",
        "What lag and exposure are measured against.",
        lambda view, _: view.save_interval_seconds,
    ),
    Described(
        "backlog_saves",
        "gauge",
        "Saves that are not durable and can become so.",
        "More than two, and growing: the network is too slow for this interval.",
        lambda view, _: view.backlog_saves,
    ),
    Described(
        "backlog_shards",
        "gauge",
        "Files of theirs that are not stored yet.",
        "As the bytes; many small files cost a request each.",
        lambda view, _: view.backlog_shards,
    ),
    Described(
        "backlog_bytes",
        "gauge",
        "Bytes of theirs that are not stored yet.",
        "Over the throughput this is the time that an orderly end takes.",
        lambda view, _: view.backlog_bytes,
    ),
    Described(
        "waiting_for_nodes_seconds",
        "gauge",
        "Longest time that a save of this node waits for other nodes' parts.",
        "Look at the nodes that the status page names: a pod is gone, or its agent cannot store.",
        lambda view, _: view.waiting_seconds,
    ),
    Described(
        "saves",
        "gauge",
        "Saves on the volume, and the last that left it, by state.",
        "quarantined, failed or held: the status page says why.",
        lambda view, _: _states(view),
        labels=("state",),
    ),
    Described(
        "newest_committed_timestamp_seconds",
        "gauge",
        "When the newest durable checkpoint of the run was saved; no sample if there is none.",
        "A restart resumes from there.",
        lambda view, _: view.newest.saved if view.newest else None,
    ),
    Described(
        "newest_committed_step",
        "gauge",
        "Its step.",
        "As above.",
        lambda view, _: view.newest.step if view.newest else None,
    ),
    Described(
        "manifests_refused",
        "gauge",
        "Files in the outbox that are not taken: damaged, or written by a newer hook.",
        "Upgrade the sidecar, or look at the trainer's log; the files are kept.",
        lambda view, _: view.refused_manifests,
    ),
    Described(
        "consecutive_failures",
        "gauge",
        "How often in a row a pass, or a try of the save that fares worst, has failed.",
        "Above 3: the last error on the status page says what to do.",
        lambda view, _: view.failures,
    ),
    Described(
        "upload_bytes_per_second",
        "gauge",
        "Bytes per second of late, 0 while nothing moves.",
        "Compare with what the network should give.",
        lambda view, _: view.rate,
    ),
    Described(
        "transfer_streams_limit",
        "gauge",
        "Requests at a time at most.",
        "Changed by ds-ckpt limit, and lowered by throttling.",
        lambda view, _: view.streams,
    ),
    Described(
        "transfer_bandwidth_limit_bytes_per_second",
        "gauge",
        "The bound that is set; 0 is none.",
        "If lag grows while throughput touches it, raise it.",
        lambda view, _: view.bandwidth,
    ),
    Described(
        "volume_free_bytes",
        "gauge",
        "Room on the volume; under its limit if it has one.",
        "Less than one checkpoint: the next save may fail, or evict the pod.",
        lambda view, _: view.free_bytes,
    ),
    Described(
        "volume_used_bytes",
        "gauge",
        "In use there; of the whole disk if the volume has no limit.",
        "As above.",
        lambda view, _: view.used_bytes,
    ),
    Described(
        "volume_size_bytes",
        "gauge",
        "What the volume may hold: its limit, else its disk.",
        "Make room for two checkpoints and what is uploaded meanwhile.",
        lambda view, _: view.limit_bytes or view.total_bytes,
    ),
    Described(
        "volume_high_water_bytes",
        "gauge",
        "The most that was in use since the agent began.",
        "How large the volume must be at least.",
        lambda view, _: view.high_water_bytes,
    ),
    Described(
        "volume_unfreed_bytes",
        "gauge",
        "Removed from the volume, and still held by another process or name.",
        "The trainer keeps files open: close them, or restart it.",
        lambda view, _: view.unfreed_bytes,
    ),
    Described(
        "agent_ready",
        "gauge",
        "1 if the agent can store now, as /readyz has it.",
        "0 for long: the status page says why not.",
        lambda view, _: int(not view.unready),
    ),
    Described(
        "agent_state",
        "gauge",
        "1 for the state that the agent is in.",
        "refused: another run has the prefix, or the store is too weak.",
        lambda view, _: {(state,): int(state == view.state) for state in get_args(AgentState)},
        labels=("state",),
    ),
    Described(
        "agent_heartbeat_timestamp_seconds",
        "gauge",
        "When the agent's main loop last wrote its status; up to twice --stall-seconds ago, while a"
        " request to the store hangs.",
        "Old while the endpoint answers: it hangs in a call; liveness restarts it.",
        lambda view, _: view.heartbeat or None,
    ),
    Described(
        "trainer_heartbeat_timestamp_seconds",
        "gauge",
        "When the trainer was last heard of.",
        "Old, and not finished: it hangs, or was killed.",
        lambda view, _: view.trainer.time if view.trainer else None,
    ),
    Described(
        "trainer_step",
        "gauge",
        "The step that the trainer is at.",
        "Does training go on?",
        lambda view, _: view.trainer.step if view.trainer else None,
    ),
    Described(
        "trainer_finished",
        "gauge",
        "1 once the trainer has said that it is done.",
        "Then lag and exposure go to 0.",
        lambda view, _: int(view.trainer.finished) if view.trainer else None,
    ),
    Described(
        "trainer_held_seconds",
        "gauge",
        "Time for which after_save has held the training loop, in all.",
        "Milliseconds a save. More: the volume is slow.",
        lambda view, _: view.trainer.held_seconds if view.trainer else None,
    ),
    Described(
        "trainer_skipped_saves",
        "gauge",
        "Saves that the hook did not hand over, in all.",
        "The trainer's log says why: no room, or files in the way.",
        lambda view, _: view.trainer.skipped_saves if view.trainer else None,
    ),
    Described(
        "restore_seconds",
        "gauge",
        "How long the restore to this volume took; no sample if it began empty.",
        "Time that each restart costs.",
        lambda view, _: view.restore_seconds,
    ),
    Described(
        "restore_bytes",
        "gauge",
        "Bytes that it brought.",
        "As above.",
        lambda view, _: view.restore_bytes,
    ),
    Described(
        "credentials_expiry_timestamp_seconds",
        "gauge",
        "When the credentials in use end; no sample if they do not, or nobody knows.",
        "Near, and not renewed: the identity's renewal is broken.",
        lambda view, _: view.credentials_expiry,
    ),
    Described(
        "build_info",
        "gauge",
        "1; which version runs.",
        "Hook and sidecar of neighbouring versions work together.",
        lambda *_: {(__version__, platform.python_version()): 1},
        labels=("version", "python"),
    ),
    Described(
        "run_info",
        "gauge",
        "1; the node, and where its checkpoints go.",
        "To tell agents apart.",
        lambda view, _: {(view.node, view.destination): 1},
        labels=("node", "destination"),
    ),
    Described(
        "uploaded_bytes",
        "counter",
        "Bytes of shards that the store took.",
        "Its rate is the throughput.",
        lambda _, tally: tally.uploaded_bytes,
    ),
    Described(
        "sent_bytes",
        "counter",
        "Bytes of shards that went onto the network, those included that were sent again.",
        "Much more than was uploaded: the network or the store loses requests.",
        lambda _, tally: tally.sent_bytes(),
    ),
    Described(
        "parts",
        "counter",
        "Requests that carried bytes of shards: sent, resumed (an earlier start had sent "
        "them), retried.",
        "Many retried: look at errors by kind.",
        lambda _, tally: {(outcome,): tally.parts[outcome] for outcome in get_args(PartOutcome)},
        labels=("outcome",),
    ),
    Described(
        "errors",
        "counter",
        "Calls and steps that failed, by operation and class of error; most are made again.",
        "The runbook of DsCkptUploadFailing goes through the classes.",
        lambda _, tally: dict(tally.errors.items()),
        labels=("operation", "kind"),
    ),
    Described(
        "verify_failures",
        "counter",
        "Bytes that were found to be other than they should be, on the volume, on their way "
        "or in the store.",
        "Any: find out where they change. Nothing wrong was committed.",
        lambda _, tally: tally.verify_failures,
    ),
    Described(
        "saves_decided",
        "counter",
        "Saves that came to an end since the agent began, by state.",
        "All but committed are lost: the log says why.",
        lambda _, tally: {(state,): tally.decided[state] for state in ENDS},
        labels=("state",),
    ),
    Described(
        "retention_checkpoints",
        "counter",
        "Checkpoints that retention gave up.",
        "As --keep-last says.",
        lambda _, tally: tally.retained_checkpoints,
    ),
    Described(
        "retention_objects",
        "counter",
        "Objects that it deleted.",
        "As above.",
        lambda _, tally: tally.retained_objects,
    ),
    Described(
        "save_commit_seconds",
        "histogram",
        "From a save to its commit.",
        "Its upper end is what a lost pod costs beside the interval.",
        lambda _, tally: tally.commit,
    ),
    Described(
        "save_phase_seconds",
        "histogram",
        "The same, split: hashing (beside the trainer), waiting (for earlier saves), "
        "uploading, verifying, nodes (other nodes' parts).",
        "The longest phase is the one to work on.",
        lambda _, tally: {(phase,): tally.phases[phase] for phase in PHASES},
        labels=("phase",),
    ),
)


class Metrics:
    """What ``/metrics`` says.

    Args:
        look: gives the view; from any thread.
        tally: counts.
    """

    def __init__(self, look: Callable[[], View], tally: Tally) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Agent(look, tally))
        ProcessCollector(namespace=PREFIX.rstrip("_"), registry=self._registry)

    def render(self, accept: str) -> tuple[str, bytes]:
        """Content type and body, as the request's ``Accept`` wants it."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)


class _Agent(Collector):
    def __init__(self, look: Callable[[], View], tally: Tally) -> None:
        self._look = look
        self._tally = tally

    def describe(self) -> list[Metric]:
        """Nothing is asked for names: reading them needs no view."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Each metric of the table that has a sample."""
        view = self._look()
        for described in METRICS:
            samples = described.read(view, self._tally)
            by_labels = samples if isinstance(samples, Mapping) else {(): samples}
            family = _FAMILIES[described.kind](
                f"{PREFIX}{described.name}", described.help, labels=["run", *described.labels]
            )
            for values, sample in by_labels.items():
                _add(family, [view.run_id, *values], sample)
            if family.samples:
                yield family


_FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _add(family: Any, labels: list[str], sample: Sample) -> None:
    if isinstance(sample, Histogram):
        total, buckets = 0, []
        for bound, count in zip((*SECONDS, None), sample.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound is None else str(float(bound)), total))
        family.add_metric(labels, buckets, sample.sum)
    elif sample is not None:
        family.add_metric(labels, sample)


def _states(view: View) -> dict[tuple[str, ...], Sample]:
    counts = dict.fromkeys(_STATES, 0)
    for save in view.saves:
        counts["committed" if save.state == "cleaned" else save.state] += 1
    return {(state,): count for state, count in counts.items()}


def document() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "What `/metrics` of the agent's port says, in Prometheus' text format or as OpenMetrics. "
        "Each sample has the label `run`;",
        "scraping adds namespace and pod. Where a value is not known there is no sample. This page "
        "is made from the code:",
        "`make docs`.",
        "",
        "| metric | kind | what it is | how to read it |",
        "| --- | --- | --- | --- |",
    ]
    for each in METRICS:
        labels = f" by {', '.join(f'`{label}`' for label in each.labels)}" if each.labels else ""
        lines.append(f"| `{each.full_name}` | {each.kind}{labels} | {each.help} | {each.act} |")
    lines += [
        "",
        "Of the agent's process itself, as in every program that is watched by Prometheus: "
        "`ds_ckpt_process_resident_memory_bytes`,",
        "`ds_ckpt_process_virtual_memory_bytes`, `ds_ckpt_process_cpu_seconds_total`, "
        "`ds_ckpt_process_start_time_seconds`,",
        "`ds_ckpt_process_open_fds` and `ds_ckpt_process_max_fds`.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(document(), end="")
