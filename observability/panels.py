"""How a panel of the dashboard is made: one look for all, each with unit and description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
GREEN, YELLOW, RED, PLAIN = "green", "yellow", "red", "text"


@dataclass(frozen=True)
class Query:
    """One query of a panel.

    Attributes:
        expression: PromQL.
        legend: how its series are called; of a table, its column.
        unit: if not the panel's.
        dashed: its lines are what others are measured against.
        levels: of a table's column, as :func:`levels` takes them.
    """

    expression: str
    legend: str
    unit: str = ""
    dashed: bool = False
    levels: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Text:
    """What a panel says in words.

    Attributes:
        title: of the panel.
        tells: what it shows.
        do: what to do about it.
        runbook: the alert whose section of the runbooks goes on from here; empty: none.
    """

    title: str
    tells: str
    do: str
    runbook: str = ""

    @property
    def description(self) -> str:
        """Shown when one points at the panel's "i"."""
        return f"{self.tells}\n\n**What to do:** {self.do}"

    @property
    def links(self) -> list[dashboard.DashboardLink]:
        """To the runbook."""
        if not self.runbook:
            return []
        link = dashboard.DashboardLink(f"Runbook: {self.runbook}")
        link.type(models.DashboardLinkType.LINK).url(f"${{runbooks}}#{self.runbook.lower()}")
        return [link.target_blank(True)]


def levels(*steps: tuple[float, str], below: str = GREEN) -> dashboard.ThresholdsConfig:
    """Colours: one below all steps, and one from each on."""
    thresholds = [models.Threshold(None, below), *(models.Threshold(*step) for step in steps)]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(thresholds)


def lines(
    text: Text,
    unit: str,
    queries: Sequence[Query],
    *,
    width: int = 8,
    height: int = 8,
    steps: Sequence[tuple[float, str]] = (),
    stacked: bool = False,
    bars: bool = False,
) -> timeseries.Panel:
    """Series over time; ``steps`` are drawn as lines across."""
    panel = (
        timeseries.Panel()
        .title(text.title)
        .description(text.description)
        .links(text.links)
        .datasource(SOURCE)
        .span(width)
        .height(height)
        .unit(unit)
        .min(0)
        .line_width(1)
        .show_points(common_models.VisibilityMode.NEVER)
        .fill_opacity(60 if bars else 30 if stacked else 8)
        .thresholds(levels(*steps))
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .calcs(["lastNotNull"])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    if steps:
        dashed = common_models.GraphThresholdsStyleMode.DASHED
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(dashed))
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if bars:
        panel.draw_style(common_models.GraphDrawStyle.BARS)
    for reference, query in _lettered(queries):
        panel.with_target(_target(reference, query))
        properties = _of_line(query)
        if properties:
            panel.override_by_query(reference, properties)
    return panel


def figures(
    text: Text,
    unit: str,
    queries: Sequence[Query],
    *,
    width: int = 4,
    height: int = 4,
    steps: Sequence[tuple[float, str]] = (),
    below: str = GREEN,
    decimals: int | None = None,
    none: str = "",
) -> stat.Panel:
    """The last value of each query, large; ``none`` is shown if there is none."""
    several = len(queries) > 1
    mode = common_models.BigValueTextMode
    panel = (
        stat.Panel()
        .title(text.title)
        .description(text.description)
        .links(text.links)
        .datasource(SOURCE)
        .span(width)
        .height(height)
        .unit(unit)
        .thresholds(levels(*steps, below=below))
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .justify_mode(common_models.BigValueJustifyMode.AUTO)
        .text_mode(mode.VALUE_AND_NAME if several else mode.VALUE)
        .orientation(common_models.VizOrientation.AUTO)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
    )
    if decimals is not None:
        panel.decimals(decimals)
    if none:
        panel.no_value(none)
    for reference, query in _lettered(queries):
        panel.with_target(_target(reference, query))
        if query.unit:
            panel.override_by_query(reference, [models.DynamicConfigValue("unit", query.unit)])
    return panel


def rows(
    text: Text,
    labels: Mapping[str, str],
    queries: Sequence[Query],
    *,
    height: int = 6,
    worst: str = "",
) -> table.Panel:
    """A table: a row for each combination of labels, a column for each query.

    Args:
        text: what it says.
        labels: to the titles of their columns; others are not shown.
        queries: a column each; one without legend gives labels only.
        height: in units of the grid.
        worst: the column that it is sorted by, the greatest first.
    """
    panel = (
        table.Panel()
        .title(text.title)
        .description(text.description)
        .links(text.links)
        .datasource(SOURCE)
        .span(24)
        .height(height)
        .unit("none")
        .no_value("-")
        .filterable(True)
        .cell_height(common_models.TableCellHeight.SM)
        .with_transformation(models.DataTransformerConfig("merge", options={}))
        .with_transformation(_columns(labels, queries))
    )
    if worst:
        panel.sort_by([common.TableSortByFieldState().display_name(worst).desc(True)])
    for reference, query in _lettered(queries):
        panel.with_target(_target(reference, query).instant().format(PromQueryFormat.TABLE))
        if query.legend:
            panel.override_by_name(query.legend, _of_column(query))
    return panel


def _columns(labels: Mapping[str, str], queries: Sequence[Query]) -> models.DataTransformerConfig:
    """Order and names of the columns; a lone query's value has no letter."""
    values = {
        "Value" if len(queries) == 1 else f"Value #{reference}": query.legend
        for reference, query in _lettered(queries)
    }
    shown = {**labels, **{name: title for name, title in values.items() if title}}
    hidden = ["Time", *(name for name, title in values.items() if not title)]
    return models.DataTransformerConfig(
        "organize",
        options={
            "excludeByName": dict.fromkeys(hidden, True),
            "indexByName": {name: place for place, name in enumerate(shown)},
            "renameByName": shown,
        },
    )


def _of_column(query: Query) -> list[models.DynamicConfigValue]:
    properties = [models.DynamicConfigValue("unit", query.unit)]
    if query.levels:
        properties += [
            models.DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
            models.DynamicConfigValue("thresholds", levels(*query.levels).build()),
        ]
    return properties


def _of_line(query: Query) -> list[models.DynamicConfigValue]:
    properties = [models.DynamicConfigValue("unit", query.unit)] if query.unit else []
    if query.dashed:
        properties += [
            models.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [6, 6]}),
            models.DynamicConfigValue("custom.fillOpacity", 0),
        ]
    return properties


def _target(reference: str, query: Query) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .datasource(SOURCE)
        .ref_id(reference)
        .expr(query.expression)
        .legend_format(query.legend)
        .range()
    )


def _lettered(queries: Sequence[Query]) -> list[tuple[str, Query]]:
    return [(chr(ord("A") + place), query) for place, query in enumerate(queries)]
