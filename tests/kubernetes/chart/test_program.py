"""What the chart writes for the program, the program takes: its settings and its arguments."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ds_ckpt_sidecar import settings
from ds_ckpt_store.transfer.plan import MIB
from tests.kubernetes.chart.helm import Document, Helm, documents, pods
from tests.kubernetes.chart.matrix import LEAST, kind, merged


def container(found: list[Document], name: str) -> dict[str, Any]:
    """One of the first pod's containers."""
    spec = pods(found)[0]["spec"]
    every = [*spec.get("initContainers", []), *spec["containers"]]
    one: dict[str, Any] = next(each for each in every if each["name"] == name)
    return one


def variables(found: list[Document], name: str) -> dict[str, str]:
    """What a container's variables say; those from elsewhere are left out."""
    given = container(found, name).get("env", [])
    return {each["name"]: each["value"] for each in given if "value" in each}


def started(environ: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> settings.AgentSettings:
    """The settings that an agent with these variables has."""
    for name in [name for name in os.environ if name.startswith("DS_CKPT_")]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return settings.load()


def test_the_agent_takes_the_settings_of_every_case(
    rendered: Mapping[str, list[Document]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, found in rendered.items():
        if pods(found):
            environ = variables(found, "ds-ckpt-sidecar")
            agent = started(environ, monkeypatch)
            known = {f"DS_CKPT_{field.upper()}" for field in settings.AgentSettings.model_fields}
            store = re.compile("DS_CKPT_(S3|GCS|AZURE|FSSPEC)_")
            unknown = {
                each
                for each in environ
                if each.startswith("DS_CKPT_") and each not in known and not store.match(each)
            }
            assert not unknown, name
            assert agent.log_format == "json"
            assert agent.listen.startswith(":")


def test_every_setting_arrives_as_it_was_meant(
    rendered: Mapping[str, list[Document]], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = started(
        variables(rendered["plain container, everything"], "ds-ckpt-sidecar"), monkeypatch
    )
    assert agent.model_dump(exclude={"journal", "termination_log"}) == {
        "volume": "/mnt/ckpt",
        "volume_limit": 600 * 1024 * MIB,
        "destination": "s3://bucket/runs/one",
        "run_id": "one",
        "keep_last": 3,
        "keep_local": 0,
        "retention_pause": 1000000,
        "order": "newest",
        "streams": 8,
        "part_mib": 16,
        "memory_mib": 64,
        "bandwidth": 500 * MIB,
        "stall_seconds": 90.5,
        "page_cache": "keep",
        "priority": "low",
        "rescan_seconds": 2,
        "drain_seconds": 280.5,
        "lease_stale_seconds": 120,
        "abandon_seconds": 3600,
        "allow_weak_store": True,
        "log_format": "json",
        "listen": ":9484",
        "exit_when_finished": True,
        "trainer_gone_seconds": 60,
        "kubernetes": True,
    }


def test_without_values_the_agent_keeps_its_own_defaults(
    rendered: Mapping[str, list[Document]], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = started(variables(rendered["Job, least"], "ds-ckpt-sidecar"), monkeypatch)
    assert agent.model_fields_set == {
        "volume",
        "destination",
        "run_id",
        "listen",
        "drain_seconds",
        "log_format",
    }
    assert agent.drain_seconds == 110


def test_the_defaults_of_memory_fit_the_formula() -> None:
    """docs/operations.md: base, and requests at a time; the chart counts 96 MiB and the latter."""
    documented = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    bases = [int(found) for found in re.findall(r"(\d+) MiB for `\w+://`", documented)]
    assert len(bases) >= 2
    assert max(bases) <= 96
    assert 96 + settings.DEFAULT_MEMORY_MIB <= 256


def test_restore_takes_its_arguments_and_a_first_start_finds_nothing(
    helms: Mapping[str, Helm], tmp_path: Path
) -> None:
    """The rendered command line, run for real on an empty store and a volume of its own."""
    store, volume = tmp_path / "store", tmp_path / "volume"
    store.mkdir()
    values = merged(
        LEAST,
        {
            "destination": f"file://{store}/run",
            "volume": {"mountPath": str(volume)},
            "restore": {"streams": 4, "bandwidth": "500MiB"},
            "agent": {"stallSeconds": 30},
            "sidecar": {"extraVolumeMounts": [{"name": "store", "mountPath": str(store)}]},
            "pod": {"extraVolumes": [{"name": "store", "emptyDir": {}}]},
        },
    )
    found = documents(helms["helm4"].render(values))
    volume.mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", "ds_ckpt_sidecar", *container(found, "ds-ckpt-restore")["args"]],
        env={**os.environ, **variables(found, "ds-ckpt-restore")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "holds no committed checkpoint yet: nothing to restore" in ran.stdout


def test_a_tag_that_was_asked_for_must_be_there(rendered: Mapping[str, list[Document]]) -> None:
    arguments = container(rendered["Job, everything"], "ds-ckpt-restore")["args"]
    assert arguments[arguments.index("--tag") + 1] == "global_step100"
    assert "--if-any" not in arguments
    assert "--if-any" in container(rendered["Job, least"], "ds-ckpt-restore")["args"]


def test_bytes_per_second_stay_a_number(rendered: Mapping[str, list[Document]]) -> None:
    """As helm has it, a number of a values file is 5e+08."""
    arguments = container(rendered["bytes as numbers"], "ds-ckpt-restore")["args"]
    assert arguments[arguments.index("--bandwidth") + 1] == "500000000"


TORCHRUN = """
import json
from torch.distributed.run import config_from_args, get_args_parser
config = config_from_args(get_args_parser().parse_args(["train.py"]))[0]
print(json.dumps([
    config.min_nodes, config.max_nodes, config.nproc_per_node, config.rdzv_endpoint,
    config.rdzv_configs["rank"],
]))
"""


def test_torchrun_needs_no_arguments_beside_the_script(helms: Mapping[str, Helm]) -> None:
    """Its own parser, with what the chart says to a node of an Indexed Job."""
    found = documents(helms["helm4"].render(kind("IndexedJob", 4, processesPerNode=2)))
    said = variables(found, "trainer")
    ran = subprocess.run(
        [sys.executable, "-c", TORCHRUN],
        # The node's number is from an annotation, which the Job's controller writes.
        env={**os.environ, **said, "PET_NODE_RANK": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    address = f"{said['MASTER_ADDR']}:29500"
    assert json.loads(ran.stdout.splitlines()[-1]) == [4, 4, 2, address, 3]


def test_probes_ask_for_pages_that_the_agent_has(rendered: Mapping[str, list[Document]]) -> None:
    asked = set()
    for name in ("Job, least", "Job, everything"):
        sidecar = container(rendered[name], "ds-ckpt-sidecar")
        handlers = [
            sidecar.get(f"{kind}Probe", {}) for kind in ("startup", "liveness", "readiness")
        ]
        handlers += sidecar.get("lifecycle", {}).values()
        asked |= {each["httpGet"]["path"] for each in handlers if each}
    assert asked == {"/startedz", "/healthz", "/readyz", "/prestop"}
