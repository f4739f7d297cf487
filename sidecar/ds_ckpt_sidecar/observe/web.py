"""The view for people and programs: the status page as HTML, and the same as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

from ds_ckpt_sidecar.observe.view import View, without_secrets

if TYPE_CHECKING:
    from jinja2 import Template

MOST_SAVES = 50
MOST_LISTED = 200
REFRESH_SECONDS = 5
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_PROSE = frozenset({"destination", "error", "reason", "unready"})


class Web:
    """Documents for the HTTP page, each made anew at each request. From any thread.

    Args:
        look: the view of now.
    """

    def __init__(self, look: Callable[[], View]) -> None:
        self._look = look

    def html(self, _accept: str) -> tuple[str, bytes]:
        """The status page."""
        text = page(self._look())
        return "text/html; charset=utf-8", text.encode(errors="replace")

    def json(self, _accept: str) -> tuple[str, bytes]:
        """The view, with the newest saves."""
        view = self._look()
        shown = dataclasses.replace(view, saves=view.saves[:MOST_LISTED])
        text = json.dumps(document(shown), indent=2, allow_nan=False)
        return "application/json", f"{text}\n".encode()


def document(view: View) -> dict[str, Any]:
    """The view as plain values, fit for JSON: no secret in a URL, and None for what is no number.

    ``ready`` is added: the agent is alive, and nothing keeps it from storing.
    """
    trainer = view.trainer.model_dump(by_alias=True) if view.trainer is not None else None
    bare = dataclasses.replace(view, trainer=None)
    values = {**dataclasses.asdict(bare), "trainer": trainer, "ready": ready(view)}
    return presentable(values)


def presentable(values: dict[str, Any]) -> dict[str, Any]:
    """Values fit for JSON and for anybody's eyes: no number that is none, no secret in a URL."""
    plain: dict[str, Any] = _plain("", values)
    return plain


def ready(view: View) -> bool:
    """Nothing keeps the agent from storing, as far as anybody knows."""
    return not view.unready


def headline(view: View) -> str:
    """What is lost if the pod dies now, in one sentence."""
    if view.newest is None and view.trainer is None and not view.saves:
        return "Nothing to lose yet: no training has been seen on this volume."
    steps = f" ({view.exposure_steps:,} steps)" if view.exposure_steps is not None else ""
    lost = f"{span(view.exposure_seconds)} of training{steps}"
    if view.newest is None:
        return f"{lost} would be lost, all of it: nothing is durable yet."
    if view.trainer_state == "unknown":
        return f"Nothing is known of the trainer; of what it saved, {lost} would be lost."
    if view.exposure_steps == 0 or (view.exposure_seconds < 1 and view.trainer_state == "finished"):
        return "Nothing would be lost: all that was trained is durable."
    return f"{lost} would be lost."


def lag(view: View) -> str:
    """How long what was saved has been waiting to become durable, and what will not."""
    waits = ""
    if view.backlog_saves:
        waits = f"{span(view.lag_seconds)}: {counted(view.backlog_saves, 'save')} not durable yet"
    lost = ""
    if view.lost_saves:
        lost = f"{counted(view.lost_saves, 'save')} will not become durable by " + (
            "itself" if view.lost_saves == 1 else "themselves"
        )
    return "; ".join(part for part in (waits, lost) if part) or "none: every save is durable"


def counted(count: int, noun: str) -> str:
    """``1 save``, ``2 saves``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def span(seconds: float | None) -> str:
    """A length of time for people, in its two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or parts or unit == "s":
            parts.append(f"{count} {unit}")
    return " ".join(part for part in parts[:2] if len(parts) == 1 or part[:2] != "0 ")


def legible(text: str) -> str:
    """As it is, but for what a terminal or a browser would obey, or cannot show.

    Control characters, and those that turn the direction of all that follows, become ``?``.
    """
    plain = text.encode(errors="replace").decode()
    return "".join(c if c.isprintable() else "?" for c in plain)


def moment(seconds: float) -> str:
    """A time for people: UTC, whole seconds."""
    try:
        time = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return "unknown"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC")


def page(view: View) -> str:
    """The status page as HTML."""
    rest = Counter(save.state for save in view.saves[MOST_SAVES:])
    shown = dataclasses.replace(view, saves=view.saves[:MOST_SAVES])
    return _template().render(
        view=_legible(document(shown)),
        headline=headline(view),
        level=_level(view),
        lag=lag(view),
        rest=rest.most_common(),
        refresh=REFRESH_SECONDS,
    )


def _level(view: View) -> str:
    """How bad it is: ``bad``, ``late`` or ``well``."""
    if not ready(view) or view.error or view.lost_saves:
        return "bad"
    interval = view.save_interval_seconds
    return "late" if interval and view.lag_seconds > 3 * interval else "well"


@functools.cache
def _template() -> Template:
    """Made at the first request: a page that nobody looks at costs no memory."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(span=span, moment=moment, counted=counted)
    source = resources.files(__package__).joinpath("status.html").read_text(encoding="utf-8")
    return environment.from_string(source)


def _legible(value: Any) -> Any:
    """All texts of a document, each in one line."""
    if isinstance(value, dict):
        return {key: _legible(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_legible(item) for item in value]
    return legible(" ".join(value.splitlines())) if isinstance(value, str) else value


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(key, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str) and name in _PROSE:
        return _URL.sub(lambda found: without_secrets(found.group()), value)
    return value
