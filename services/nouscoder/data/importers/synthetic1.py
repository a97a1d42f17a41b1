"""PrimeIntellect's SYNTHETIC-1 and verifiable-coding-problems: `verification_info` by task_type.

verifiable_code: {"language", "test_cases": [{"type": "stdin_stdout" | "function_call", "fn_name", "input", "output"}]}.
verifiable_math: {"ground_truth"}. Both are a dict, or a string of JSON or of a Python literal. The other task types
(llm_judgeable_groundtruth_similarity, ...) have nothing that can be run or compared.
"""

from __future__ import annotations

from typing import Any

from nouscoder.data.importers.fields import Row, call_tests, decoded, optional_text, references, stdin_tests, text
from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.data.references import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CallTests, MathCase, MathTests, Prelude, StdinTests


def read(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row."""
    kind = optional_text(row, "task_type") or "verifiable_code"
    info = decoded(row.get("verification_info") or "{}")
    if not isinstance(info, dict):
        raise Rejected(Reason.UNREADABLE_TESTS, "verification_info is not a record")
    if kind == "verifiable_math":
        gold = optional_text(info, "ground_truth")
        if not gold:
            raise Rejected(Reason.NO_ANSWER, "verification_info has no ground_truth")
        tests: StdinTests | CallTests | MathTests = MathTests((MathCase(gold),))
    elif kind == "verifiable_code":
        tests = case_tests(info.get("test_cases"))
    else:
        raise Rejected(Reason.NOT_VERIFIABLE, f"task_type {kind}")
    problem = Problem(
        problem_id=optional_text(row, "problem_id") or f"synthetic1-{number}",
        prompt=text(row, "prompt"),
        tests=tests,
        prelude=Prelude.NONE if isinstance(tests, MathTests) else Prelude.LCB,
        source="synthetic1",
        family=optional_text(row, "source"),
    )
    is_code = not isinstance(tests, MathTests)
    return ReferencedProblem(problem, references(row.get("gold_standard_solution")) if is_code else ())


def case_tests(cases: Any) -> StdinTests | CallTests:
    """Tests from a list of {type, fn_name, input, output}."""
    if not isinstance(cases, list) or not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test case")
    kinds = {case.get("type", "stdin_stdout") for case in cases}
    found = [(case["input"], case["output"]) for case in cases]
    if kinds == {"stdin_stdout"}:
        return stdin_tests(found)
    names = {case.get("fn_name") for case in cases}
    if kinds != {"function_call"} or len(names) != 1 or not (name := names.pop()):
        raise Rejected(Reason.UNREADABLE_TESTS, f"test cases of the types {sorted(map(str, kinds))}")
    return call_tests(str(name), found)
