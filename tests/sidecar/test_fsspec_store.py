"""A store of fsspec from end to end: refused without leave, and whole with it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pyftpdlib.handlers import ThrottledDTPHandler

from tests.servers_ftp import Ftp
from tests.sidecar.handoff import Trainer
from tests.sidecar.test_cli import as_json, no_settings_of_the_user, run
from tests.sidecar.world import agent_process, contents, until

__all__ = ["no_settings_of_the_user"]  # a fixture, used by every test here

MIB = 1 << 20


@pytest.fixture(params=["local", "ftp"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "local":
        return f"local://{tmp_path}/store"
    server: Ftp = request.getfixturevalue("ftp")
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    return server.url()


@pytest.fixture
def agent(url: str, tmp_path: Path) -> Callable[..., int]:
    def once(*options: str) -> int:
        volume = str(tmp_path / "volume")
        result = run("agent", "--volume", volume, "--destination", url, "--once", *options)
        once.said = result.output  # type: ignore[attr-defined]
        return result.exit_code

    return once


def test_a_weak_store_is_refused_without_leave(agent, tmp_path: Path, url: str) -> None:
    trainer = Trainer(tmp_path / "volume", seed=1)
    trainer.save("step1", {"zero.pt": 100})
    assert agent() == 1
    for words in ("no conditional create", "--allow-weak-store", "one node alone"):
        assert words in agent.said
    assert as_json("ls", url)["checkpoints"] == []


def test_a_weak_store_serves_one_node_that_asks_for_it(agent, tmp_path: Path, url: str) -> None:
    """Shards above the size of a part too: they are sent by one put."""
    trainer = Trainer(tmp_path / "volume", seed=1)
    for step, tag in enumerate(("step1", "a/ü 1%")):
        files = {"mp_rank_00_model_states.pt": 12 * MIB + step, "zero.pt": 50, "empty.pt": 0}
        last = trainer.save(tag, files, step=step)
    before = contents(Path(trainer.folder(last)))
    options = ("--allow-weak-store", "--part-mib", "5", "--keep-last", "2")
    options += ("--retention-pause", "0")
    assert agent(*options) == 0, agent.said
    trainer.save("step3", {"zero.pt": 70}, step=3)
    assert agent(*options) == 0, agent.said
    listed = as_json("ls", url)
    assert [entry["tag"] for entry in listed["checkpoints"]] == ["a/ü 1%", "step3"]
    assert listed["damaged"] == {}
    verified = as_json("verify", url, "--all")
    assert verified["damaged"] == {}
    to = tmp_path / "new"
    document = as_json("restore", "--from", url, "--to", str(to), "--tag", last.tag)
    assert document["tag"] == last.tag
    assert contents(to / last.tag) == before
    assert as_json("restore", "--from", url, "--to", str(to))["tag"] == "step3"


def test_an_agent_killed_in_the_middle_of_a_shard_leaves_nothing_to_be_seen(
    ftp: Ftp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one sends that shard again from its start, and commits."""

    class Slow(ThrottledDTPHandler):
        read_limit = 4 * MIB  # a second

    trainer = Trainer(tmp_path / "volume", seed=1)
    trainer.save("step1", {"zero.pt": 16 * MIB})
    volume, url = trainer.volume.path, ftp.url()
    temporary = ftp.folder / url.rpartition("/")[2] / ".ds_ckpt-tmp"
    options = ("--once", "--allow-weak-store")

    def half_sent() -> bool:
        return temporary.is_dir() and any(f.stat().st_size > MIB for f in temporary.iterdir())

    with monkeypatch.context() as patch:
        patch.setattr(ftp.handler, "dtp_handler", Slow)
        log = tmp_path / "log"
        with agent_process(log, volume, url, *options, environ=ftp.environ) as first:
            until(half_sent)
            first.end(signal.SIGKILL)
    for name, value in ftp.environ.items():
        monkeypatch.setenv(name, value)
    assert as_json("ls", url)["checkpoints"] == []
    result = run("agent", "--volume", volume, "--destination", url, *options)
    assert result.exit_code == 0, result.output
    verified = as_json("verify", url)
    assert (verified["objects"], verified["bytes"]) == (1, 16 * MIB)
