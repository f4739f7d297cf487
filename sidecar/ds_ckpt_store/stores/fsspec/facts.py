"""What file systems tell of a file, each in words of its own."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

# Names under which a version of the content is told, the most telling first.
_TAGS = ("etag", "ETag", "e_tag", "eTag", "version_id", "VersionId", "generation", "blob_id")
# What else tells two files of one name apart, where there is no such tag.
_IDENTITIES = ("ino", "unique", "inode", "fileId")
_TIMES = (
    "mtime",
    "modify",
    "last_modified",
    "LastModified",
    "lastModified",
    "Last-Modified",
    "modified",
    "modificationTime",
    "timeModified",
    "updated",
    "last_write_time",
    "created",
)
_FTP_TIME = "%Y%m%d%H%M%S"
_TOO_LARGE_FOR_SECONDS = 1e11  # a time in milliseconds


def version_of(entry: Mapping[str, Any]) -> str:
    """An opaque token that changes with the content, as finely as the file system can tell."""
    for name in _TAGS:
        if entry.get(name):
            return str(entry[name])
    parts = [str(entry[name]) for name in _IDENTITIES if entry.get(name)]
    time = _time(entry)
    parts.append(str(seconds(time) or time))  # one library tells one time in two forms
    parts.append(str(entry.get("size")))
    return "-".join(parts)


def modified_of(entry: Mapping[str, Any]) -> float:
    """Seconds since the epoch by the file system's clock, or 0 if it does not tell."""
    return seconds(_time(entry))


def _time(entry: Mapping[str, Any]) -> Any:
    found = next((entry[name] for name in _TIMES if entry.get(name)), None)
    return found or getattr(entry.get("last_commit"), "date", None)  # of a Git repository


def seconds(value: Any) -> float:
    """A time in any of the forms in which libraries tell it; 0 if it is none."""
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            value = value.replace(tzinfo=datetime.timezone.utc)
        return float(value.timestamp())
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value / 1000 if value > _TOO_LARGE_FOR_SECONDS else float(value)
    if isinstance(value, str):
        return _seconds_of_text(value.strip())
    return 0.0


def _seconds_of_text(text: str) -> float:
    whole, _, fraction = text.partition(".")
    if len(whole) == 14 and whole.isdecimal():
        try:
            found = datetime.datetime.strptime(whole, _FTP_TIME)
        except ValueError:
            return 0.0
        part = float(f"0.{fraction}") if fraction.isdecimal() else 0.0
        return found.replace(tzinfo=datetime.timezone.utc).timestamp() + part
    try:
        return seconds(datetime.datetime.fromisoformat(text.replace("Z", "+00:00")))
    except ValueError:
        pass
    try:
        return seconds(datetime.datetime.strptime(text, "%a, %d %b %Y %H:%M:%S %Z"))
    except ValueError:
        return 0.0
