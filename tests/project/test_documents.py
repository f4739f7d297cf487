"""What the documents say is there: links, commands, settings, versions."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_ckpt_hook.settings import Settings
from ds_ckpt_sidecar.settings import AgentSettings

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for folder, pattern in ((ROOT, "*.md"), (ROOT / "docs", "**/*.md"), (ROOT / "changes", "*.md"))
    for path in folder.glob(pattern)
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def links(document: Path) -> Iterator[str]:
    yield from LINK.findall(CODE_BLOCK.sub("", (ROOT / document).read_text()))


def anchors(document: Path) -> set[str]:
    text = CODE_BLOCK.sub("", document.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    dead = []
    for link in links(document):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / document).parent / name if name else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_every_design_record_is_in_the_index() -> None:
    records = {path.name for path in (ROOT / "docs/design").glob("[0-9]*.md")}
    assert records == {
        link for link in links(Path("docs/design/README.md")) if re.match(r"\d", link)
    }
    numbers = sorted(name[:4] for name in records)
    assert numbers == [f"{number:04}" for number in range(1, len(records) + 1)]


def test_every_test_that_the_record_of_faults_names_is_there() -> None:
    text = (ROOT / "docs/design/faults.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", text))
    assert len(named) == len(set(re.findall(r"`[^`]*::[^`]*`", text))) > 50
    missing = [
        f"{path}::{name}"
        for path, name in sorted(named)
        if not re.search(rf"^ *def {name}\(", (ROOT / "tests" / path).read_text(), re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("document", ["docs/design/protocol.md", "SECURITY.md"])
def test_every_test_that_holds_a_promise_is_there(document: str) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", text))
    assert len(named) > 30
    missing = [
        f"{path}::{name}"
        for path, name in sorted(named)
        if not (ROOT / path).exists()
        or (name and not re.search(rf"^ *def {name}\(", (ROOT / path).read_text(), re.MULTILINE))
    ]
    assert missing == []


def test_the_protocol_names_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / "docs/design/protocol.md").read_text()
    assert {"simulate", "soak"} <= set(re.findall(r"`make ([a-z]+)", text)) <= targets


def test_the_readme_names_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"^make ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(named) <= targets


def test_operations_lists_every_setting_of_the_agent_and_no_other() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    rows = dict(re.findall(r"^\| `--([a-z0-9-]+)` \| `(DS_CKPT_[A-Z0-9_]+)`", text, re.MULTILINE))
    fields = AgentSettings.model_fields
    assert rows == {name.replace("_", "-"): f"DS_CKPT_{name.upper()}" for name in fields}


@pytest.mark.parametrize(
    ("field", "shown"),
    [
        ("keep_local", "1"),
        ("retention_pause", "3600 s"),
        ("order", "`oldest`"),
        ("streams", "16"),
        ("memory_mib", "32"),
        ("stall_seconds", "60 s"),
        ("page_cache", "`drop`"),
        ("priority", "`normal`"),
        ("part_mib", "64"),
        ("rescan_seconds", "5"),
        ("drain_seconds", "25"),
        ("lease_stale_seconds", "600"),
        ("abandon_seconds", "21600"),
        ("log_format", "`text`"),
    ],
)
def test_operations_shows_the_default(field: str, shown: str) -> None:
    text = (ROOT / "docs/operations.md").read_text()
    (row,) = re.findall(rf"^\| `--{field.replace('_', '-')}` \|.*$", text, re.MULTILINE)
    assert row.split("|")[3].strip() == shown
    default = AgentSettings.model_fields[field].default
    plain = shown.strip("`").removesuffix(" s")
    assert str(default).removesuffix(".0") == plain


def test_operations_lists_what_the_hook_reads() -> None:
    source = (ROOT / "trainer_hook/ds_ckpt_hook/settings.py").read_text()
    read = set(re.findall(r'"(DS_CKPT_[A-Z_]+)"', source))
    assert len(read) >= len(Settings.__dataclass_fields__)
    text = (ROOT / "docs/operations.md").read_text()
    assert read <= set(re.findall(r"^\| `(DS_CKPT_[A-Z_]+)` \|", text, re.MULTILINE))


def test_the_installed_version_is_the_one_in_the_project_file() -> None:
    (version,) = re.findall(
        r'^version = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert importlib.metadata.version("ds-ckpt-sidecar") == version


def test_the_licence_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
