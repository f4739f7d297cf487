"""What the commands share: the application, options, and how an error ends one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer

from ds_ckpt_store.contract import access
from ds_ckpt_store.contract.filesystem import Filesystem
from ds_ckpt_store.errors import CkptError, InputError

app = typer.Typer(
    help="Make DeepSpeed checkpoints durable, look at them, and bring them back.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

URLS = "s3://, gs://, az://, file:///folder, or a URL that fsspec knows"
Url = Annotated[str, typer.Argument(help=URLS, metavar="URL")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
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


@contextlib.contextmanager
def errors() -> Iterator[None]:
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
        remedy = access.denied(error, Filesystem()) or access.unwritable(error)
        typer.echo(f"ds-ckpt: {error}{f'; {remedy}' if remedy else ''}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("ds-ckpt: interrupted; run it again to continue", err=True)
        raise typer.Exit(1) from None


def keep_apart(url: str, folder: str) -> None:
    """A store in a volume, or a volume in a store, would write over each other's files.

    Raises:
        InputError: they overlap.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("file", "local"):
        return
    store, volume = os.path.realpath(unquote(parts.path)), os.path.realpath(folder)
    if os.path.commonpath([store, volume]) in (store, volume):
        raise InputError(f"{url} and the volume {folder} lie within each other: keep them apart")
