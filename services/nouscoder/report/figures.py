"""A chart with its title, legend and values, as a figure of a page."""

from __future__ import annotations

from itertools import pairwise

from nouscoder.report.charts import table
from nouscoder.report.curves import Drawn
from nouscoder.report.markup import escape


def figure(drawn: Drawn) -> str:
    """The figure. Its values are also a table, for readers without a script."""
    chart = drawn.chart
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    values = f'<details><summary>values</summary><div class="values" tabindex="0">{table(chart)}</div></details>'
    caption = f"<figcaption><h3>{escape(chart.title)}</h3>{_legend(drawn)}</figcaption>"
    return f'<figure>{caption}{drawn.svg}<div class="readout" aria-live="polite" hidden></div>{note}{values}</figure>'


def _legend(drawn: Drawn) -> str:
    items = []
    for index, series in enumerate(drawn.chart.series):
        swatch = f'<svg viewBox="0 0 22 10" aria-hidden="true">{_mark(drawn, index)}</svg>'
        items.append(f"<li>{swatch}{escape(series.name)}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _mark(drawn: Drawn, index: int) -> str:
    """The mark of a series in the legend: a layer, a dot when no two neighbours have a value, else a line."""
    values = drawn.chart.series[index].values
    if drawn.is_layered:
        return f'<rect class="fill-{index}" x="6" y="0" width="10" height="10"/>'
    if all(left is None or right is None for left, right in pairwise(values)):
        return f'<circle class="fill-{index}" cx="11" cy="5" r="4"/>'
    return f'<line class="line-{index}" x1="0" x2="22" y1="5" y2="5"/>'
