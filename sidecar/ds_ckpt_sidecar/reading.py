"""The commands that look at a store or bring something back: restore, ls, show, verify."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Annotated, Any

import typer

from ds_ckpt_sidecar import render
from ds_ckpt_sidecar.console import AsJson, Bandwidth, StallSeconds, Url, app, errors, keep_apart
from ds_ckpt_sidecar.settings import LimitSettings, ReadSettings, check
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.clock import SystemClock, system_random
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import DamagedError, InputError
from ds_ckpt_store.restore import Restore
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.probe import for_reading
from ds_ckpt_store.stores.retry import Retry, RetryStore
from ds_ckpt_store.transfer.budget import STREAMS, Budget, Stall
from ds_ckpt_store.transfer.download import Downloader, RemoteShard

Streams = Annotated[int, typer.Option(min=1, max=256, help="Requests at a time at most.")]


@contextlib.contextmanager
def opened(
    url: str,
    stall_seconds: float | None = None,
    on_retry: Callable[[Retry], None] | None = None,
) -> Iterator[Store]:
    """A store whose calls are repeated; closed at the end."""
    settings = check(ReadSettings, stall_seconds=stall_seconds)
    store = open_store(
        url.rstrip("/") if not url.endswith("://") else url, stall_seconds=settings.stall_seconds
    )
    try:
        yield RetryStore(store, SystemClock(), system_random(), on_retry=on_retry)
    finally:
        store.close()


@contextlib.contextmanager
def _reading(
    url: str,
    stall_seconds: float | None = None,
    on_retry: Callable[[Retry], None] | None = None,
) -> Iterator[Store]:
    with opened(url, stall_seconds, on_retry) as store:
        yield for_reading(store)


@contextlib.contextmanager
def _fetching(
    url: str, streams: int, bandwidth: str | None, stall_seconds: float | None
) -> Iterator[tuple[Store, Executor, Budget]]:
    """What a command needs that reads a lot."""

    def say(stall: Stall) -> None:
        typer.echo(
            f"ds-ckpt: warning: no byte moved for {stall.seconds:.0f} s while {stall.requests} "
            "requests are under way; each is given up by its own timeout and made again",
            err=True,
        )

    # As a container's first process it would not end by SIGTERM: the kernel spares that one.
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = check(ReadSettings, stall_seconds=stall_seconds)
    budget = Budget(
        SystemClock(),
        streams=streams,
        bandwidth=check(LimitSettings, bandwidth=bandwidth).bandwidth or 0,
        stall_seconds=settings.stall_seconds,
        on_stall=say,
    )
    with (
        _reading(url, settings.stall_seconds, lambda retry: budget.heed(retry.error)) as store,
        ThreadPoolExecutor(budget.fit) as pool,
    ):
        yield store, pool, budget


@app.command()
def restore(
    source: Annotated[str, typer.Option("--from", help="Where from.", metavar="URL")],
    to: Annotated[str, typer.Option("--to", help="Where to: the volume.", metavar="DIR")],
    tag: Annotated[
        str | None, typer.Option(help="The newest committed with this tag; default: the newest.")
    ] = None,
    save: Annotated[
        str | None, typer.Option(help="This very save (see ls --json).", metavar="SAVE_ID")
    ] = None,
    streams: Streams = STREAMS,
    bandwidth: Bandwidth = None,
    stall_seconds: StallSeconds = None,
    if_any: Annotated[
        bool,
        typer.Option("--if-any", help="Nothing committed yet is no failure: a first start."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a committed checkpoint back into a folder, every shard verified.

    Interrupted and run again, it continues. DeepSpeed's `latest` is written last.

    Example: ds-ckpt restore --from s3://bucket/run-7 --to /ckpt
    """
    with (
        errors(),
        _fetching(source, streams, bandwidth, stall_seconds) as (store, pool, budget),
    ):
        keep_apart(source, to)
        if if_any and (tag is not None or save is not None):
            raise InputError(
                "give --if-any for the newest checkpoint only, without --tag or --save"
            )
        job = Restore(store, pool, budget=budget, clock=SystemClock(), rng=system_random())
        if if_any and not job.catalog.committed() and not job.catalog.damaged:
            if as_json:
                render.emit_json({"tag": None})
            else:
                typer.echo(f"{store.url} holds no committed checkpoint yet: nothing to restore")
            return
        with render.progress_bar("restore", wanted=not as_json) as (total, advance):
            result = job.run(
                Volume(to),
                tag=tag,
                save_id=save,
                progress=advance,
                plan=lambda _record, fetch: total(fetch),
            )
        for warning in _warnings(job.catalog, result.without_hold, result.set_aside):
            typer.echo(f"ds-ckpt: {warning}", err=True)
        if as_json:
            render.emit_json(
                {
                    "tag": result.record.tag,
                    "save_id": result.record.save_id,
                    "folder": result.folder,
                    "step": result.record.step,
                    "bytes": result.record.size,
                    "fetched_bytes": result.fetched_bytes,
                    "reused_bytes": result.reused_bytes,
                    "set_aside": result.set_aside,
                    "damaged": dict(job.catalog.damaged),
                    "seconds": round(result.seconds, 3),
                }
            )
        else:
            typer.echo(
                f"restored {result.record.tag!r} (save {result.record.save_id}) to "
                f"{result.folder}: {len(result.record.files)} files verified, "
                f"{result.fetched_bytes} bytes fetched in {result.seconds:.2f} s"
            )


