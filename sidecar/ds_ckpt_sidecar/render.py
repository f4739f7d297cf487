"""What commands print: tables for people, one JSON document for programs, progress on terminals."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from ds_ckpt_store.contract.manifest import SaveStatus, SidecarStatus, TrainerStatus
from ds_ckpt_store.records import Record


def emit_json(document: Any) -> None:
    """One JSON document on standard output."""
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


PIPE_WIDTH = 240


def _console() -> Console:
    """Standard output; tags and paths are printed as they are, whatever they look like.

    Into a pipe or a file each row is one line.
    """
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(markup=False, emoji=False, highlight=False, width=width)


def moment(milliseconds: int) -> str:
    """A save time for people: UTC, whole seconds."""
    time = datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.timezone.utc)
    return time.strftime("%Y-%m-%d %H:%M:%S")


def summary(record: Record, *, latest: bool) -> dict[str, Any]:
    """One record as ``ls --json`` and ``show --json`` give it."""
    return {
        "tag": record.tag,
        "state": record.state,
        "latest": latest,
        "save_id": record.save_id,
        "folder": record.folder,
        "run_id": record.run_id,
        "epoch": record.epoch,
        "step": record.step,
        "time_ms": record.time_ms,
        "kind": record.kind,
        "metrics": record.metrics,
        "pin": record.pin,
        "parent": record.parent,
        "world_size": record.world_size,
        "nodes": record.nodes,
        "bytes": record.size,
        "files": len(record.files),
    }


def print_records(records: list[Record], latest: str | None) -> None:
    """``ls``: newest last."""
    table = Table(box=None, pad_edge=False)
    for name in ("TAG", "STEP", "SAVED (UTC)", "SIZE", "FILES", "NODES", "KIND", "STATE"):
        right = name in ("STEP", "SIZE", "FILES", "NODES")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for record in records:
        marks: list[str] = [record.state]
        if record.save_id == latest:
            marks.append("latest")
        if record.pin:
            marks.append("pinned")
        table.add_row(
            record.tag,
            "" if record.step is None else str(record.step),
            moment(record.time_ms),
            decimal(record.size),
            str(len(record.files)),
            str(len(record.nodes)),
            record.kind,
            ", ".join(marks),
        )
    _console().print(table)


def print_record(record: Record, *, latest: bool) -> None:
    """``show``: everything about one checkpoint."""
    console = _console()
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, value in summary(record, latest=latest).items():
        if name == "time_ms":
            name, value = "saved", f"{moment(record.time_ms)} UTC"
        elif name == "bytes":
            value = f"{record.size} ({decimal(record.size)})"
        elif name == "nodes":
            value = ", ".join(record.nodes)
        elif name == "metrics":
            value = ", ".join(f"{key}={number}" for key, number in record.metrics.items())
        facts.add_row(name, "" if value is None else str(value))
    console.print(facts)
    files = Table(box=None, pad_edge=False)
    files.add_column("FILE", overflow="fold")
    files.add_column("BYTES", justify="right")
    files.add_column("CRC32C")
    files.add_column("RANK", justify="right")
    for entry in record.files:
        files.add_row(entry.path, str(entry.size), entry.crc32c, str(entry.rank))
    for entry in record.companions:
        files.add_row(f"(beside) {entry.path}", str(entry.size), entry.crc32c, str(entry.rank))
    console.print()
    console.print(files)


def print_status(
    sidecar: SidecarStatus | None,
    trainer: TrainerStatus | None,
    saves: list[SaveStatus],
    now: float,
) -> None:
    """``status``: what sidecar and trainer last said on the volume."""
    console = _console()
    if sidecar is None:
        console.print("sidecar   never seen on this volume")
    else:
        console.print(
            f"sidecar   {sidecar.state}, seen {now - sidecar.time:.0f} s ago, backlog "
            f"{sidecar.backlog_saves} saves / {decimal(sidecar.backlog_bytes)}, "
            f"free {decimal(sidecar.free_bytes)}"
        )
        console.print(f"to        {sidecar.destination or '(not connected yet)'}")
        newest = sidecar.newest_committed_tag or "none yet"
        console.print(f"durable   {newest}")
        if sidecar.last_error:
            console.print(f"error     {sidecar.last_error}", style="red")
    if trainer is None:
        console.print("trainer   never seen on this volume")
    else:
        state = "finished" if trainer.finished else "running"
        console.print(
            f"trainer   {state}, run {trainer.run_id!r}, step {trainer.step}, "
            f"seen {now - trainer.time:.0f} s ago"
        )
        if trainer.error:
            console.print(f"error     {trainer.error}", style="red")
    if saves:
        table = Table(box=None, pad_edge=False)
        for name in ("TAG", "STATE", "DONE", "SINCE", "REASON"):
            table.add_column(name, overflow="fold")
        for save in saves:
            share = f"{100 * save.bytes_done // save.bytes_total} %" if save.bytes_total else ""
            reason = save.reason or (
                f"waiting for nodes {', '.join(node[:8] for node in save.waiting_for)}"
                if save.waiting_for
                else ""
            )
            table.add_row(save.tag, save.state, share, f"{now - save.time:.0f} s", reason)
        console.print(table)


def show(table: Table) -> None:
    """A table on standard output."""
    _console().print(table)


Advance = Callable[[int], None]


@contextlib.contextmanager
def progress_bar(title: str, *, wanted: bool) -> Iterator[tuple[Advance, Advance]]:
    """A progress bar over bytes on standard error, if that is a terminal.

    Yields:
        ``(set_total, advance)``, both in bytes.
    """
    console = Console(stderr=True)
    if not (wanted and console.is_terminal):
        yield (lambda _: None), (lambda _: None)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task(title, total=None)
        yield (
            lambda total: progress.update(task, total=total),
            lambda count: progress.update(task, advance=count),
        )
