"""The peak of a real agent on a real S3, with default settings, whatever the sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import servers
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import PATIENCE, agent_process

MIB = 1 << 20
MOST = 100 * MIB

TELL_PEAK = """
import atexit, sys

def tell():
    with open("/proc/self/status") as status:
        print(*(line for line in status if line.startswith("VmHWM")), file=sys.stderr)

atexit.register(tell)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "shards",
    [{"x": 160 * MIB}, {f"{number}.pt": MIB for number in range(100)}],
    ids=["large", "many"],
)
def test_the_agent_keeps_within_100_mib(
    tmp_path: Path, seaweed: servers.S3, shards: dict[str, int]
) -> None:
    trainer = Trainer(tmp_path / "volume", seed=1)
    trainer.save("t", shards)
    url = f"s3://{seaweed.bucket()}/run"
    environ = {"DS_CKPT_S3_ENDPOINT": seaweed.endpoint}
    with agent_process(
        tmp_path / "log", trainer.volume.path, url, "--once", environ=environ, program=TELL_PEAK
    ) as agent:
        assert agent.process.wait(PATIENCE * 2) == 0, agent.output()
    (line,) = [line for line in agent.output().splitlines() if line.strip().startswith("VmHWM")]
    assert int(line.split()[1]) * 1024 <= MOST
