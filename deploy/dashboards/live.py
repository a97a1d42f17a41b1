"""The dashboards' expressions against a Prometheus: variables filled, series read. Standard library only."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "helm" / "nouscoder" / "dashboards"
_REQUEST_LIMIT_S = 30.0


class CannotCheck(Exception):
    """Prometheus or a file cannot be read. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Target:
    """One expression of one panel, as in the file. `settings` are the numbers that the reader may change."""

    dashboard: str
    panel: str
    ref: str
    expr: str
    legend: str
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Span:
    """Points in time, in Unix seconds, at each of which an expression is evaluated."""

    start_s: float
    end_s: float
    step_s: float

    @property
    def num_points(self) -> int:
        """Both ends included."""
        return math.floor((self.end_s - self.start_s) / self.step_s + 1e-6) + 1


def read_json(path: Path) -> dict[str, Any]:
    """A dashboard's file. Raises CannotCheck."""
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise CannotCheck(f"{path} cannot be read: {error}") from None
    return tree


def settings_of(tree: dict[str, Any]) -> dict[str, str]:
    """The numbers that the dashboard's reader may type, by the name of the variable."""
    return {one["name"]: one["query"] for one in tree.get("templating", {}).get("list", []) if one["type"] == "textbox"}


def panel_targets(dashboard: str, panel: dict[str, Any], settings: Mapping[str, str]) -> Iterator[Target]:
    """The expressions of one panel of the JSON."""
    for one in panel.get("targets", []):
        yield Target(dashboard, panel["title"], one["refId"], one["expr"], one.get("legendFormat", ""), settings)


def targets_of(path: Path) -> list[Target]:
    """Every expression of a dashboard. Raises CannotCheck."""
    tree = read_json(path)
    settings = settings_of(tree)
    found = [target for panel in _panels(tree) for target in panel_targets(path.name, panel, settings)]
    if not found:
        raise CannotCheck(f"{path} holds no expression")
    return found


def _panels(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in tree.get("panels", []):
        yield panel
        yield from _panels(panel)


def filled(expr: str, variables: Mapping[str, str]) -> str:
    """`expr` with $name and ${name} replaced. Raises CannotCheck for a variable without a value."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in variables:
            raise CannotCheck(f"the variable ${name} has no value: {expr}")
        return variables[name]

    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, expr)


def ask(url: str, call: str, form: Mapping[str, str]) -> Any:
    """The data of an answer of Prometheus' API, or its error about the expression (a str). Raises CannotCheck."""
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/api/v1/{call}", urllib.parse.urlencode(form).encode())
        with urllib.request.urlopen(request, timeout=_REQUEST_LIMIT_S) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code in (400, 422):
            return str(json.load(error).get("error", error.reason))
        raise CannotCheck(f"{url} answers {error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        raise CannotCheck(f"no Prometheus at {url}: {error}") from None


def series_of(url: str, expr: str, span: Span) -> list[dict[str, Any]] | str:
    """The series of an expression over a span, or Prometheus' error about the expression. Raises CannotCheck."""
    times = {"start": f"{span.start_s:.3f}", "end": f"{span.end_s:.3f}", "step": f"{span.step_s:.3f}"}
    data = ask(url, "query_range", {"query": expr, **times})
    if isinstance(data, str):
        return data
    series: list[dict[str, Any]] = data["result"]
    return series


def why_empty(series: list[dict[str, Any]] | str, legend: str) -> str:
    """The reason why a panel with these series has no data, or ""."""
    if isinstance(series, str):
        return series
    if not series:
        return "no series"
    if not any(math.isfinite(float(value)) for one in series for _, value in one["values"]):
        return "only NaN"
    for label in re.findall(r"{{\s*(\w+)\s*}}", legend):
        if any(label not in one["metric"] for one in series):
            return f"no label {label}, which the legend names"
    return ""
