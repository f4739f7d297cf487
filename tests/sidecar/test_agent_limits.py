"""What an agent may use: settings, a file that changes it while it runs, and what it says of it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import psutil
import pytest

from ds_ckpt_sidecar.agent import Agent
from ds_ckpt_sidecar.limits import LimitsWatch
from ds_ckpt_sidecar.settings import AgentSettings, load
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.manifest import TransferLimits
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import ExpiredError, SettingsError, ThrottledError
from ds_ckpt_store.stores.memory import MemoryBucket, MemoryStore
from ds_ckpt_store.stores.port import Capabilities, Limits
from ds_ckpt_store.transfer.budget import Budget
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import Lines, World, agent_process, until
from tests.store.transfer.support import TickingClock

MIB = 1 << 20


# ---- settings


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("500MiB", 500 * MIB),
        ("2GB", 2 * 10**9),
        ("1048576", MIB),
        ("1.5 GiB/s", 3 << 29),
        ("200MiB/s", 200 * MIB),
        ("500Mi", 500 * MIB),
        ("5e+08", 500_000_000),
        ("1E9", 10**9),
        ("none", 0),
        ("0", 0),
    ],
)
def test_a_bandwidth_is_written_as_people_write_it(text: str, rate: int, tmp_path: Path) -> None:
    where = {"volume": str(tmp_path), "destination": "file:///x"}
    assert load(**where, bandwidth=text).bandwidth == rate


@pytest.mark.parametrize(
    "text",
    [
        "fast",
        "-1",
        "1e30",
        "500",
        "65535",
        "10 bananas",
        "inf",
        "nan",
        "",
        "5e+08MB",
        "500MB and more",
        "5+08",
        "1e-3",
        "0.0001KB",
        "500M!",
    ],
)
def test_a_bandwidth_that_makes_no_sense_is_refused_by_name(text: str, tmp_path: Path) -> None:
    where = {"volume": str(tmp_path), "destination": "file:///x"}
    with pytest.raises(SettingsError, match="DS_CKPT_BANDWIDTH"):
        load(**where, bandwidth=text)


def agent_for(tmp_path: Path, capabilities: Capabilities, **settings: object) -> Agent:
    return Agent(
        AgentSettings(volume=str(tmp_path), destination="memory://b/r", **settings),  # type: ignore[arg-type]
        store=MemoryStore(MemoryBucket(SystemClock()), capabilities),
        volume=Volume(str(tmp_path)),
        log=Lines(),
    )


def test_what_cannot_work_with_the_store_is_refused_before_anything_begins(tmp_path: Path) -> None:
    small = Capabilities(limits=Limits(max_part=100 * MIB))
    with pytest.raises(SettingsError, match=r"DS_CKPT_PART_MIB.*at most 100 MiB"):
        agent_for(tmp_path, small, part_mib=101)
    greedy = Capabilities(request_memory=64 * MIB)
    with pytest.raises(SettingsError, match=r"no room for one request.*DS_CKPT_MEMORY_MIB"):
        agent_for(tmp_path, greedy, memory_mib=64)
    agent_for(tmp_path, greedy, memory_mib=65)
    assert not any(tmp_path.iterdir())


def test_memory_bounds_the_streams(world: World, trainer: Trainer) -> None:
    hungry = MemoryStore(world.bucket, Capabilities(request_memory=10 * MIB))
    trainer.save("t", {"x": 6 * MIB})
    agent = world.agent(trainer.volume.path, store=hungry, streams=16, memory_mib=32)
    assert agent.run(once=True) == 0
    assert world.log.of("agent.started")[0]["streams"] == 3


# ---- the file


class Watched:
    """A watch over a volume, on a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.volume = Volume(str(folder))
        self.volume.prepare()
        self.clock = TickingClock()
        self.budget = Budget(self.clock, streams=8, fit=12, bandwidth=5 * MIB)
        self.log = Lines()
        self.watch = LimitsWatch(
            self.volume,
            self.budget,
            bandwidth=5 * MIB,
            streams=8,
            log=self.log,
            clock=self.clock,
        )

    def look(self) -> tuple[int, int]:
        self.clock.sleep(2)
        self.watch.look()
        return self.budget.bandwidth, self.budget.most


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_the_file_is_over_the_settings_as_long_as_it_is_there(watched: Watched) -> None:
    assert watched.look() == (5 * MIB, 8)
    watched.volume.write_limits(TransferLimits(bandwidth=MIB))
    assert watched.look() == (MIB, 8)
    watched.volume.write_limits(TransferLimits(bandwidth=0, streams=2))
    assert watched.look() == (0, 2)
    watched.volume.write_limits(TransferLimits(streams=99))
    assert watched.look() == (5 * MIB, 12)
    os.unlink(watched.volume.limits)
    assert watched.look() == (5 * MIB, 8)
    said = watched.log.of("limits.changed")
    assert [line["bandwidth"] for line in said] == ["1 MiB/s", "no limit", "5 MiB/s", "5 MiB/s"]
    assert "room for 12" in said[2]["reason"]
    watched.look()
    assert len(watched.log.of("limits.changed")) == 4


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "not json": b"{",
    "a list": b"[]",
    "newer": b'{"schema": 99, "streams": 1}',
    "no schema": b'{"streams": 1}',
    "no streams": b'{"schema": 1, "streams": 0}',
    "too many": b'{"schema": 1, "streams": 257}',
    "negative": b'{"schema": 1, "bandwidth": -1}',
    "a crawl": b'{"schema": 1, "bandwidth": 1}',
    "huge": b'{"schema": 1, "bandwidth": 99999999999999999999999}',
    "words": b'{"schema": 1, "bandwidth": "fast"}',
    "large": b'{"schema": 1, "streams": 1, "x": "' + b"x" * 100_000 + b'"}',
    "deep": b"[" * 4000,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_file_that_is_not_what_it_should_be_changes_nothing_and_is_said_once(
    watched: Watched, data: bytes
) -> None:
    watched.volume.write_limits(TransferLimits(bandwidth=MIB, streams=3))
    watched.look()
    Path(watched.volume.limits).write_bytes(data)
    for _ in range(3):
        assert watched.look() == (MIB, 3)
    assert len(watched.log.of("limits.ignored")) == 1
    watched.volume.write_limits(TransferLimits(streams=4))
    assert watched.look() == (5 * MIB, 4)


