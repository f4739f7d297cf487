"""The commands behind ``ds-ckpt``: each opens what it needs, calls the library, and prints."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote, urlsplit

import typer

from ds_ckpt_sidecar import __version__, render
from ds_ckpt_sidecar.agent import Agent
from ds_ckpt_sidecar.limits import describe_rate
from ds_ckpt_sidecar.observe.log import make_log
from ds_ckpt_sidecar.settings import LimitSettings, ReadSettings, check, load
from ds_ckpt_store.catalog import Catalog
from ds_ckpt_store.contract import digest
from ds_ckpt_store.contract.clock import SystemClock, system_random
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.contract.manifest import SaveStatus, TransferLimits
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError, DamagedError, InputError, ThrottledError
from ds_ckpt_store.restore import Restore
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.probe import for_reading
from ds_ckpt_store.stores.retry import Retry, RetryStore
from ds_ckpt_store.transfer.budget import STREAMS, Budget, Stall
from ds_ckpt_store.transfer.download import Downloader, RemoteShard

OVERTIME_SECONDS = 5.0

app = typer.Typer(
    help="Make DeepSpeed checkpoints durable, look at them, and bring them back.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StatusT = TypeVar("StatusT")
Url = Annotated[str, typer.Argument(help="s3://bucket/prefix or file:///folder", metavar="URL")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Streams = Annotated[int, typer.Option(min=1, max=256, help="Requests at a time at most.")]
StallSeconds = Annotated[
    float | None,
    typer.Option(
        envvar="DS_CKPT_STALL_SECONDS",
        help="Give up a request on which nothing moves for so long (default: 60).",
    ),
]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        help="Bytes per second at most, like 500MiB (default: none, no limit).", metavar="RATE"
    ),
]


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


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn an error into a sentence and an exit code."""
    try:
        yield
    except InputError as error:
        typer.echo(f"ds-ckpt: {error}", err=True)
        raise typer.Exit(2) from None
    except CkptError as error:
        typer.echo(f"ds-ckpt: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"ds-ckpt: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("ds-ckpt: interrupted; run it again to continue", err=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def _reading(
    url: str,
    stall_seconds: float | None = None,
    on_retry: Callable[[Retry], None] | None = None,
) -> Iterator[Store]:
    settings = check(ReadSettings, stall_seconds=stall_seconds)
    store = open_store(
        url.rstrip("/") if not url.endswith("://") else url, stall_seconds=settings.stall_seconds
    )
    try:
        yield for_reading(RetryStore(store, SystemClock(), system_random(), on_retry=on_retry))
    finally:
        store.close()


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

    def slow_down(retry: Retry) -> None:
        if isinstance(retry.error, ThrottledError):
            budget.throttled()

    settings = check(ReadSettings, stall_seconds=stall_seconds)
    budget = Budget(
        SystemClock(),
        streams=streams,
        bandwidth=check(LimitSettings, bandwidth=bandwidth).bandwidth or 0,
        stall_seconds=settings.stall_seconds,
        on_stall=say,
    )
    with (
        _reading(url, settings.stall_seconds, slow_down) as store,
        ThreadPoolExecutor(budget.fit) as pool,
    ):
        yield store, pool, budget


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
        str | None, typer.Option(help="s3://bucket/prefix or file:///folder", metavar="URL")
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
        int | None, typer.Option(help="MiB in a part, 5 to 5120 (default: 16).")
    ] = None,
    memory_mib: Annotated[
        int | None,
        typer.Option(help="MiB that all requests together may hold (default: 32)."),
    ] = None,
    bandwidth: Bandwidth = None,
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
) -> None:
    """Watch a volume and make every save on it durable.

    Every option can be given as an environment variable DS_CKPT_<OPTION>.

    Example: ds-ckpt agent --volume /ckpt --destination s3://bucket/run-7 --keep-last 5
    """
    with _errors():
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
        )
        _keep_apart(settings.destination, settings.volume)
        process = Agent(
            settings,
            store=open_store(settings.destination, stall_seconds=settings.stall_seconds),
            volume=Volume(settings.volume, Filesystem()),
            log=make_log(settings.log_format),
        )
        _stop_on_signal(process, settings.drain_seconds)
        raise typer.Exit(process.run(once=once))


def _keep_apart(url: str, folder: str) -> None:
    """A store in a volume, or a volume in a store, would write over each other's files.

    Raises:
        InputError: they overlap.
    """
    parts = urlsplit(url)
    if parts.scheme != "file":
        return
    store, volume = os.path.realpath(unquote(parts.path)), os.path.realpath(folder)
    if os.path.commonpath([store, volume]) in (store, volume):
        raise InputError(f"{url} and the volume {folder} lie within each other: keep them apart")


def _stop_on_signal(process: Agent, drain_seconds: float) -> None:
    """Drain on SIGTERM and SIGINT, and end in time even if a request never comes back.

    A store that accepts connections and then says nothing holds a thread in a read for minutes.
    What was done is in the store and in the journal, so ending there costs a repetition.
    """

    def end() -> None:
        typer.echo(
            f"ds-ckpt: a request did not come back within {drain_seconds:.0f} s of draining and "
            f"{OVERTIME_SECONDS:.0f} s more; ending. A later start continues",
            err=True,
        )
        os._exit(1)

    def stop(*_: object) -> None:
        process.stop()
        timer = threading.Timer(drain_seconds + OVERTIME_SECONDS, end)
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


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
    as_json: AsJson = False,
) -> None:
    """Bring a committed checkpoint back into a folder, every shard verified.

    Interrupted and run again, it continues. DeepSpeed's `latest` is written last.

    Example: ds-ckpt restore --from s3://bucket/run-7 --to /ckpt
    """
    with (
        _errors(),
        _fetching(source, streams, bandwidth, stall_seconds) as (store, pool, budget),
    ):
        _keep_apart(source, to)
        job = Restore(store, pool, budget=budget, clock=SystemClock(), rng=system_random())
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
    with _errors(), _reading(url) as store:
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
    with _errors(), _reading(url) as store:
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
    with _errors(), _fetching(url, streams, bandwidth, stall_seconds) as (store, pool, budget):
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


@app.command()
def status(
    volume: Annotated[
        str,
        typer.Option(help="The shared volume.", metavar="DIR", envvar="DS_CKPT_VOLUME"),
    ],
    as_json: AsJson = False,
) -> None:
    """Show what sidecar and trainer last said on a volume.

    Example: ds-ckpt status --volume /ckpt
    """
    with _errors():
        if not os.path.isdir(volume):
            raise InputError(f"the volume {volume} does not exist")
        place = Volume(volume)
        saves = list(_save_statuses(place))
        sidecar, trainer = _if_readable(place.sidecar_status), _if_readable(place.trainer_status)
        if as_json:
            render.emit_json(
                {
                    "volume": place.path,
                    "sidecar": sidecar.model_dump(by_alias=True) if sidecar else None,
                    "trainer": trainer.model_dump(by_alias=True) if trainer else None,
                    "saves": [save.model_dump(by_alias=True) for save in saves],
                }
            )
        else:
            render.print_status(sidecar, trainer, saves, SystemClock().time())


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
    with _errors():
        if not os.path.isdir(volume):
            raise InputError(f"the volume {volume} does not exist")
        place = Volume(volume)
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
    with _errors():
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
