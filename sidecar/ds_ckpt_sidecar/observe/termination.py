"""The container's termination message: what is durable and what is not, for ``kubectl describe``.

The kubelet reads at most 4096 bytes of it when the container has ended, however it has ended. A
SIGKILL leaves no time to write, so the file always holds what is true now: it is written anew at
each change. It is one file under a mount point, so it cannot be replaced, only written over.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ds_ckpt_sidecar.observe.log import Log

DEFAULT = "/dev/termination-log"
MOST_BYTES = 4096
_LINE_BYTES = 600  # of one line; a folder's name alone may have 220


def compose(durable: str, not_durable: Sequence[str], advice: str) -> bytes:
    """The message: a first line, one for each save that is not durable, and what to do.

    Args:
        durable: what is.
        not_durable: one sentence each, the most important first. If there is no room, a reason
            that goes on from one to the next is said once; then the last ones are left out, and
            counted.
        advice: what to do.
    """
    first, last = _line(f"durable: {durable}"), _line(advice)
    lines = [_line(f"not durable: {sentence}") for sentence in not_durable]
    whole = b"".join([first, *lines, last])
    if len(whole) <= MOST_BYTES:
        return whole
    lines = [_line(f"not durable: {sentence}") for sentence in _said_once(not_durable)]
    rest = "and {} more that are not durable\n"
    room = MOST_BYTES - len(first) - len(last) - len(rest.format(len(lines)))
    kept: list[bytes] = []
    if sum(map(len, lines)) <= room:
        return b"".join([first, *lines, last])
    while lines and len(lines[0]) <= room:
        room -= len(lines[0])
        kept.append(lines.pop(0))
    return b"".join([first, *kept, rest.format(len(lines)).encode(), last])


def _said_once(sentences: Sequence[str]) -> list[str]:
    """Sentences of a name, a colon and a reason, with no reason twice in a row."""
    said, before = [], ""
    for sentence in sentences:
        name, colon, reason = sentence.partition(": ")
        said.append(f"{name}: the same" if colon and reason == before else sentence)
        before = reason
    return said


def _line(text: str) -> bytes:
    """One line of not too many bytes, whatever a trainer has put into a tag."""
    plain = "".join(char if char.isprintable() else " " for char in text)
    data = plain.encode(errors="replace")
    if len(data) > _LINE_BYTES:
        data = data[: _LINE_BYTES - 3].decode(errors="ignore").encode() + b"..."
    return data + b"\n"


class TerminationMessage:
    """The file.

    Args:
        path: where; empty for nowhere.
        log: told once if it cannot be written.
    """

    def __init__(self, path: str, log: Log) -> None:
        self._path = path
        self._log = log
        self._written = b""
        self._failed = False

    def write(self, message: bytes) -> None:
        """Write it over what was there, unless it is the same; never raises."""
        if not self._path or message == self._written:
            return
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not hang
            fd = os.open(self._path, flags, 0o644)
            try:
                os.pwrite(fd, message, 0)  # first: killed in between, its beginning is right
                os.ftruncate(fd, len(message))
            finally:
                os.close(fd)
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._log.warning(
                    "termination.unwritten",
                    error=f"{self._path}: {error.strerror}",
                    reason="the pod's status will not say what is durable; events and log do",
                )
        else:
            self._written = message


def default_path() -> str:
    """Where Kubernetes looks for it; empty where there is no such file."""
    return DEFAULT if os.path.exists(DEFAULT) else ""
