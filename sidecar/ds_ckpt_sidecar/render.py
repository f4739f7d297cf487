"""What commands print: tables for people, one JSON document for programs, progress on terminals."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ds_ckpt_sidecar.observe import web
from ds_ckpt_sidecar.observe.view import View
from ds_ckpt_store.contract.clock import SystemClock
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
    saved = datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.timezone.utc)
    return saved.strftime("%Y-%m-%d %H:%M:%S")


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
            _text(record.tag),
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


def print_status(view: View) -> None:
    """``status``: what sidecar and trainer last said on the volume."""
    _console().print(status(view))


def watch_status(look: Callable[[], View], pause: float) -> None:
    """``status --watch``, until Ctrl-C: in place on a terminal, else a block for each change."""
    console = _console()
    with contextlib.suppress(KeyboardInterrupt):
        if console.is_terminal:
            with Live(status(look()), console=console, auto_refresh=False, screen=True) as live:
                while True:
                    SystemClock().sleep(pause)
                    live.update(status(look()), refresh=True)
        for view in changes(look, pause):
            console.print(_text(f"-- {web.moment(view.now)}"), status(view), sep="\n")
            sys.stdout.flush()


def changes(look: Callable[[], View], pause: float) -> Iterator[View]:
    """The view, and again each time that more than ages have changed."""
    last: object = None
    while True:
        view = look()
        step = view.trainer.step if view.trainer is not None else None
        saves = [(save.save_id, save.state, save.bytes_done) for save in view.saves]
        now = (view.state, view.alive, view.newest and view.newest.save_id, view.error)
        if (now, view.unready, step, saves) != last:
            last = (now, view.unready, step, saves)
            yield view
        SystemClock().sleep(pause)


def status(view: View) -> Group:
    """One view for a terminal."""
    said = web.document(view)
    lines = [_text(f"now       {web.headline(view)}", "bold")]
    if not view.heartbeat:
        lines.append(_text("sidecar   never seen on this volume"))
    else:
        lines += [
            _text(
                f"sidecar   {_state(view)}, seen {web.span(view.now - view.heartbeat)} ago, "
                f"backlog {web.counted(view.backlog_saves, 'save')} / "
                f"{decimal(view.backlog_bytes)}, free {decimal(view.free_bytes)}"
            ),
            _text(f"to        {said['destination'] or '(not connected yet)'}"),
            _text(f"durable   {view.newest.tag if view.newest else 'none yet'}"),
            _text(f"lag       {web.lag(view)}"),
        ]
        for name in ("unready", "error", "remedy"):
            if said[name]:
                lines.append(_text(f"{name:<9} {said[name]}", "" if name == "remedy" else "red"))
    trainer = said["trainer"]
    if trainer is None:
        lines.append(_text("trainer   never seen on this volume"))
    else:
        step = "unknown" if trainer["step"] is None else trainer["step"]
        lines.append(
            _text(
                f"trainer   {view.trainer_state}, run {trainer['run_id']!r}, "
                f"step {step}, seen {web.span(view.trainer_silent_seconds)} ago"
            )
        )
        if trainer["error"]:
            lines.append(_text(f"error     {trainer['error']}", "red"))
    return Group(*lines, _saves(said["saves"])) if said["saves"] else Group(*lines)


def _state(view: View) -> str:
    silent = not view.alive and view.state not in ("stopped", "never seen")
    return f"silent (was {view.state})" if silent else view.state


def _saves(saves: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("TAG", "STATE", "DONE", "LEFT", "AGE", "REASON"):
        table.add_column(name, overflow="fold")
    for save in saves:
        nodes = ", ".join(node[:8] for node in save["waiting_for"])
        left = save["left_seconds"]
        table.add_row(
            _text(save["tag"] or save["save_id"]),
            save["state"],
            _done(save),
            "" if left is None else web.span(left),
            web.span(save["age_seconds"]),
            _text(save["reason"] or (f"waiting for nodes {nodes}" if nodes else "")),
        )
    return table


def _done(save: dict[str, Any]) -> str:
    """Bytes count by the request, so of small files only how many are stored tells anything."""
    share = f"{100 * save['share']:.0f} %" if save["bytes_total"] else ""
    files = f", {save['shards_done']} of {save['shards_total']} files"
    return share + (files if share and save["open"] and save["shards_total"] else "")


def _text(text: str, style: str = "") -> Text:
    return Text(web.legible(text), style=style)


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
