"""The picture of a dashboard: its panels where Grafana puts them. Pure: series in, SVG out."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.dashboards.live import Span
from deploy.pictures.boards import Board, Panel
from deploy.pictures.plots import Box, curves, heat_map, number
from deploy.pictures.series import Series

from nouscoder.report.markup import escape

_COLUMN, _ROW, _GAP, _MARGIN, _HEAD = 50, 30, 8, 12, 24
_WIDTH = 24 * _COLUMN + 2 * _MARGIN
_LINE, _LINE_CHARS = 18, 190
# Ten hues that differ in lightness too, on white and on nearly black.
_HUES = ("#2f7ed8", "#e07b00", "#2a9d5c", "#c8453b", "#8e63ce", "#b58900", "#0f9ba8", "#d0589c", "#7a8b99", "#8a5a3c")
_STATES = {"green": "#22954f", "orange": "#d97706", "red": "#d43c32"}


@dataclass(frozen=True, slots=True)
class Source:
    """What the series of a picture are: a sentence, the variables that were chosen, and the digest of a recording."""

    sentence: str
    variables: Mapping[str, str]
    digest: str


def picture(board: Board, found: Mapping[int, Sequence[Series]], span: Span, source: Source) -> str:
    """The picture. `found` has the series of each panel by the panel's number; a panel without any says so."""
    chosen = {**source.variables, **board.settings}
    lines = [board.description, *textwrap.wrap(source.sentence, _LINE_CHARS)]
    lines += textwrap.wrap(", ".join(f"{name} {value}" for name, value in chosen.items()) + ".", _LINE_CHARS)
    top = _MARGIN + 30 + _LINE * len(lines)
    height = top + _ROW * max(panel.y + panel.h for panel in board.panels) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' role="img" aria-label="The dashboard {escape(board.title)}" data-dashboard="{board.digest}"'
        f' data-recording="{source.digest}">',
        f"<style>{_style()}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 16}">{escape(board.title)}</text>',
    ]
    for row, line in enumerate(lines):
        parts.append(f'<text class="soft" x="{_MARGIN}" y="{_MARGIN + 38 + _LINE * row}">{escape(line)}</text>')
    for panel in board.panels:
        parts += _panel(panel, found.get(panel.number, ()), span, top)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, found: Sequence[Series], span: Span, top: float) -> list[str]:
    x, y = _MARGIN + panel.x * _COLUMN, top + panel.y * _ROW
    if panel.kind == "row":
        return [f'<text class="row" x="{x}" y="{y + 20}">{escape(panel.title)}</text>']
    box = Box(x, y, panel.w * _COLUMN - _GAP, panel.h * _ROW - _GAP)
    inside = Box(box.x, box.y + _HEAD, box.w, box.h - _HEAD)
    return [
        f'<g data-panel="{panel.number}" data-series="{len(found)}">',
        f'<rect class="panel" x="{box.x}" y="{box.y}" width="{box.w}" height="{box.h}" rx="3"/>',
        f'<text class="name" x="{box.x + 12}" y="{box.y + 18}">{escape(panel.title)}</text>',
        *_content(panel, found, inside, span),
        "</g>",
    ]


def _content(panel: Panel, found: Sequence[Series], inside: Box, span: Span) -> list[str]:
    if not found:
        return [f'<text class="soft mid" x="{inside.x + inside.w / 2}" y="{inside.y + inside.h / 2}">no data</text>']
    if panel.kind == "stat":
        return number(panel, found, inside)
    if panel.kind == "heatmap":
        return heat_map(panel, found, inside, span)
    return curves(panel, found, inside, span)


def _style() -> str:
    rules = [
        "svg{font:11px system-ui,sans-serif;fill:#16191d}",
        ".page{fill:#f4f5f7}.panel{fill:#fff;stroke:#dde1e7}.soft{fill:#5a6472}.mid{text-anchor:middle}.end{text-anchor:end}",
        ".title{font-size:18px;font-weight:600}.row{font-size:14px;font-weight:600}.name{font-size:12px;font-weight:600}",
        ".big{font-size:26px;font-weight:600;text-anchor:middle}.line{fill:none;stroke-width:1.5}.area{opacity:.3}",
        ".grid{stroke:#dde1e7}.spark{opacity:.15;stroke:none}.bound{fill:none;stroke-dasharray:6 4}",
        *(f".c{index}{{stroke:{hue}}}.f{index}{{fill:{hue}}}" for index, hue in enumerate(_HUES)),
        *(f".{name}{{fill:{color};stroke:{color}}}" for name, color in _STATES.items()),
        ".big{stroke:none}.bound{fill:none}.spark{stroke:none}",
        "@media(prefers-color-scheme:dark){svg{fill:#e8ebef}.page{fill:#101317}.panel{fill:#181c22;stroke:#2d343d}",
        ".soft{fill:#9aa5b4}.grid{stroke:#2d343d}}",
    ]
    return "".join(rules)
