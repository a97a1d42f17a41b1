"""What is inside a panel: curves, layers, a heat map or a number, as SVG. Pure: values in, markup out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.dashboards.live import Span
from deploy.pictures.boards import Panel
from deploy.pictures.series import Series
from deploy.pictures.units import Scale, scale_of

from nouscoder.report.charts import nice_ticks
from nouscoder.report.markup import escape

NUM_COLORS = 10
_LEGEND_ROWS, _LEGEND_ROW = 5, 14
_LEFT, _RIGHT, _X_LABELS = 56, 12, 18
_NUM_SHADES = 8


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels. y grows downwards."""

    x: float
    y: float
    w: float
    h: float

    def at(self, point: float, num_points: int) -> float:
        """The x of a point in time."""
        return round(self.x + self.w * point / max(1, num_points - 1), 1)

    def level(self, value: float, ticks: Sequence[float]) -> float:
        """The y of a value; values outside the axis are put at its end."""
        share = (min(max(value, ticks[0]), ticks[-1]) - ticks[0]) / (ticks[-1] - ticks[0])
        return round(self.y + self.h * (1 - share), 1)


def curves(panel: Panel, found: Sequence[Series], box: Box, span: Span) -> list[str]:
    """Lines over time, or layers if the panel is stacked; below them each name with its last and largest value."""
    layers = _stacked(found) if panel.stacked else [series.values for series in found]
    drawn = [value for layer in layers for value in layer if value is not None]
    low = min(drawn) if panel.low is None else panel.low
    high = max(drawn) if panel.high is None else panel.high
    scale = scale_of(panel.unit, max(abs(low), abs(high)))
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-6):
        high = low + (scale.divisor if low == 0 else abs(low))
    ticks = [tick * scale.divisor for tick in nice_ticks(low / scale.divisor, high / scale.divisor)]
    plot = _plot(box, min(len(found), _LEGEND_ROWS) * _LEGEND_ROW)
    parts = [*_grid(plot, ticks, scale), *_time_axis(plot, span), *_bounds(panel, plot, ticks)]
    below: Sequence[float | None] = [None] * span.num_points
    for index, (series, layer) in enumerate(zip(found, layers, strict=True)):
        if panel.stacked:
            parts.append(_area(index, layer, below, plot, ticks))
            below = layer
        parts.append(_line(index, series.name, layer, plot, ticks))
    return parts + _legend(found, panel.unit, plot, box)


def _stacked(found: Sequence[Series]) -> list[tuple[float | None, ...]]:
    layers, below = [], [0.0] * len(found[0].values)
    for series in found:
        below = [before + (value or 0.0) for before, value in zip(below, series.values, strict=True)]
        layers.append(tuple(below))
    seen = [any(series.values[point] is not None for series in found) for point in range(len(below))]
    return [tuple(value if there else None for value, there in zip(layer, seen, strict=True)) for layer in layers]


def _plot(box: Box, below: float) -> Box:
    return Box(box.x + _LEFT, box.y + 6, box.w - _LEFT - _RIGHT, box.h - _X_LABELS - below - 22)


def _grid(plot: Box, ticks: Sequence[float], scale: Scale) -> list[str]:
    parts = []
    for tick in ticks:
        y = plot.level(tick, ticks)
        parts.append(f'<path class="grid" d="M{plot.x} {y}h{plot.w}"/>')
        parts.append(f'<text class="soft end" x="{plot.x - 6}" y="{y + 3.5}">{scale.text(tick)}</text>')
    return parts


def _time_axis(plot: Box, span: Span) -> list[str]:
    """Minutes since the start, at most about six."""
    minutes = (span.end_s - span.start_s) / 60
    every = next(step for step in (0.5, 1, 2, 5, 10, 15, 30, 60, 120, 360, 1440, 1e9) if minutes / step <= 6)
    parts, at = [], 0.0
    while at <= minutes:
        x = round(plot.x + plot.w * at / minutes, 1)
        label = f"{at:g}" + (" min" if at == 0 else "")
        parts.append(f'<text class="soft mid" x="{x}" y="{plot.y + plot.h + 14}">{label}</text>')
        at += every
    return parts


def _bounds(panel: Panel, plot: Box, ticks: Sequence[float]) -> list[str]:
    """The thresholds that are inside the axis."""
    inside = [one for one in panel.thresholds if one.value is not None and ticks[0] < one.value < ticks[-1]]
    return [
        f'<path class="bound {one.color}" d="M{plot.x} {plot.level(one.value or 0.0, ticks)}h{plot.w}"/>'
        for one in inside
    ]


def _runs(layer: Sequence[float | None]) -> list[list[int]]:
    """The points of each stretch without a gap."""
    runs: list[list[int]] = [[]]
    for point, value in enumerate(layer):
        if value is not None:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _corners(run: Sequence[int], layer: Sequence[float | None], plot: Box, ticks: Sequence[float]) -> list[str]:
    """Corners of a stretch; a point between two others of its height is left out."""
    levels = [plot.level(layer[point] or 0.0, ticks) for point in run]
    kept = [
        index
        for index in range(len(run))
        if index in (0, len(run) - 1) or not levels[index - 1] == levels[index] == levels[index + 1]
    ]
    return [f"{plot.at(run[index], len(layer))} {levels[index]}" for index in kept]


