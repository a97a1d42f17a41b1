"""Horizontal bars: one row for each name, one bar in it for each series."""

from __future__ import annotations

from dataclasses import dataclass

from nouscoder.report.charts import Series, format_number, framed, heads, legend_of
from nouscoder.report.markup import escape

_WIDTH, _LEFT, _RIGHT = 560, 132, 116
_BAR, _GAP = 20, 8


@dataclass(frozen=True, slots=True)
class BarChart:
    """`names` [rows]; the values of each series are [rows], None where there is none. `unit` follows each value."""

    title: str
    names: tuple[str, ...]
    series: tuple[Series, ...]
    unit: str = ""
    note: str = ""

    def text(self, value: float | None) -> str:
        """A value as it is shown."""
        return format_number(value) + (self.unit if value is not None else "")


def bar_figure(chart: BarChart) -> str:
    """The chart with its title, a legend when it has several series, and its values as a table."""
    marks = (f'<rect class="fill-{index}" x="6" width="10" height="10"/>' for index in range(len(chart.series)))
    legend = "" if len(chart.series) == 1 else legend_of(zip(marks, (one.name for one in chart.series), strict=True))
    return framed(chart.title, legend, _bar_rows(chart), chart.note, _table(chart))


def _bar_rows(chart: BarChart) -> str:
    present = [value for series in chart.series for value in series.values if value is not None]
    low, high = min([0.0, *present]), max([0.0, *present])
    scale = (_WIDTH - _LEFT - _RIGHT) / ((high - low) or 1.0)
    zero = _LEFT - low * scale
    row = _BAR * len(chart.series) + _GAP
    parts = []
    for place, name in enumerate(chart.names):
        top = place * row + _GAP / 2
        middle = top + _BAR * len(chart.series) / 2 + 5
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{middle:g}" text-anchor="end">{escape(name)}</text>')
        for index, series in enumerate(chart.series):
            parts += _bar(chart, series.values[place], index, top + index * _BAR, zero, scale)
    height = row * len(chart.names)
    parts.append(f'<line class="rail" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{height}"/>')
    return (
        f'<svg class="bars" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(chart.title)}">'
        f"{''.join(parts)}</svg>"
    )


def _bar(chart: BarChart, value: float | None, index: int, top: float, zero: float, scale: float) -> list[str]:
    """The bar of a value and the value itself, at the right."""
    text = f'<text class="tick" x="{_WIDTH - _RIGHT + 8}" y="{top + 15:g}">{escape(chart.text(value))}</text>'
    if not value:
        return [text]
    left, width = zero + min(0.0, value * scale), abs(value * scale)
    return [
        f'<rect class="fill-{index}" x="{left:.1f}" y="{top + 2:g}" width="{width:.1f}" height="{_BAR - 4}"/>',
        text,
    ]


def _table(chart: BarChart) -> str:
    head = heads(("", *(one.name for one in chart.series)))
    rows = []
    for place, name in enumerate(chart.names):
        cells = "".join(f"<td>{escape(chart.text(one.values[place]))}</td>" for one in chart.series)
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
