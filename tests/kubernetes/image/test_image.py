"""The image: what is in it, what is not, and that it works with no rights at all.

Every container here runs as the chart's does: a read-only root, no capabilities, no new
privileges, any user but root. What the image and its start cost is printed, not judged.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ds_ckpt_sidecar import __version__
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import system_random
from tests import servers, servers_gcs
from tests.kubernetes.conftest import Podman
from tests.kubernetes.tools import install, machine
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import check_whole

OWN = 65532
ARBITRARY = 1234567890
RESTRICTED = (
    "--read-only",
    "--read-only-tmpfs=false",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--network=host",
)
VOLUME = "/checkpoints"
COMPILERS = "cc gcc g++ c++ c99 cpp ld as ar make cmake clang tcc rustc cargo go"


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints for whoever reads the output of the tests."""

    def printed(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", flush=True)

    return printed


def environment(environ: Mapping[str, str]) -> list[str]:
    return [f"--env={name}={value}" for name, value in environ.items()]


def restricted(
    uid: int = OWN, volume: Path | None = None, environ: Mapping[str, str] | None = None
) -> list[str]:
    """Arguments of ``podman run``, but for the image and what it is told."""
    mounts = [f"--volume={volume}:{VOLUME}"] if volume else []
    settings = {"DS_CKPT_VOLUME": VOLUME, "DS_CKPT_LOG_FORMAT": "json", **(environ or {})}
    return [*RESTRICTED, f"--user={uid}:{uid}", *mounts, *environment(settings)]


def own(volume: Path, uid: int) -> None:
    """Give a volume to a user, as the kubelet and a trainer of that user would have made it."""
    for folder, _, files in os.walk(volume):
        for name in (".", *files):
            os.lchown(os.path.join(folder, name), uid, uid)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume with one save that waits for the sidecar; of the image's user."""
    trainer = Trainer(tmp_path / "volume", seed=1)
    trainer.save("step1", {"a.pt": 3_000_000, "b.pt": 10})
    own(tmp_path / "volume", OWN)
    return tmp_path / "volume"


@pytest.fixture
def destination(seaweed: servers.S3) -> dict[str, str]:
    """Settings that name a new prefix on an S3 server of this machine."""
    return {**seaweed.environ, "DS_CKPT_DESTINATION": f"s3://{seaweed.bucket()}/run"}


# ---- what it is


def test_it_says_what_it_is_and_runs_as_a_user_known_by_number(podman: Podman, image: str) -> None:
    (found,) = json.loads(podman("image", "inspect", image).stdout)
    settings = found["Config"]
    assert settings["User"] == f"{OWN}:{OWN}"
    assert settings["Entrypoint"] == ["ds-ckpt"]
    assert settings["Cmd"] == ["agent"]
    assert "Healthcheck" not in found
    assert "Healthcheck" not in settings
    labels = {
        name.removeprefix("org.opencontainers.image."): value
        for name, value in settings["Labels"].items()
    }
    assert labels["title"] == "ds-ckpt-sidecar"
    assert labels["licenses"] == "Apache-2.0"
    assert labels["version"] == __version__
    said = podman("run", "--rm", *RESTRICTED, image, "--version").stdout
    assert said == f"ds-ckpt {__version__}\n"


def test_it_adds_one_folder_to_pythons_image_and_nothing_of_building(
    podman: Podman, image: str
) -> None:
    base = (machine.TOOLS / "base").read_text().strip()
    changed = [line.split() for line in podman("diff", image, base).stdout.splitlines()]
    outside = [
        path
        for kind, path in changed
        if not path.startswith("/opt/ds-ckpt/") and (kind, path) not in (("A", "/opt/ds-ckpt"),)
    ]
    assert [path for path in outside if path != "/opt"] == []
    assert len(changed) > 1000


def inside(podman: Podman, image: str, script: str) -> str:
    """What a shell script writes in a container of the image, as root, that it sees everything."""
    run = ["run", "--rm", "--network=none", "--user=0", "--entrypoint=sh"]
    return podman(*run, image, "-euc", script).stdout


def test_no_compiler_cache_or_test_is_in_it(podman: Podman, image: str) -> None:
    found = inside(podman, image, f"for name in {COMPILERS}; do command -v $name || :; done")
    assert found.split() == []
    found = inside(
        podman,
        image,
        "find / -xdev -path /proc -prune -o -type d "
        "'(' -name .cache -o -name pip-cache -o -path '*/cache/pip' ')' -print; "
        "find /opt '(' -name tests -o -name test -o -name 'test_*.py' -o -name conftest.py ')'",
    )
    assert found.split() == []


def test_it_does_not_know_where_its_packages_came_from(podman: Podman, image: str) -> None:
    lent = (machine.TOOLS / "pip.conf").read_text()
    addresses = {
        re.sub(r"^\w+://([^/@]*@)?([^/:]+).*", r"\2", address)
        for address in [*re.findall(r"^index-url = (.*)$", lent, re.MULTILINE), *install.mirror()]
    }
    inspected = podman("image", "inspect", image).stdout
    assert "index" not in inspected
    for address in addresses:
        assert address not in inspected
        assert inside(podman, image, f"grep -rlF {address} /opt /etc/pip* /etc/apt || :") == ""
    assert inside(podman, image, "test ! -s /etc/pip.conf; env").count("PIP_") == 0


def test_hadolint_finds_nothing() -> None:
    ran = subprocess.run(
        [machine.tool("hadolint"), machine.ROOT / "Dockerfile"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


# ---- what it does


@pytest.mark.parametrize("uid", [OWN, ARBITRARY])
def test_any_user_stores_a_checkpoint_and_brings_it_back_with_no_rights(
    podman: Podman,
    image: str,
    volume: Path,
    destination: dict[str, str],
    seaweed: servers.S3,
    tmp_path: Path,
    uid: int,
) -> None:
    own(volume, uid)
    podman("run", "--rm", *restricted(uid, volume, destination), image, "agent", "--once")
    bucket = destination["DS_CKPT_DESTINATION"].split("/")[2]
    store = seaweed.store(bucket)
    (record,) = Catalog(store, system_random()).committed()
    assert record.tag == "step1"
    check_whole(store, record)
    store.close()

    fresh = tmp_path / "fresh"
    fresh.mkdir()
    own(fresh, uid)
    arguments = ["restore", destination["DS_CKPT_DESTINATION"], VOLUME]
    podman("run", "--rm", *restricted(uid, fresh, destination), image, *arguments)
    for name in ("a.pt", "b.pt"):
        assert (fresh / "step1" / name).read_bytes() == (volume / "step1" / name).read_bytes()


def test_its_start_compiles_nothing(
    podman: Podman, image: str, volume: Path, destination: dict[str, str]
) -> None:
    told = restricted(OWN, volume, {**destination, "PYTHONVERBOSE": "1"})
    said = podman("run", "--rm", *told, image, "agent", "--once").stderr
    read = re.findall(r"^# code object from '?([^'\n]+?)'?$", said, re.MULTILINE)
    assert len(read) > 300
    assert [path for path in read if not path.endswith(".pyc")] == []


def imported(podman: Podman, image: str, volume: Path, environ: Mapping[str, str]) -> set[str]:
    """The packages that an agent has imported when it has stored a checkpoint."""
    told = restricted(OWN, volume, {**environ, "PYTHONPROFILEIMPORTTIME": "1"})
    said = podman("run", "--rm", *told, image, "agent", "--once").stderr
    modules = re.findall(r"^import time:[^|]*\|[^|]*\| +([\w.]+)$", said, re.MULTILINE)
    assert len(modules) > 300
    return {module.partition(".")[0] for module in modules}


SDKS = {"boto3", "botocore", "google", "azure", "msal", "cryptography", "fsspec", "kubernetes"}


def test_an_agent_of_s3_imports_no_other_sdk(
    podman: Podman, image: str, volume: Path, destination: dict[str, str]
) -> None:
    assert imported(podman, image, volume, destination) & SDKS == {"boto3", "botocore"}


def test_an_agent_of_cloud_storage_imports_no_other_sdk(
    podman: Podman, image: str, volume: Path, fake_gcs: servers_gcs.GCS
) -> None:
    environ = fake_gcs.environ(DS_CKPT_DESTINATION=f"gs://{fake_gcs.bucket()}/run")
    assert imported(podman, image, volume, environ) & SDKS == {"google"}


def test_an_agent_of_a_folder_imports_no_sdk(podman: Podman, image: str, volume: Path) -> None:
    environ = {"DS_CKPT_DESTINATION": f"file://{VOLUME}/store"}
    assert imported(podman, image, volume, environ) & SDKS == set()
