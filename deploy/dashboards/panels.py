"""A dashboard as rows of panels, each with a unit, a description and expressions.

`grafana_foundation_sdk` defines Grafana's JSON. This module defines what all dashboards share: the variables, the
widths of panels, the style of legends and thresholds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

RATE = "$__rate_interval"
WINDOW = "$window"  # for rare events: a batch, an update of the policy
SCOPE = 'namespace="$namespace",app_kubernetes_io_instance="$release"'

_SOURCE = models.DataSourceRef(type_val="prometheus", uid="$datasource")
_COLORS = ("green", "orange", "red")


class Kind(StrEnum):
    """How a panel shows its series."""

    LINES = "lines"
    STACKED = "stacked"
    NUMBER = "number"
    HEATMAP = "heatmap"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. `warn` and `bad` are thresholds of its colour; `bad` < `warn` means that less is worse.

    `words` [n] are shown in place of the values 0 to n - 1. `low` and `high` bound the axis. `width` is out of 24.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.LINES
    warn: float | None = None
    bad: float | None = None
    low: float | None = 0
    high: float | None = None
    words: tuple[str, ...] = ()
    width: int = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """A number that the reader types at the top of a dashboard; expressions use it as $name."""

    name: str
    title: str
    value: str


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. `finds` is a metric of every installation shown; its labels give the values of the variables."""

    uid: str
    title: str
    description: str
    finds: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    settings: tuple[Setting, ...] = ()


def metric(name: str, *more: str) -> str:
    """A selector of a metric of the project in the chosen namespace and release; `more` are further matchers."""
    return f"nouscoder_{name}{{{','.join((SCOPE, *more))}}}"


def per_second(name: str, by: str = "", over: str = RATE) -> str:
    """The rate of a counter, over all processes."""
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping} (rate({metric(name)}[{over}]))"


def share(part: str, whole: str) -> str:
    """`part` / `whole`, and 0 while `whole` is 0."""
    return f"{part} / clamp_min({whole}, 1e-9)"


def quantiles(name: str, over: str = RATE) -> tuple[Query, ...]:
    """Median, 95th and 99th percentile of a histogram."""
    rates = f"sum by (le) (rate({metric(f'{name}_bucket')}[{over}]))"
    return tuple(
        Query(f"histogram_quantile({quantile}, {rates})", f"p{quantile * 100:.0f}") for quantile in (0.5, 0.95, 0.99)
    )


def buckets(name: str, over: str = RATE) -> tuple[Query, ...]:
    """A histogram's buckets for a heat map."""
    return (Query(f"sum by (le) (increase({metric(f'{name}_bucket')}[{over}]))", "{{le}}"),)


