"""The same rows are the same problems, in whichever file they are."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from tests.services.test_data_import import ROWS, jsonl, parquet
from tests.services.test_named_sets import SETS
from tests.services.test_trainers_sets import GENERIC, GIVEN

from nouscoder.data.importers.formats import FORMATS, read_referenced
from nouscoder.data.importers.options import ImportOptions
from nouscoder.data.importers.rows import file_rows
from nouscoder.data.importers.run import import_files, rejections_of
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.data.problems import ProblemFileError

FOLDERS = {"hardtests", "livecodebench_pro", "kattis", "harbor"}  # read from files of a layout of their own
EXAMPLES: list[dict[str, Any]] = [{}, {"examples": []}, {"examples": [{"input": "1\n", "output": "2\n"}]}]


def array(path: Path, *rows: object) -> Path:
    """A file with one JSON array, with white space."""
    path.write_text(json.dumps(rows, indent=1))
    return path


def packed_lines(path: Path, *rows: object) -> Path:
    """Compressed JSON lines."""
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n\n" for row in rows).encode()))
    return path


def table(path: Path, *rows: dict[str, Any]) -> Path:
    """A parquet file: a field that a row lacks is null."""
    names = dict.fromkeys(name for row in rows for name in row)
    return parquet(path, *({name: row.get(name) for name in names} for row in rows))


CONTAINERS: dict[str, Callable[..., Path]] = {
    "rows.jsonl": jsonl,
    "rows.json": array,
    "rows.jsonl.gz": packed_lines,
    "rows.parquet": table,
}


ADDED: dict[str, list[dict[str, Any]]] = {  # records of different fields, which are one type in a column of parquet
    "synthetic1": [
        {"prompt": "?", "verification_info": {"test_cases": [{"input": "1\n", "output": "1\n"}]}},
        {
            "prompt": "?",
            "verification_info": {
                "language": "cpp",
                "test_cases": [{"type": "stdin_stdout", "fn_name": "f", "input": "1\n", "output": "1\n"}],
            },
        },
    ],
    "deepcoder": [
        {"problem": "?", "tests": [{"input": "1\n", "output": "1\n"}]},
        {"problem": "?", "tests": [{"type": "stdin_stdout", "input": "1\n", "output": "1\n"}]},
        {"problem": "?", "tests": [{"testtype": "stdin", "input": "1\n", "output": "1\n"}]},
    ],
    "generic": [
        {"prompt": "?", "tests": {"type": "stdin", "cases": [{"input": "1\n", "output": "1\n"}]}},
        {"prompt": "?", "tests": {"type": "stdin", "cases": [{"input": "1\n", "output": "1\n", "args": ["x"]}]}},
        {"prompt": "?", "tests": {"inputs": ["1\n"], "outputs": ["1\n"]}},
        {"prompt": "?", "tests": {"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}},
        {
            "prompt": "?",
            "tests": {
                "type": "checker",
                "checker": {"code": "1", "language": "python"},
                "cases": [{"input": "1\n", "output": "1\n"}],
            },
        },
        {"prompt": "?", "tests": {"type": "call", "entry_point": "f", "cases": [{"args": ["y"], "expected": "2"}]}},
    ],
}


def rows_of(name: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a format that the other tests have."""
    found = [row for known, _, row, *_ in ROWS if known == name]
    if name in SETS:
        found += [row.value for row in file_rows(SETS[name][0](folder), 0) if isinstance(row.value, dict)]
    found += {"generic": [row for row, _ in GENERIC], "nouscoder": [{"problem": "?", **row} for row, _ in GIVEN]}.get(
        name, []
    )
    return found


def outcome(name: str, file: Path, number: int) -> object:
    """What a file of one format gives: its problems and its rejections."""
    out = file.with_name(f"{number}.out.parquet")
    try:
        summary = import_files(name, [file], out)
    except Exception as error:  # nothing could be imported
        return type(error)
    listed = rejections_of(Path(summary.rejections)) if summary.rejected else []
    return list(read_parquet(out)), [line["reason"] for line in listed]


@pytest.mark.parametrize("name", sorted(set(FORMATS) - FOLDERS))
def test_the_same_rows_are_the_same_problems_in_every_container(tmp_path: Path, name: str) -> None:
    """`examples` of a row once took its place. A missing field, and one that is null, are the same."""
    (tmp_path / "set").mkdir()
    given = rows_of(name, tmp_path / "set")
    groups = [[row | EXAMPLES[at % 3] if name != "codeforces" else row] for at, row in enumerate(given)]
    groups += [[row for (row,) in groups], ADDED.get(name, given[:1])]
    for at, rows in enumerate(groups):
        found = {}
        for number, (file, write) in enumerate(CONTAINERS.items()):
            folder = tmp_path / f"{at}.{number}"
            folder.mkdir()
            try:
                found[file] = outcome(name, write(folder / file, *rows), number)
            except pyarrow.ArrowException:  # rows whose fields have different types have no columns
                assert file == "rows.parquet"
        first = found.pop("rows.jsonl")
        for file, other in found.items():
            assert other == first, (file, rows)


def test_fields_of_a_row_are_no_container_and_no_row_is_cut(tmp_path: Path) -> None:
    """Each was taken for another thing: examples for rows, files for a package, `.csv` in a name, a comma in a text."""
    tests = {"inputs": [""], "outputs": ["1"]}
    row = {"problem": "?", "answer": "1", "examples": [{"input": "other", "target": "2"}]}
    options = ImportOptions(columns={"question": "problem"})
    import_files("reasoning", [jsonl(tmp_path / "r.jsonl", row)], tmp_path / "r.parquet", options=options)
    assert [one.problem.prompt for one in read_parquet(tmp_path / "r.parquet")] == ["?"]

    lines = jsonl(tmp_path / "a.csv.jsonl", {"prompt": "?", "tests": tests}, {"prompt": "?", "files": []})
    summary = import_files("generic", [lines], tmp_path / "a.parquet")
    assert [line["file"] for line in rejections_of(Path(summary.rejections))] == [str(lines)]

    (tmp_path / "m.csv").write_text("question,answer\nWhat is 2,3 and 4?,9\n1+1?,2\n")
    summary = import_files("math", [tmp_path / "m.csv"], tmp_path / "m.parquet")
    assert [one.problem.prompt for one in read_parquet(tmp_path / "m.parquet")] == ["1+1?"]
    (rejected,) = rejections_of(Path(summary.rejections))
    assert rejected["detail"] == "it has 1 values more than the first line"


def test_a_problem_file_with_a_field_of_another_set_is_no_other_set(tmp_path: Path) -> None:
    tests = {"type": "stdin", "cases": [{"input": "", "output": "1"}]}
    row = {"problem_id": "p", "prompt": "Print 1.", "problem": "Print 2.", "tests": tests}
    with pytest.raises(ProblemFileError, match="problem: unknown field"):
        list(read_referenced(jsonl(tmp_path / "p.jsonl", row)))
    del row["problem"]
    with pytest.raises(ProblemFileError, match="prompt_template"):
        list(read_referenced(jsonl(tmp_path / "t.jsonl", {**row, "prompt_template": "Solve it."})))
