"""Sets a machine up for the tests of what the agent shows: ``make observability-tools``.

Prometheus, promtool and Alertmanager are unpacked from Debian's packages into ``.observability/``,
so that no service is set up, let alone started; only the template that Alertmanager looks for at
a fixed place is put there. Chromium needs libraries and is installed by apt, with a font. What is
there is not done again; a program that is on PATH is used as it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / ".observability"
BIN = TOOLS / "bin"

# Program to Debian's package, and to what the program is called in it.
SERVERS = {
    "prometheus": ("prometheus", "prometheus"),
    "promtool": ("prometheus", "promtool"),
    "alertmanager": ("prometheus-alertmanager", "prometheus-alertmanager"),
}
TEMPLATES = Path("/usr/share/prometheus/alertmanager")
BROWSER = ("chromium", "fonts-dejavu-core")


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is done, and how long it took."""
    print(f"observability-tools: {what} ...", flush=True)
    start = time.monotonic()
    yield
    print(f"observability-tools: {what}: {time.monotonic() - start:.1f} s", flush=True)


def run(*command: str | Path, **options: object) -> None:
    """Run a command; end with what it wrote if it fails."""
    ran = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    if ran.returncode:
        sys.exit(
            f"{ran.stdout}{ran.stderr}\n"
            f"observability-tools: failed: {' '.join(map(str, command))}\n"
            f"(where Debian's packages are not to be had, put {', '.join([*SERVERS, BROWSER[0]])} "
            "on PATH)"
        )


def has(name: str) -> bool:
    """Whether a program is linked, or can be linked to what is on PATH."""
    link = BIN / name
    if not link.exists():
        names = (name, *(called for _, called in [SERVERS.get(name, ("", name))]))
        found = next(filter(None, map(shutil.which, names)), None)
        if found is None:
            return False
        place(name, found)
    return True


def place(name: str, target: str) -> None:
    """Link a program into ``.observability/bin``."""
    link = BIN / name
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def apt(*arguments: str, cwd: Path | None = None) -> None:
    """Run apt-get, asking nothing."""
    if not shutil.which("apt-get"):
        sys.exit(
            "observability-tools: there is no apt-get here; put these on PATH yourself: "
            f"{', '.join([*SERVERS, BROWSER[0]])}"
        )
    run(
        "apt-get",
        "-qq",
        *arguments,
        cwd=cwd,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )


def servers(missing: set[str]) -> None:
    """Unpack the programs; nothing of their packages is set up."""
    packages = sorted({SERVERS[name][0] for name in missing})
    with step(f"Debian's packages, unpacked: {', '.join(packages)}"):
        folder = TOOLS / "download"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        apt("download", *packages, cwd=folder)
        for archive in folder.glob("*.deb"):
            run("dpkg-deb", "--extract", archive, TOOLS / "debian")
        for name in missing:
            place(name, f"../debian/usr/bin/{SERVERS[name][1]}")
        shutil.rmtree(folder)


def need_root(what: str) -> None:
    """End if somebody else runs this."""
    if os.geteuid():
        sys.exit(
            f"observability-tools: {what} is missing, and only root can put it there: run "
            "`sudo make observability-tools`"
        )


def templates() -> None:
    """Debian's Alertmanager does not start without its template, which is not in the program."""
    unpacked = TOOLS / "debian" / TEMPLATES.relative_to("/")
    if unpacked.exists() and not TEMPLATES.exists():
        need_root(str(TEMPLATES))
        shutil.copytree(unpacked, TEMPLATES)


def browser() -> None:
    """Install Chromium with all that it needs."""
    name = BROWSER[0]
    need_root(name)
    with step(f"Debian's packages, installed: {', '.join(BROWSER)}"):
        apt("install", "--yes", "--no-install-recommends", *BROWSER)
        if not has(name):
            sys.exit(f"observability-tools: apt-get installed {name}, but it is not on PATH")


def main() -> None:
    """Do what is not done yet."""
    BIN.mkdir(parents=True, exist_ok=True)
    missing = {name for name in (*SERVERS, BROWSER[0]) if not has(name)}
    if missing and not os.geteuid():
        with step("which packages there are"):
            apt("update")
    if missing & SERVERS.keys():
        servers(missing & SERVERS.keys())
    templates()
    if BROWSER[0] in missing:
        browser()


if __name__ == "__main__":
    main()
