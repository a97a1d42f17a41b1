"""Where pass rates are read: files of them, evaluations, runs and the stages of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nouscoder.broker.curriculum import open_curriculum
from nouscoder.config import load_config
from nouscoder.data.filters.run import read_recipe, select
from nouscoder.data.pass_rates import PassCount, read_pass_rates
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.domain.curriculum import ProblemStatistics
from nouscoder.errors import Unusable

COUNTS = {"never": (0, 8), "half": (4, 8), "always": (8, 8)}


def write(file: Path, value: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=1))
    return file


def evaluation(folder: Path) -> Path:
    """The folder of a finished `nouscoder eval --n 8`, with two profiles of which the first counts."""
    problems = [
        {"problem_id": name, "difficulty": "easy", "num_samples": sampled, "accepted": {"process": passed, "lcb": 0}}
        for name, (passed, sampled) in COUNTS.items()
    ]
    write(folder / "report.json", {"model": "m", "profiles": {"process": {}, "lcb": {}}, "problems": problems})
    # Equal answers share a verdict, so this file alone does not say how many samples passed.
    (folder / "verdicts.jsonl").write_text('{"key": "k", "verdict": "accepted", "passed": 3, "total": 3}\n')
    return folder


def statistics(counts: dict[str, tuple[int, int]]) -> dict[str, str]:
    """The problems of a run's curriculum.json."""
    made = (
        ProblemStatistics(name, groups=1, sampled=sampled, accepted=passed)
        for name, (passed, sampled) in counts.items()
    )
    return {one.problem_id: one.to_text() for one in made}


def run_folder(folder: Path, counts: dict[str, tuple[int, int]]) -> Path:
    """The folder of a run that has trained."""
    write(folder / "curriculum.json", {"cursor": 5, "problems": statistics(counts)})
    write(folder / "evaluation_after.json", {"policy_version": 3, "pass_at_1": 0.5, "problems": recorded(COUNTS)})
    (folder / "config.toml").write_text("[run]\n")
    return folder


def recorded(counts: dict[str, tuple[int, int]]) -> list[dict[str, object]]:
    """The problems in the record of an evaluation during a run."""
    return [{"problem_id": name, "passed": passed, "sampled": of} for name, (passed, of) in counts.items()]


def counted(path: Path) -> dict[str, tuple[int, int]]:
    return {name: (count.passed, count.sampled) for name, count in read_pass_rates(path).items()}


def test_an_evaluation_is_read_by_its_folder_its_report_or_its_verdicts(tmp_path: Path) -> None:
    folder = evaluation(tmp_path / "base")
    for path in (folder, folder / "report.json", folder / "verdicts.jsonl"):
        assert counted(path) == COUNTS, path


def test_a_run_is_read_by_what_it_trained_on_or_else_by_its_last_evaluation(tmp_path: Path) -> None:
    trained = run_folder(tmp_path / "trained", {"half": (3, 4)})
    assert counted(trained) == {"half": (3, 4)}
    assert counted(trained / "curriculum.json") == {"half": (3, 4)}
    assert counted(trained / "evaluation_after.json") == COUNTS
    measured = run_folder(tmp_path / "measured", {})
    assert counted(measured) == COUNTS
    array = write(tmp_path / "stats.json", recorded(COUNTS))  # data stats RUN --json
    assert counted(array) == COUNTS
    assert read_pass_rates(array)["half"] == PassCount(4, 8)


def test_what_has_no_pass_rates_gets_one_clear_sentence(tmp_path: Path) -> None:
    unfinished = evaluation(tmp_path / "unfinished")
    (unfinished / "report.json").unlink()
    old = write(tmp_path / "old/evaluation_after.json", {"policy_version": 3, "pass_at_1": 0.5})
    (tmp_path / "old/config.toml").write_text("")
    write(tmp_path / "unsound/report.json", {"problems": [{"problem_id": "a", "passed": 2, "sampled": 1}]})
    for path, sentence in (
        (unfinished, "unfinished has no report.json: .* end the evaluation with the same nouscoder eval command"),
        (unfinished / "verdicts.jsonl", "unfinished has no report.json"),
        (tmp_path / "old", "old is the folder of a run without pass rates"),
        (old, r"evaluation_after.json, problems: .*an earlier release"),
        (tmp_path / "unsound", r"report.json, problems, record 1: passed 2 is more than sampled 1"),
    ):
        with pytest.raises(Unusable, match=sentence):
            read_pass_rates(path)


def test_a_curriculum_and_a_filter_take_the_folder_of_an_evaluation(tmp_path: Path) -> None:
    evaluation(tmp_path / "base")
    (tmp_path / "run.toml").write_text('[broker.curriculum]\nname = "pass_rates"\npass_rates = "base"\n')
    curriculum = open_curriculum(load_config(tmp_path / "run.toml"), [*COUNTS, "other"])
    assert {choice.problem_id for choice in curriculum.choices_from(0, 4)} == {"never", "half"}
    tests = {"type": "stdin", "cases": [{"input": "1\n", "output": "1\n"}]}
    lines = [json.dumps({"problem_id": name, "prompt": name, "tests": tests}) for name in COUNTS]
    (tmp_path / "problems.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "r.toml").write_text(
        'name = "r"\ninputs = ["problems.jsonl"]\n[[steps]]\nfilter = "pass_rate"\nfile = "base"\nbelow = 1.0\n'
    )
    selection = select(read_recipe(tmp_path / "r.toml"), tmp_path / "r.parquet")
    assert {item.problem.problem_id for item in read_parquet(tmp_path / "r.parquet")} == {"never", "half"}
    assert set(selection.files) == {"problems.jsonl", "base"}
