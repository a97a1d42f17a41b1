"""Charts as SVG text. Pure: data in, markup out.

Colours come from the page's custom properties (`series-0` to `series-7`), so one chart works in light, dark and print.
Series differ in dash pattern and name as well as in colour. The attribute `data-chart` holds the values of a chart; the
page's script shows them at the pointer or with the arrow keys. `table` shows the same values without a script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from nouscoder.report.markup import escape

Values = tuple[float | None, ...]

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 34
_NUM_TICKS, _NUM_X_TICKS = 5, 9
_OUTLIER = 10  # a value so many times the median flattens the others
_NEARLY_0 = 1000  # a value so many times below the median would flatten them on a logarithmic axis
_FEW = 24  # so many values of a joined curve are dots too
# Within these bounds a difference of two values and its logarithm are finite.
_SMALLEST, _LARGEST = 1e-200, 1e200


@dataclass(frozen=True, slots=True)
class Series:
    """One curve or one layer. `values` [points] are None where a value is missing.

    A curve has a gap there, unless it is `joined`. `errors` [points] are drawn as whiskers of this length up and down.
    """

    name: str
    values: Values
    errors: Values = ()
    joined: bool = False

    def error(self, point: int) -> float | None:
        """The error of a point, None when it has none."""
        return self.errors[point] if self.errors else None

    def text(self, point: int) -> str:
        """A value as it is shown, with its error."""
        return with_error(self.values[point], self.error(point))


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of lines or layered bars. `xs` [points] ascend; `low`, `high` bound the axis; `unit` follows a value."""

    title: str
    x_label: str
    xs: tuple[float, ...]
    series: tuple[Series, ...]
    unit: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""
    is_layered: bool = False

    def bounds(self) -> list[float]:
        """The values and the ends of their whiskers."""
        return [
            value + sign * (series.error(point) or 0.0)
            for series in self.series
            for point, value in enumerate(series.values)
            if value is not None
            for sign in (-1, 1)
        ]

    @property
    def is_logarithmic(self) -> bool:
        """Whether an outlier would flatten the curves. Values that are 0, below or nearly 0 have no place there."""
        found = [] if self.is_layered or self.high is not None else self.bounds()
        middle = median(found) if found else 0.0
        return _SMALLEST < middle < _NEARLY_0 * min(found) and _LARGEST > max(found) > _OUTLIER * middle


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to pixels along one side."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log10(one) if self.is_log else one for one in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 1)


def line_chart(chart: Chart) -> str:
    """Curves over a common axis, with a gap where a value is missing. Empty when no series has a value."""
    present = chart.bounds()
    if not present:
        return ""
    low = min(present) if chart.low is None else chart.low
    high = max(present) if chart.high is None else chart.high
    if chart.low is not None and high == low:
        high = low + 1  # a curve that never leaves the bound lies on it
    ticks = log_ticks(min(present), high) if chart.is_logarithmic else nice_ticks(low, high)
    x_axis, y_axis = _x_axis(chart.xs), _Axis(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP, chart.is_logarithmic)
    curves = [_curve(series, index, chart.xs, x_axis, y_axis) for index, series in enumerate(chart.series)]
    pixels = [x_axis.at(x) for x in chart.xs]
    grid = _y_grid(y_axis, ticks, [_tick_text(tick) for tick in ticks])
    return _figure(chart, [*grid, *_x_labels(chart, pixels), *curves], pixels)


def share_chart(chart: Chart) -> str:
    """One bar per point, split by each series' share of the sum at that point. Empty when all sums are 0."""
    ticks = (0.0, 0.25, 0.5, 0.75, 1.0)
    sums = _sums(chart)
    return _bars(chart, [total or 1.0 for total in sums], ticks, [f"{tick:.0%}" for tick in ticks]) if any(sums) else ""


def count_chart(chart: Chart) -> str:
    """One bar per point, the sum of the series at that point. Empty when all sums are 0."""
    sums = _sums(chart)
    ticks = nice_ticks(0, max(sums, default=0.0))
    return _bars(chart, [1.0] * len(sums), ticks, [format_number(tick) for tick in ticks]) if any(sums) else ""


def _sums(chart: Chart) -> list[float]:
    return [
        sum(max(0.0, value) for series in chart.series if (value := series.values[point]) is not None)
        for point in range(len(chart.xs))
    ]