def _line(index: int, name: str, layer: Sequence[float | None], plot: Box, ticks: Sequence[float]) -> str:
    path = "".join(f"M{'L'.join(_corners(run, layer, plot, ticks))}" for run in _runs(layer) if len(run) > 1)
    dots = "".join(
        f'<circle class="f{index % NUM_COLORS}" cx="{x}" cy="{y}" r="2"/>'
        for run in _runs(layer)
        if len(run) == 1
        for x, y in [_corners(run, layer, plot, ticks)[0].split()]
    )
    return f'<path class="line c{index % NUM_COLORS}" d="{path}"><title>{escape(name)}</title></path>{dots}'


def _area(
    index: int, layer: Sequence[float | None], below: Sequence[float | None], plot: Box, ticks: Sequence[float]
) -> str:
    paths = []
    floor = [ticks[0] if value is None else value for value in below]
    for run in _runs(layer):
        corners = _corners(run, layer, plot, ticks) + _corners(run, floor, plot, ticks)[::-1]
        paths.append(f"M{'L'.join(corners)}z")
    return f'<path class="area f{index % NUM_COLORS}" d="{"".join(paths)}"/>'


def _legend(found: Sequence[Series], unit: str, plot: Box, box: Box) -> list[str]:
    """A row for each series. If there are too many, those with the largest values, and how many more there are."""
    shown = list(range(len(found)))
    if len(found) > _LEGEND_ROWS:
        largest = sorted(shown, key=lambda index: -max(found[index].present))
        shown = sorted(largest[: _LEGEND_ROWS - 1])
    top = plot.y + plot.h + _X_LABELS + 10
    right = box.x + box.w - _RIGHT
    heads = ((right - 66, "last"), (right, "max"))
    parts = [f'<text class="soft end" x="{x}" y="{top}">{head}</text>' for x, head in heads]
    for row, index in enumerate(shown):
        series, y = found[index], top + (row + 1) * _LEGEND_ROW - 2
        parts.append(f'<rect class="f{index % NUM_COLORS}" x="{box.x + 14}" y="{y - 8}" width="10" height="8" rx="2"/>')
        parts.append(f'<text x="{box.x + 30}" y="{y}">{escape(series.name)}</text>')
        parts.append(f'<text class="end" x="{right - 66}" y="{y}">{_text(unit, series.present[-1])}</text>')
        parts.append(f'<text class="end" x="{right}" y="{y}">{_text(unit, max(series.present))}</text>')
    left_out = [max(found[index].present) for index in range(len(found)) if index not in shown]
    if left_out:
        y = top + _LEGEND_ROWS * _LEGEND_ROW - 2
        text = f"and {len(left_out)} more, at most {_text(unit, max(left_out))}"
        parts.append(f'<text class="soft" x="{box.x + 30}" y="{y}">{text}</text>')
    return parts


def _text(unit: str, value: float) -> str:
    return scale_of(unit, value).text(value)


def heat_map(panel: Panel, found: Sequence[Series], box: Box, span: Span) -> list[str]:
    """A row for each bucket of a histogram, darker where more was counted. Buckets add up, so their differences."""
    ordered = sorted(found, key=lambda series: float(series.labels["le"]))
    rows, before = [], [0.0] * span.num_points
    for series in ordered:
        now = [value or 0.0 for value in series.values]
        rows.append([max(0.0, value - below) for value, below in zip(now, before, strict=True)])
        before = now
    largest = max(max(row) for row in rows) or 1.0
    plot = _plot(box, 0)
    high, wide = plot.h / len(rows), plot.w / span.num_points
    parts = _time_axis(plot, span)
    for number, (series, row) in enumerate(zip(ordered, rows, strict=True)):
        y = plot.y + plot.h - (number + 1) * high
        bound = float(series.labels["le"])
        text = "more" if bound == float("inf") else _text(panel.unit, bound)
        parts.append(f'<text class="soft end" x="{plot.x - 6}" y="{y + high / 2 + 3.5:.1f}">{text}</text>')
        parts += _cells([round(_NUM_SHADES * value / largest + 0.49) for value in row], plot.x, y, wide, high)
    return parts


def _cells(shades: Sequence[int], x: float, y: float, wide: float, high: float) -> list[str]:
    """Neighbours of one shade are one rectangle. The shade 0 is left blank."""
    parts, start = [], 0
    for point in range(1, len(shades) + 1):
        if point < len(shades) and shades[point] == shades[start]:
            continue
        if shades[start]:
            place = (
                f'x="{x + start * wide:.1f}" y="{y:.1f}" width="{(point - start) * wide:.1f}" height="{high - 1:.1f}"'
            )
            parts.append(f'<rect class="f0" opacity="{shades[start] / _NUM_SHADES:.2f}" {place}/>')
        start = point
    return parts


def number(panel: Panel, found: Sequence[Series], box: Box) -> list[str]:
    """The last value, in the colour of its threshold, over a small curve."""
    series = found[0]
    last = series.present[-1]
    scale = scale_of(panel.unit, last)
    text = panel.words.get(f"{last:g}", scale.text(last))
    color = panel.color(last)
    ticks = nice_ticks(min(0.0, *series.present), max(series.present))
    plot = Box(box.x + 1, box.y + box.h * 0.5, box.w - 2, box.h * 0.5 - 1)
    floor = [ticks[0]] * len(series.values)
    corners = [
        "L".join(_corners(run, series.values, plot, ticks) + _corners(run, floor, plot, ticks)[::-1])
        for run in _runs(series.values)
    ]
    return [
        f'<path class="spark {color}" d="{"".join(f"M{one}z" for one in corners)}"/>',
        f'<text class="big {color}" x="{box.x + box.w / 2}" y="{box.y + box.h * 0.52}">{escape(text)}</text>',
    ]
