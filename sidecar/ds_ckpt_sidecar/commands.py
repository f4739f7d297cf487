"""The commands behind ``ds-ckpt``: each opens what it needs, calls the library, and prints.

Those that only read a store are in :mod:`ds_ckpt_sidecar.reading`, gc in ``collecting``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ds_ckpt_sidecar import __version__, collecting, doctoring, reading, render
from ds_ckpt_sidecar.console import URLS, AsJson, Bandwidth, StallSeconds, app, errors, keep_apart
from ds_ckpt_sidecar.lifecycle import Save
from ds_ckpt_sidecar.limits import describe_rate
from ds_ckpt_sidecar.observe.view import View, look
from ds_ckpt_sidecar.observe.web import document, presentable
from ds_ckpt_sidecar.running import explained, run_agent
from ds_ckpt_sidecar.settings import LimitSettings, check, load
from ds_ckpt_store.contract.clock import SystemClock
from ds_ckpt_store.contract.manifest import (
    SaveStatus,
    SidecarStatus,
    TrainerStatus,
    TransferLimits,
)
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import InputError

__all__ = ["app", "collecting", "doctoring", "reading"]  # the others add commands to the first

StatusT = TypeVar("StatusT")


class Order(str, Enum):
    """Which save to upload first."""

    oldest = "oldest"
    newest = "newest"


class LogFormat(str, Enum):
    """How log lines look."""

    text = "text"
    json = "json"


class PageCache(str, Enum):
    """What becomes of cached pages of what was uploaded."""

    drop = "drop"
    keep = "keep"


class Priority(str, Enum):
    """For CPU and disk."""

    normal = "normal"
    low = "low"


class StoreKind(str, Enum):
    """Where the demo's checkpoints go."""

    file = "file"
    s3 = "s3"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ds-ckpt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def agent(
    volume: Annotated[
        str | None, typer.Option(help="The folder that trainer and agent share.", metavar="DIR")
    ] = None,
    destination: Annotated[
        str | None,
        typer.Option(help=URLS, metavar="URL"),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Store what is there, then exit (1 if not all of it).")
    ] = False,
    run_id: Annotated[
        str | None, typer.Option(help="The run; default: what the trainer says.")
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(help="Keep the last N in the store; default: keep all.")
    ] = None,
    keep_local: Annotated[
        int | None, typer.Option(help="Committed saves that stay on the volume (default: 1).")
    ] = None,
    retention_pause: Annotated[
        float | None,
        typer.Option(help="Seconds from giving a checkpoint up to deleting it (default: 3600)."),
    ] = None,
    order: Annotated[
        Order | None, typer.Option(help="Which save to upload first (default: oldest).")
    ] = None,
    streams: Annotated[
        int | None, typer.Option(help="Requests at a time at most (default: 16).")
    ] = None,
    part_mib: Annotated[
        int | None, typer.Option(help="MiB in a part, 5 to 5120 (default: 64).")
    ] = None,
    memory_mib: Annotated[
        int | None,
        typer.Option(help="MiB that all requests together may hold (default: 32)."),
    ] = None,
    bandwidth: Bandwidth = None,
    volume_limit: Annotated[
        str | None,
        typer.Option(
            help="What the volume may hold before the pod is evicted, like 200Gi (default: none).",
            metavar="SIZE",
        ),
    ] = None,
    stall_seconds: StallSeconds = None,
    page_cache: Annotated[
        PageCache | None,
        typer.Option(help="What becomes of cached pages of uploaded shards (default: drop)."),
    ] = None,
    priority: Annotated[
        Priority | None,
        typer.Option(help="low: stand behind training for CPU and disk (default: normal)."),
    ] = None,
    rescan_seconds: Annotated[
        float | None, typer.Option(help="Look through the outbox at least this often (default: 5).")
    ] = None,
    drain_seconds: Annotated[
        float | None, typer.Option(help="Time for what is left after SIGTERM (default: 25).")
    ] = None,
    lease_stale_seconds: Annotated[
        float | None,
        typer.Option(help="Silence that ends another run's lease (default: 600)."),
    ] = None,
    abandon_seconds: Annotated[
        float | None,
        typer.Option(help="Wait for a node whose attempt is over, before a save is given up."),
    ] = None,
    allow_weak_store: Annotated[
        bool | None,
        typer.Option(
            "--allow-weak-store",
            help="Accept a store without conditional create, for one node alone.",
        ),
    ] = None,
    journal: Annotated[
        str | None, typer.Option(help="The agent's memory; default: on the volume.")
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(help="Log lines as text or JSON (default: text).")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(help="For probes and preStop, like :8484 (default: nowhere).", metavar="ADDR"),
    ] = None,
    exit_when_finished: Annotated[
        bool | None,
        typer.Option("--exit-when-finished", help="End once the trainer is over and all decided."),
    ] = None,
    trainer_gone_seconds: Annotated[
        float | None,
        typer.Option(help="Silence after which a trainer is over, for that (default: 300)."),
    ] = None,
    termination_log: Annotated[
        str | None,
        typer.Option(help="The termination message (default: Kubernetes' own, if it is there)."),
    ] = None,
    kubernetes: Annotated[
        bool | None,
        typer.Option("--kubernetes", help="Report by events and annotations of the own pod."),
    ] = None,
) -> None:
    """Watch a volume and make every save on it durable.

    Every option can be given as an environment variable DS_CKPT_<OPTION>.

    Example: ds-ckpt agent --volume /ckpt --destination s3://bucket/run-7 --keep-last 5
    """
    with errors():
        with explained(termination_log):
            settings = load(
                volume=volume,
                destination=destination,
                run_id=run_id,
                keep_last=keep_last,
                keep_local=keep_local,
                retention_pause=retention_pause,
                order=order.value if order else None,
                streams=streams,
                part_mib=part_mib,
                memory_mib=memory_mib,
                bandwidth=bandwidth,
                volume_limit=volume_limit,
                stall_seconds=stall_seconds,
                page_cache=page_cache.value if page_cache else None,
                priority=priority.value if priority else None,
                rescan_seconds=rescan_seconds,
                drain_seconds=drain_seconds,
                lease_stale_seconds=lease_stale_seconds,
                abandon_seconds=abandon_seconds,
                allow_weak_store=allow_weak_store,
                journal=journal,
                log_format=log_format.value if log_format else None,
                listen=listen,
                exit_when_finished=exit_when_finished,
                trainer_gone_seconds=trainer_gone_seconds,
                termination_log=termination_log,
                kubernetes=kubernetes,
            )
            keep_apart(settings.destination, settings.volume)
        raise typer.Exit(run_agent(settings, once=once))


