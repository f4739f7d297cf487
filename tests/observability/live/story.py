"""What happens in the live run, in order: each event is made for real, and waited for.

An event is over when Prometheus has seen what it should see of it, so the run goes as fast as the
machine can. When each began and ended is noted, for the tests to hold the series against.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ds_ckpt_store.contract import names
from ds_ckpt_store.contract.clock import system_random
from ds_ckpt_store.contract.volume import Volume
from tests.faultproxy import Fault
from tests.observability.live.lab import SAVE_SECONDS, Lab, Node
from tests.observability.live.monitoring import SCRAPE_SECONDS, wait_until

PATIENCE = 60.0
"""Seconds that one thing may take, on a busy machine; most take two or three."""

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>"
NOBODY = "0" * 32
"""A node that there is not."""

MIB = 1 << 20
LEAST_ROOM = 24 * MIB
MOST_BALLAST = 200 * MIB  # where the volume is no small filesystem


@dataclass
class Story:
    """What was told of a run.

    Attributes:
        lab: where.
        events: name to when it began and ended, in seconds since the epoch.
        expositions: what an agent that had seen much said, by the ``Accept`` that was sent.
    """

    lab: Lab
    expositions: dict[str, str] = field(default_factory=dict)
    events: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def span(self) -> tuple[float, float]:
        """From the first event to the end of the last."""
        return (
            min(start for start, _ in self.events.values()),
            max(end for _, end in self.events.values()),
        )


Event = Callable[[Lab], None]


def tell(lab: Lab, say: Callable[[str], None]) -> Story:
    """All of it."""
    story = Story(lab)
    for event in EVENTS:
        name = event.__name__
        if event is agent_crashes_again_and_again:  # a new one has counted no errors yet
            for accept in ("text/plain", OPENMETRICS):
                story.expositions[accept] = lab.nodes[0].page("/metrics", accept).decode()
        began = time.time()
        event(lab)
        if event is not file_is_no_manifest:  # until somebody has been told, more happens
            await_alerts(lab, "firing", ALERTS.get(name, ()), since=began)
        if event is EVENTS[-1]:
            time.sleep(3 * SCRAPE_SECONDS)  # what came last must be scraped, too
        story.events[name] = began, time.time()
        say(f"{name}: {time.time() - began:.1f} s")
    return story


# ---- the events


def training_begins(lab: Lab) -> None:
    """Saves are made on both nodes and committed; retention gives up those beyond its number."""
    lab.save_every(SAVE_SECONDS)
    for node in lab.nodes:
        node.agent.start()
    lab.train()
    lab.until("ds_ckpt_retention_objects_total > 0", PATIENCE, "retention")


def store_throttles(lab: Lab) -> None:
    """The store asks for less: requests are made again."""
    with fault(lab, Fault(r"^PUT .*partNumber=", "status", times=4)):
        lab.until('ds_ckpt_errors_total{kind="ThrottledError"} > 0', PATIENCE, "throttling")


def byte_flips(lab: Lab) -> None:
    """A byte changes on its way into the store, which notices."""
    with fault(lab, Fault(r"^PUT .*optim_states.*partNumber=", "flip", after=1000, times=2)):
        lab.until("ds_ckpt_verify_failures_total > 0", PATIENCE, "a byte that was changed")


def limit_is_set(lab: Lab) -> None:
    """Somebody limits the bandwidth of one node, and the requests that it may make at a time."""
    first = lab.nodes[0]
    limit(lab, first, "--bandwidth", "4MiB", "--streams", "1")
    lab.until(
        f"ds_ckpt_transfer_bandwidth_limit_bytes_per_second == {4 * MIB}", PATIENCE, "a limit"
    )
    lab.until("ds_ckpt_backlog_bytes > 0", PATIENCE, "a backlog")


def agent_is_killed(lab: Lab) -> None:
    """An agent is killed between two parts of a shard; its next start goes on from there.

    Its credentials are short-lived ones this time: whoever gives them out has trouble.
    """
    first = lab.nodes[0]
    second_part = Fault(
        r"^PUT .*rank_0_mp_rank_00_optim_states.*partNumber=2", "stall", then=first.agent.kill
    )
    with fault(lab, second_part):
        wait_until(lambda: lab.proxy.hits(second_part) > 0, PATIENCE, "a second part")
    lab.until('up{pod="live-0"} == 0', PATIENCE, "the agent to be missed")
    lab.identity.seconds = 2
    first.agent.start()
    lab.until('ds_ckpt_parts_total{outcome="resumed"} > 0', PATIENCE, "parts that are there")
    limit(lab, first, "--reset")
    lab.until("max(ds_ckpt_transfer_bandwidth_limit_bytes_per_second) == 0", PATIENCE, "no limit")


def credentials_are_renewed(lab: Lab) -> None:
    """Whoever gives out credentials is well again."""
    lab.identity.seconds = 3600
    expiry = "min(ds_ckpt_credentials_expiry_timestamp_seconds) - time()"
    lab.until(f"{expiry} > 3000", PATIENCE, "credentials that last")


def file_is_no_manifest(lab: Lab) -> None:
    """Somebody leaves files in the outbox: one that is damaged, and one of a newer hook."""
    outbox = Path(Volume(str(lab.nodes[0].disk.path)).outbox)
    for content in ("{", json.dumps({"schema": 99})):
        save_id = names.new_save_id(int(time.time() * 1000), system_random())
        (outbox / f"{save_id}.{NOBODY}.json").write_text(content)
    lab.until("ds_ckpt_manifests_refused > 0", PATIENCE, "a manifest that is refused")


def files_are_removed(lab: Lab) -> None:
    """Somebody has been told of these files, and removes them."""
    await_alerts(lab, "firing", ALERTS["file_is_no_manifest"])
    for path in Path(Volume(str(lab.nodes[0].disk.path)).outbox).glob(f"*.{NOBODY}.json"):
        path.unlink()
    lab.until("max(ds_ckpt_manifests_refused) == 0", PATIENCE, "it to be gone")


def save_is_skipped(lab: Lab) -> None:
    """A file is gone before the hook sees it."""
    (lab.gate / "lose").touch()
    lab.until("ds_ckpt_trainer_skipped_saves > 0", PATIENCE, "a save that is not handed over")


def rights_are_missing(lab: Lab) -> None:
    """Somebody takes the right to write away, and gives it back."""
    refused = Fault(r"^PUT .*global_step", "status", times=None, status=403, body=DENIED)
    with fault(lab, refused):
        lab.until("ds_ckpt_consecutive_failures > 3", PATIENCE, "failures in a row")
        await_alerts(lab, "firing", ALERTS["rights_are_missing"])
    for node in lab.nodes:  # as somebody does who will not wait for the next try
        node.agent.kill()
        node.agent.start()
    lab.until("max(ds_ckpt_upload_lag_seconds) < 5", PATIENCE, "the backlog to be gone")


def store_stops(lab: Lab) -> None:
    """The store is gone while training goes on; meanwhile a shard of what waits is changed."""
    began = time.time()
    lab.server.kill()
    outbox = Volume(str(lab.nodes[0].disk.path))
    sent = set(outbox.manifests())  # as far as anybody knows
    wait_until(lambda: set(outbox.manifests()) - sent != set(), PATIENCE, "a save that waits")
    change_a_shard(lab.nodes[0])
    lab.until('ds_ckpt_backlog_saves{pod="live-0"} >= 2', PATIENCE, "a backlog")
    lab.save_every(2 * SAVE_SECONDS)
    await_alerts(lab, "firing", ["DsCkptUploadLag"], since=began)


def store_is_back(lab: Lab) -> None:
    """It is there again, with all that it had."""
    began = time.time()
    lab.server.start()
    lab.proxy.lead_to(*lab.server.address)
    lab.until("max(ds_ckpt_upload_lag_seconds) < 10", PATIENCE, "the backlog to be gone")
    lab.until('ds_ckpt_saves_decided_total{state="superseded"} > 0', PATIENCE, "a changed save")
    await_alerts(lab, "resolved", ["DsCkptUploadLag"], since=began)
    lab.save_every(SAVE_SECONDS)


def requests_hang(lab: Lab) -> None:
    """The store takes requests of the agents' main loops, and answers none of them."""
    began = time.time()
    with fault(lab, Fault(r"^(GET|PUT|HEAD) .*\.ds_ckpt", "stall", times=None)):
        await_alerts(lab, "firing", ALERTS["requests_hang"], since=began)