def as_json(board: Board) -> str:
    """The dashboard as Grafana's JSON. Deterministic."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["nouscoder"])
        .timezone("browser")
        .refresh("10s")
        .time("now-1h", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("NousCoder")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["nouscoder"])
            .include_vars(True)
            .keep_time(True)
            .as_dropdown(True)
        )
    )
    for variable in _variables(board):
        builder = builder.with_variable(variable)
    numbers = itertools.count(1)
    for title, panels in board.rows:
        builder = builder.with_row(dashboard.Row(title).id(next(numbers)))
        for panel in panels:
            builder = builder.with_panel(_BUILD[panel.kind](panel).id(next(numbers)))
    text = json.dumps(builder.build(), cls=JSONEncoder, indent=1, sort_keys=True)
    return text + "\n"


Variable = (
    dashboard.DatasourceVariable | dashboard.QueryVariable | dashboard.IntervalVariable | dashboard.TextBoxVariable
)


def _variables(board: Board) -> Sequence[Variable]:
    def labels(name: str, title: str, query: str) -> dashboard.QueryVariable:
        return (
            dashboard.QueryVariable(name)
            .label(title)
            .datasource(_SOURCE)
            .query(query)
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
        )

    choices = ("1m", "5m", "15m", "1h", "6h")
    window = (
        dashboard.IntervalVariable("window")
        .label("Window")
        .description("Period over which rare events are added up; longer than a batch takes")
        .values(",".join(choices))
        .options([models.VariableOption(text=choice, value=choice, selected=choice == "5m") for choice in choices])
        .current(models.VariableOption(text="5m", value="5m", selected=True))
    )
    return (
        dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
        labels("namespace", "Namespace", f"label_values({board.finds}, namespace)"),
        labels(
            "release",
            "Release",
            f'label_values({board.finds}{{namespace="$namespace"}}, app_kubernetes_io_instance)',
        ),
        window,
        *(_text_box(setting) for setting in board.settings),
    )


def _text_box(setting: Setting) -> dashboard.TextBoxVariable:
    value = models.VariableOption(text=setting.value, value=setting.value, selected=True)
    box = dashboard.TextBoxVariable(setting.name).label(setting.title).default_value(setting.value)
    return box.current(value).options([value])


AnyPanel = TypeVar("AnyPanel", timeseries.Panel, stat.Panel, heatmap.Panel)


def _common(builder: AnyPanel, panel: Panel) -> AnyPanel:
    for query, letter in zip(panel.queries, "ABCDEFGHIJ", strict=False):
        target = prometheus.Dataquery().expr(query.expr).ref_id(letter).legend_format(query.legend or "__auto")
        if panel.kind is Kind.HEATMAP:
            target = target.format(PromQueryFormat.HEATMAP)
        builder = builder.with_target(target)
    builder = builder.title(panel.title).description(panel.description).unit(panel.unit).datasource(_SOURCE)
    return builder.span(panel.width).height(4 if panel.kind is Kind.NUMBER else 8)


def _lines(panel: Panel) -> timeseries.Panel:
    builder = _common(timeseries.Panel(), panel)
    builder = (
        builder.line_width(1)
        .fill_opacity(10)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.TABLE)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    if panel.low is not None:
        builder = builder.min(panel.low)
    if panel.high is not None:
        builder = builder.max(panel.high)
    if panel.warn is not None or panel.bad is not None:
        style = common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
        builder = builder.thresholds(_thresholds(panel)).thresholds_style(style)
    return builder


def _stacked(panel: Panel) -> timeseries.Panel:
    stack = common.StackingConfig().mode(common_models.StackingMode.NORMAL)
    return _lines(panel).stacking(stack).fill_opacity(40)


def _number(panel: Panel) -> stat.Panel:
    builder = _common(stat.Panel(), panel)
    builder = (
        builder.thresholds(_thresholds(panel))
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    if panel.words:
        named = {str(value): models.ValueMappingResult(text=word) for value, word in enumerate(panel.words)}
        builder = builder.mappings([models.ValueMap(options=named)])
    return builder


def _heatmap(panel: Panel) -> heatmap.Panel:
    return (
        _common(heatmap.Panel(), panel)
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .color(heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Blues").steps(32))
    )


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    """Green, then orange from `warn`, red from `bad`; reversed if less is worse."""
    bounds = [(bound, color) for bound, color in ((panel.warn, "orange"), (panel.bad, "red")) if bound is not None]
    colors = [_COLORS[0], *(color for _, color in bounds)]
    values = [bound for bound, _ in bounds]
    if panel.warn is not None and panel.bad is not None and panel.bad < panel.warn:
        values.reverse()
        colors.reverse()
    steps = [models.Threshold(value=None, color=colors[0])]
    steps += [models.Threshold(value=value, color=color) for value, color in zip(values, colors[1:], strict=True)]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


_BUILD: Mapping[Kind, Callable[[Panel], timeseries.Panel | stat.Panel | heatmap.Panel]] = {
    Kind.LINES: _lines,
    Kind.STACKED: _stacked,
    Kind.NUMBER: _number,
    Kind.HEATMAP: _heatmap,
}
