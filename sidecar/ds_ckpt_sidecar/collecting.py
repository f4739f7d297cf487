"""``ds-ckpt gc``: what nobody will use any more, shown or removed."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Annotated, Any

import typer
from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.filesize import decimal

from ds_ckpt_sidecar import render
from ds_ckpt_sidecar.console import URLS, AsJson, StallSeconds, app, errors
from ds_ckpt_sidecar.reading import opened
from ds_ckpt_sidecar.settings import Seconds, check
from ds_ckpt_store.catalog import STALE_AFTER, Catalog
from ds_ckpt_store.collect import CLOCK_NAME, OLDER_THAN, Collector, Finding, Kind
from ds_ckpt_store.contract.clock import system_random
from ds_ckpt_store.deciding import for_deciding
from ds_ckpt_store.errors import InputError
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.probe import for_reading

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")


def _duration(value: object) -> object:
    """``24h``, ``90m``, ``2d``, ``3600``."""
    if not isinstance(value, str):
        return value
    found = _DURATION.fullmatch(value.strip().lower())
    if found is None:
        raise ValueError(f"{value!r} is no time: write 24h, 90m, 2d, or seconds")
    return float(found[1]) * _UNITS[found[2]]


class GcSettings(BaseSettings):
    """What one gc is told: those of the agent that it needs, and its own."""

    model_config = SettingsConfigDict(env_prefix="DS_CKPT_", extra="ignore", frozen=True)

    destination: str = ""
    run_id: str = ""
    older_than: Annotated[Seconds, BeforeValidator(_duration)] = OLDER_THAN
    lease_stale_seconds: Annotated[Seconds, Field(gt=0)] = STALE_AFTER
    allow_weak_store: bool = False


@app.command()
def gc(
    url: Annotated[
        str | None,
        typer.Argument(help=f"{URLS}; default: DS_CKPT_DESTINATION.", metavar="URL"),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(help="Whose; default: DS_CKPT_RUN_ID, else the run that has the lease."),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            help="Silence after which a save that nobody finishes is dead (default: 24h).",
            metavar="TIME",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    lease_stale_seconds: Annotated[
        float | None,
        typer.Option(help="As the agents have it (default: 600); shorter silence is no death."),
    ] = None,
    allow_weak_store: Annotated[
        bool | None,
        typer.Option(
            "--allow-weak-store",
            help="Accept a store without conditional create, while no agent is at work.",
        ),
    ] = None,
    stall_seconds: StallSeconds = None,
    as_json: AsJson = False,
) -> None:
    """Remove what a run has left in the store and nobody will use: the garbage, nothing else.

    Unfinished uploads and objects of saves that are over, and saves that died before they were
    complete. Never a committed checkpoint, a save that may still be finished, or another run's.

    Example: ds-ckpt gc s3://bucket/run-7 --dry-run
    """
    with errors():
        settings = check(
            GcSettings,
            destination=url,
            run_id=run_id,
            older_than=older_than,
            lease_stale_seconds=lease_stale_seconds,
            allow_weak_store=allow_weak_store,
        )
        if not settings.destination:
            raise InputError("say where: give the URL, or set DS_CKPT_DESTINATION")
        with opened(settings.destination, stall_seconds) as store:
            run = _run(for_reading(store), settings)
            if dry_run:
                store = for_reading(store)
            else:
                store = for_deciding(
                    store,
                    system_random(),
                    CLOCK_NAME,
                    allow_weak=settings.allow_weak_store,
                    stale_after=settings.lease_stale_seconds,
                )
            collector = Collector(
                Catalog(store, system_random()),
                run,
                older_than=settings.older_than,
                stale_after=settings.lease_stale_seconds,
            )
            report = _Report(store.url, run, collector, dry_run=dry_run, as_json=as_json)
            for finding in collector.look(dry_run=dry_run):
                report.add(finding)
            report.end()


def _run(store: Store, settings: GcSettings) -> str:
    """The run whose garbage is asked for; where nothing was ever stored there is none."""
    catalog = Catalog(store, system_random())
    owner = catalog.owner()
    if owner is None and not (catalog.records() or catalog.undecided()):
        raise InputError(
            f"{store.url} has no lease and no save, so no agent has worked under it: correct the "
            "URL (it is the agent's destination, with the run's prefix)"
        )
    if owner is not None and settings.lease_stale_seconds < owner.stale_seconds:
        typer.echo(
            f"ds-ckpt: warning: agents take {owner.stale_seconds:.0f} s of silence for death, and "
            f"this gc one of {settings.lease_stale_seconds:.0f} s: it may give up a save that is "
            "at work",
            err=True,
        )
    if settings.run_id:
        return settings.run_id
    if owner is None:
        raise InputError(
            f"{store.url} has no lease, which was lost: name the run with --run-id (the next start "
            "of an agent makes a new one)"
        )
    typer.echo(
        f"ds-ckpt: of run {owner.run_id!r}, which has the lease (--run-id names another)",
        err=True,
    )
    return owner.run_id


# ---- what is printed


# Of each kind: what is done, what a dry run would do, to one, and to several.
_WORDS: dict[Kind, tuple[str, str, str, str]] = {
    "complete": ("committed", "would commit", "save", "saves"),
    "save": ("gave up", "would give up", "save", "saves"),
    "upload": ("aborted", "would abort", "unfinished upload", "unfinished uploads"),
    "object": ("deleted", "would delete", "object", "objects"),
    "leftover": ("removed", "would remove", "leftover", "leftovers"),
    "unexplained": ("did not touch", "would not touch", "folder or file", "folders or files"),
}


class _Report:
    """What one gc prints: a line for each finding as it comes, or one document at the end."""

    def __init__(
        self, url: str, run: str, collector: Collector, *, dry_run: bool, as_json: bool
    ) -> None:
        self._url = url
        self._run = run
        self._collector = collector
        self._dry_run = dry_run
        self._as_json = as_json
        self._findings: list[Finding] = []
        self._strange: set[str] = set()
        self._counts: Counter[Kind] = Counter()
        self._objects: Counter[Kind] = Counter()
        self._sizes: Counter[Kind] = Counter()

    def add(self, finding: Finding) -> None:
        """One finding, just dealt with."""
        if finding.key not in self._strange:
            self._counts[finding.kind] += 1
        if finding.kind == "unexplained":
            self._strange.add(finding.key)  # its objects and its uploads are two findings
        self._objects[finding.kind] += finding.objects
        self._sizes[finding.kind] += finding.size
        if self._as_json:
            self._findings.append(finding)
            return
        done, to_do, noun, _ = _WORDS[finding.kind]
        size = _size(finding.kind, finding.objects, finding.size)
        verb = to_do if self._dry_run else done
        what = finding.key if finding.kind == "unexplained" else f"{noun} {finding.key}"
        typer.echo(f"{verb} {what} ({size}): {finding.reason}")

    def end(self) -> None:
        """What was left, and the sum of all.

        Raises:
            typer.Exit: something should have gone and did not.
        """
        collector = self._collector
        if not collector.dated:
            typer.echo(
                "ds-ckpt: warning: nothing may be written here, so the store's time is not known: "
                "ages are counted to the newest document of the run, and there may be more",
                err=True,
            )
        if self._as_json:
            render.emit_json(self._document())
        else:
            for left in collector.left:
                typer.echo(f"left {left.key or self._url}: {left.reason}")
            typer.echo(self._summary())
        if any(left.failed for left in collector.left):
            raise typer.Exit(1)
        if not collector.known:
            typer.echo(
                f"ds-ckpt: nothing of run {self._run!r} is known under {self._url}: is the name "
                "right?",
                err=True,
            )
            raise typer.Exit(2)

    def _summary(self) -> str:
        sums = [self._sum(kind) for kind in _WORDS if self._counts[kind] and kind != "unexplained"]
        parts = [", ".join(sums) or "nothing to collect"]
        in_use = [each for each in self._collector.left if not each.failed]
        failed = [each for each in self._collector.left if each.failed]
        if len(in_use) == 1:
            parts.append(f"left {in_use[0].key}: {in_use[0].reason}")
        elif in_use:
            parts.append(f"left {len(in_use)} that may be in use, each for its reason above")
        if failed:
            parts.append(f"{len(failed)} could not be removed: {failed[0].reason}")
        if self._counts["unexplained"]:
            parts.append(f"{self._sum('unexplained')} that nothing explains: look at them")
        if self._collector.pointed is not None:
            parts.append(f"latest names {self._collector.pointed.folder} now")
        if self._collector.foreign:
            count = self._collector.foreign
            folders = "folder" if count == 1 else "folders"
            parts.append(f"{count} {folders} of other runs not touched")
        mode = ", dry run" if self._dry_run else ""
        return f"gc of run {self._run!r} under {self._url}{mode}: {'; '.join(parts)}"

    def _sum(self, kind: Kind) -> str:
        done, to_do, one, many = _WORDS[kind]
        count = self._counts[kind]
        size = _size(kind, self._objects[kind], self._sizes[kind])
        return f"{to_do if self._dry_run else done} {count} {one if count == 1 else many} ({size})"

    def _document(self) -> dict[str, Any]:
        collector = self._collector
        pointed = collector.pointed
        return {
            "url": self._url,
            "run_id": self._run,
            "dry_run": self._dry_run,
            "summary": self._summary(),
            "store_time_known": collector.dated,
            "counts": {kind: self._counts[kind] for kind in _WORDS},
            "bytes": {kind: self._sizes[kind] for kind in _WORDS},
            "findings": [_entry(finding) for finding in self._findings],
            "left": [dataclasses.asdict(left) for left in collector.left],
            "latest_moved_to": pointed.folder if pointed is not None else None,
            "folders_of_other_runs": collector.foreign,
        }


def _entry(finding: Finding) -> dict[str, Any]:
    entry = dataclasses.asdict(finding)
    entry["bytes"] = entry.pop("size")
    return entry


def _size(kind: Kind, objects: int, size: int) -> str:
    """Bytes, and how many objects where a finding stands for several."""
    if kind in ("upload", "object", "leftover"):
        return decimal(size)
    return f"{objects} object{'s' if objects != 1 else ''}, {decimal(size)}"
