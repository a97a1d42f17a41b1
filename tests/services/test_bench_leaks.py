"""The bench of the search for leaks plants leaks, searches in a process of its own, and says what was found."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from nouscoder.cli.app import app


def test_the_bench_finds_what_it_planted_and_prints_every_figure() -> None:
    told = CliRunner().invoke(app, ["bench", "leaks", "--problems", "300", "--leaks", "9", "--json"])
    assert told.exit_code == 0, told.output
    figures = json.loads(told.output)
    assert (figures["problems"], figures["leaks"], figures["missed"], figures["wrong"]) == (300, 9, 0, 0)
    assert min(figures["wall_s"], figures["cpu_s"], figures["control_cpu_s"], figures["peak_bytes"]) > 0
