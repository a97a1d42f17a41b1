"""CodeContests: DeepMind's parquet (deepmind/code_contests), and the JSON array of rllm.

DeepMind's row has name, description, public_tests, private_tests and generated_tests ({input: [...], output: [...]}),
solutions ({language: [...], solution: [...]}), time_limit, memory_limit_bytes, input_file, difficulty, cf_rating.
Source: github.com/google-deepmind/code_contests, contest_problem.proto. rllm's has problem and tests {inputs, outputs}.
"""

from __future__ import annotations

from typing import Any

from nouscoder.data.importers.fields import MAX_REFERENCES, Row, optional_text, pairs, stdin_tests, text
from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.data.problems import fit_in_a_task
from nouscoder.data.references import Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import StdinTests

_LANGUAGES = {2: "cpp", 3: "python", 4: "java"}  # 1 is Python 2
_PARTS = ("public_tests", "private_tests", "generated_tests")
_DIFFICULTIES = {1: "easy", 2: "medium", 3: "hard", 4: "harder", 5: "hardest"}
_FIRST_LETTER, _LAST_LETTER = 7, 28  # A to V, the problem's place in its contest
_SOURCES = {1: "codechef", 2: "codeforces", 3: "hackerearth", 4: "codejam", 5: "atcoder", 6: "aizu"}


def read(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row of DeepMind's data set, named by its name."""
    if optional_text(row, "input_file") or optional_text(row, "output_file"):
        raise Rejected(Reason.NEEDS_FILES, "the program reads or writes a file instead of stdin and stdout")
    problem = Problem(
        problem_id=text(row, "name"),
        prompt=text(row, "description"),
        tests=stdin_tests(_cases(row, *_PARTS)),
        public_tests=_public_tests(row),
        difficulty=_fact(row, "cf_rating") or _difficulty(row.get("difficulty")),
        source="code_contests",
        family=_SOURCES.get(row.get("source") or 0, ""),
    )
    return ReferencedProblem(problem, _solutions(row.get("solutions")), _facts(row))


def read_rllm(row: Row, number: int) -> ReferencedProblem:
    """The problem of an entry of rllm's array, named by its place, counted from 0."""
    tests = row.get("tests") or {}
    cases = stdin_tests(pairs(tests.get("inputs"), tests.get("outputs")))
    return ReferencedProblem(
        Problem(f"code-contests-{number - 1}", text(row, "problem"), cases, source="code_contests")
    )


def _public_tests(row: Row) -> StdinTests | None:
    if not (row.get("public_tests") or {}).get("input"):
        return None
    found = stdin_tests(_cases(row, "public_tests"))
    return found if fit_in_a_task(found) else None


def _cases(row: Row, *parts: str) -> list[tuple[Any, Any]]:
    found = []
    for name in parts:
        tests = row.get(name) or {}
        if tests.get("input"):
            found += pairs(tests["input"], tests.get("output"))
    if not found:
        raise Rejected(Reason.NO_TESTS, "there is no public, private or generated test")
    return found


def _solutions(value: Any) -> tuple[Reference, ...]:
    found = value or {}
    both = zip(found.get("solution") or (), found.get("language") or (), strict=False)
    known = [Reference(code, _LANGUAGES[language]) for code, language in both if language in _LANGUAGES]
    # Python first, because candidates are mostly python.
    return tuple(sorted(known, key=lambda one: one.language != "python")[:MAX_REFERENCES])


def _fact(row: Row, name: str) -> str:
    """A field as text. 0 means that it is unknown."""
    found = optional_text(row, name)
    return "" if found == "0" else found


def _difficulty(value: Any) -> str:
    """The name of a difficulty of contest_problem.proto."""
    if isinstance(value, int) and _FIRST_LETTER <= value <= _LAST_LETTER:
        return chr(ord("A") + value - _FIRST_LETTER)
    return _DIFFICULTIES.get(value, "") if isinstance(value, int) else str(value or "")


def _facts(row: Row) -> dict[str, str]:
    facts = {name: _fact(row, name) for name in ("cf_rating", "cf_contest_id", "cf_index", "memory_limit_bytes")}
    limit = row.get("time_limit") or {}
    if limit:
        facts["time_limit_s"] = str((limit.get("seconds") or 0) + (limit.get("nanos") or 0) / 1e9)
    return {name: value for name, value in facts.items() if value}