@app.command()
def status(
    volume: Annotated[
        str,
        typer.Option(help="The shared volume.", metavar="DIR", envvar="DS_CKPT_VOLUME"),
    ],
    as_json: AsJson = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until Ctrl-C; into a pipe: at each change.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two looks of --watch.")
    ] = 2.0,
) -> None:
    """Show what sidecar and trainer last said on a volume.

    Example: ds-ckpt status --volume /ckpt --watch
    """
    with errors():
        place = _volume(volume)
        if watch and as_json:
            raise InputError("--watch prints no JSON: repeat ds-ckpt status --json instead")
        if watch:
            render.watch_status(partial(_view, place), interval)
        elif as_json:
            render.emit_json(_status_document(place))
        else:
            render.print_status(_view(place))


def _volume(path: str) -> Volume:
    """The volume there.

    Raises:
        InputError: there is none, or its own folders are not what they should be.
    """
    if not os.path.isdir(path):
        what = "is no folder" if os.path.lexists(path) else "does not exist"
        raise InputError(f"the volume {path} {what}")
    volume = Volume(path)
    volume.refuse_links()
    return volume


def _status_document(place: Volume) -> dict[str, Any]:
    sidecar, trainer, saves = said = _said(place)
    return {
        "volume": place.path,
        "sidecar": presentable(sidecar.model_dump(by_alias=True)) if sidecar else None,
        "trainer": presentable(trainer.model_dump(by_alias=True)) if trainer else None,
        "saves": [presentable(save.model_dump(by_alias=True)) for save in saves],
        "view": document(_view(place, said)),
    }


Said = tuple[SidecarStatus | None, TrainerStatus | None, list[SaveStatus]]