def file_is_held(lab: Lab) -> None:
    """Somebody else has a name for a shard that the agent removes, so its room is not freed."""
    node = lab.nodes[0]
    volume = Volume(str(node.disk.path))
    save_id = sorted(volume.manifests())[-1].split(".")[0]
    shard = next(Path(volume.link_folder(save_id)).glob("*optim_states.pt"))
    held = node.disk.path / "held"
    os.link(shard, held)
    lab.until("ds_ckpt_volume_unfreed_bytes > 0", PATIENCE, "room that is not freed")
    held.unlink()
    lab.until("max(ds_ckpt_volume_unfreed_bytes) == 0", PATIENCE, "it to be freed")


def disk_fills(lab: Lab) -> None:
    """Something else writes to the volume, until little is left."""
    lab.save_every(3600)
    free = 'ds_ckpt_volume_free_bytes{pod="live-0"}'
    (before,) = lab.prometheus.now(free)
    volume = lab.nodes[0].disk.path
    ballast = volume / "ballast"
    with ballast.open("wb") as file:
        while room(volume) > LEAST_ROOM and file.tell() < MOST_BALLAST:
            file.write(bytes(4 * MIB))
            file.flush()
            time.sleep(0.1)
    lab.until(f"{free} < {before - 100 * MIB}", PATIENCE, "little room")
    ballast.unlink()
    lab.save_every(SAVE_SECONDS)


