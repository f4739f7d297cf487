"""Finding node manifests. The periodic scan is the truth; inotify is a hint.

inotify overflows, runs out of watches and does not see network volumes, so nothing depends on it:
it only ends a wait early.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ds_ckpt_store.contract.manifest import NodeManifest
from ds_ckpt_store.contract.volume import Volume
from ds_ckpt_store.errors import ManifestError, UnknownSchemaError


@dataclass(frozen=True)
class Found:
    """One file of the outbox: a manifest, or why it is none; when, in seconds, it was written."""

    name: str
    manifest: NodeManifest | None
    verdict: Literal["good", "bad", "newer", "unreadable"] = "good"
    reason: str = ""
    written: float = 0.0


class Outbox:
    """The outbox of one volume. A file is read again only when it changes."""

    def __init__(self, volume: Volume, node: str) -> None:
        self._volume = volume
        self._node = node
        self._read: dict[str, tuple[object, Found]] = {}

    def scan(self) -> list[Found]:
        """Every file in the outbox, oldest save first."""
        read = {}
        for name in self._volume.manifests():
            state = self._volume.fs.stat(f"{self._volume.outbox}/{name}")
            if state is None:
                continue
            known = self._read.get(name)
            if known is None or known[0] != state.identity or known[1].verdict == "unreadable":
                known = (state.identity, self._judge(name, state.mtime_ns / 1e9))
            read[name] = known
        self._read = read
        return [found for _, found in read.values()]

    def _judge(self, name: str, written: float) -> Found:
        try:
            manifest = self._volume.manifest(name)
        except UnknownSchemaError as error:
            return Found(name, None, "newer", str(error))
        except ManifestError as error:
            return Found(name, None, "bad", str(error))
        except OSError as error:
            return Found(name, None, "unreadable", f"{self._volume.outbox}/{name}: {error}")
        if manifest.node != self._node:
            reason = f"it is of node {manifest.node}, and this volume is node {self._node}"
            return Found(name, None, "bad", reason)
        return Found(name, manifest, written=written)


def watch(folder: str, wake: threading.Event, warn: Callable[[str], None]) -> Callable[[], None]:
    """Set ``wake`` when something happens in a folder; returns how to stop.

    Where the system gives no notifications, it says so once and the scan alone does the work.
    """
    from watchdog.events import FileSystemEvent, FileSystemEventHandler
    from watchdog.observers import Observer

    class Wake(FileSystemEventHandler):
        def on_any_event(self, event: FileSystemEvent) -> None:
            if event.event_type not in ("opened", "closed_no_write"):
                wake.set()

    observer = Observer()
    try:
        observer.schedule(Wake(), folder, recursive=False)
        observer.start()
    except OSError as error:
        warn(f"no file notifications on {folder} ({error}); the periodic scan does it alone")
        return lambda: None

    def stop() -> None:
        observer.stop()
        observer.join(timeout=5)

    return stop
