"""What trainers and sidecars have said, noted while they say it: the word that the end is held to.

A volume may be lost and a trainer killed, so nothing is asked for afterwards. What a rank wrote is
known by its SHA-256 from its own report, before the save was handed over; that a save is committed
counts from the first report of it, by a trainer or by a status file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError

COMMITTED = ("committed", "cleaned")
_OTHER_STATUSES = ("sidecar.json", "trainer.json")


@dataclass
class Written:
    """One save as its ranks wrote it.

    Attributes:
        tag: its tag.
        step: of the training.
        files: path to rank to SHA-256; with storage of its own each node writes the model's file.
    """

    tag: str
    step: int
    files: dict[str, dict[int, str]] = field(default_factory=dict)

    def stored(self) -> dict[str, str]:
        """Path to SHA-256 of what is to be stored: of several copies that of the lowest rank."""
        return {path: by[min(by)] for path, by in self.files.items()}


@dataclass(frozen=True)
class Claim:
    """Somebody has said that a save is committed."""

    tag: str
    by: str


class Ledger:
    """All that was said.

    Attributes:
        written: name of a save to what its ranks wrote.
        names: save id to that name, as the trainers were told it.
        claims: save id to who first said that it is committed.
        problems: what no rank may ever say.
        counts: how often each event was told, by all ranks together.
    """

    def __init__(self) -> None:
        self.written: dict[str, Written] = {}
        self.names: dict[str, str] = {}
        self.claims: dict[str, Claim] = {}
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        self._resumed: dict[int, dict[int, tuple[str | None, set[str]]]] = {}
        self._tags: dict[int, set[str]] = {}
        self._read: dict[Path, int] = {}
        self._seen: dict[Path, int] = {}

    # ---- listening

    def read(self, reports: Iterable[Path]) -> None:
        """Take what ranks have written since; the line that a killed one was writing is no word."""
        for path in reports:
            done = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(done)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = done + len(whole)
            for line in whole.splitlines():
                self.take(json.loads(line))

    def watch(self, volumes: Iterable[Path]) -> None:
        """Look for what sidecars have written since."""
        for path in volumes:
            volume = Volume(str(path))
            for file in sorted(Path(volume.status).glob("[!.]*.json")):
                if file.name in _OTHER_STATUSES or file.stem in self.claims:
                    continue
                try:
                    changed = file.stat().st_mtime_ns
                    if self._seen.get(file) == changed:
                        continue
                    status = volume.save_status(file.stem)
                except (OSError, CkptError) as error:
                    if not isinstance(error, FileNotFoundError):
                        self.problems.append(f"{file} cannot be read: {error}")
                    continue
                self._seen[file] = changed
                if status is not None and status.state in COMMITTED:
                    self.claim(status.save_id, status.tag, f"the status on {path.name}")

    def hear(self, agent: str, lines: Iterable[dict[str, Any]]) -> None:
        """Take what an agent has said in its log."""
        for line in lines:
            if line["event"] == "save.committed":
                self.claim(line["save_id"], line["tag"], f"the log of {agent}")

    def take(self, line: dict[str, Any]) -> None:
        """One line of one rank."""
        event, attempt, rank = line["event"], line["attempt"], line["rank"]
        self.counts[event] += 1
        who = f"rank {rank} of attempt {attempt}"
        if event == "wrote":
            self._wrote(line, rank, attempt)
        elif event == "saved" and line["save_id"]:
            known = self.names.setdefault(line["save_id"], line["save"])
            if known != line["save"]:
                self.problems.append(f"save {line['save_id']} is both {known} and {line['save']}")
        elif event == "durable":
            self.claim(line["save_id"], line["tag"], who)
        elif event == "resumed":
            self._resume(line, rank, attempt, who)
        elif event == "torn":
            self.problems.append(f"{who}: {line['reason']}")

    def claim(self, save_id: str, tag: str, by: str) -> None:
        """Note that a save was said to be committed."""
        self.claims.setdefault(save_id, Claim(tag, by))

    def _wrote(self, line: dict[str, Any], rank: int, attempt: int) -> None:
        save = self.written.setdefault(line["save"], Written(line["tag"], line["step"]))
        for path, sha256 in line["files"].items():
            save.files.setdefault(path, {})[rank] = sha256
        if rank == 0:
            tags = self._tags.setdefault(attempt, set())
            self.counts["tag saved again"] += line["tag"] in tags
            tags.add(line["tag"])

    def _resume(self, line: dict[str, Any], rank: int, attempt: int, who: str) -> None:
        """All ranks of an attempt resume from one save, or none does; and from what was written."""
        names = set()
        for path, told in line["files"].items():
            name, _, sha256 = told.partition(":")
            names.add(name)
            written = self.written.get(name)
            if written is None or sha256 not in written.files.get(path, {}).values():
                self.problems.append(f"{who} has loaded a {path} of {name} that nobody wrote")
        others = self._resumed.setdefault(attempt, {})
        others[rank] = (line["tag"], names)
        tags = {tag for tag, _ in others.values()}
        saves = set().union(*(names for _, names in others.values()))
        if len(tags) > 1 or len(saves) > 1:
            self.problems.append(
                f"attempt {attempt} resumes from several saves at once: {sorted(saves)} under tags "
                f"{sorted(map(str, tags))}"
            )

    # ---- the word

    def name_of(self, save_id: str) -> str | None:
        """The name of a save, if a trainer has told it."""
        return self.names.get(save_id)

    def resumes(self) -> int:
        """Attempts that went on from a checkpoint."""
        return sum(
            any(tag is not None for tag, _ in ranks.values()) for ranks in self._resumed.values()
        )
