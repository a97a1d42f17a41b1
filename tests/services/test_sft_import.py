"""`nouscoder sft import`: rows of OpenCodeReasoning become examples of `nouscoder sft`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.services.test_data_import import jsonl, parquet
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.data.importers.rows import file_rows
from nouscoder.errors import Unusable
from nouscoder.sft.open_code_reasoning import import_examples
from nouscoder.sft.records import example_of


def row(index: int, **more: Any) -> dict[str, Any]:
    """A row of OpenCodeReasoning-2."""
    return {
        "question_id": f"q{index}",
        "question": "-",
        "r1_generation": f"<think>...</think> answer {index}",
        "solution": "print(1)",
        "judgement": "right",
        "pass_rate": "-1",
        "dataset": "taco",
        "split": "train",
        "index": str(index),
        **more,
    }


def test_rows_become_examples_and_the_others_are_counted(tmp_path: Path) -> None:
    """Questions of two files are counted through; tests go before judgements; the first version has other names."""
    first = jsonl(tmp_path / "taco-0.jsonl", {"question": "Q0"}, {"question": ""})
    second = parquet(tmp_path / "taco-1.parquet", {"question": "Q2"})
    force = jsonl(tmp_path / "cf.jsonl", {"description": "F", "input_format": "n", "note": None})
    rows = jsonl(
        tmp_path / "rows.jsonl",
        row(0),
        row(1),  # its question is empty
        row(2, judgement="wrong"),
        row(3),  # there is no such question
        row(4, question="Own", pass_rate="1.0", judgement="wrong"),
        row(5, question="Own", pass_rate=0.5),
        row(6, question="Own", judgement=None),
        row(7, question="Own", r1_generation=""),
        row(0, dataset="open-r1/codeforces"),
        {"id": "x", "input": "First", "output": "version", "dataset": "apps", "split": "train", "index": 9},
        [1],
    )
    rows.write_text(rows.read_text() + "{torn\n")
    out = tmp_path / "examples.jsonl"
    given = [f"taco/train={first}", f"taco/train={second}", f"open-r1/codeforces/train={force}"]
    found = import_examples([str(rows)], out, given)
    assert (found.examples, found.rejected) == (
        7,
        {"missing_field": 2, "no_answer": 1, "malformed": 1, "not_json": 1},
    )
    examples = [example_of(record.value) for record in file_rows(out, 0)]
    assert [(one.record.problem_id, one.record.prompt, one.accepted) for one in examples] == [
        ("q0", "Q0", True),
        ("q2", "Q2", False),
        ("q4", "Own", True),
        ("q5", "Own", False),
        ("q6", "Own", None),
        ("q0", "F\n\nInput\n\nn", True),
        ("apps/train/9", "First", None),
    ]
    assert examples[0].turns[0].text == "<think>...</think> answer 0"


def test_an_import_of_examples_that_cannot_be_says_why(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", row(0), row(1))
    out = tmp_path / "examples.jsonl"
    with pytest.raises(Unusable, match=r"no row is an example \(2 missing_field\)"):
        import_examples([str(rows)], out)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]
    for wrong in ("taco/train", f"tacos/train={rows}", f"train={rows}"):
        with pytest.raises(Unusable, match="DATASET/SPLIT=FILE"):
            import_examples([str(rows)], out, [wrong])
    out.write_text("")
    with pytest.raises(Unusable, match="exists already"):
        import_examples([str(rows)], out)


def test_the_command_prints_the_counts(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", row(0, question="Q"), row(1))
    for options, out in (([], "a.jsonl"), (["--json"], "b.jsonl.gz")):
        result = CliRunner().invoke(app, ["sft", "import", str(rows), "--out", str(tmp_path / out), *options])
        assert result.exit_code == 0, result.output
        if options:
            assert json.loads(result.output)["rejected"] == {"missing_field": 1}
        else:
            assert [line.split() for line in result.output.splitlines()[1:]] == [
                ["examples", "1"], ["rejected", "rows", "1"], ["missing_field", "1"],
            ]  # fmt: skip
    assert len(list(file_rows(tmp_path / "b.jsonl.gz", 0))) == 1
