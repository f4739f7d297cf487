"""What ``make k8s-tools`` has put on this machine, and podman over it.

Images and containers lie in the project's own folder, apart from the user's: the stand-in for
Python's image bears that image's name, and must not be taken for it elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / ".kubernetes"
SIDECAR = "localhost/ds-ckpt-sidecar:test"
TRAINER = "localhost/ds-ckpt-trainer:test"
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")


def tool(name: str) -> Path:
    """Path of a program: helm3, helm4, kubectl, hadolint."""
    found = TOOLS / "bin" / name
    assert found.exists(), f"{found} is missing: run `make k8s-tools` first"
    return found


def environ() -> dict[str, str]:
    """With this, podman has the project's settings and storage."""
    settings = TOOLS / "containers.conf"
    assert settings.exists(), f"{settings} is missing: run `make k8s-tools` first"
    return {
        **os.environ,
        "CONTAINERS_CONF": str(settings),
        "CONTAINERS_STORAGE_CONF": str(TOOLS / "storage.conf"),
    }


def podman(
    *arguments: str | os.PathLike[str],
    check: bool = True,
    timeout: float | None = 120,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run podman with the project's settings and storage.

    Args:
        arguments: of podman.
        check: whether a failure is an AssertionError with what podman said.
        timeout: in seconds, after which podman is killed and TimeoutExpired raised.
        stdin: text for it; nothing if None.
    """
    ran = subprocess.run(
        ["podman", *map(os.fspath, arguments)],
        env=environ(),
        input=stdin or "",
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check:
        said = f"{ran.stdout[-4000:]}{ran.stderr[-8000:]}"
        assert ran.returncode == 0, f"podman {' '.join(map(str, arguments))}:\n{said}"
    return ran


def build(name: str, *arguments: str | os.PathLike[str], stdin: str | None = None) -> str:
    """Build an image of this name from the stand-in base; what has not changed is not repeated.

    Returns a name of its own for what was built: ``name`` is given anew by another run beside.

    The host's network, authorities and index of packages are lent to the build and left out of
    the image.
    """
    lent = ["--pull=never", "--network=host"]
    lent += [f"--volume={TOOLS / 'pip.conf'}:/etc/pip.conf:ro"]
    if AUTHORITIES.exists():
        lent += [f"--volume={AUTHORITIES}:{AUTHORITIES}:ro"]
    with tempfile.TemporaryDirectory() as folder:
        number = Path(folder) / "id"
        lent += [f"--iidfile={number}", f"--tag={name}"]
        podman("build", *lent, *arguments, timeout=900, stdin=stdin)
        built = number.read_text().strip()
    own = f"{name}-{built.removeprefix('sha256:')[:16]}"
    podman("tag", built, own)
    return own


def forget_older(name: str, current: str) -> None:
    """Take from images that were built as ``name`` over a day ago their own names."""
    told = podman("images", "--format={{.Repository}}:{{.Tag}} {{.Created}}", "--noheading").stdout
    for line in told.splitlines():
        own, _, age = line.partition(" ")
        old = any(word in age for word in ("day", "week", "month", "year"))
        if old and own.startswith(f"{name}-") and own != current:
            podman("rmi", own, check=False)


def build_sidecar() -> str:
    """The image of the ``Dockerfile``; a name that it keeps."""
    return build(SIDECAR, ROOT)


def build_trainer() -> str:
    """An image that trains with what :func:`trainer_mounts` lends it; a name that it keeps.

    An interpreter that lies in root's home must be reached by other users.
    """
    (base,) = [line for line in (TOOLS / "base").read_text().split() if line]
    return build(TRAINER, "-", stdin=f"FROM {base}\nRUN chmod 711 /root\n")


def trainer_mounts() -> list[str]:
    """Arguments of podman that lend a container this test's interpreter, torch and DeepSpeed.

    They come with the host's ``/usr``, whose libraries they were built for.
    """
    lent = {Path("/usr"), Path(sys.base_prefix), ROOT}
    inner = {path for path in lent if any(other in path.parents for other in lent)}
    return [f"--volume={path}:{path}:ro" for path in sorted(lent - inner)]
