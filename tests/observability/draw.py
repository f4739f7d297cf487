"""Draws the dashboard from a live Prometheus without Grafana, and says what is wrong with it.

Variables are resolved as Grafana does: several values become an alternative of escaped ones, "All"
its own value, and ``$__rate_interval`` follows the range and the interval of scraping.

``python -m tests.observability.draw DASHBOARD URL PNG SECONDS``
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

POINTS = 300
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")


@dataclass(frozen=True)
class Problem:
    """What is wrong with one query: refused, without any number, or always the same."""

    panel: str
    expression: str
    kind: Literal["error", "empty", "constant"]
    text: str = ""


class Scope:
    """Values of the variables: the dashboard's own, or those that are ``chosen``."""

    def __init__(
        self,
        dashboard: Mapping[str, Any],
        seconds: float,
        scrape: float,
        chosen: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.step = max(scrape, seconds / POINTS)
        interval = max(self.step + scrape, 4 * scrape)
        self._values = {
            "__rate_interval": f"{math.ceil(interval * 1000)}ms",
            "__interval": f"{math.ceil(self.step * 1000)}ms",
            "__range": f"{math.ceil(seconds)}s",
            "__range_s": f"{math.ceil(seconds)}",
        }
        for variable in dashboard["templating"]["list"]:
            name = variable["name"]
            if chosen and name in chosen:
                self._values[name] = _alternatives(chosen[name])
            elif variable.get("includeAll"):
                self._values[name] = variable["allValue"]

    def substitute(self, expression: str) -> str:
        """An expression with its variables replaced; what is none stays (``$1`` of a regex)."""
        return VARIABLE.sub(
            lambda found: self._values.get(found[1] or found[2], found[0]), expression
        )


def _alternatives(values: Sequence[str]) -> str:
    escaped = [re.sub(r"[\\^$*+?.()|\[\]{}]", r"\\\\\g<0>", value) for value in values]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All panels, those in closed rows included."""
    return [one for panel in dashboard["panels"] for one in (panel, *panel.get("panels", []))]


def expressions(dashboard: Mapping[str, Any]) -> Iterator[str]:
    """What is asked by panels and annotations."""
    for panel in panels(dashboard):
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (one["expr"] for one in dashboard["annotations"]["list"] if "expr" in one)


class _Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **parameters: object) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=60) as answer:
            return json.load(answer)["data"]

    def scrape_seconds(self) -> float:
        """The interval that its targets are scraped at."""
        found = [
            re.fullmatch(r"(\d+)(ms|s|m)", target["scrapeInterval"])
            for target in self.get("targets", state="active")["activeTargets"]
        ]
        units = {"ms": 0.001, "s": 1.0, "m": 60.0}
        return min((float(one[1]) * units[one[2]] for one in found if one), default=15.0)


@dataclass(frozen=True)
class _Series:
    labels: dict[str, str]
    name: str
    times: list[float]
    values: list[float]
    target: dict[str, Any]


def draw(
    dashboard_json: str | Path,
    prometheus_url: str,
    png_path: str | Path,
    seconds: float,
    chosen: Mapping[str, Sequence[str]] | None = None,
) -> list[Problem]:
    """Draw the last ``seconds`` of every panel to a PNG.

    Args:
        dashboard_json: the file.
        prometheus_url: without a path.
        png_path: to write.
        seconds: until now.
        chosen: values of variables by name; of the others "All".
    """
    dashboard = json.loads(Path(dashboard_json).read_text())
    server = _Prometheus(prometheus_url)
    scope = Scope(dashboard, seconds, server.scrape_seconds(), chosen)
    end = time.time()
    problems: list[Problem] = []

    def ask(title: str, target: dict[str, Any]) -> list[_Series]:
        expression = scope.substitute(target["expr"])
        try:
            data = server.get(
                "query_range", query=expression, start=end - seconds, end=end, step=scope.step
            )
        except urllib.error.HTTPError as error:
            problems.append(Problem(title, expression, "error", json.load(error).get("error", "")))
            return []
        series = [_series(one, target, end) for one in data["result"]]
        numbers = [[value for value in one.values if not math.isnan(value)] for one in series]
        if not any(numbers):
            problems.append(Problem(title, expression, "empty"))
        elif all(len(set(one)) <= 1 for one in numbers):
            problems.append(Problem(title, expression, "constant"))
        return series

    marks = [
        value / 1000 - end
        for one in dashboard["annotations"]["list"]
        for series in ask(one["name"], one)
        for value in set(series.values)
    ]
    everything = panels(dashboard)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in everything)
    figure = plt.figure(figsize=(24, height * 0.42))
    for panel in everything:
        place = panel["gridPos"]
        axes = figure.add_axes(
            (
                place["x"] / 24 + 0.025,
                1 - (place["y"] + place["h"] - min(1.6, place["h"] / 2)) / height,
                place["w"] / 24 - 0.035,
                max(0.1, place["h"] - 2.6) / height,
            )
        )
        axes.set_title(panel["title"], fontsize=9, loc="left")
        series = [one for target in panel.get("targets", []) for one in ask(panel["title"], target)]
        _DRAWN[panel["type"]](axes, panel, series, [m for m in marks if -seconds <= m <= 0])
    figure.savefig(png_path, dpi=60)
    plt.close(figure)
    return problems


def _series(result: dict[str, Any], target: dict[str, Any], end: float) -> _Series:
    labels = result["metric"]
    legend = target.get("legendFormat", "")
    name = re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1], ""), legend)
    times = [point[0] - end for point in result["values"]]
    return _Series(labels, name, times, [float(point[1]) for point in result["values"]], target)


def _properties(panel: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """Unit and custom fields of a target's series."""
    found: dict[str, Any] = {"unit": panel["fieldConfig"]["defaults"]["unit"]}
    named = {"byFrameRefID": target.get("refId"), "byName": target.get("legendFormat")}
    for override in panel["fieldConfig"].get("overrides", []):
        matcher = override["matcher"]
        if named.get(matcher["id"]) == matcher["options"]:
            found |= {one["id"]: one["value"] for one in override["properties"]}
    return found


def human(value: float, unit: str) -> str:
    """A number as Grafana would show it, roughly."""
    if unit == "s":
        for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return f"{value * 1000:.3g} ms"
    if unit in ("bytes", "binBps"):
        for power, name in ((3, "Gi"), (2, "Mi"), (1, "Ki")):
            if abs(value) >= 1024**power:
                return f"{value / 1024**power:.3g} {name}B{'/s' if unit == 'binBps' else ''}"
    if unit == "percentunit":
        return f"{value:.0%}"
    return ["yes", "no"][not value] if unit == "bool_yes_no" else f"{value:.4g}"


def _row(axes: Any, panel: dict[str, Any], *_: Any) -> None:
    axes.axis("off")
    axes.set_title("", loc="left")
    axes.text(0, 0, panel["title"], fontsize=13, weight="bold", va="bottom")


def _lines(axes: Any, panel: dict[str, Any], series: list[_Series], marks: list[float]) -> None:
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.yaxis.set_major_formatter(lambda value, _: human(value, unit))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if custom.get("stacking", {}).get("mode") == "normal" and series:
        times = sorted({moment for one in series for moment in one.times})
        values = [dict(zip(one.times, one.values, strict=True)) for one in series]
        heights = [[one.get(moment, 0.0) for moment in times] for one in values]
        axes.stackplot(times, heights, labels=[one.name for one in series], alpha=0.6)
    else:
        for one in series:
            dashed = "custom.lineStyle" in _properties(panel, one.target)
            axes.plot(one.times, one.values, "--" if dashed else "-", label=one.name, lw=1)
    for mark in marks:
        axes.axvline(mark, color="green", lw=0.4, ls=":")
    if series:
        axes.set_ylim(bottom=panel["fieldConfig"]["defaults"].get("min"))
        axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4)
    else:
        axes.text(0.5, 0.5, "No data", ha="center", transform=axes.transAxes)


