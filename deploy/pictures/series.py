"""The series of a panel: what Prometheus answers for its expressions, under the names of its legends."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.dashboards.live import CannotCheck, Span, Target, filled, series_of
from deploy.pictures.boards import Panel


@dataclass(frozen=True, slots=True)
class Series:
    """`values` [points] are None where there is none. `labels` are those of the answer."""

    name: str
    labels: dict[str, str]
    values: tuple[float | None, ...]

    @property
    def present(self) -> list[float]:
        """The values that there are."""
        return [value for value in self.values if value is not None]


def read_series(url: str, panel: Panel, variables: Mapping[str, str], span: Span) -> list[Series]:
    """All series of a panel that have a value, in the order of expressions and names. Raises CannotCheck."""
    found = [series for target in panel.targets for series in _of_target(url, target, variables, span)]
    return [series for series in found if series.present]


def _of_target(url: str, target: Target, variables: Mapping[str, str], span: Span) -> list[Series]:
    expr = filled(target.expr, {**variables, **target.settings})
    answer = series_of(url, expr, span)
    if isinstance(answer, str):
        raise CannotCheck(f"{target.dashboard}, {target.panel}: {answer}: {expr}")
    found = [Series(_name(target, one["metric"]), one["metric"], _values(one["values"], span)) for one in answer]
    return sorted(found, key=lambda series: series.name)


def _name(target: Target, labels: dict[str, str]) -> str:
    if target.legend == "__auto":
        return ", ".join(labels.values()) or target.panel
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), target.legend).strip()


def _values(samples: list[Any], span: Span) -> tuple[float | None, ...]:
    values: list[float | None] = [None] * span.num_points
    for at_s, text in samples:
        value = float(text)
        if math.isfinite(value):
            values[round((at_s - span.start_s) / span.step_s)] = value
    return tuple(values)
