"""Azure's store from end to end: an agent that is killed, another that goes on, verify, restore."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.faultproxy import Fault, FaultProxy
from tests.servers_azure import Azure
from tests.sidecar.handoff import Trainer
from tests.sidecar.test_cli import as_json, no_settings_of_the_user, run
from tests.sidecar.world import agent_process, contents, until

__all__ = ["no_settings_of_the_user"]  # a fixture, used by every test here

MIB = 1 << 20
FILES = {"mp_rank_00_model_states.pt": 18 * MIB, "zero.pt": 3 * MIB, "small.pt": 50, "empty.pt": 0}


@pytest.fixture
def url(azurite: Azure, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in azurite.environ.items():
        monkeypatch.setenv(name, value)
    return f"az://{azurite.container()}/runs/one"


def test_a_save_is_committed_verified_and_restored(url: str, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "volume", seed=1)
    for step, tag in enumerate(("step1", "a/ü 1%")):
        last = trainer.save(tag, FILES, step=step)
    before = contents(Path(trainer.folder(last)))
    options = ("--volume", trainer.volume.path, "--destination", url, "--once")
    result = run("agent", *options, "--part-mib", "5", "--keep-last", "2")
    assert result.exit_code == 0, result.output
    assert "content-crc64" in result.output
    assert [entry["tag"] for entry in as_json("ls", url)["checkpoints"]] == ["step1", "a/ü 1%"]
    verified = as_json("verify", url, "--all")
    assert verified["damaged"] == {}
    restored = as_json("restore", "--from", url, "--to", str(tmp_path / "new"))
    assert restored["tag"] == last.tag
    assert contents(tmp_path / "new" / last.tag) == before


def test_an_agent_killed_in_the_middle_of_a_shard_is_followed_by_one_that_goes_on(
    azurite: Azure, url: str, tmp_path: Path
) -> None:
    trainer = Trainer(tmp_path / "volume", seed=1)
    trainer.save("step1", FILES)
    parts = urlsplit(azurite.origin)
    block = r"^PUT .*mp_rank.*blockid=.{28}M[^C]"
    options = ("--part-mib", "5", "--streams", "1", "--once")
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        stalled = proxy.add(Fault(block, "stall", skip=2, after=MIB, times=None))
        environ = azurite.through(proxy.url).environ
        log = tmp_path / "log"
        with agent_process(log, trainer.volume.path, url, *options, environ=environ) as first:
            until(lambda: proxy.hits(stalled))
            time.sleep(1.5)  # the journal is written twice a second
            first.end(signal.SIGKILL)
        assert as_json("ls", url)["checkpoints"] == []
        proxy.clear()
        before = proxy.lines(block)
        log = tmp_path / "log2"
        with agent_process(log, trainer.volume.path, url, *options, environ=environ) as second:
            assert second.process.wait(60) == 0, second.output()
        assert proxy.lines(block)[len(before) :] == before[-1:], "the stalled one, and no other"
    verified = as_json("verify", url)
    assert (verified["objects"], verified["bytes"]) == (len(FILES), sum(FILES.values()))