def _figures(axes: Any, panel: dict[str, Any], series: list[_Series], _: list[float]) -> None:
    axes.axis("off")
    parts = [
        human(one.values[-1], _properties(panel, one.target)["unit"])
        + (f" {one.name}" if len(series) > 1 else "")
        for one in series
    ]
    shown = "\n".join(parts) or panel["fieldConfig"]["defaults"].get("noValue", "No data")
    axes.text(0.5, 0.5, shown, ha="center", va="center", fontsize=20 if len(parts) < 2 else 15)


def _table(axes: Any, panel: dict[str, Any], series: list[_Series], _: list[float]) -> None:
    """Merged by the labels that all queries have, as Grafana's transformation does."""
    axes.axis("off")
    options = panel["transformations"][1]["options"]
    renamed = {
        name: options["renameByName"][name]
        for name in sorted(options["indexByName"], key=options["indexByName"].__getitem__)
    }
    if not series:
        axes.text(0.5, 0.5, "No data", ha="center")
        return
    labels: dict[str, set[str]] = {}
    for one in series:
        labels.setdefault(one.target["refId"], set()).update(one.labels)
    common = sorted(set.intersection(*labels.values()))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for one in series:
        line = lines.setdefault(tuple(one.labels.get(label, "") for label in common), {})
        line |= {renamed[label]: value for label, value in one.labels.items() if label in renamed}
        if one.name:
            line[one.name] = human(one.values[-1], _properties(panel, one.target)["unit"])
    columns = [title for title in renamed.values() if any(title in line for line in lines.values())]
    cells = [[line.get(column, "-") for column in columns] for line in lines.values()]
    drawn = axes.table(cells, colLabels=columns, loc="upper center", cellLoc="left")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)


_DRAWN = {"row": _row, "timeseries": _lines, "stat": _figures, "table": _table}


if __name__ == "__main__":
    for found in draw(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])):
        print(found)
