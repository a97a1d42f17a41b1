"""Sets of contest problems: CodeContests, TACO, APPS and SYNTHETIC-1.

CodeContests is DeepMind's parquet (deepmind/code_contests), or the JSON array of rllm.
DeepMind's row has name, description, public_tests, private_tests and generated_tests ({input: [...], output: [...]}),
solutions ({language: [...], solution: [...]}), time_limit, memory_limit_bytes, input_file, difficulty, cf_rating.
Source: github.com/google-deepmind/code_contests, contest_problem.proto. rllm's has problem and tests {inputs, outputs}.

TACO (BAAI/TACO) and APPS (codeparrot/apps): a question and `input_output`, a JSON string.

`input_output` has inputs, outputs and, for problems about a function, fn_name. An input or output is text or a list of
lines; for a function an input is the list of its arguments. A result may be wrapped in a list of one: its graders
accept the list and the value in it, and so do those of the sets below (`CallTests.wrapped`).

PrimeIntellect's SYNTHETIC-1 and verifiable-coding-problems: `verification_info` by task_type.

verifiable_code: {"language", "test_cases": [{"type": "stdin_stdout" | "function_call", "fn_name", "input", "output"}]}.
Three quarters of verifiable-coding-problems ask for C++, Rust or JavaScript. A row becomes a problem of its language,
unless its tests call a function: only Python functions can be called.
verifiable_math: {"ground_truth"}. Both are a dict, or a string of JSON or of a Python literal. The other task types
(llm_judgeable_groundtruth_similarity, ...) have nothing that can be run or compared.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nouscoder.data.importers.fields import (
    MAX_REFERENCES,
    Reason,
    Rejected,
    Row,
    call_tests,
    decoded,
    facts_of,
    optional_text,
    pairs,
    references,
    shown,
    stdin_tests,
    text,
    verified_answer,
)
from nouscoder.data.importers.rows import Format
from nouscoder.data.problems import Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import CallTests, MathTests, Prelude, StdinTests, language_name

_LANGUAGES = {2: "cpp", 3: "python", 4: "java"}  # 1 is Python 2
_PARTS = ("public_tests", "private_tests", "generated_tests")
_DIFFICULTIES = {1: "easy", 2: "medium", 3: "hard", 4: "harder", 5: "hardest"}
_FIRST_LETTER, _LAST_LETTER = 7, 28  # A to V, the problem's place in its contest
_SOURCES = {1: "codechef", 2: "codeforces", 3: "hackerearth", 4: "codejam", 5: "atcoder", 6: "aizu"}


def read_code_contests(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row of DeepMind's data set, named by its name."""
    if optional_text(row, "input_file") or optional_text(row, "output_file"):
        raise Rejected(Reason.NEEDS_FILES, "the program reads or writes a file instead of stdin and stdout")
    problem = Problem(
        problem_id=text(row, "name"),
        prompt=text(row, "description"),
        tests=stdin_tests(_cases(row, *_PARTS)),
        public_tests=shown(stdin_tests(public)) if (public := _cases(row, "public_tests")) else None,
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


def _cases(row: Row, *parts: str) -> list[tuple[Any, Any]]:
    found = []
    for name in parts:
        tests = row.get(name) or {}
        if tests.get("input"):
            found += pairs(tests["input"], tests.get("output"))
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


_FACTS = ("url", "source", "name", "date", "time_limit", "memory_limit")


def read_taco(row: Row, number: int, source: str = "taco") -> ReferencedProblem:
    """The problem of a row of TACO, named by its place, or of APPS, named by its problem_id."""
    named = optional_text(row, "problem_id", "id") if source == "apps" else ""
    problem = Problem(
        problem_id=f"{source}-{named or number}",
        prompt=text(row, "question"),
        tests=tests_of(decoded(row.get("input_output") or "{}")),
        prelude=Prelude.LCB,
        difficulty=optional_text(row, "difficulty").lower(),
        source=source,
        family=optional_text(row, "source"),
        starter_code=optional_text(row, "starter_code"),
    )
    return ReferencedProblem(problem, references(row.get("solutions")), facts_of(row, *_FACTS))


def tests_of(value: Any) -> StdinTests | CallTests:
    """Tests from {inputs, outputs, fn_name}."""
    if not isinstance(value, dict) or not value.get("inputs"):
        raise Rejected(Reason.NO_TESTS, "input_output has no inputs")
    found = pairs(value["inputs"], value.get("outputs"))
    if not value.get("fn_name"):
        return stdin_tests(found)
    return call_tests(str(value["fn_name"]), found, wrapped=True)


def read_synthetic1(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row."""
    kind = optional_text(row, "task_type") or "verifiable_code"
    info = decoded(row.get("verification_info") or "{}")
    if not isinstance(info, dict):
        raise Rejected(Reason.UNREADABLE_TESTS, "verification_info is not a record")
    if kind == "verifiable_math":
        tests: StdinTests | CallTests | MathTests = verified_answer(info)
    elif kind == "verifiable_code":
        tests = case_tests(info.get("test_cases"))
    else:
        raise Rejected(Reason.NOT_VERIFIABLE, f"task_type {kind}")
    is_code = not isinstance(tests, MathTests)
    language = language_name(optional_text(info, "language") or "python") if is_code else "python"
    if language == "pypy":  # another implementation of the language that is asked for
        language = "python"
    problem = Problem(
        problem_id=optional_text(row, "problem_id") or f"synthetic1-{number}",
        prompt=text(row, "prompt"),
        tests=tests,
        prelude=Prelude.LCB if is_code and language == "python" else Prelude.NONE,
        source="synthetic1",
        family=optional_text(row, "source"),
        languages=(language,),
    )
    known = references(row.get("gold_standard_solution"), language) if is_code else ()
    return ReferencedProblem(problem, known, names_languages=bool(optional_text(info, "language")))


def case_tests(cases: Any) -> StdinTests | CallTests:
    """Tests from a list of {type, fn_name, input, output}."""
    if not isinstance(cases, list) or not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test case")
    kinds = {case.get("type") or "stdin_stdout" for case in cases}
    found = [(case["input"], case["output"]) for case in cases]
    if kinds == {"stdin_stdout"}:
        return stdin_tests(found)
    names = {case.get("fn_name") for case in cases}
    if kinds != {"function_call"} or len(names) != 1 or not (name := names.pop()):
        raise Rejected(Reason.UNREADABLE_TESTS, f"test cases of the types {sorted(map(str, kinds))}")
    return call_tests(str(name), found, wrapped=True)


FORMATS = {
    "taco": Format(read_taco, "TACO"),
    "apps": Format(partial(read_taco, source="apps"), "APPS"),
    "synthetic1": Format(read_synthetic1, "PrimeIntellect SYNTHETIC-1, verifiable-coding-problems"),
    "code_contests": Format(read_code_contests, "CodeContests of DeepMind"),
    "rllm_contests": Format(read_rllm, "CodeContests as rllm's JSON array"),
}
