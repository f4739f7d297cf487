"""What must hold at the end of a soak, whatever the hand did.

Everything is looked at from outside: by ``ds-ckpt`` as a user has it, by the records and the keys
that the store lists, and by what was noted while it was said. Each check returns sentences; none
means that it holds. ``test_checks.py`` breaks each of them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract import names
from ds_ckpt_store.records import Record
from ds_ckpt_store.stores.port import Store
from tests.soak.commands import Answer
from tests.soak.ledger import Ledger
from tests.soak.nodes import End
from tests.soak.shards import mark_of, sha256_of

DOCUMENTS = ("owner.json", "saves/", "receipts/", "checkpoints/", "holds/", "clock/")
RESTORES_AT_A_TIME = 2
# Not record.damaged: bytes flip in flight, and what is damaged in the store is looked for there.
WANTS_HELP = ("save.quarantined", "save.held", "save.failed", "uploads.left")


@dataclass
class Found:
    """Figures of the checks."""

    restored: int = 0
    restored_bytes: int = 0
    verified: int = 0
    collected: int = 0


class Checker:
    """Compares what comes back with what was said.

    Args:
        ledger: what was said.
        url: of the prefix.
        store: opened there, past every fault.
        run: calls ``ds-ckpt``, past every fault too.
        work: an existing folder to restore into.
        keep_last: the rule that retention follows.
    """

    def __init__(
        self,
        ledger: Ledger,
        url: str,
        *,
        store: Store,
        run: Callable[..., Answer],
        work: Path,
        keep_last: int,
    ) -> None:
        self.found = Found()
        self._ledger = ledger
        self._url = url
        self._store = store
        self._run = run
        self._work = work
        self._keep_last = keep_last

    def records(self) -> list[Record]:
        """All records, oldest first."""
        return Catalog(self._store, random.Random()).records()

    # ---- all of it

    def everything(self) -> list[str]:
        """Every check of the store, in an order that leaves the store clean."""
        problems = self.decisions()
        problems += self.pointer()
        problems += self.restores()
        problems += self.verify()
        problems += self.garbage()
        return problems

    # ---- decisions

    def decisions(self) -> list[str]:
        """What was said to be committed is, or retention has given it up by its rule."""
        catalog = Catalog(self._store, random.Random())
        records = catalog.records()
        problems = [f"{key} is damaged: {reason}" for key, reason in catalog.damaged.items()]
        by_id = {record.save_id: record for record in records}
        for save_id, claim in self._ledger.claims.items():
            record = by_id.get(save_id)
            if record is None:
                problems.append(f"save {save_id} has no record, though {claim.by} said committed")
            elif record.state == "abandoned":
                problems.append(
                    f"save {save_id} is abandoned ({record.reason}), though {claim.by} said "
                    "committed"
                )
            elif record.tag != claim.tag:
                problems.append(f"save {save_id} has tag {record.tag!r}, {claim.by} said otherwise")
        decided = [record for record in records if record.state != "abandoned"]
        for record in decided[-self._keep_last :]:
            if record.state == "deleted":
                problems.append(f"{_name(record)} was given up, one of the last {self._keep_last}")
        for record in decided:
            if record.state == "deleted" and record.pin:
                problems.append(f"{_name(record)} was given up, though it is pinned")
        return problems

    def pointer(self) -> list[str]:
        """``latest`` names the newest."""
        catalog = Catalog(self._store, random.Random())
        committed = catalog.committed()
        said = catalog.latest_text()
        wanted = committed[-1].folder if committed else None
        return [] if said == wanted else [f"latest names {said!r}, the newest is {wanted!r}"]

    # ---- bytes

    def restores(self) -> list[str]:
        """Every committed save comes back bit for bit: by its id, its tag, or as the newest."""
        committed = [record for record in self.records() if record.state == "committed"]
        if not committed:
            return ["nothing is committed"]
        newest = {record.tag: record for record in committed}
        several = {tag for tag, n in Counter(record.tag for record in committed).items() if n > 1}
        wanted = [(record, ("--save", record.save_id)) for record in committed]
        wanted += [(newest[tag], ("--tag", tag)) for tag in sorted(several)]
        wanted.append((committed[-1], ()))
        with ThreadPoolExecutor(RESTORES_AT_A_TIME) as pool:
            found = list(pool.map(self._restore, range(len(wanted)), *zip(*wanted, strict=True)))
        whole = [record for (record, _), bad in zip(wanted, found, strict=True) if not bad]
        self.found.restored = len(whole)
        self.found.restored_bytes = sum(record.size for record in whole)
        return [problem for problems in found for problem in problems]

    def _restore(self, number: int, record: Record, options: tuple[str, ...]) -> list[str]:
        folder = self._work / f"restored-{number}"
        what = f"{_name(record)} restored by {' '.join(options) or 'nothing'}"
        answer = self._run("restore", "--from", self._url, "--to", str(folder), *options)
        try:
            if answer.code:
                return [f"{what}: exit code {answer.code}: {answer.errors.strip()[-2000:]}"]
            return check_restored(self._ledger, folder, record.save_id, what)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def verify(self) -> list[str]:
        """``ds-ckpt verify`` finds every object right, and looks at all of them."""
        answer = self._run("verify", self._url, "--all", "--json")
        if answer.code:
            return [f"verify: exit code {answer.code}: {answer.errors.strip()[-2000:]}"]
        seen = json.loads(answer.output)["objects"]
        listed = sum(len(r.objects()) for r in self.records() if r.state == "committed")
        self.found.verified = seen
        return [] if seen == listed else [f"verify looked at {seen} objects of {listed}"]

    # ---- garbage

    def garbage(self) -> list[str]:
        """gc finds what is left, a second one finds nothing, and then nothing is left."""
        problems = []
        for turn in (1, 2):
            # Nobody is at work any more, so nothing needs to be given time.
            patience = ("--older-than", "0", "--lease-stale-seconds", "0.001")
            answer = self._run("gc", self._url, *patience, "--json")
            if answer.code:
                return [f"gc: exit code {answer.code}: {answer.errors.strip()[-2000:]}"]
            found = json.loads(answer.output)["findings"]
            self.found.collected += len(found)
            if turn == 2 and found:
                problems.append(f"a second gc still finds {found[:5]}")
        undecided = Catalog(self._store, random.Random()).undecided()
        problems += [f"save {intent.save_id} is not decided" for intent in undecided]
        problems += [f"gc left {key}" for key in self.unexplained()]
        problems += [f"gc left an unfinished upload of {u.key}" for u in self._store.uploads("")]
        return problems

    def unexplained(self) -> list[str]:
        """Keys that belong to nothing that is committed, and are no document of the protocol."""
        listed = {
            key
            for record in self.records()
            if record.state == "committed"
            for key, _ in record.objects()
        }
        own = f"{names.VOLUME_DIR}/"
        return [
            info.key
            for info in self._store.list("")
            if info.key not in listed
            and info.key != names.LATEST
            and not info.key.startswith(tuple(own + name for name in DOCUMENTS))
        ]


def _name(record: Record) -> str:
    return f"save {record.save_id} (tag {record.tag!r})"


# ---- what needs no store


def check_restored(ledger: Ledger, folder: Path, save_id: str | None, what: str) -> list[str]:
    """What was restored into an empty folder is one save, just as its ranks wrote it.

    Args:
        ledger: what was written.
        folder: the volume that it was restored into.
        save_id: which save it should be; None if any.
        what: for the sentences.
    """
    tag = (folder / names.LATEST).read_text()
    marks = {
        str(path.relative_to(folder / tag)): mark_of(path)
        for path in sorted((folder / tag).rglob("*"))
        if path.is_file()
    }
    saves = sorted({mark.save if mark else "no save" for mark in marks.values()})
    if len(saves) != 1:
        return [f"{what} is torn: its files are of {saves}"]
    written = ledger.written.get(saves[0])
    if written is None:
        return [f"{what} is of save {saves[0]}, which nobody wrote"]
    problems = []
    known = ledger.names.get(save_id or "", saves[0])
    if known != saves[0]:
        problems.append(f"{what} is of save {saves[0]}, its trainers called it {known}")
    if written.tag != tag:
        problems.append(f"{what} has tag {tag!r}, it was saved as {written.tag!r}")
    wanted = written.stored()
    if set(marks) != set(wanted):
        problems.append(f"{what} has files {sorted(marks)}, {sorted(wanted)} were written")
    for path in sorted(set(marks) & set(wanted)):
        if sha256_of(folder / tag / path) != wanted[path]:
            problems.append(f"{what}: {path} has other bytes than were written")
    return problems


def check_ends(ends: Iterable[End]) -> list[str]:
    """No process ended that was not told to, or killed."""
    return [
        f"{end.who} ended with code {end.code}, and nobody had made it: see {end.log}"
        for end in ends
        if not end.wanted
    ]


def check_log(name: str, lines: Iterable[Mapping[str, object]], *, last: bool) -> list[str]:
    """An agent has asked for no person, and if it was the last on its volume it left nothing.

    Args:
        name: of the agent.
        lines: of its log.
        last: whether no other came after it.
    """
    problems = []
    left: object = "no word of its end"
    for line in lines:
        if line["event"] in WANTS_HELP:
            problems.append(f"{name} says {line['event']}: {dict(line)}")
        elif line["event"] == "agent.stopped":
            left = line["left"]
    if last and left != 0:
        problems.append(f"{name}, the last on its volume, ended with {left!r} left to do")
    return problems


def check_counts(counts: Mapping[str, int], demanded: Collection[str]) -> list[str]:
    """Each kind that there was time for has happened."""
    return [f"{kind!r} never happened" for kind in demanded if not counts.get(kind)]
