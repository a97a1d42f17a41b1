"""How importers judge right and wrong programs on real rows: the references, and the reference of another problem.

Rows that no repository here has are read from the folder NOUSCODER_REAL_ROWS: HumanEval.jsonl.gz of openai/human-eval,
LeetCodeDataset-v0.3.1-test.jsonl.gz of newfacade/LeetCodeDataset, mbpp.jsonl and sanitized-mbpp.json of
google-research. The table of docs/data.md has what was measured.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nouscoder.config import load_config
from nouscoder.data.importers.run import import_files
from nouscoder.data.problem_parquet import read_parquet
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import local_grader

ROWS = os.environ.get("NOUSCODER_REAL_ROWS", "")
OURS = Path(__file__).parents[1] / "data"
DISTANCE = 23  # neighbours are often two sizes of one problem, which one program solves
FILES = [
    ("humaneval", "HumanEval.jsonl.gz"),
    ("mbpp", "mbpp.jsonl"),
    ("mbpp", "sanitized-mbpp.json"),
    ("leetcode", "LeetCodeDataset-v0.3.1-test.jsonl.gz"),
    ("leetcode", "leetcode_200.jsonl.gz"),
]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "file"), FILES)
def test_references_are_accepted_and_those_of_other_problems_are_not(tmp_path: Path, name: str, file: str) -> None:
    path = OURS / file if (OURS / file).exists() else Path(ROWS) / file
    if not path.exists():
        pytest.skip(f"NOUSCODER_REAL_ROWS has no {file}")
    summary = import_files(name, [path], tmp_path / "problems.parquet")
    items = [item for item in read_parquet(tmp_path / "problems.parquet") if item.references]
    refused, accepted = asyncio.run(faults(items))
    print(f"{file}: {len(items)} rows, rejected {summary.rejected}, refused {refused}, accepted {accepted}")
    assert not refused
    assert len(accepted) <= 0.02 * len(items), "some references of other problems may be right"


async def faults(items: Sequence[ReferencedProblem]) -> tuple[list[str], list[str]]:
    """The problems whose reference is refused, and those that accept another's."""
    async with local_grader(load_config(None).verifier) as grader:

        async def is_accepted(item: ReferencedProblem, code: str) -> bool:
            rules = replace(item.problem.grading_rules(), text_is_code=True)
            return (await grader.grade(rules.submission(item.problem.tests, code))).kind is VerdictKind.ACCEPTED

        right = await asyncio.gather(*(is_accepted(item, item.references[0].code) for item in items))
        others = [*items[DISTANCE:], *items[:DISTANCE]]
        wrong = await asyncio.gather(
            *(is_accepted(item, other.references[0].code) for item, other in zip(items, others, strict=True))
        )
    names = [item.problem.problem_id for item in items]
    refused = [name for name, is_right in zip(names, right, strict=True) if not is_right]
    return refused, [name for name, is_right in zip(names, wrong, strict=True) if is_right]
