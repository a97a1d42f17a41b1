"""A dashboard's file as what a picture needs: its panels, where they are, how they look."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.dashboards.live import CannotCheck, Target, panel_targets, read_json, settings_of

_KINDS = {"row", "stat", "timeseries", "heatmap"}


@dataclass(frozen=True, slots=True)
class Threshold:
    """The colour from this value on; None is below every other."""

    value: float | None
    color: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. x, y, w, h are in the units of Grafana's grid, 24 wide."""

    number: int
    title: str
    kind: str
    x: int
    y: int
    w: int
    h: int
    unit: str
    targets: tuple[Target, ...]
    stacked: bool
    low: float | None
    high: float | None
    thresholds: tuple[Threshold, ...]
    words: dict[str, str]

    def color(self, value: float) -> str:
        """The colour of a number."""
        return [one.color for one in self.thresholds if one.value is None or value >= one.value][-1]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. `settings` are the numbers that its reader may type, by the title beside the field."""

    name: str
    title: str
    description: str
    digest: str
    settings: dict[str, str]
    panels: tuple[Panel, ...]


def read_board(path: Path) -> Board:
    """A dashboard's file. Raises CannotCheck."""
    tree = read_json(path)
    values = settings_of(tree)
    titles = {one["label"]: one["query"] for one in tree["templating"]["list"] if one["name"] in values}
    panels = tuple(_panel(path, one, values) for one in tree["panels"])
    return Board(path.stem, tree["title"], tree["description"], digest(path), titles, panels)


def digest(path: Path) -> str:
    """Names the content of a dashboard's file. Raises CannotCheck."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise CannotCheck(f"{path} cannot be read: {error}") from None


def _panel(path: Path, tree: dict[str, Any], values: dict[str, str]) -> Panel:
    if tree["type"] not in _KINDS:
        raise CannotCheck(f"{path}: no picture can be drawn of a panel of type {tree['type']}")
    defaults = tree.get("fieldConfig", {}).get("defaults", {})
    steps = defaults.get("thresholds", {}).get("steps", [])
    words = [one["options"] for one in defaults.get("mappings", [])]
    grid = tree["gridPos"]
    return Panel(
        number=tree["id"],
        title=tree["title"],
        kind=tree["type"],
        x=grid["x"],
        y=grid["y"],
        w=grid["w"],
        h=grid["h"],
        unit=defaults.get("unit", "none"),
        targets=tuple(panel_targets(path.name, tree, values)),
        stacked=defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal",
        low=defaults.get("min"),
        high=defaults.get("max"),
        thresholds=tuple(Threshold(one["value"], one["color"]) for one in steps),
        words={value: one["text"] for options in words for value, one in options.items()},
    )
