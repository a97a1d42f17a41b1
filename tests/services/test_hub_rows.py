"""Data sets of a hub are read with the library `datasets`. Local folders of the same layout stand for the hub."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from nouscoder.data.importers import run
from nouscoder.data.importers.formats import FORMATS
from nouscoder.data.importers.rows import HubDataUnusable, HubRows, hub_rows
from nouscoder.data.importers.run import CannotImport, import_files, rejections_of, source_named
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.data.problems import ReferencedProblem

CASES = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing leaves this machine, and nothing is written to the user's cache."""
    import datasets
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE"):
        monkeypatch.setattr(datasets.config, name, str(tmp_path_factory.mktemp("cache")))


def taco(number: int) -> dict[str, Any]:
    tests = {"inputs": [f"{number}\n"], "outputs": [f"{2**70 + number}\n"]}
    return {"question": f"Question {number}.", "solutions": "[]", "input_output": json.dumps(tests)}


def lcb(name: str) -> dict[str, Any]:
    facts = {"question_title": "T", "platform": "atcoder", "contest_date": "2024-08-03T00:00:00", "starter_code": ""}
    tests = {"public_test_cases": json.dumps(CASES), "private_test_cases": "[]", "metadata": "{}"}
    return {
        "question_id": name,
        "question_content": "Add.",
        "contest_id": "abc1",
        "difficulty": "hard",
        **facts,
        **tests,
    }


@pytest.fixture
def taco_folder(tmp_path: Path) -> Path:
    """As BAAI/TACO after its conversion: parquet files of two splits."""
    folder = tmp_path / "TACO"
    (folder / "data").mkdir(parents=True)
    parts = {
        "train-00000-of-00002": range(4),
        "train-00001-of-00002": range(4, 9),
        "test-00000-of-00001": range(20, 22),
    }
    for name, numbers in parts.items():
        parquet.write_table(arrow.Table.from_pylist([taco(n) for n in numbers]), folder / "data" / f"{name}.parquet")
    return folder


@pytest.fixture
def lcb_folder(tmp_path: Path) -> Path:
    """As livecodebench/code_generation_lite: one file a release, and a program."""
    folder = tmp_path / "code_generation_lite"
    folder.mkdir()
    (folder / "code_generation_lite.py").write_text("raise SystemExit('it ran')\n")
    for name, rows in (("test", ["a", "b"]), ("test6", ["c"])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(lcb(row)) + "\n" for row in rows))
    return folder


def test_the_splits_of_a_data_set_are_those_that_files_would_give(taco_folder: Path, tmp_path: Path) -> None:
    files = sorted((taco_folder / "data").glob("train-*"))
    import_files("taco", files, tmp_path / "files.parquet")
    import_files("taco", [source_named(f"hub:{taco_folder}")], tmp_path / "hub.parquet")
    prompts = [item.problem.prompt for item in read_parquet(tmp_path / "hub.parquet")]
    assert prompts == [item.problem.prompt for item in read_parquet(tmp_path / "files.parquet")]
    assert prompts == [f"Question {n}." for n in range(9)]
    import_files("taco", [source_named(f"hub:{taco_folder}?split=test")], tmp_path / "test.parquet")
    assert [item.problem.prompt for item in read_parquet(tmp_path / "test.parquet")] == ["Question 20.", "Question 21."]


def test_one_file_of_a_data_set_is_read_with_its_dates_as_texts_and_no_program_runs(
    lcb_folder: Path, tmp_path: Path
) -> None:
    import_files("livecodebench", [source_named(f"hub:{lcb_folder}?file=test6.jsonl")], tmp_path / "hub.parquet")
    import_files("livecodebench", [lcb_folder / "test6.jsonl"], tmp_path / "file.parquet")
    (item,) = read_parquet(tmp_path / "hub.parquet")
    assert [item] == list(read_parquet(tmp_path / "file.parquet"))
    assert item.metadata["contest_date"] == "2024-08-03T00:00:00"
    with pytest.raises(HubDataUnusable, match="scripts are no longer supported"):
        import_files("livecodebench", [source_named(f"hub:{lcb_folder}")], tmp_path / "all.parquet")


def test_a_hub_that_is_not_reached_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library tried for half a minute, with two lines for each try."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("datasets.load_dataset", lambda **_: pytest.fail("the library was asked"))
    wanted = (
        r"cannot be read: http://127.0.0.1:1 is not reached: .*refused; where .*: hf download a/b --repo-type dataset"
    )
    with pytest.raises(HubDataUnusable, match=wanted):
        import_files("taco", [source_named("hub:a/b")], tmp_path / "out.parquet")
    assert logging.getLogger("huggingface_hub").handlers == []


class Killed(BaseException):
    """The process died here."""


def test_an_import_that_was_killed_goes_on_in_the_stream(
    taco_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_PART_PROBLEMS", 2)
    source, out = source_named(f"hub:{taco_folder}"), tmp_path / "out.parquet"
    read, calls = FORMATS["taco"].read, []

    def dying(row: Any, number: int) -> ReferencedProblem:
        calls.append(number)
        if len(calls) == 6:
            raise Killed
        return read(row, number)

    monkeypatch.setitem(FORMATS, "taco", replace(FORMATS["taco"], read=dying))
    with pytest.raises(Killed):
        import_files("taco", [source], out)
    assert import_files("taco", [source], out).problems == 9
    assert [item.problem.prompt for item in read_parquet(out)] == [f"Question {n}." for n in range(9)]
    assert calls == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9]


def test_a_rejected_row_names_the_data_set(taco_folder: Path, tmp_path: Path) -> None:
    row = taco(0) | {"input_output": "{}"}
    table = arrow.Table.from_pylist([row, taco(1)])
    parquet.write_table(table, taco_folder / "data" / "test-00000-of-00001.parquet")
    summary = import_files("taco", [source_named(f"hub:{taco_folder}?split=test")], tmp_path / "out.parquet")
    assert summary.rejected == {"no_tests": 1}
    assert [one["file"] for one in rejections_of(Path(summary.rejections))] == [f"hub:{taco_folder}?split=test"]


def test_a_name_and_its_parts() -> None:
    assert hub_rows("hub:a/b") == HubRows("a/b")
    text = "hub:a/b?split=test&subset=main&file=data/x.jsonl&revision=v1"
    assert hub_rows(text) == HubRows("a/b", "test", "main", "data/x.jsonl", "v1")
    assert str(hub_rows(text)) == text
    assert source_named("a/b.jsonl") == Path("a/b.jsonl")


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("taco", "hub:no/such", r"^hub:no/such\?split=train cannot be read: Couldn't reach 'no/such' on the Hub"),
        ("taco", "hub:FOLDER?split=tarin", r"cannot be read: Bad split: tarin. Available splits: \['train', 'test'\]"),
        ("taco", "hub:FOLDER?file=none.jsonl", r"file=none.jsonl cannot be read: "),
        ("taco", "hub:FOLDER?splt=test", r"unknown part 'splt': did you mean split\? \(known: split, subset, file"),
        ("taco", "hub:?split=test", "names no data set: hub:ORGANISATION/NAME"),
        ("kattis", "hub:FOLDER", "kattis is read from files, not from a hub"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    taco_folder: Path, tmp_path: Path, name: str, source: str, message: str
) -> None:
    with pytest.raises((HubDataUnusable, CannotImport), match=message) as refused:
        import_files(name, [source_named(source.replace("FOLDER", str(taco_folder)))], tmp_path / "out.parquet")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out.parquet").exists()
