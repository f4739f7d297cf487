"""The image: what is in it, what is not, and that it works with no rights at all.

Every container here has the rights that the chart gives it: a read-only root, no capabilities, no
new privileges, a user that is not root, and its limit of memory.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from ds_ckpt_sidecar import __version__
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract.clock import system_random
from tests import servers, servers_azure, servers_gcs
from tests.kubernetes.conftest import Podman
from tests.kubernetes.image.container import agent, of_chart, own, rights, settings
from tests.kubernetes.tools import install, machine
from tests.sidecar.handoff import Trainer
from tests.sidecar.world import check_whole

OWN = 65532
ARBITRARY = 1234567890
COMPILERS = "cc gcc g++ c++ c99 cpp ld as ar make cmake clang tcc rustc cargo go"


def ds_ckpt(
    podman: Podman,
    image: str,
    *arguments: str,
    volume: Path,
    environ: Mapping[str, str],
    uid: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the image to its end, as the chart's sidecar."""
    told = [*rights(of_chart("ds-ckpt-sidecar"), uid), *settings(volume, environ)]
    return podman("run", "--rm", *told, image, *arguments)


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


def check_committed(seaweed: servers.S3, destination: Mapping[str, str], tag: str) -> None:
    """One checkpoint is in the store, and whole."""
    bucket = destination["DS_CKPT_DESTINATION"].split("/")[2]
    with contextlib.closing(seaweed.store(bucket)) as store:
        (record,) = Catalog(store, system_random()).committed()
        assert record.tag == tag
        check_whole(store, record)


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
    given = rights(of_chart("ds-ckpt-sidecar"))
    said = podman("run", "--rm", "--network=none", *given, image, "--version").stdout
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
    ds_ckpt(podman, image, "agent", "--once", volume=volume, environ=destination, uid=uid)
    check_committed(seaweed, destination, "step1")

    fresh = tmp_path / "fresh"
    fresh.mkdir()
    own(fresh, uid)
    container = of_chart("ds-ckpt-restore")
    container["args"] = [
        destination["DS_CKPT_DESTINATION"] if each == "s3://bucket/run" else each
        for each in container["args"]
    ]
    told = [*rights(container, uid), *settings(fresh, destination)]
    podman("run", "--rm", *told, image, *container["args"])
    for name in ("a.pt", "b.pt"):
        assert (fresh / "step1" / name).read_bytes() == (volume / "step1" / name).read_bytes()


def test_it_keeps_storing_what_comes_has_no_rights_and_ends_on_sigterm(
    image: str, volume: Path, destination: dict[str, str], seaweed: servers.S3, tmp_path: Path
) -> None:
    with agent(image, volume, destination, tmp_path) as running:
        running.until_ready()
        running.wait_for("save.committed")
        check_committed(seaweed, destination, "step1")
        assert {running.status(key) for key in ("CapEff", "CapPrm", "CapBnd")} == {"0" * 16}
        assert running.status("NoNewPrivs") == "1"
        assert running.status("Seccomp") == "2"
        assert set(running.status("Uid").split()) == {str(OWN)}
        assert [running.page(path) for path in ("/healthz", "/startedz")] == [(200, "ok\n")] * 2
        assert running.stop() == 0
    assert running.lines("agent.stopped")[0]["left"] == 0


LIBRARIES = ("cryptography", "_cffi_backend", "google", "google_crc32c", "azure", "psycopg", "grpc")


def test_of_libraries_that_it_does_not_need_none_is_in_its_memory(
    image: str, volume: Path, destination: dict[str, str], tmp_path: Path
) -> None:
    with agent(image, volume, destination, tmp_path) as running:
        running.wait_for("save.committed")
        mapped = {path.partition("/site-packages/")[2] for path in running.mapped()}
    packages = {re.split(r"[./]", path)[0] for path in mapped} - {""}
    assert "_awscrt" in packages
    assert packages & set(LIBRARIES) == set()


def test_its_start_compiles_nothing(
    podman: Podman, image: str, volume: Path, destination: dict[str, str]
) -> None:
    told = {**destination, "PYTHONVERBOSE": "1"}
    said = ds_ckpt(podman, image, "agent", "--once", volume=volume, environ=told).stderr
    read = re.findall(r"^# code object from '?([^'\n]+?)'?$", said, re.MULTILINE)
    assert len(read) > 300
    assert [path for path in read if not path.endswith(".pyc")] == []


def imported(
    podman: Podman, image: str, volume: Path, environ: Mapping[str, str], *mounts: str
) -> set[str]:
    """The packages that an agent has imported when it has stored a checkpoint."""
    told = settings(volume, {**environ, "PYTHONPROFILEIMPORTTIME": "1"})
    given = [*rights(of_chart("ds-ckpt-sidecar")), *mounts, *told]
    said = podman("run", "--rm", *given, image, "agent", "--once").stderr
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
    url = f"gs://{fake_gcs.bucket()}/run"
    environ = {**fake_gcs.environ(), "DS_CKPT_DESTINATION": url}
    assert imported(podman, image, volume, environ) & SDKS == {"google", "cryptography"}


def test_an_agent_of_azure_imports_no_other_sdk(
    podman: Podman, image: str, volume: Path, azurite: servers_azure.Azure
) -> None:
    url = f"az://{azurite.container()}/run"
    environ = {**azurite.environ, "DS_CKPT_DESTINATION": url}
    assert imported(podman, image, volume, environ) & SDKS == {"azure", "cryptography"}


def test_an_agent_of_a_folder_imports_no_sdk(
    podman: Podman, image: str, volume: Path, tmp_path: Path
) -> None:
    (tmp_path / "store").mkdir()
    own(tmp_path / "store", OWN)
    environ = {"DS_CKPT_DESTINATION": "file:///store"}
    mount = f"--volume={tmp_path / 'store'}:/store"
    assert imported(podman, image, volume, environ, mount) & SDKS == set()


# What boto3's chain of credentials calls: a role, a web identity (IRSA), single sign-on, a login.
CREDENTIALS = ("sts", "sso", "sso-oidc", "signin")


def test_botocore_still_knows_what_credentials_come_from(podman: Podman, image: str) -> None:
    script = (
        "import boto3, sys; session = boto3.session.Session();"
        "print(*session.get_available_services());"
        "[session.client(name, region_name='eu-west-1') for name in sys.argv[1:]]"
    )
    run = ["run", "--rm", "--network=none", "--entrypoint=/opt/ds-ckpt/bin/python"]
    said = podman(*run, image, "-c", script, "s3", *CREDENTIALS).stdout
    assert set(said.split()) == {"s3", *CREDENTIALS}