def agent_crashes_again_and_again(lab: Lab) -> None:
    """Something ends an agent whenever it has begun."""
    node = lab.nodes[0]
    started = f'ds_ckpt_process_start_time_seconds{{pod="{node.name}"}}'
    for _ in range(4):
        (before,) = lab.prometheus.now(started)
        node.agent.kill()
        node.agent.start()
        lab.until(f"{started} > {before}", PATIENCE, "the next start")


def node_is_missing(lab: Lab) -> None:
    """One node's agent is gone, so saves of the other wait for its part."""
    lab.nodes[1].agent.kill()
    lab.until("ds_ckpt_waiting_for_nodes_seconds > 5", PATIENCE, "a wait for the other node")


def volume_is_replaced(lab: Lab) -> None:
    """That node's pod is evicted: its successor restores, and training goes on from there."""
    lost = lab.nodes[1]
    lab.kill_trainers()
    lost.disk.remove()
    lost.disk.make()
    answer = lab.commands.restore(lost.disk.path).wait()
    assert answer.code == 0, answer.errors
    lost.agent.start()
    lab.train()
    lab.until("ds_ckpt_restore_seconds > 0", PATIENCE, "a restore")
    lab.until(
        'ds_ckpt_saves_decided_total{state="abandoned"} > 0', PATIENCE, "a half save given up"
    )
    lab.until("max(ds_ckpt_waiting_for_nodes_seconds) == 0", PATIENCE, "nothing to wait for")


def training_ends(lab: Lab) -> None:
    """The trainers finish, and all is stored."""
    lab.finish_training(PATIENCE)
    lab.until("min(ds_ckpt_trainer_finished) == 1", PATIENCE, "the end of the training")
    lab.until("max(ds_ckpt_exposure_seconds) == 0", PATIENCE, "nothing to lose")


EVENTS: tuple[Event, ...] = (
    training_begins,
    store_throttles,
    byte_flips,
    file_is_no_manifest,
    limit_is_set,
    agent_is_killed,
    credentials_are_renewed,
    files_are_removed,
    save_is_skipped,
    rights_are_missing,
    store_stops,
    store_is_back,
    requests_hang,
    file_is_held,
    disk_fills,
    agent_crashes_again_and_again,
    node_is_missing,
    volume_is_replaced,
    training_ends,
)


# Event to the alerts that it makes fire.
ALERTS = {
    "byte_flips": ("DsCkptVerifyFailed",),
    "file_is_no_manifest": ("DsCkptManifestRefused",),
    "agent_is_killed": ("DsCkptCredentialsExpiring",),
    "rights_are_missing": ("DsCkptUploadFailing",),
    "store_stops": (
        "DsCkptUploadLag",
        "DsCkptExposure",
        "DsCkptVolumeFilling",
    ),
    "requests_hang": ("DsCkptAgentSilent",),
    "store_is_back": ("DsCkptSaveLost",),
    "agent_crashes_again_and_again": ("DsCkptAgentRestarting",),
    "node_is_missing": ("DsCkptNodeMissing", "DsCkptAgentDown"),
}


# ---- its means


@contextlib.contextmanager
def fault(lab: Lab, made: Fault) -> Iterator[None]:
    """A fault between agents and store."""
    lab.proxy.add(made)
    try:
        yield
    finally:
        lab.proxy.drop(made)
    assert lab.proxy.hits(made), f"no request met {made}"


def limit(lab: Lab, node: Node, *options: str) -> None:
    """As a person changes what an agent may use."""
    answer = lab.commands.run("limit", "--volume", str(node.disk.path), *options)
    assert answer.code == 0, answer.errors


def room(path: Path) -> int:
    """Bytes that are free."""
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def await_alerts(lab: Lab, status: str, names: Iterable[str], since: float = 0.0) -> None:
    """Wait until the receiver has been told that these alerts fire, or do so no longer."""
    for name in names:
        wait_until(
            lambda name=name: bool(lab.receiver.heard(name, status, since)),
            PATIENCE,
            f"{name} to be {status}",
        )


def change_a_shard(node: Node) -> None:
    """Change one byte of the newest save that was handed over."""
    volume = Volume(str(node.disk.path))
    save_id = sorted(volume.manifests())[-1].split(".")[0]
    shard = next(Path(volume.link_folder(save_id)).glob("*optim_states.pt"))
    with shard.open("r+b") as file:
        file.seek(100_000)
        byte = file.read(1)
        file.seek(100_000)
        file.write(bytes([byte[0] ^ 1]))
