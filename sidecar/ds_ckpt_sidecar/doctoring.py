"""``ds-ckpt doctor``: is the volume shared and readable, and the store ours to use and safe?"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from typing import Annotated

import typer
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from ds_ckpt_sidecar import __version__, doctor, render
from ds_ckpt_sidecar.console import URLS, AsJson, StallSeconds, app, errors, keep_apart
from ds_ckpt_sidecar.doctor import Finding
from ds_ckpt_sidecar.examine.users import ourselves
from ds_ckpt_sidecar.observe.web import legible
from ds_ckpt_sidecar.settings import check
from ds_ckpt_store.contract.clock import SystemClock, system_random
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import CkptError, InputError
from ds_ckpt_store.stores import open_store
from ds_ckpt_store.stores.port import Store
from ds_ckpt_store.stores.retry import RetryPolicy, RetryStore

MOST_PATHS = 1_000_000
PATIENCE = RetryPolicy(tries=3, deadline=30.0)


class DoctorSettings(BaseSettings):
    """What one look is told: those settings of the agent that it needs."""

    model_config = SettingsConfigDict(env_prefix="DS_CKPT_", extra="ignore", frozen=True)

    volume: str = ""
    destination: str = ""
    run_id: str = ""
    allow_weak_store: bool = False
    # Nobody waits a minute to hear that nothing answers.
    stall_seconds: Annotated[float, Field(ge=1, le=3600)] = 15.0


@app.command(name="doctor")
def examine(
    volume: Annotated[
        str | None,
        typer.Option(help="The shared volume; default: DS_CKPT_VOLUME.", metavar="DIR"),
    ] = None,
    destination: Annotated[
        str | None,
        typer.Option(help=f"{URLS}; default: DS_CKPT_DESTINATION.", metavar="URL"),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(help="The run; default: DS_CKPT_RUN_ID, else what the trainer says."),
    ] = None,
    allow_weak_store: Annotated[
        bool | None,
        typer.Option(
            "--allow-weak-store",
            help="Accept a store without conditional create, for one node alone.",
        ),
    ] = None,
    stall_seconds: StallSeconds = None,
    as_json: AsJson = False,
) -> None:
    """Look for what keeps saves from being stored, and say what to do about it.

    Run it where the agent runs, as its user and with its environment. It changes nothing: what it
    writes to try the volume and the store, it removes. Exits 1 if it finds an error.

    Example: ds-ckpt doctor --volume /ckpt --destination s3://bucket/run-7
    """
    with errors():
        settings = check(
            DoctorSettings,
            volume=volume,
            destination=destination,
            run_id=run_id,
            allow_weak_store=allow_weak_store,
            stall_seconds=stall_seconds,
        )
        if not settings.volume and not settings.destination:
            raise InputError(
                "say what to look at: --volume, --destination or both (or DS_CKPT_VOLUME and "
                "DS_CKPT_DESTINATION)"
            )
        found: list[Finding] = []
        if settings.volume:
            place = Volume(settings.volume)
            found += doctor.check_volume(place, most=MOST_PATHS)
            if os.path.isdir(place.own):
                found += doctor.check_processes(place)
        wrong = False
        if settings.destination:
            try:
                found += _store(settings)
            except InputError as error:
                wrong = True
                found.append(
                    Finding("error", "DS_CKPT_DESTINATION", str(error), "correct the setting")
                )
        _show(found, as_json=as_json)
        if any(each.severity == "error" for each in found):
            raise typer.Exit(2 if wrong else 1)


def _store(settings: DoctorSettings) -> list[Finding]:
    """What is found in the store.

    Raises:
        InputError: the destination cannot work, whatever the store says.
    """
    url = settings.destination.rstrip("/")
    url = settings.destination if settings.destination.endswith("://") else url
    if settings.volume:
        keep_apart(url, settings.volume)
    try:
        opened = open_store(url, stall_seconds=settings.stall_seconds)
    except InputError:
        raise
    except CkptError as error:
        return [Finding("error", "DS_CKPT_DESTINATION", str(error), "install what it names")]
    store: Store = RetryStore(opened, SystemClock(), system_random(), policy=PATIENCE)
    try:
        found = doctor.check_store(store, run_id=_run(settings))
        if not any(each.severity == "error" for each in found):
            found += doctor.check_promises(store, allow_weak=settings.allow_weak_store)
    finally:
        opened.close()
    return found


def _run(settings: DoctorSettings) -> str:
    if settings.run_id or not settings.volume:
        return settings.run_id
    try:
        trainer = Volume(settings.volume).trainer_status()
    except (InputError, OSError):
        return ""
    return trainer.run_id if trainer is not None else ""


def _show(found: list[Finding], *, as_json: bool) -> None:
    counts = Counter(each.severity for each in found)
    if as_json:
        render.emit_json(
            {
                "version": __version__,
                "user": str(ourselves()),
                "counts": {level: counts[level] for level in ("error", "warning", "note", "ok")},
                "findings": [dataclasses.asdict(each) for each in found],
            }
        )
        return
    for each in found:
        typer.echo(legible(f"{each.severity:8} {each.what}: {each.sentence}"))
        if each.remedy:
            typer.echo(legible(f"{'':8}   do: {each.remedy}"))
    told = [
        f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}"
        for level in ("error", "warning")
        if counts[level]
    ]
    typer.echo(f"doctor, as {ourselves()}: {' and '.join(told) or 'all is well'}")
