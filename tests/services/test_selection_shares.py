"""What each step of a shipped selection keeps of all real problems, as a table; docs/data.md has its figures.

`NOUSCODER_REAL_ROWS=FOLDER pytest -m soak tests/services/test_selection_shares.py`, where FOLDER/ORGANISATION/NAME is a
clone. Steps that need models, pass rates or a sandbox are left out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.services.test_importer_rates import RLLM, ROWS

from nouscoder.data.filters.duplicates import Decontaminate
from nouscoder.data.filters.run import read_recipe
from nouscoder.data.filters.step import Context, Sources
from nouscoder.data.importers.run import import_files
from nouscoder.grade_files.answers import GradingTarget

SELECTIONS = Path(__file__).parents[2] / "configs" / "data"
TACO = "FlagOpen/TACO/taco_generation_example.json"
# Problems of each name, and those that they are decontaminated against.
SETS = {"codeforces": "code_contests", "code_contests": "codeforces", "taco": "code_contests"}
WITHOUT_MODELS = {"exact_duplicates", "near_duplicates", "decontaminate", "num_tests", "tests_type", "no_urls"}
WITHOUT_MODELS |= {"no_images", "prompt_script"}


def imported(folder: Path) -> dict[str, Path]:
    """The problems of each set. TACO's file has prompts alone, which get a test."""
    prompts = [row["prompt"].removeprefix("\nQUESTION:\n") for row in json.loads((ROWS / TACO).read_text())]
    tests = {"inputs": ["1\n"], "outputs": ["1\n"]}
    rows = [{"prompt": one.rpartition("\nUse ")[0] or one, "input_output": json.dumps(tests)} for one in prompts]
    (folder / "taco.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"codeforces": ("deepcoder", ROWS / RLLM / "test/code/codeforces.json")}
    files |= {"code_contests": ("rllm_contests", ROWS / RLLM / "test/code/code_contests.json")}
    files |= {"taco": ("generic", folder / "taco.jsonl")}
    for name, (form, source) in files.items():
        import_files(form, [source], folder / f"{name}.parquet")
    return {name: folder / f"{name}.parquet" for name in files}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_shipped_selections_keep_most_real_problems(tmp_path: Path) -> None:
    if not (ROWS / TACO).exists() or not (ROWS / RLLM).exists():
        pytest.skip(f"NOUSCODER_REAL_ROWS has no {TACO} or no {RLLM}")
    sets = imported(tmp_path)
    kept: dict[str, float] = {}
    for file in sorted(SELECTIONS.glob("*.toml")):
        for number, step in enumerate(read_recipe(file, folder=tmp_path).steps, start=1):
            shares = []
            for name, held in SETS.items() if step.filter in WITHOUT_MODELS else ():
                sources = Sources([sets[name]], tmp_path / "staging")
                found = step.model_copy(update={"against": [f"{held}.parquet"]} if step.files() else {})
                candidates = sources.candidates()
                context = Context(tmp_path, tmp_path / "evidence", GradingTarget(), sources.references)
                kept[name] = 1 - len(found.apply(candidates, context).dropped) / len(candidates)
                shares.append(f"{name} {kept[name]:.1%}")
            print(f"| {file.stem} | {number} {step.filter} | {' | '.join(shares) or 'needs a model or a sandbox'} |")
            if isinstance(step, Decontaminate) and shares:
                assert kept["taco"] > 0.5