@pytest.mark.parametrize("what", ["link", "folder", "fifo", "unreadable"])
def test_what_is_no_file_of_ours_is_not_followed(
    watched: Watched, tmp_path: Path, what: str
) -> None:
    path = watched.volume.limits
    if what == "link":
        (tmp_path / "elsewhere").write_bytes(TransferLimits(streams=1).to_bytes())
        os.symlink(tmp_path / "elsewhere", path)
    elif what == "folder":
        os.mkdir(path)
    elif what == "fifo":
        os.mkfifo(path)
    else:
        os.symlink("/proc/self/mem", path)
    assert watched.look() == (5 * MIB, 8)
    assert len(watched.log.of("limits.ignored")) == 1


# ---- an agent at work


def test_a_running_upload_is_slowed_and_freed(world: World, trainer: Trainer) -> None:
    trainer.save("t", {"x": 20 * MIB})
    trainer.volume.write_limits(TransferLimits(bandwidth=MIB))
    with world.running(trainer.volume.path):
        until(lambda: world.log.of("limits.changed"))
        until(lambda: world.store.asked("put_part"))
        threading.Event().wait(1.5)
        assert world.states() == {}  # 20 seconds would be needed
        sidecar = trainer.volume.sidecar_status()
        assert sidecar is not None
        assert (sidecar.bandwidth, sidecar.streams) == (MIB, 4)
        trainer.volume.write_limits(TransferLimits(bandwidth=0))
        until(lambda: world.states() == {"t": "committed"}, seconds=10)
    world.check_whole()