def _bars(chart: Chart, scales: Sequence[float], ticks: Sequence[float], labels: Sequence[str]) -> str:
    """Stacked bars of the values, each divided by the scale [points] of its point."""
    slot = (WIDTH - LEFT - RIGHT) / len(chart.xs)
    y_axis = _Axis(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    centres = [round(LEFT + (point + 0.5) * slot, 1) for point in range(len(chart.xs))]
    bars = []
    for point, scale in enumerate(scales):
        below = 0.0
        for index, series in enumerate(chart.series):
            value = max(0.0, series.values[point] or 0.0)
            if not value:
                continue
            top, bottom = y_axis.at((below + value) / scale), y_axis.at(below / scale)
            bars.append(
                f'<rect class="fill-{index}" x="{centres[point] - slot * 0.46:.1f}" y="{top}"'
                f' width="{slot * 0.92:.1f}" height="{max(0.0, bottom - top - 0.6):.1f}"/>'
            )
            below += value
    return _figure(chart, _y_grid(y_axis, ticks, labels) + _x_labels(chart, centres) + bars, centres)


def dumbbell(before: float | None, after: float | None) -> str:
    """Two rates in [0, 1] on one line, for a cell of a table: a ring for before, a dot for after."""
    axis = _Axis(0, 1, 8, 152)
    parts = ['<line class="rail" x1="8" x2="152" y1="9" y2="9"/>']
    if before is not None and after is not None:
        change = "gain" if after >= before else "loss"
        parts.append(f'<line class="change {change}" x1="{axis.at(before)}" x2="{axis.at(after)}" y1="9" y2="9"/>')
    if after is not None:
        parts.append(f'<circle class="after" cx="{axis.at(after)}" cy="9" r="5"/>')
    if before is not None:
        parts.append(f'<circle class="before" cx="{axis.at(before)}" cy="9" r="4"/>')
    return f'<svg class="dumbbell" viewBox="0 0 160 18" aria-hidden="true">{"".join(parts)}</svg>'


def interval(value: float, low: float, high: float) -> str:
    """A rate in [0, 1] and its interval on one line, for a cell of a table."""
    axis = _Axis(0, 1, 8, 152)
    return (
        '<svg class="dumbbell" viewBox="0 0 160 18" aria-hidden="true">'
        '<line class="rail" x1="8" x2="152" y1="9" y2="9"/>'
        f'<line class="change gain" x1="{axis.at(low)}" x2="{axis.at(high)}" y1="9" y2="9"/>'
        f'<circle class="after" cx="{axis.at(value)}" cy="9" r="5"/></svg>'
    )


def table(chart: Chart) -> str:
    """The chart's values as a table."""
    head = heads((chart.x_label, *(series.name for series in chart.series)))
    rows = []
    for point, x in enumerate(chart.xs):
        cells = "".join(f"<td>{series.text(point)}</td>" for series in chart.series)
        rows.append(f'<tr><th scope="row">{x:g}</th>{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def heads(names: Iterable[str]) -> str:
    """The cells of a table's head. One without a name is no heading."""
    return "".join(f'<th scope="col">{escape(name)}</th>' if name else "<td></td>" for name in names)


def scrolled_table(kind: str, names: Iterable[str], rows: Iterable[str]) -> str:
    """A table that a reader can scroll. `rows` are markup."""
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{heads(names)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def legend_of(marks: Iterable[tuple[str, str]]) -> str:
    """The names of series, each after its mark, which is SVG."""
    swatches = (
        f'<li><svg viewBox="0 0 22 10" aria-hidden="true">{mark}</svg>{escape(name)}</li>' for mark, name in marks
    )
    return f'<ul class="legend">{"".join(swatches)}</ul>'


def framed(title: str, legend: str, drawing: str, note: str, values: str) -> str:
    """A drawing as a figure. Its values are also a table, for readers without a script."""
    noted = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3>{legend}</figcaption>{drawing}{noted}"
        f'<details><summary>values</summary><div class="values" tabindex="0">{values}</div></details></figure>'
    )


def nice_ticks(low: float, high: float, num: int = _NUM_TICKS) -> tuple[float, ...]:
    """Round numbers that enclose low and high. Their distance is 1, 2 or 5 times a power of ten."""
    low, high = (min(max(value, -_LARGEST), _LARGEST) for value in (low, high))
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, _SMALLEST):
        padding = 0.1 * size if size > _SMALLEST else 1.0
        low, high = low - padding, high + padding
    rough = (high - low) / (num - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(index * step for index in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Numbers that enclose two positive ones. The ends are 1, 2 or 5 times a power of ten, the others powers of ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    round_ones = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    first = max(one for one in round_ones if one <= low)
    last = min(one for one in round_ones if one >= high)
    inner = [10.0**power for power in powers if first < 10.0**power < last]
    return (first, *inner[:: 1 + len(inner) // 6], last)


def with_error(value: float | None, error: float | None) -> str:
    """A value and its error, to one digit of the error, or two where the first is 1."""
    if value is None or not error:
        return format_number(value) + ("" if error is None else " ± 0")
    power = math.floor(math.log10(error))
    digits = min(max(0, -power + (error < 2 * 10.0**power)), 9)
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def format_number(value: float | None) -> str:
    """Four significant digits, with thin spaces between thousands; a dash for None."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e7:
        return f"{value:.2e}"
    text = f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}".replace(",", "\u2009")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _tick_text(tick: float) -> str:
    """As short as possible, because the space beside the axis is small. A tick has at most three digits."""
    text = format_number(tick)
    return f"{tick:.3g}" if "e" in text else text


def _x_axis(xs: Sequence[float]) -> _Axis:
    low, high = xs[0], xs[-1]
    return _Axis(low, high, LEFT, WIDTH - RIGHT) if high > low else _Axis(low - 1, low + 1, LEFT, WIDTH - RIGHT)


def _curve(series: Series, index: int, xs: Sequence[float], x_axis: _Axis, y_axis: _Axis) -> str:
    """A polyline for each run of neighbouring values, a dot for a value without a neighbour, and whiskers.

    A joined series of few values has dots too. Two of them are no line: it would say how the curve went between.
    """

    def height(value: float) -> float:
        return y_axis.at(min(max(value, y_axis.low), y_axis.high))

    runs: list[list[str]] = [[]]
    parts = []
    for point, (x, value) in enumerate(zip(xs, series.values, strict=True)):
        if value is None:
            runs += [] if series.joined else [[]]
            continue
        runs[-1].append(f"{x_axis.at(x)},{height(value)}")
        if (error := series.error(point)) is not None:
            parts.append(
                f'<line class="whisker line-{index}" x1="{x_axis.at(x)}" x2="{x_axis.at(x)}"'
                f' y1="{height(value + error)}" y2="{height(value - error)}"/>'
            )
    for run in runs:
        if is_line := len(run) > (2 if series.joined else 1):
            parts.append(f'<polyline class="line-{index}" points="{" ".join(run)}"/>')
        if not is_line or (series.joined and len(run) <= _FEW):
            dots = (point.split(",") for point in run)
            parts += [f'<circle class="fill-{index}" cx="{x_text}" cy="{y_text}" r="4"/>' for x_text, y_text in dots]
    return "".join(parts)


def _y_grid(axis: _Axis, ticks: Sequence[float], labels: Sequence[str]) -> list[str]:
    return [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{axis.at(tick)}" y2="{axis.at(tick)}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{axis.at(tick) + 4}" text-anchor="end">{label}</text>'
        for tick, label in zip(ticks, labels, strict=True)
    ]


def _x_labels(chart: Chart, pixels: Sequence[float]) -> list[str]:
    """Round numbers between the first and the last point, and the name of the axis."""
    first, last = chart.xs[0], chart.xs[-1]
    found = nice_ticks(first, last, _NUM_X_TICKS) if last > first else (first,)
    axis = _Axis(first, max(last, first + 1), pixels[0], pixels[-1])
    whole = all(x.is_integer() for x in chart.xs)
    labels = [
        f'<text class="tick" x="{axis.at(tick)}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick:.6g}</text>'
        for tick in found
        if first <= tick <= last and (tick.is_integer() or not whole)
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    name = f'<text class="tick" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(chart.x_label)}</text>'
    return [*labels, name]


def _figure(chart: Chart, parts: Sequence[str], pixels: Sequence[float]) -> str:
    data = {
        "x": chart.x_label,
        "xs": chart.xs,
        "pixels": pixels,
        "unit": chart.unit,
        "series": [
            {"name": series.name, "values": [series.text(point) for point in range(len(series.values))]}
            for series in chart.series
        ],
    }
    described = f"{chart.title}, by {chart.x_label}. Left and right arrow keys read the values."
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{escape(described)}"'
        f' data-chart="{escape(json.dumps(data, ensure_ascii=False))}">{"".join(parts)}'
        f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )
