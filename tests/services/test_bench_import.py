"""The bench of the import measures real imports of rows that the importers read, beside the same work without them."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from nouscoder.bench.errors import BenchError
from nouscoder.bench.import_control import STAGES, stage_seconds
from nouscoder.bench.import_rows import LAYOUTS, rows
from nouscoder.cli.app import app
from nouscoder.data.importers.formats import format_named
from nouscoder.domain.submission import StdinTests
from nouscoder.formats.tests import digest_of


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rows_of_a_layout_are_read_by_its_importer_and_are_all_different(layout: str) -> None:
    known, digests = format_named(layout), set()
    lines = list(itertools.islice(rows(layout, 10**9), 3))
    for number, line in enumerate(lines, 1):
        row = orjson.loads(line)
        tests = known.read(row, number).problem.tests
        assert isinstance(tests, StdinTests)
        found = LAYOUTS[layout].pairs(orjson.loads(LAYOUTS[layout].text(row)))
        # The public test of LiveCodeBench is none of the packed ones.
        assert [(case.input, case.output) for case in tests.cases[-len(found) :]] == found
        digests.add(digest_of(tests))
    assert len(digests) == len(lines)


def test_the_control_stores_the_file_of_each_row_under_the_digest_of_the_importer(tmp_path: Path) -> None:
    lines = list(rows("taco", 10**5))
    spent = stage_seconds("taco", io.BytesIO(b"".join(lines)), tmp_path)
    digests = {digest_of(format_named("taco").read(json.loads(line), 1).problem.tests) for line in lines}
    assert {f"sha256:{file.name}" for file in tmp_path.iterdir()} == digests
    assert tuple(spent) == STAGES


def test_the_bench_prints_every_figure_and_leaves_nothing(tmp_path: Path) -> None:
    asked = ["bench", "import", "--megabytes", "1", "--layout", "synthetic1", "--folder", str(tmp_path), "--json"]
    told = CliRunner().invoke(app, asked)
    assert told.exit_code == 0, told.output
    (figures,) = json.loads(told.output)
    assert figures["problems"] == figures["num_rows"] > 10
    assert figures["rejected"] == 0
    assert figures["num_bytes"] == figures["control_bytes"] >= 10**6
    assert figures["mb_per_core_second"] == pytest.approx(figures["num_bytes"] / 1e6 / figures["cpu_s"])
    assert set(figures["control"]) == set(STAGES)
    assert figures["peak_bytes"] > 10 * 2**20
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_layout_is_named_with_the_nearest() -> None:
    told = CliRunner().invoke(app, ["bench", "import", "--layout", "tacos"])
    assert isinstance(told.exception, BenchError)
    assert str(told.exception).startswith("there is no layout 'tacos': did you mean taco?")
