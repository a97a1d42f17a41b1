"""What a run folder has that a reader lacks: points of the charts, and evaluations, while the run goes on.

The points are those of `charts` (curves.py): each batch is a point, so the lines of the last batch and the new ones are
enough to make all new points. They take the place of all points behind the last step and batch before these lines.

INVARIANT: a reader that takes every answer in order has the points of report.html. That holds from any `Position`, also
one of an earlier process, and after lines were removed or changed: a position that fits the file no more begins anew.

INVARIANT: nothing is read while the files stay as they are, and no line is kept between two answers.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nouscoder.recorded_evaluations import RecordedEvaluations
from nouscoder.report.charts import Chart, Series
from nouscoder.report.curves import charts
from nouscoder.report.run_data import (
    EvaluationData,
    Record,
    RunData,
    evaluation_of,
    json_record,
    number,
    steps_of_versions,
)

METRICS = "metrics.jsonl"
_PIECE_BYTES = 512 * 1024
_CHECKED_BYTES = 256
_POSITION = re.compile(r"([0-9]{1,15})-([0-9]{1,10})")
_Points = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Position:
    """How far a metrics.jsonl was read: up to the byte `offset`. `check` is of the bytes before it."""

    offset: int = 0
    check: int = 0

    def __str__(self) -> str:
        return f"{self.offset}-{self.check}"


START = Position()


def position_of(text: str | None) -> Position:
    """The position that a reader names. Anything else is the start."""
    found = _POSITION.fullmatch(text or "")
    return Position(int(found[1]), int(found[2])) if found else START


@dataclass(frozen=True, slots=True)
class NewPoints:
    """Points of charts, as `points` makes them.

    The reader's points with an x above `after` (by the name of the axis) do not count any more, without it all of them.
    """

    charts: _Points
    after: Mapping[str, float] | None
    position: Position


class NewLines:
    """Reads one metrics.jsonl from a position on."""

    def __init__(self, file: Path, position: Position = START) -> None:
        self._file = file
        self._wanted = position
        self._position = START
        self._after: Mapping[str, float] | None = None  # the last step and batch before the position
        self._seen: tuple[int, ...] = ()
        self.steps: dict[int, float] = {0: 0.0}  # the last step of each policy version

    def read(self) -> Iterator[NewPoints]:
        """What is new, in pieces; nothing while the file stays as it is."""
        try:
            with self._file.open("rb") as file:
                stat = os.fstat(file.fileno())
                seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                if seen == self._seen:
                    return
                yield from self._pieces(file)
                self._seen = seen
        except FileNotFoundError:  # a run without a step, or one whose log was removed
            if self._seen or self._wanted != START:
                self._seen, self._wanted = (), START
                self._begin_anew()
                yield NewPoints([], None, START)

    def _pieces(self, file: BinaryIO) -> Iterator[NewPoints]:
        if self._wanted != START:
            self._catch_up(file)
        if _check(file, self._position.offset) != self._position.check:
            self._begin_anew()
        at_end = False
        while not at_end:
            records, num_passed, next_offset, at_end = _read_batches(file, self._position.offset)
            after, self._position = self._after, Position(next_offset, _check(file, next_offset))
            self._pass(records[:num_passed])
            self.steps |= steps_of_versions(records)
            yield NewPoints(points(RunData("", {}, tuple(records))), after, self._position)

    def _catch_up(self, file: BinaryIO) -> None:
        """Go to the position that the reader has, if it fits."""
        wanted, self._wanted = self._wanted, START
        if _check(file, wanted.offset) != wanted.check:
            return
        offset = file.seek(0)
        for line in file:
            offset += len(line)
            if offset > wanted.offset:
                break
            if (record := json_record(line)) is not None:
                self._pass([record])
                self.steps |= steps_of_versions([record])
        self._position = wanted

    def _pass(self, records: Sequence[Record]) -> None:
        """These records are before the position now."""
        if records:
            step = number(records[-1], "step") or 0.0
            self._after = {"step": step, "batch": number(records[-1], "batch_id") or 0.0}

    def _begin_anew(self) -> None:
        self._position, self._after, self.steps = START, None, {0: 0.0}


def _check(file: BinaryIO, offset: int) -> int:
    """A check of the bytes before `offset`; -1 where the file is shorter."""
    start = max(0, offset - _CHECKED_BYTES)
    file.seek(start)
    data = file.read(offset - start)
    return zlib.crc32(data) if len(data) == offset - start else -1


def _read_batches(file: BinaryIO, offset: int) -> tuple[list[Record], int, int, bool]:
    """The records of whole batches from `offset` on, how many of them are passed, where to go on, whether that is all.

    At the end of the file these are all records, and the last batch is read again the next time, with what was added.
    """
    size = _PIECE_BYTES
    while True:
        file.seek(offset)
        data = file.read(size)
        at_end = len(data) < size
        records: list[Record] = []
        last_batch, last_start, last_index, start = None, 0, 0, 0
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            record = json_record(line)
            batch = None if record is None else number(record, "batch_id", "step")
            if record is not None and batch is not None:
                if batch != last_batch:
                    last_batch, last_start, last_index = batch, start, len(records)
                records.append(record)
            start += len(line)
        if at_end:
            return records, last_index, offset + last_start, True
        if last_start:
            return records[:last_index], last_index, offset + last_start, False
        size *= 2  # one batch fills the piece


@dataclass(frozen=True, slots=True)
class NewEvaluations:
    """All evaluations: their points, and a row for each with its step."""

    charts: _Points
    rows: list[dict[str, Any]]


class Evaluations:
    """Reads the evaluations of one run folder."""

    def __init__(self, folder: Path) -> None:
        self._recorded = RecordedEvaluations(folder)
        self._told: list[dict[str, Any]] = []

    def read(self, steps: dict[int, float]) -> NewEvaluations | None:
        """All evaluations, if there is one more or one has another step. `steps` are those of the policy versions."""
        figures = self._recorded.figures()
        rows = [{**one, "step": steps.get(one["policy_version"])} for one in figures]
        if rows == self._told:
            return None
        self._told = rows
        lines = [{"policy_version": row["policy_version"], "step": row["step"]} for row in rows if row["step"]]
        evaluated: list[EvaluationData] = [found for one in figures if (found := evaluation_of(one)) is not None]
        return NewEvaluations(points(RunData("", {}, tuple(lines), evaluations=tuple(evaluated))), rows)


def points(run: RunData) -> _Points:
    """The charts with a value, by their place in the report; points are [x, value, error], without a value in a gap."""
    found = []
    for place, chart in enumerate(charts(run)):
        series = [_series(chart, one) for one in chart.series]
        if any(point[1] is not None for one in series for point in one["points"]):
            record = {"place": place, "title": chart.title, "x": chart.x_label, "unit": chart.unit, "series": series}
            record |= {"low": chart.low, "high": chart.high, "layered": chart.is_layered}
            # The note of a layered chart sums over the whole run.
            found.append(record | {"note": "" if chart.is_layered else chart.note})
    return found


def _series(chart: Chart, series: Series) -> dict[str, Any]:
    found: list[list[float | None]] = []
    for at, (x, value) in enumerate(zip(chart.xs, series.values, strict=True)):
        error = series.error(at)
        if value is not None or not series.joined:
            found.append([x, _short(value)] + ([] if error is None else [_short(error)]))
    return {"name": series.name, "joined": series.joined, "points": found}


def _short(value: float | None) -> float | None:
    """Six significant digits: more than a chart shows."""
    return None if value is None else float(f"{value:.6g}")
