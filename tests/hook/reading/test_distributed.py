"""Two ranks on one node: saved by torch through the volume and the sidecar, read from a real S3."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ds_ckpt_hook
from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.volume import Volume
from tests.faultproxy import FaultProxy
from tests.hook.processes import lines_of, run_ranks
from tests.hook.reading.stored import MIB, url_of
from tests.servers import S3
from tests.sidecar.handoff import Trainer
from tests.sidecar.test_cli import no_settings_of_the_user, run

__all__ = ["no_settings_of_the_user"]  # a fixture

WEIGHTS = torch.arange(4096 * 1024, dtype=torch.float32).reshape(4096, 1024)
SAME = torch.arange(1_500_000, dtype=torch.int32)


def store(volume: Path, url: str) -> None:
    options = ("--volume", str(volume), "--destination", url, "--once", "--part-mib", "5")
    result = run("agent", *options)
    assert result.exit_code == 0, result.output


def asked(proxy: FaultProxy, ending: str) -> Counter[tuple[str, str]]:
    """How often which range of which of the files was asked for."""
    return Counter(
        (seen.line.partition("?")[0].rpartition("/")[2], seen.headers.get("range", ""))
        for seen in proxy.seen
        if re.search(rf"^GET .*{ending}(\?|$)", seen.line)
    )


def test_saved_by_two_ranks_and_read_by_ranges_once_a_node(
    seaweed: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in seaweed.environ.items():
        monkeypatch.setenv(name, value)
    worker = ["-m", "tests.hook.workers.distributed"]
    bucket = seaweed.bucket()

    run_ranks(lambda rank: [*worker, "save", str(tmp_path)])
    volume = tmp_path / "volume"
    for rank in (0, 1):
        said = lines_of(tmp_path / f"rank{rank}.jsonl")
        assert [line["tag"] for line in said] == ["step-7", "step-8"]
        assert all(all(line["summed"]) for line in said), "summed while it was written"
    found = [Volume(str(volume)).manifest(name) for name in Volume(str(volume)).manifests()]
    for manifest in found:
        shards = {shard.path: shard for shard in manifest.shards}
        assert set(shards) == {".metadata", "__0_0.distcp", "__1_0.distcp"}
        for path, shard in shards.items():
            data = (volume / manifest.tag / path).read_bytes()
            assert shard.crc32c == digest.to_hex(digest.crc32c(data))
    store(volume, f"s3://{bucket}/dcp")

    tensors = {"rows": WEIGHTS, "columns": WEIGHTS[:64].clone(), "same": SAME}
    save_file(tensors, tmp_path / "model.safetensors")
    file = {"model.safetensors": (tmp_path / "model.safetensors").read_bytes()}
    Trainer(tmp_path / "other", seed=1).save("hf", file)
    store(tmp_path / "other", f"s3://{bucket}/hf")

    server = urlsplit(seaweed.endpoint)
    with FaultProxy(str(server.hostname), int(server.port or 0)) as proxy:
        monkeypatch.setenv("DS_CKPT_S3_ENDPOINT", proxy.url)
        monkeypatch.setenv("DS_CKPT_CACHE", str(tmp_path / "cache"))
        urls = [
            url_of(f"s3://{bucket}/dcp", "step-8"),
            url_of(f"s3://{bucket}/hf", "hf"),
        ]
        proxy.seen.clear()
        run_ranks(lambda rank: [*worker, "load", str(tmp_path), *urls])
        for rank in (0, 1):
            said = lines_of(tmp_path / f"rank{rank}.jsonl")
            assert [(line["same"], line["step"]) for line in said] == [(True, 7), (True, None)]
        ranges = asked(proxy, "(distcp|metadata|safetensors)")
        assert set(ranges.values()) == {1}, "once a node, and not once a rank"
        names = {"__0_0.distcp", "__1_0.distcp", ".metadata", "model.safetensors"}
        assert {name for name, _ in ranges} == names

        proxy.seen.clear()
        resharded: dict[str, Any] = {"rows": torch.zeros(4096, 1024), "step": 0}
        with_one_rank(urls[0], resharded)
        assert torch.equal(resharded["rows"], WEIGHTS)
        assert resharded["step"] == 7
        assert not asked(proxy, "(distcp|metadata)"), "a restart finds it on the node"

        monkeypatch.setenv("DS_CKPT_CACHE", str(tmp_path / "another node"))
        proxy.seen.clear()
        only: dict[str, Any] = {"step": 0}
        with_one_rank(urls[0], only)
        assert only == {"step": 7}
        assert sum(size_of(each) for each in asked(proxy, "distcp")) <= 5 * MIB
        part = {"columns": torch.zeros(64, 1024)}
        proxy.seen.clear()
        with_one_rank(urls[1], part)
        assert torch.equal(part["columns"], WEIGHTS[:64])
        assert sum(size_of(each) for each in asked(proxy, "safetensors")) <= 5 * MIB


def with_one_rank(url: str, state: dict[str, Any]) -> None:
    reader = ds_ckpt_hook.dcp.Reader(url)
    dcp.load(state, storage_reader=reader)
    reader.close()


def size_of(asked_for: tuple[str, str]) -> int:
    first, last = re.findall(r"\d+", asked_for[1])
    return int(last) - int(first) + 1
