"""A problem's prelude is used in its grading: programs sampled in a run get the same verdict as from the API."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.config import SandboxSection
from nouscoder.data.importers.formats import read_referenced
from nouscoder.data.problem_parquet import load_problems
from nouscoder.data.problems import ReferencedProblem, save_problems
from nouscoder.domain.submission import Prelude
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import open_sandbox

DATA = Path(__file__).parents[1] / "data" / "leetcode_200.jsonl.gz"
METHOD = """class Solution:
    def total(self, numbers: List[int]) -> Optional[int]:
        return sum(numbers) if numbers else None"""
MADE_UP = {
    "task_id": "total",
    "query": "Add the numbers.",
    "prompt": "from typing import *",
    "completion": METHOD,
    "entry_point": "Solution().total",
    "test": "def check(candidate):\n    assert candidate(numbers = [1, 2]) == 3\n",
    "meta": {"difficulty": "Easy"},
}


def leetcode(tmp_path: Path) -> list[tuple[ReferencedProblem, str]]:
    """Problems, each with an answer of a policy: an invented one, and the first 30 of a real set.

    An answer is a method with its helpers, without the imports that LeetCode provides.
    """
    real = gzip.decompress(DATA.read_bytes()).splitlines()[:30]
    lines = [json.dumps(MADE_UP).encode(), *real]
    file = tmp_path / "leetcode.jsonl.gz"
    file.write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
    return list(zip(read_referenced(file), (json.loads(line)["completion"] for line in lines), strict=True))


@pytest.mark.timeout(300)
async def test_sampled_leetcode_methods_can_use_the_names_that_leetcode_imports(tmp_path: Path) -> None:
    items = leetcode(tmp_path)
    save_problems(tmp_path / "train.jsonl", [item.problem for item, _ in items])
    sandbox = open_sandbox(SandboxSection(backend="local", slots=2))
    await sandbox.start()
    try:
        grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()))
        for problem, (_, program) in zip(load_problems(tmp_path / "train.jsonl"), items, strict=True):
            assert (problem.prelude, problem.source) == (Prelude.LCB, "leetcode")
            answer = f"```python\n{program}\n```"
            verdict = await grader.grade(problem.grading_rules().submission(problem.tests, answer))
            assert verdict.kind is VerdictKind.ACCEPTED, (problem.problem_id, verdict)
    finally:
        await sandbox.close()
