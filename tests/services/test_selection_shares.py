"""What each step of a shipped selection keeps of real problems; docs/data.md has the table.

The rows of tests/data are measured by default, and the table is printed when it differs. With
`NOUSCODER_REAL_ROWS=FOLDER pytest -s -m soak`, where FOLDER/ORGANISATION/NAME is a clone, those of two larger sets are
printed. Steps that need models, pass rates or a sandbox are left out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.services.test_importer_rates import RLLM, ROWS

from nouscoder.data.filters.run import read_recipe
from nouscoder.data.filters.step import Context, Sources, Step
from nouscoder.data.importers.run import import_files
from nouscoder.grade_files.answers import GradingTarget

ROOT = Path(__file__).parents[2]
SELECTIONS = sorted((ROOT / "configs" / "data").glob("*.toml"))
TACO = "FlagOpen/TACO/taco_generation_example.json"
# Problems of each name, and those that they are decontaminated against.
AGAINST = {"code_contests": "leetcode", "leetcode": "code_contests"}
AGAINST |= {"codeforces": "code_contests", "taco": "code_contests"}
WITHOUT_TESTS = ("codeforces", "taco")  # or with examples alone
MEASURED = {"exact_duplicates", "near_duplicates", "decontaminate", "num_tests", "tests_type", "no_urls", "no_images"}
MEASURED |= {"prompt_script"}


def imported(folder: Path) -> dict[str, Path]:
    data = ROOT / "tests" / "data"
    files = {"code_contests": ("rllm_contests", data / "code_contests_165.json.gz")}
    files |= {"leetcode": ("leetcode", data / "leetcode_200.jsonl.gz")}
    for name, (form, source) in files.items():
        import_files(form, [source], folder / f"{name}.parquet")
    return {name: folder / f"{name}.parquet" for name in files}


def shares(steps: list[Step], name: str, folder: Path) -> str:
    """The share in percent that all steps keep, and of what was left the share that each keeps."""
    sources = Sources([folder / f"{name}.parquet"], folder / "staging")
    left, own = [sources.candidates()], []
    for step in steps:
        if step.filter == "num_tests" and name in WITHOUT_TESTS:
            own.append("-")
            continue
        found = step.model_copy(update={"against": [f"{AGAINST[name]}.parquet"]} if step.files() else {})
        context = Context(folder, folder / "evidence", GradingTarget(), sources.references)
        dropped = found.apply(left[-1], context).dropped
        left.append([one for one in left[-1] if one.problem_id not in dropped])
        before, after = len(left[-2]), len(left[-1])
        own.append(f"{100 * after / before:.0f}" if before else "-")
    return f"{100 * len(left[-1]) / len(left[0]):.0f} ({', '.join(own)})"


def table_of(names: list[str], folder: Path) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of docs/data.md and those that are measured now, with the columns of these sets."""
    pages = (ROOT / "docs" / "data.md").read_text().splitlines()
    head = next(line for line in pages if line.startswith("| selection | steps |"))
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    written, measured = [], []
    for file in SELECTIONS:
        steps = list(read_recipe(file, folder=folder).steps)
        kept = [step for step in steps if step.filter in MEASURED]
        others = [step.filter for step in steps if step not in kept]
        row = [file.stem, ", ".join(step.filter for step in kept) or "none", ", ".join(others) or "none"]
        measured.append([*row, *(shares(kept, name, folder) if kept else "" for name in names)])
        line = next((line for line in pages if line.startswith(f"| {file.stem} | {row[1]} |")), "")
        cells = dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=False))
        written.append([cells.get(name, "?") for name in (*columns[:3], *names)])
    return written, measured


def lines(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@pytest.mark.long
def test_docs_say_what_each_shipped_selection_keeps(tmp_path: Path) -> None:
    written, measured = table_of([*imported(tmp_path)], tmp_path)
    assert written == measured, f"docs/data.md must have\n{lines(measured)}"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_shares_of_larger_sets_are_printed(tmp_path: Path) -> None:
    if not (ROWS / TACO).exists() or not (ROWS / RLLM).exists():
        pytest.skip(f"NOUSCODER_REAL_ROWS has no {TACO} or no {RLLM}")
    imported(tmp_path)
    prompts = [row["prompt"].removeprefix("\nQUESTION:\n") for row in json.loads((ROWS / TACO).read_text())]
    tests = {"inputs": ["1\n"], "outputs": ["1\n"]}  # its file has prompts alone
    rows = [{"prompt": one.rpartition("\nUse ")[0] or one, "input_output": json.dumps(tests)} for one in prompts]
    (tmp_path / "taco.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_files("generic", [tmp_path / "taco.jsonl"], tmp_path / "taco.parquet")
    import_files("deepcoder", [ROWS / RLLM / "test/code/codeforces.json"], tmp_path / "codeforces.parquet")
    _, measured = table_of([*WITHOUT_TESTS], tmp_path)
    print(f"\n{lines(measured)}")
