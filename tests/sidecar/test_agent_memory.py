"""The peak of a real agent on a real S3, with default settings, whatever the sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import servers
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import PATIENCE, agent_process

MIB = 1 << 20
MOST = 100 * MIB

# Run in the agent's process first. An agent ends with os._exit, which calls nothing that was
# registered with atexit, so the peak is told there.
TELL_PEAK = """
import os, sys

leave = os._exit

def tell_and_leave(code):
    with open("/proc/self/status") as status:
        print(*(line for line in status if line.startswith("VmHWM")), file=sys.stderr, flush=True)
    leave(code)

os._exit = tell_and_leave
"""


def peak(output: str) -> int:
    """The peak in bytes that an agent process with ``TELL_PEAK`` told in its ``output``."""
    (line,) = [line for line in output.splitlines() if line.strip().startswith("VmHWM")]
    return int(line.split()[1]) * 1024


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
    assert peak(agent.output()) <= MOST
