"""A command that writes parquet asks for its library before it reads, asks a model or makes a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.command_line import nouscoder

from nouscoder.data.importers import run as importing


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the inputs of the commands, where nobody may open a store of tests."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"problem": "What is 1 + 1?", "answer": "2"}) + "\n")
    Path("seeds.jsonl").write_text(json.dumps({"seed_id": "a", "text": "add"}) + "\n")
    Path("recipe.toml").write_text('name = "x"\ninputs = ["rows.parquet"]\nsteps = [{filter = "no_urls"}]\n')
    begun: Callable[..., object] = lambda *_, **__: pytest.fail("the work began")  # noqa: E731
    monkeypatch.setattr(importing, "open_blobs", begun)


@pytest.mark.parametrize(
    ("library", "extra", "command"),
    [
        ("pyarrow", "data", "data import math rows.jsonl --out o.parquet"),
        ("datasets", "hub", "data import math hub:someone/set --out o.parquet"),
        ("pyarrow", "data", "data filter recipe.toml --out o.parquet"),
        ("pyarrow", "data", "data synthesize seeds.jsonl --url http://127.0.0.1:9/v1 --model m --out o.parquet"),
    ],
)
def test_the_library_is_asked_for_first(
    library: str, extra: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, an import read and stored all rows of its first part, and a synthesis had asked its models everything."""
    monkeypatch.setitem(sys.modules, library, None)
    before = sorted(Path().iterdir())
    ended = nouscoder(*command.split())
    assert ended.exit_code == 78, ended
    assert library in ended.stderr
    assert f"[{extra}]" in ended.stderr
    assert sorted(Path().iterdir()) == before