def test_a_store_that_throttles_is_said_and_asked_for_less(world: World, trainer: Trainer) -> None:
    world.fault("put_part", "fail-before", count=6, error=ThrottledError)
    trainer.save("t", {"x": 40 * MIB})
    agent = world.agent(trainer.volume.path)
    assert agent.run(once=True) == 0
    assert agent._budget.streams() < 4
    said = world.log.of("store.retried")
    assert len(said) == 1, "one line, however many calls were throttled"
    assert (said[0]["kind"], said[0]["error"][:8]) == ("ThrottledError", "put_part")
    world.check_whole()


def test_credentials_that_expire_in_mid_upload_are_waited_for(
    world: World, trainer: Trainer
) -> None:
    world.fault("put_part", "fail-before", count=15, skip=1, error=ExpiredError)
    trainer.save("t", {"x": 21 * MIB})
    assert world.once(trainer.volume.path) == 0
    assert len(world.store.asked("begin", "t@")) == 1, "the same upload goes on"
    assert world.states() == {"t": "committed"}


def test_a_request_that_is_never_answered_is_said(trainer: Trainer) -> None:
    world = World()
    answer = threading.Event()
    world.fault("put_part", "call", action=lambda: answer.wait(20) and None)
    trainer.save("t", {"x": 10 * MIB})
    with world.running(trainer.volume.path, stall_seconds=1, streams=1):
        until(lambda: world.log.of("transfer.stalled"), seconds=15)
        answer.set()
        until(lambda: world.states() == {"t": "committed"})
    assert len(world.log.of("transfer.stalled")) == 1
    assert world.log.of("transfer.stalled")[0]["requests"] == 1


def test_low_priority_is_taken_by_all_threads(trainer: Trainer, tmp_path: Path) -> None:
    trainer.save("t", {"x": 10})
    destination = (tmp_path / "store").as_uri()
    options = ("--priority", "low", "--rescan-seconds", "60", "--listen", "127.0.0.1:0")
    with agent_process(tmp_path / "log", trainer.volume.path, destination, *options) as agent:
        agent.wait_for("save.committed")
        tasks = Path(f"/proc/{agent.process.pid}/task")
        nice = [
            int((task / "stat").read_text().rsplit(")", 1)[1].split()[16])
            for task in tasks.iterdir()
        ]
        assert len(nice) > 1
        assert set(nice) == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)}
        ioclass = psutil.Process(agent.process.pid).ionice().ioclass
        assert ioclass == psutil.IOPRIO_CLASS_IDLE
        assert agent.end() == 0
        assert agent.of("priority.not_lowered") == []


def test_status_of_an_older_agent_without_limits_is_read(tmp_path: Path) -> None:
    volume = Volume(str(tmp_path))
    volume.prepare()
    old = {"schema": 1, "time": 1.0, "pid": 1, "version": "0", "state": "running"}
    Path(f"{volume.status}/sidecar.json").write_text(json.dumps(old))
    sidecar = volume.sidecar_status()
    assert sidecar is not None
    assert (sidecar.streams, sidecar.bandwidth) == (0, 0)


def test_the_pool_has_as_many_threads_as_memory_has_room_for(tmp_path: Path) -> None:
    agent = agent_for(tmp_path, Capabilities(request_memory=MIB), streams=2, memory_mib=10)
    assert agent._budget.fit >= 5
    assert agent._budget.streams() == 2
    assert isinstance(agent._store, MemoryStore)


# ---- the end


def test_a_signal_lifts_the_settings_bound_at_once_and_never_the_files(watched: Watched) -> None:
    watched.look()
    watched.watch.lift()
    assert watched.budget.bandwidth == 0
    watched.volume.write_limits(TransferLimits(bandwidth=MIB))
    watched.look()
    watched.watch.lift()
    assert watched.budget.bandwidth == MIB
