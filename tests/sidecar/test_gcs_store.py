"""Cloud Storage from end to end: an agent that is killed, another that goes on, verify, restore.

On fake-gcs-server, where nothing is proven by a checksum: it is found out, said, and read back.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests

from ds_ckpt_sidecar.journal import FLUSH_SECONDS
from tests.faultproxy import Fault, FaultProxy
from tests.servers_gcs import GCS
from tests.sidecar.handoff import Trainer
from tests.sidecar.test_cli import as_json, no_settings_of_the_user, run
from tests.sidecar.world import agent_process, contents, until

__all__ = ["no_settings_of_the_user"]  # a fixture, used by every test here

MIB = 1 << 20
FILES = {"mp_rank_00_model_states.pt": 18 * MIB, "zero.pt": 3 * MIB, "small.pt": 50, "empty.pt": 0}


@pytest.fixture
def url(fake_gcs: GCS, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in fake_gcs.environ().items():
        monkeypatch.setenv(name, value)
    return f"gs://{fake_gcs.bucket()}/runs/one"


def temporary(server: GCS, url: str) -> list[str]:
    """Objects of unfinished uploads, as any tool sees them."""
    bucket = urlsplit(url).netloc
    answer = requests.get(f"{server.endpoint}/storage/v1/b/{bucket}/o", timeout=10).json()
    return [each["name"] for each in answer["items"] if ".ds_ckpt-parts/" in each["name"]]


def test_a_save_is_committed_verified_and_restored(fake_gcs: GCS, url: str, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "volume", seed=1)
    for step, tag in enumerate(("step1", "a/ü 1%")):
        last = trainer.save(tag, FILES, step=step)
    before = contents(Path(trainer.folder(last)))
    options = ("--volume", trainer.volume.path, "--destination", url, "--once")
    result = run("agent", *options, "--part-mib", "5", "--keep-last", "2")
    assert result.exit_code == 0, result.output
    assert "stored-checksum proves nothing here" in result.output
    assert [entry["tag"] for entry in as_json("ls", url)["checkpoints"]] == ["step1", "a/ü 1%"]
    verified = as_json("verify", url, "--all")
    assert verified["damaged"] == {}
    restored = as_json("restore", "--from", url, "--to", str(tmp_path / "new"))
    assert restored["tag"] == last.tag
    assert contents(tmp_path / "new" / last.tag) == before
    assert temporary(fake_gcs, url) == []


def test_an_agent_killed_in_the_middle_of_a_shard_is_followed_by_one_that_goes_on(
    fake_gcs: GCS, url: str, tmp_path: Path
) -> None:
    trainer = Trainer(tmp_path / "volume", seed=1)
    trainer.save("step1", FILES)
    parts = urlsplit(fake_gcs.endpoint)
    part = r"^POST /upload/.*\.ds_ckpt-parts%2F\w+%2F\d{5}"
    options = ("--part-mib", "5", "--streams", "1", "--once")
    with FaultProxy(str(parts.hostname), int(parts.port or 0)) as proxy:
        stalled = proxy.add(Fault(part, "stall", skip=2, after=MIB, times=None))
        environ = GCS(proxy.url).environ()
        log = tmp_path / "log"
        with agent_process(log, trainer.volume.path, url, *options, environ=environ) as first:
            until(lambda: proxy.hits(stalled))
            time.sleep(2 * FLUSH_SECONDS)
            first.end(signal.SIGKILL)
        assert as_json("ls", url)["checkpoints"] == []
        assert len(temporary(fake_gcs, url)) == 3, "two parts, and the mark of the upload"
        proxy.clear()
        sent = len(proxy.lines(part))
        log = tmp_path / "log2"
        with agent_process(log, trainer.volume.path, url, *options, environ=environ) as second:
            assert second.process.wait(60) == 0, second.output()
        assert len(proxy.lines(part)) - sent == 2, "of four parts, two were there"
    verified = as_json("verify", url)
    assert (verified["objects"], verified["bytes"]) == (len(FILES), sum(FILES.values()))
    assert temporary(fake_gcs, url) == []
