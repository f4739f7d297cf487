"""What a URL and the environment say of a file system, checked before anything is sent.

``DS_CKPT_FSSPEC_OPTIONS``
    JSON object: the ``storage_options`` of that file system. Never printed.
``DS_CKPT_FSSPEC_OPTIONS_FILE``
    file with such an object, for secrets; where both name an option, the file wins.
``DS_CKPT_FSSPEC_BLOCK_MIB``
    MiB of a large object that are held and sent at a time (default 8).
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import get_filesystem_class, known_implementations, registry

from ds_ckpt_store.errors import SettingsError
from ds_ckpt_store.stores import PROVIDERS, shown_path

OPTIONS = "DS_CKPT_FSSPEC_OPTIONS"
OPTIONS_FILE = "DS_CKPT_FSSPEC_OPTIONS_FILE"
BLOCK_MIB = "DS_CKPT_FSSPEC_BLOCK_MIB"
MIB = 1 << 20
DEFAULT_BLOCK = 8 * MIB
# S3 takes no smaller part, and a larger block than this one is a slip of the pen.
SMALLEST_MIB, LARGEST_MIB = 5, 1024

# Options that bound how long a connection may be silent, by kind of URL; all in seconds.
GUARDS = {
    "ftp": ("timeout",),
    "sftp": ("timeout", "banner_timeout", "auth_timeout"),
    "ssh": ("timeout", "banner_timeout", "auth_timeout"),
    "smb": ("timeout",),
    "abfs": ("connection_timeout", "read_timeout"),
    "abfss": ("connection_timeout", "read_timeout"),
}


@dataclass(frozen=True)
class FsspecOptions:
    """One folder of one file system, and how to open it.

    Attributes:
        url: as the user wrote it, without a slash at the end.
        protocol: its scheme.
        kind: fsspec's class for it.
        arguments: what the class is made with; may hold secrets.
        root: the folder, as the file system writes paths.
        block: bytes of a large object that are held and sent at a time.
    """

    url: str
    protocol: str
    kind: Any
    arguments: Mapping[str, Any] = field(repr=False)
    root: str
    block: int = DEFAULT_BLOCK

    @classmethod
    def from_url(cls, url: str, environ: Mapping[str, str], stall_seconds: float) -> FsspecOptions:
        """Read URL and environment; nothing is sent.

        Args:
            url: of a folder or a prefix.
            environ: where the settings are looked up.
            stall_seconds: given to the file system where it takes such an option.

        Raises:
            SettingsError: the URL or a setting cannot work; it names which.
        """
        protocol = urlsplit(url).scheme
        kind = _kind(url, protocol)
        _check_url(url, kind)
        given = _given_options(environ)
        try:
            of_url = kind._get_kwargs_from_urls(url)
            root = str(kind._strip_protocol(url)).rstrip("/")
        except ValueError as error:
            raise SettingsError(f"{url!r}: is no URL of {protocol}://: {error}") from error
        if protocol == "hf" and "@" not in root:
            # It would take the @ in the name of a checkpoint's folder for that of a revision.
            raise SettingsError(f"{url!r}: name the revision too: hf://user/repo@main/folder")
        arguments = {**_guards(protocol, kind, stall_seconds), **of_url, **given}
        if not root.strip("/"):
            raise SettingsError(f"{url!r}: names no folder; write {protocol}://.../folder")
        return cls(url.rstrip("/"), protocol, kind, arguments, root, _block(environ))

    def hide(self, text: str) -> str:
        """A text of the file system without the values of its options."""
        for value in sorted(_texts(self.arguments), key=len, reverse=True):
            if value not in self.url:
                text = text.replace(value, "***")
        return text


def _kind(url: str, protocol: str) -> Any:
    if "::" in url:
        raise SettingsError(f"{url!r}: a chain of file systems is no destination")
    if protocol not in {*known_implementations, *registry}:
        known = ", ".join(f"{scheme}://" for scheme in PROVIDERS)
        raise SettingsError(
            f"unknown kind of store {protocol!r}; known are {known} and what fsspec knows"
        )
    try:
        return get_filesystem_class(protocol)
    except ImportError as error:
        hint = str(error) if str(error) != "None" else f"its library is missing: {error.__cause__}"
        raise SettingsError(
            f"{url!r}: fsspec knows {protocol}://, but it cannot be used yet: {hint}"
        ) from error


def _check_url(url: str, kind: Any) -> None:
    try:
        parts = urlsplit(url)
        password, host = parts.password, parts.netloc
    except ValueError as error:
        raise SettingsError(f"the destination is no URL: {error}") from error
    if password is not None:
        raise SettingsError(
            f"the destination {parts.scheme}://...@{parts.hostname} holds a password, which would "
            f"be shown wherever the destination is: give it in {OPTIONS_FILE}"
        )
    if ".." in parts.path.split("/"):
        raise SettingsError(f"{url!r}: the folder must be written without '..'")
    if issubclass(kind, LocalFileSystem) and host:
        raise SettingsError(
            f"{url!r}: {host!r} stands where a host would; a folder is written with three "
            f"slashes, and better as file:///folder, which promises more"
        )


def _given_options(environ: Mapping[str, str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if text := environ.get(OPTIONS, "").strip():
        given.update(_object(text, OPTIONS))
    if path := environ.get(OPTIONS_FILE, ""):
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise SettingsError(
                f"{OPTIONS_FILE}={shown_path(path)}: cannot be read: {why}"
            ) from None
        given.update(_object(text, OPTIONS_FILE))
    return given


def _object(text: str, name: str) -> dict[str, Any]:
    """A JSON object; what is wrong with it is told without showing any of it."""
    try:
        value = json.loads(text)
    except ValueError as error:
        place = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        raise SettingsError(f"{name} is no JSON{place}; write an object of options") from None
    if not isinstance(value, dict):
        raise SettingsError(f"{name} is no JSON object; write {{...}}, an option for each name")
    return value


def _block(environ: Mapping[str, str]) -> int:
    text = environ.get(BLOCK_MIB, "")
    if not text:
        return DEFAULT_BLOCK
    if not (text.isascii() and text.isdecimal()) or not SMALLEST_MIB <= int(text) <= LARGEST_MIB:
        raise SettingsError(
            f"{BLOCK_MIB}={text!r}: must be a whole number from {SMALLEST_MIB} to {LARGEST_MIB}"
        )
    return int(text) * MIB


def _guards(protocol: str, kind: Any, stall_seconds: float) -> dict[str, Any]:
    names = GUARDS.get(protocol, ())
    takes = inspect.signature(kind.__init__).parameters.values()
    any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes)
    known = {each.name for each in takes}
    return {name: math.ceil(stall_seconds) for name in names if any_name or name in known}


def _texts(value: Any) -> Iterator[str]:
    """Every text among the options that is long enough to be looked for."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str) and len(value) >= 3:
        yield value