def _said(place: Volume) -> Said:
    sidecar, trainer = _if_readable(place.sidecar_status), _if_readable(place.trainer_status)
    saves = {save.save_id: save for save in _save_statuses(place)}
    return sidecar, trainer, [*saves.values(), *_handed_over(place, saves)]


def _view(place: Volume, said: Said | None = None) -> View:
    found = _said(place) if said is None else said
    return look(*found, SystemClock().time(), _if_readable(place.restored_from))


@app.command()
def limit(
    volume: Annotated[
        str,
        typer.Option(help="The shared volume.", metavar="DIR", envvar="DS_CKPT_VOLUME"),
    ],
    bandwidth: Annotated[
        str | None,
        typer.Option(help="Bytes per second at most, like 200MiB; none.", metavar="RATE"),
    ] = None,
    streams: Annotated[
        int | None, typer.Option(min=1, max=256, help="Requests at a time at most.")
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Back to what the agent's settings say.")
    ] = False,
) -> None:
    """Change what a running agent may use; it looks once a second, also in a long upload.

    Holds until it is changed again, over restarts of the agent too. Without options: show it.

    Example: ds-ckpt limit --volume /ckpt --bandwidth 200MiB
    """
    with errors():
        place = _volume(volume)
        if not os.path.isdir(os.path.dirname(place.limits)):
            raise InputError(f"{volume} is no volume yet: neither trainer nor agent has used it")
        rate = check(LimitSettings, bandwidth=bandwidth).bandwidth
        before = None if reset else _if_readable(place.transfer_limits)
        limits = (before or TransferLimits()).model_copy(
            update={
                name: value
                for name, value in (("bandwidth", rate), ("streams", streams))
                if value is not None
            }
        )
        if limits == TransferLimits():
            place.fs.unlink(place.limits)
        elif limits != before:
            place.write_limits(limits)
        wide = "as set" if limits.bandwidth is None else describe_rate(limits.bandwidth)
        typer.echo(f"bandwidth {wide}, streams {limits.streams or 'as set'}")


def _if_readable(read: Callable[[], StatusT | None]) -> StatusT | None:
    """A status file that is not what it should be is said, and hides nothing else."""
    try:
        return read()
    except InputError as error:
        typer.echo(f"ds-ckpt: warning: left out: {error}", err=True)
        return None


def _save_statuses(volume: Volume) -> Iterator[SaveStatus]:
    for name in volume.fs.names(volume.status):
        if name.endswith(".json") and name not in ("sidecar.json", "trainer.json"):
            found = _if_readable(partial(volume.save_status, name[: -len(".json")]))
            if found is not None:
                yield found


def _handed_over(volume: Volume, known: Collection[str]) -> Iterator[SaveStatus]:
    """What lies in the outbox and no agent has spoken of, as one that has just found it would."""
    for name in volume.manifests():
        if name.split(".")[0] in known:
            continue
        manifest, written = None, None
        with contextlib.suppress(OSError):  # it is gone: an agent has dealt with it
            manifest = _if_readable(partial(volume.manifest, name))
            written = volume.fs.stat(f"{volume.outbox}/{name}")
        if manifest is not None and written is not None:
            reason = "handed over, and no agent has looked at it yet"
            save = Save(manifest, name, written.mtime_ns / 1e9, reason=reason)
            yield save.status(SystemClock().time())


@app.command()
def demo(
    store: Annotated[StoreKind, typer.Option(help="Where checkpoints go.")] = StoreKind.file,
    zero_stage: Annotated[int, typer.Option(min=0, max=3, help="DeepSpeed ZeRO stage.")] = 2,
    keep: Annotated[
        Path | None, typer.Option(help="Work in this folder and leave it there.", metavar="DIR")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train, lose the pod, restore, resume, and compare losses to the last bit.

    Real DeepSpeed with two ranks on the CPU; takes a minute. Exits 1 when the losses differ.
    """
    with errors():
        from ds_ckpt_sidecar.demo.demo import run_demo
        from ds_ckpt_sidecar.demo.report import table

        def say(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        result = run_demo(store=store.value, zero_stage=zero_stage, workdir=keep, say=say)
        if as_json:
            render.emit_json(result.as_dict())
        else:
            render.show(table(result))
        if not result.losses_identical:
            raise typer.Exit(1)
