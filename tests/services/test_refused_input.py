"""Commands that read problem files: a file that is refused gives one sentence, and nothing is written or changed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nouscoder.cli.app import app
from nouscoder.errors import NousCoderError

SERVER = ("--url", "http://127.0.0.1:9/v1", "--model", "m")
COMMANDS: dict[str, tuple[str, ...]] = {
    "sft sample": ("sft", "sample", "FILE", *SERVER, "--out", "made/teacher.jsonl"),
    "eval": ("eval", "FILE", *SERVER, "--out", "made/evaluation"),
    "eval of samples": ("eval", "FILE", "--samples", "bad.jsonl", "--out", "made/evaluation"),
    "data synthesize": ("data", "synthesize", "FILE", *SERVER, "--out", "made/new.parquet"),
}
GOOD = {"problem_id": "p", "prompt": "Print 1.", "tests": {"type": "stdin", "cases": [{"input": "", "output": "1\n"}]}}
FILES: dict[str, bytes] = {
    "bad.jsonl": b"{\n",
    "wrong.jsonl": b'{"promt": "a"}\n',
    "torn.jsonl": json.dumps(GOOD).encode() + b'\n{"problem_id": "q"',
    "empty.jsonl": b"",
    "random.jsonl": random.Random(1).randbytes(2000),
    "random.parquet": random.Random(1).randbytes(2000),
}


def everything(folder: Path) -> dict[Path, bytes | None]:
    """All files with their bytes, and all folders."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(*arguments: str) -> str:
    """The sentence with which the command ends."""
    answer: Any = CliRunner().invoke(app, list(arguments))
    assert isinstance(answer.exception, NousCoderError), (answer.exception, answer.output)
    sentence = str(answer.exception)
    assert "\n" not in sentence
    assert "body" not in sentence
    assert "Errno" not in sentence
    return sentence


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "good.jsonl").write_text(json.dumps(GOOD) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", [*FILES, "missing.jsonl"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_refused_file_changes_nothing(command: str, name: str, place: Path) -> None:
    before = everything(place)
    assert name in refused(*(name if part == "FILE" else part for part in COMMANDS[command]))
    assert everything(place) == before


def test_refused_samples_leave_no_folder_of_an_evaluation(place: Path) -> None:
    (place / "half.jsonl").write_text('{"problem_id": "p", "code": "print(1)"}\n{"problem_id": "r", "code": ""}\n')
    assert "half.jsonl, line 2: the problem file has no problem 'r'" in refused(
        *("eval", "good.jsonl", "--samples", "half.jsonl", "--out", "made")
    )
    assert not (place / "made").exists()


def test_a_file_that_no_sampling_made_is_not_replaced(place: Path) -> None:
    for out in ("good.jsonl", "wrong.jsonl"):
        before = everything(place)
        assert f"{out} exists already" in refused("sft", "sample", "good.jsonl", *SERVER, "--out", out)
        assert everything(place) == before
