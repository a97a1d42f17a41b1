"""The plot of `nouscoder bench objectives` as an SVG file: pass@1 of each run before and after. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from nouscoder.bench.objective_figures import ObjectiveBench, RunFigures
from nouscoder.report.markup import escape

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 170, 24, 40, 44
_ROW, _LINE = 42, 10
_TICKS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_STYLE = """
  svg {
    font: 13px system-ui, sans-serif;
    --page: #ffffff; --ink: #16191d; --soft: #5a6472; --rule: #dde1e7; --line: #0068b8;
  }
  @media (prefers-color-scheme: dark) {
    svg { --page: #101317; --ink: #e8ebef; --soft: #9aa5b4; --rule: #2d343d; --line: #56b4f5; }
  }
  .page { fill: var(--page); } .name { fill: var(--ink); } .tick { fill: var(--soft); }
  .grid { stroke: var(--rule); } .change { stroke: var(--line); stroke-width: 2; }
  .before { fill: var(--page); stroke: var(--line); stroke-width: 2; } .after { fill: var(--line); }
"""


def plot(bench: ObjectiveBench) -> str:
    """One row for each variant, one line for each run: a ring for pass@1 before, a dot for pass@1 after."""
    height = _TOP + _ROW * len(bench.variants) + _BOTTOM
    bottom = height - _BOTTOM
    parts = [f'<rect class="page" width="{_WIDTH}" height="{height}"/>', *_legend()]
    for tick in _TICKS:
        parts.append(f'<line class="grid" x1="{_x(tick)}" x2="{_x(tick)}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{_x(tick)}" y="{bottom + 18}" text-anchor="middle">{tick:.1f}</text>')
    middle = (_x(0.0) + _x(1.0)) / 2
    label = "pass@1 on held-out problems"
    parts.append(f'<text class="tick" x="{middle}" y="{bottom + 36}" text-anchor="middle">{label}</text>')
    for row, variant in enumerate(bench.variants):
        y = _TOP + _ROW * (row + 0.5)
        parts.append(f'<text class="name" x="{_LEFT - 14}" y="{y + 4}" text-anchor="end">{escape(variant)}</text>')
        parts += _runs(bench.of(variant), y)
    described = f"{label}, before and after, for {', '.join(bench.variants)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(described)}">\n<style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _runs(runs: Sequence[RunFigures], middle: float) -> list[str]:
    parts = []
    for index, run in enumerate(runs):
        y = middle + _LINE * (index - (len(runs) - 1) / 2)
        parts += _change(_x(run.pass_at_1_before), _x(run.pass_at_1_after), y)
    return parts


def _change(before: float, after: float, y: float) -> list[str]:
    return [
        f'<line class="change" x1="{before}" x2="{after}" y1="{y}" y2="{y}"/>',
        f'<circle class="before" cx="{before}" cy="{y}" r="3.5"/>',
        f'<circle class="after" cx="{after}" cy="{y}" r="4"/>',
    ]


def _legend() -> list[str]:
    text = '<text class="tick" x="{}" y="24">{}</text>'
    return [
        *_change(_LEFT, _LEFT + 30, 20),
        text.format(_LEFT + 42, "one run, from before (ring) to after (dot); one line for each seed"),
    ]


def _x(rate: float) -> float:
    return round(_LEFT + rate * (_WIDTH - _LEFT - _RIGHT), 1)
