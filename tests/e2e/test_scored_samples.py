"""From graded samples to preference pairs: each test is run, and the score is the share that passes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nouscoder.config import load_config
from nouscoder.errors import Unusable
from nouscoder.evaluation.evaluate import EvaluationRequest, evaluate
from nouscoder.evaluation.samples import SamplingSettings
from nouscoder.evaluation.scored_samples import scored_problems
from nouscoder.reward_model.pairs import PairRule, read_pairs, write_pairs

pytestmark = pytest.mark.timeout(600)  # on a busy machine

# By the numbers 1 to 4: the first prints each of them, the second is wrong for 2 and 3, the last is no Python.
PROGRAMS = ["print(input())", "n = int(input())\nprint(n if n in (1, 4) else 0)", "print(0)", "print("]


def test_the_share_of_passed_tests_is_the_score(tmp_path: Path) -> None:
    cases = [{"input": f"{number}\n", "output": f"{number}\n"} for number in range(1, 5)]
    problem = {"problem_id": "echo", "prompt": "Print it.", "tests": {"type": "stdin", "cases": cases}}
    problems, given = tmp_path / "problems.jsonl", tmp_path / "samples.jsonl"
    problems.write_text(json.dumps(problem | {"prompt_template": "Q: {prompt}"}) + "\n")
    given.write_text("".join(json.dumps({"task_id": "echo", "solution": code}) + "\n" for code in PROGRAMS))
    request = EvaluationRequest(problems, tmp_path / "eval", SamplingSettings(""), samples=given)
    config = load_config(None, [])
    evaluate(request, config)
    [found] = scored_problems(problems, tmp_path / "eval")
    assert [sample.is_right for sample in found.samples] == [True, False, False, False]
    with pytest.raises(Unusable, match="evaluate them with --all-tests"):
        _ = found.scores
    evaluate(replace(request, all_tests=True), config)
    [found] = scored_problems(problems, tmp_path / "eval")
    assert (found.problem_id, found.prompt) == ("echo", "Q: Print it.")
    assert [sample.answer for sample in found.samples] == PROGRAMS
    assert found.scores == [1.0, 0.5, 0.0, 0.0]
    counts = write_pairs([found], PairRule(), 0, 0, tmp_path / "pairs.jsonl")
    assert counts.pairs == 1
    [pair] = read_pairs(tmp_path / "pairs.jsonl")
    assert (pair.chosen, pair.rejected) == (PROGRAMS[0], PROGRAMS[1])


def test_a_folder_without_samples_of_the_problems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="is not the folder of an evaluation"):
        scored_problems(tmp_path / "problems.jsonl", tmp_path)
