"""The points that a browser gets of a run while it goes on: those of its report, whatever happens to its files."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.e2e.report_pages import STEPS_PER_BATCH, metrics_line, write_compared_runs, write_lines

from nouscoder.report import follow
from nouscoder.report.follow import START, Evaluations, NewLines, Position, points, position_of
from nouscoder.report.run_data import read_run

Curves = dict[tuple[str, str], dict[float, list[float | None]]]


class Reader:
    """What a browser keeps of the points."""

    def __init__(self) -> None:
        self.curves: dict[str, Curves] = {}
        self.position = START

    def take(self, source: str, charts: Sequence[dict[str, Any]], after: Mapping[str, float] | None = None) -> None:
        curves = self.curves.setdefault(source, {})
        for (title, _), curve in curves.items():
            limit = -1 if after is None else after["batch" if "time went" in title else "step"]
            for x in [x for x in curve if x > limit]:
                del curve[x]
        for chart in charts:
            for series in chart["series"]:
                curve = curves.setdefault((chart["title"], series["name"]), {})
                curve |= {x: rest for x, *rest in series["points"]}

    def read(self, lines: NewLines) -> int:
        """Returns the number of points that came."""
        count = 0
        for found in lines.read():
            self.take("steps", found.charts, found.after)
            self.position = found.position
            count += sum(len(series["points"]) for chart in found.charts for series in chart["series"])
        return count

    def all(self) -> Curves:
        return with_values([self.curves.get("steps", {}), self.curves.get("evaluations", {})])


def with_values(parts: Sequence[Curves]) -> Curves:
    """The curves that have a value, and of these the values."""
    found: Curves = {}
    for part in parts:
        for name, curve in part.items():
            there = {x: value for x, value in curve.items() if value[0] is not None}
            if there:
                found.setdefault(name, {}).update(there)
    return found


def of_report(folder: Path) -> Curves:
    """The values of report.html."""
    reader = Reader()
    reader.take("steps", points(read_run(folder)))
    return reader.all()


def lines_of(num_steps: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [metrics_line(step, draw) for step in range(1, num_steps + 1)]


def append(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    with file.open("a", encoding="utf8") as output:
        output.write("".join(json.dumps(line) + "\n" for line in lines))


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 9)),
        st.tuples(st.just("cut"), st.integers(0, 12)),  # a learner that goes on from an older checkpoint
        st.tuples(st.just("amend"), st.just(0)),  # the evaluations that come into the last lines at the end
        st.tuples(st.just("again"), st.just(0)),  # another connection, or another process, from the last event on
        st.tuples(st.just("gone"), st.just(0)),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(changes=CHANGES, piece_bytes=st.sampled_from([1000, 9000, 512 * 1024]))
def test_a_reader_of_all_events_has_the_points_of_the_report(
    changes: list[tuple[str, int]], piece_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    file = folder / "metrics.jsonl"
    reader, lines, there = Reader(), NewLines(file), list[dict[str, Any]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, "_PIECE_BYTES", piece_bytes)
        for seed, (kind, count) in enumerate(changes):
            if kind == "add":
                new = lines_of(len(there) + count, seed)[len(there) :]
                there += new
                append(file, new)
            elif kind == "cut":
                there = there[: max(0, len(there) - count)]
                write_lines(file, there)
            elif kind == "amend":
                there = [*there[:-2], *({**line, "evaluation": {"pass_at_1": 0.5}} for line in there[-2:])]
                write_lines(file, there)
            elif kind == "gone":
                there = []
                file.unlink(missing_ok=True)
            else:
                lines = NewLines(file, position_of(str(reader.position)))
            reader.read(lines)
            assert reader.all() == of_report(folder)
            assert reader.read(lines) == 0, "nothing is read twice"


def test_an_event_has_only_the_points_that_are_new(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    there = lines_of(400)
    append(file, there[:-1])
    reader, lines = Reader(), NewLines(file)
    first = reader.read(lines)
    append(file, there[-1:])
    assert reader.read(lines) < first / 50
    append(file, [{"torn": True}])
    with file.open("a") as output:
        output.write('{"step": 401, "batch_id": 10')
    reader.read(lines)
    again = NewLines(file, position_of(str(reader.position)))
    assert Reader().read(again) < first / 50, "one that comes back gets the last batch again at most"
    assert len(again.steps) == 1 + 400 // STEPS_PER_BATCH, "and knows the step of each policy"
    assert reader.all() == of_report(tmp_path)


@pytest.mark.parametrize("text", [None, "", "x", "1", "-1-2", "12-", "9" * 99 + "-1", "1-1\nevent: x", "7-7"])
def test_a_position_that_does_not_fit_is_the_start(text: str | None, tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", lines_of(6))
    found = [*NewLines(tmp_path / "metrics.jsonl", position_of(text)).read()]
    assert [one.after for one in found] == [None]


def test_the_evaluations_stand_where_the_report_has_them_and_come_once(tmp_path: Path) -> None:
    write_compared_runs(tmp_path / "page.html")
    folder = tmp_path / "one"
    reader, lines, evaluations = Reader(), NewLines(folder / "metrics.jsonl"), Evaluations(folder)
    assert evaluations.read({0: 0.0}) is not None, "before the first step"
    reader.read(lines)
    found = evaluations.read(lines.steps)
    assert found is not None
    reader.take("evaluations", found.charts)
    assert reader.all() == of_report(folder)
    assert [(row["step"], row["policy_version"]) for row in found.rows] == [(0, 0), (40, 10), (80, 20), (120, 30)]
    assert evaluations.read(lines.steps) is None
    assert str(Position(12, 34)) == "12-34"