def _warnings(catalog: Catalog, without_hold: str, set_aside: str) -> Iterator[str]:
    for reason in catalog.damaged.values():
        yield f"warning: left out: {reason}"
    if without_hold:
        yield (
            f"warning: retention was not held off while restoring ({without_hold}); harmless "
            "unless this very checkpoint was being given up"
        )
    if set_aside:
        yield f"note: what stood there before is kept in {set_aside}"


@app.command(name="ls")
def list_checkpoints(
    url: Url,
    every: Annotated[bool, typer.Option("--all", help="Deleted and abandoned ones too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints under a prefix, newest last.

    Example: ds-ckpt ls s3://bucket/run-7
    """
    with errors(), _reading(url) as store:
        catalog = Catalog(store, system_random())
        records = catalog.records() if every else catalog.committed()
        damaged = dict(catalog.damaged)
        pointed = catalog.latest()
        latest = pointed.save_id if pointed else None
        if as_json:
            render.emit_json(
                {
                    "url": store.url,
                    "latest": latest,
                    "checkpoints": [
                        render.summary(record, latest=record.save_id == latest)
                        for record in records
                    ],
                    "damaged": damaged,
                }
            )
        elif records:
            render.print_records(records, latest)
        else:
            typer.echo(f"{store.url} holds no committed checkpoint", err=True)
        for reason in damaged.values():
            typer.echo(f"ds-ckpt: warning: left out: {reason}", err=True)


@app.command()
def show(
    url: Url,
    tag: Annotated[str, typer.Argument(help="The tag; the newest committed save of it.")],
    as_json: AsJson = False,
) -> None:
    """Show one checkpoint: where it came from, and every file with its checksum.

    Example: ds-ckpt show s3://bucket/run-7 global_step1000
    """
    with errors(), _reading(url) as store:
        catalog = Catalog(store, system_random())
        record = catalog.find(tag)
        pointed = catalog.latest()
        latest = pointed is not None and pointed.save_id == record.save_id
        if as_json:
            document: dict[str, Any] = render.summary(record, latest=latest)
            document["files"] = [entry.model_dump() for entry in record.files]
            document["companions"] = [entry.model_dump() for entry in record.companions]
            render.emit_json(document)
        else:
            render.print_record(record, latest=latest)


@app.command()
def verify(
    url: Url,
    tag: Annotated[
        str | None, typer.Argument(help="The newest with this tag; default: the newest.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every committed checkpoint.")] = False,
    streams: Streams = STREAMS,
    bandwidth: Bandwidth = None,
    stall_seconds: StallSeconds = None,
    as_json: AsJson = False,
) -> None:
    """Read a checkpoint back and compare every byte's checksum with its record.

    Example: ds-ckpt verify s3://bucket/run-7 --all
    """
    with errors(), _fetching(url, streams, bandwidth, stall_seconds) as (store, pool, budget):
        if every and tag is not None:
            raise InputError("give a tag or --all, not both")
        catalog = Catalog(store, system_random())
        records = catalog.committed() if every else [catalog.find(tag)]
        broken = dict(catalog.damaged)
        objects = [
            RemoteShard(key, entry.size, digest.from_hex(entry.crc32c), "")
            for record in records
            for key, entry in record.objects()
        ]
        reader = Downloader(store, pool, budget=budget, fs=Filesystem(), clock=SystemClock())
        with render.progress_bar("verify", wanted=not as_json) as (total, advance):
            total(sum(entry.size for entry in objects))
            damages = reader.verify(objects, check=lambda: None, progress=advance)
        broken.update({damage.key: damage.reason for damage in damages})
        size = sum(entry.size for entry in objects)
        if as_json:
            render.emit_json(
                {
                    "url": store.url,
                    "checkpoints": [record.tag for record in records],
                    "objects": len(objects),
                    "bytes": size,
                    "damaged": broken,
                }
            )
        else:
            tags = ", ".join(record.tag for record in records) or "none"
            typer.echo(f"checked {len(objects)} objects, {size} bytes of {tags}")
        if broken:
            what = "; ".join(f"{key}: {reason}" for key, reason in sorted(broken.items()))
            raise DamagedError(f"{len(broken)} objects are damaged: {what}", tuple(broken))
