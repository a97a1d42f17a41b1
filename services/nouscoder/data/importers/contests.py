"""Sets of contest problems: LiveCodeBench, CodeContests, TACO, APPS and SYNTHETIC-1.

LiveCodeBench (livecodebench/code_generation_lite): question_title, question_content, platform, question_id, contest_id,
contest_date, starter_code, difficulty, public_test_cases (JSON), private_test_cases (JSON, or base64 of zlib of a
pickle of JSON) and metadata (JSON). Source: lcb_runner/benchmarks/code_generation.py. LiveCodeBench's prompt is a form
(domain/prompt.py). A pickle of another thing than one text is refused without running anything. It is never loaded. Its
operations are listed (pickletools.genops), and only those that a pickled text consists of are allowed; operations that
import names or call them are among the others.

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

import base64
import json
import pickletools
import warnings
from functools import partial
from typing import Any

from nouscoder.data.bounded_files import FileTooLarge, unpacked
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
from nouscoder.domain.submission import CallTests, Limits, MathTests, Prelude, Profile, StdinTests, language_name

MAX_UNPACKED_BYTES = 1024**3  # of one row's private tests
_TEXT = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_HARMLESS = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})


class UnsafePickle(ValueError):
    """The pickle holds something other than one text. The text names the operation."""


def text_of_pickle(data: bytes) -> str:
    """The text. Raises UnsafePickle, and ValueError for data that is not a whole pickle."""
    found: str | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of wrong escapes in operations that are refused
        for operation, argument, position in pickletools.genops(data):
            if operation.name in _TEXT and found is None:
                found = str(argument)
            elif operation.name not in _HARMLESS:
                raise UnsafePickle(f"operation {operation.name} at byte {position}: only one text is allowed")
    if found is None:
        raise UnsafePickle("the pickle holds no text")
    return found


LCB_LIMITS = Limits(wall_time_s=6.0, cpu_time_s=6.0)  # lcb_runner/runner/parser.py: --timeout 6


def read_livecodebench(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row, judged as published. Its id is the question_id, as in LiveCodeBench's sample files."""
    problem = Problem(
        problem_id=text(row, "question_id"),
        prompt=text(row, "question_content"),
        starter_code=optional_text(row, "starter_code"),
        tests=_lcb_tests(row, "public_test_cases", "private_test_cases"),
        public_tests=(
            shown(_lcb_tests(row, "public_test_cases")) if packed_cases(row.get("public_test_cases")) else None
        ),
        limits=LCB_LIMITS,
        prelude=Prelude.LCB,
        profile=Profile.LCB,
        difficulty=optional_text(row, "difficulty"),
        source="livecodebench",
        family=optional_text(row, "platform"),
    )
    facts = facts_of(row, "contest_date", "platform", "contest_id", "question_title")
    return ReferencedProblem(problem, metadata=facts)


def _lcb_tests(row: Row, *names: str) -> StdinTests | CallTests:
    cases = [case for name in names for case in packed_cases(row.get(name))]
    return lcb_tests(cases, decoded(row.get("metadata") or "{}"))


def lcb_tests(cases: list[Any], metadata: Any) -> StdinTests | CallTests:
    """Tests of LiveCodeBench's form: {input, output, testtype}. A function's arguments are JSON, one a line."""
    kinds = {case.get("testtype") or "stdin" for case in cases}
    found = [(case["input"], case["output"]) for case in cases]
    if kinds <= {"stdin", "stdin_stdout"}:
        return stdin_tests(found)
    if kinds != {"functional"}:
        raise Rejected(Reason.UNREADABLE_TESTS, f"tests of the types {sorted(kinds)}")
    entry_point = metadata.get("func_name") if isinstance(metadata, dict) else None
    if not entry_point:
        raise Rejected(Reason.MISSING_FIELD, "metadata has no func_name")
    try:
        calls = [([json.loads(line) for line in given.split("\n")], json.loads(wanted)) for given, wanted in found]
    except ValueError as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"an argument or a result is not JSON: {error}") from None
    return call_tests(entry_point, calls)


def packed_cases(value: Any) -> list[Any]:
    """The list of tests that a field holds: as it is, as JSON, or as base64 of zlib of a pickle of JSON."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        value = _unpacked(value) if value.strip() else "[]"
    cases = decoded(value if value is not None else [])
    if not isinstance(cases, list):
        raise Rejected(Reason.UNREADABLE_TESTS, "the tests are not a list")
    return cases


def _unpacked(packed: str) -> str:
    try:
        return text_of_pickle(unpacked(base64.b64decode(packed, validate=True), MAX_UNPACKED_BYTES))
    except UnsafePickle as error:
        raise Rejected(Reason.UNSAFE_PICKLE, str(error)) from None
    except FileTooLarge as error:
        raise Rejected(Reason.TOO_LARGE, f"the private tests cannot be unpacked: {error}") from None
    except ValueError as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"the private tests cannot be unpacked: {error}") from None


# CodeContests, TACO, APPS and SYNTHETIC-1.

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
    "livecodebench": Format(read_livecodebench, "LiveCodeBench, code_generation_lite"),
    "taco": Format(read_taco, "TACO"),
    "apps": Format(partial(read_taco, source="apps"), "APPS"),
    "synthetic1": Format(read_synthetic1, "PrimeIntellect SYNTHETIC-1, verifiable-coding-problems"),
    "code_contests": Format(read_code_contests, "CodeContests of DeepMind"),
    "rllm_contests": Format(read_rllm, "CodeContests as rllm's JSON array"),
}
