"""The page of `nouscoder objectives compare --html FILE`: one batch under every objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nouscoder.atomic_files import write_whole
from nouscoder.report.bar_charts import BarChart, bar_figure
from nouscoder.report.charts import Series, scrolled_table
from nouscoder.report.markup import escape, html_page, section, tiles

# An objective's figures, as `nouscoder objectives compare --json` prints them.
Figures = Mapping[str, Any]

_QUARTERS = ("shortest quarter", "2nd quarter", "3rd quarter", "longest quarter")
_CLIP_NOTE = (
    "The share of loss tokens on which the clip acts: it removes their gradient, or bounds it (GPPO, CISPO)."
    " A missing value means that the batch has no such token."
)


def write_objectives_page(file: Path, title: str, comparisons: Sequence[Figures]) -> None:
    """Write the page. Raises StorageError."""
    write_whole(file, objectives_page(title, comparisons).encode("utf8"))


def objectives_page(title: str, comparisons: Sequence[Figures]) -> str:
    """The whole page. `title` names the batch."""
    charts = "".join(map(bar_figure, bar_charts(comparisons)))
    facts = tiles({"objectives": str(len(comparisons))})
    return html_page(
        f"Objectives on {title}",
        facts,
        [
            section("Loss, gradient and clipped tokens", f'<div class="charts">{charts}</div>'),
            section("Cosine between gradients", _cosines(comparisons)),
        ],
    )


def bar_charts(comparisons: Sequence[Figures]) -> list[BarChart]:
    """The charts with bars."""
    names = tuple(str(item["name"]) for item in comparisons)

    def series(name: str, value: Callable[[Figures], float | None]) -> Series:
        return Series(name, tuple(map(value, comparisons)))

    def share(name: str, key: str) -> Series:
        return series(name, lambda item: _percent(item["clipped"][key]))

    def of_quarter(name: str, quarter: int) -> Series:
        return series(name, lambda item: _percent(item["clipped"]["by_length"][quarter]))

    return [
        BarChart("Loss", names, (series("loss", lambda item: item["loss"]),)),
        BarChart("Norm of the gradient", names, (series("norm", lambda item: item["gradient_norm"]),)),
        BarChart(
            "Clipped tokens by correctness",
            names,
            (share("accepted rollouts", "accepted"), share("rejected rollouts", "rejected")),
            unit=" %",
            note=_CLIP_NOTE,
        ),
        BarChart(
            "Clipped tokens by length",
            names,
            tuple(of_quarter(name, quarter) for quarter, name in enumerate(_QUARTERS)),
            unit=" %",
            note="Quarters of the batch's rollouts, by their number of sampled tokens.",
        ),
    ]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _cosines(comparisons: Sequence[Figures]) -> str:
    """One row and one column for each objective. The colour of a cell goes from -1 to 1 in steps of 0.25."""
    names = [str(item["name"]) for item in comparisons]
    rows = (
        f'<tr><th scope="row">{escape(item["name"])}</th>{"".join(_cell(item["cosines"][name]) for name in names)}</tr>'
        for item in comparisons
    )
    return (
        '<p class="note">1: the same direction; 0: at right angles; a dash: one of the gradients is zero.</p>'
        + scrolled_table("cosines", ("", *names), rows)
    )


def _cell(value: float | None) -> str:
    if value is None:
        return "<td>-</td>"
    sign, step = ("minus" if value < 0 else "plus"), round(abs(value) * 4)
    return f'<td class="{sign}-{step}">{value:.3f}</td>'
