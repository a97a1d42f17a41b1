"""Sets as trainers publish them, whose rows have a question and tests in one of the public forms; and rows of any set.

generic: the field names below, or those of `--column`. A question (prompt, question, problem or question_content: text,
or the messages of a chat: a system message and the user's), and tests, input_output, test_cases, inputs with
outputs, or an answer, which is compared as mathematics. In verl's layout the question is `prompt`, and the tests or the
answer are in reward_model.ground_truth. Further fields: problem_id, task_id, question_id or id; starter_code, fn_name,
entry_point or func_name, languages or language, solutions or solution, difficulty, source or data_source, family,
contest_date or date.

nouscoder (NousResearch/RLVR_Coding_Problems, lcb_test): problem, tests {input, output, fn_name}, fn_name, problem_type
(func for functions), starter_code. Outputs are compared as the authors' grader does: |a - b| <= 1e-4 for the numbers of
a line, and results of functions exactly. Source: NousResearch/atropos, environments/code_execution_server
(coding_server.py, lcb_modal_endpoint.py).

deepcoder (agentica-org/DeepCoder-Preview-Dataset): problem, solutions, starter_code and tests, whose JSON depends on
the part. primeintellect: a list of {type, fn_name, input, output}; taco: {inputs, outputs, fn_name}; lcbv5: a list of
{input, output, testtype, metadata: {func_name}}; codeforces: a list of {input, output}.

klear (Kwai-Klear/KlearReasoner-CodeSub-15K): verl's layout with DeepCoder's tests. The prompts are in DeepCoder's form,
of which the question and the starter code are taken. As in generic rows, the tests may also be those of rllm and
Code-R1: {functional: a program that runs behind the answer} or {pytest: a file}, or such a text alone. Source:
Kwai-Klear/KlearReasoner, verl/utils/reward_score/code_r1_reward/firejail_exec.py; rllm, rewards/code_reward.py.

skywork (Skywork/Skywork-OR1-RL-Data): verl's layout. The tests are {inputs, outputs, fn_name}, LeetCodeDataset's
{import_prefix, test_code, entry_point}, {assert_case} or, for mathematics, an answer. extra_info.model_difficulty has
for each of three models how many of 16 answers were wrong. Source: SkyworkAI/Skywork-OR1,
verl/utils/reward_score/livecodebench/compute_score.py, and the data set's card.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from nouscoder.data.importers.contests import case_tests
from nouscoder.data.importers.fields import (
    Reason,
    Rejected,
    Row,
    asked_of,
    at_path,
    call_tests,
    decoded,
    facts_of,
    optional_text,
    pairs,
    references,
    text,
)
from nouscoder.data.importers.functions import checked, functional_tests, leetcode_tests, without_form
from nouscoder.data.importers.livecodebench import LCB_LIMITS, lcb_tests
from nouscoder.data.importers.mathematics import ANSWER_TEMPLATE
from nouscoder.data.importers.rows import Format
from nouscoder.data.importers.training_sets import pytest_tests
from nouscoder.data.problems import ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.submission import (
    AssertTests,
    CallTests,
    Comparator,
    ComparatorKind,
    Limits,
    MathCase,
    MathTests,
    Prelude,
    StdinTests,
    Tests,
    language_name,
)
from nouscoder.formats.body import first_fault, tests_from_json
from nouscoder.formats.json_values import TooManyValues, ValueCount
from nouscoder.formats.public_shapes import NotTests, rewritten, test_names

_NO_FUNCTION = ("", "none")
_TESTS = ("tests", "input_output", "test_cases")
_TRUTH = "reward_model.ground_truth"
_DATES = ("contest_date", "date")


def found_tests(value: Any, function: str = "") -> Tests:
    """Tests in a public form, or this project's; `function` is called where they name none. Raises Rejected."""
    value, function = decoded(value), "" if function in _NO_FUNCTION else function
    if isinstance(value, list):
        value = _of_list(value, function)
    if isinstance(value, Mapping):
        value = _of_record(dict(value), function)
    if not isinstance(value, dict):
        if isinstance(value, StdinTests | CallTests | AssertTests):
            return value
        raise Rejected(Reason.UNREADABLE_TESTS, f"neither a list of tests nor a record: {value!r:.60}")
    try:
        shaped = rewritten({"tests": value}, ValueCount())
        return tests_from_json(to_json((shaped or {"tests": value})["tests"]))
    except TooManyValues as error:
        raise Rejected(Reason.TOO_LARGE, str(error)) from None
    except NotTests as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"{error.field}: {error}") from None
    except ValidationError as error:
        field, wrong = first_fault(error, "tests")
        raise Rejected(Reason.UNREADABLE_TESTS, f"{field}: {wrong}") from None


def _of_list(cases: list[Any], function: str) -> Any:
    """Tests, or the record that a list of cases stands for."""
    if not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test")
    first = cases[0]
    if isinstance(first, str):
        return AssertTests(tuple(checked(case) for case in cases))
    if isinstance(first, list) and all(isinstance(case, list) and len(case) == 2 for case in cases):
        return _paired([case[0] for case in cases], [case[1] for case in cases])
    if not isinstance(first, dict):
        raise Rejected(Reason.UNREADABLE_TESTS, f"a test is {first!r:.60}")
    if first.get("testtype"):
        return lcb_tests(cases, {"func_name": function} if function else first.get("metadata") or {})
    if first.get("type") in ("stdin_stdout", "function_call"):
        return case_tests(cases)
    functions = {case.get("fn_name") for case in cases}
    if len(functions) > 1:
        raise Rejected(Reason.UNREADABLE_TESTS, f"the tests call {len(functions)} functions")
    return _paired([case["input"] for case in cases], [case["output"] for case in cases]) | {"fn_name": functions.pop()}


def _paired(inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    return {"inputs": inputs, "outputs": outputs}


def _of_record(tests: dict[str, Any], function: str) -> Any:
    """Tests, or the record with the name of the function."""
    if tests.get("test_code") and tests.get("entry_point"):  # LeetCodeDataset's
        names = ("test_code", "entry_point", "import_prefix")
        return leetcode_tests(*(str(tests.get(name) or "") for name in names))
    for form, read in (("functional", functional_tests), ("pytest", pytest_tests)):
        if isinstance(tests.get(form), str):
            return read(tests[form])
    if any(tests.get("assert_case") or ()) and not any(decoded(tests.get("inputs") or ())):
        return AssertTests(tuple(checked(case) for case in decoded(tests["assert_case"])))
    if not tests.get("type"):
        inputs, outputs = (decoded(tests.get(f"{name}s") or tests.get(name)) for name in ("input", "output"))
        pairs(inputs or (), outputs or ())
        others = {name: value for name, value in tests.items() if name not in ("inputs", "outputs", "input", "output")}
        return others | _paired(inputs, outputs) | {"fn_name": tests.get("fn_name") or function}
    return tests


def read_generic(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row of any set."""
    function = optional_text(row, "fn_name", "entry_point", "func_name")
    question, facts = asked_of(row, "prompt", "question", "problem", "question_content")
    found = next((row[name] for name in _TESTS if row.get(name) not in (None, "")), None)
    if found is None and row.get("inputs"):
        found = _paired(decoded(row["inputs"]), decoded(row.get("outputs")))
    if found is not None:
        tests = found_tests(found, function)
    else:
        tests = _tests_or_answer(optional_text(row, "answer") or at_path(row, _TRUTH), function)
    languages = row.get("languages") or row.get("language")
    names = languages.split(",") if isinstance(languages, str) else languages or ["python"]
    problem = Problem(
        problem_id=optional_text(row, "problem_id", "task_id", "question_id", "id") or f"generic-{number}",
        prompt=question,
        tests=tests,
        prelude=Prelude.NONE if isinstance(tests, MathTests) else Prelude.LCB,
        prompt_template=ANSWER_TEMPLATE if isinstance(tests, MathTests) else "",
        difficulty=optional_text(row, "difficulty"),
        source=optional_text(row, "source", "data_source") or "generic",
        family=optional_text(row, "family"),
        starter_code=optional_text(row, "starter_code"),
        languages=tuple(language_name(str(name).strip()) for name in names),
    )
    known = references(row.get("solutions") or row.get("solution"))
    return ReferencedProblem(problem, known, facts | facts_of(row, *_DATES), names_languages=bool(languages))


def _tests_or_answer(truth: Any, function: str) -> Tests:
    """Tests, or an answer of mathematics: what is not JSON of tests."""
    if truth is None or truth == "":
        raise Rejected(Reason.NO_TESTS, "there are neither tests nor an answer")
    try:
        value = decoded(truth)
    except Rejected:
        value = None
    if isinstance(value, list) and value and all(isinstance(one, str) and "assert" not in one for one in value):
        if len(value) > 1:
            raise Rejected(Reason.UNREADABLE_TESTS, f"there are {len(value)} answers, and one is wanted")
        return MathTests((MathCase(value[0]),))  # Skywork's, a list of one
    if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict | str)):
        return found_tests(value, function)
    program = value if isinstance(value, str) else str(truth)
    if _PROGRAM.search(program):
        return found_tests({"pytest" if test_names(program) else "functional": program})
    return MathTests((MathCase(str(truth)),))


_PROGRAM = re.compile(r"(?m)^(?:def \w+\(|class \w+[(:]|assert |import \w+$|from \w+ import )")


_CLOSE = Comparator(ComparatorKind.LCB, absolute_tolerance=1e-4)


def read_nouscoder(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row of the authors' sets, named by its place."""
    tests = decoded(row.get("tests") or {})
    named = tests.get("fn_name") if isinstance(tests, dict) else None
    function = str(named or row.get("fn_name") or "")
    found = _authors_calls(tests, function) if function not in _NO_FUNCTION else found_tests(tests)
    problem = Problem(
        problem_id=optional_text(row, "problem_id", "question_id") or f"nouscoder-{number}",
        prompt=text(row, "problem"),
        tests=found,
        comparator=_CLOSE if isinstance(found, StdinTests) else Comparator(),
        prelude=Prelude.LCB,
        difficulty=optional_text(row, "difficulty"),
        source="nouscoder",
        family=optional_text(row, "problem_type"),
        starter_code=optional_text(row, "starter_code"),
    )
    return ReferencedProblem(problem, references(row.get("solutions") or row.get("solution")), facts_of(row, *_DATES))


def _authors_calls(tests: Any, function: str) -> CallTests:
    """As in grade_call_based: text is JSON, an argument a line; another output is a list whose first item counts."""
    if isinstance(tests, list):
        tests = {name: [case[name] for case in tests] for name in ("input", "output")}
    inputs, outputs = (decoded(tests.get(name) or tests.get(f"{name}s") or ()) for name in ("input", "output"))
    try:
        calls = [
            (
                [json.loads(line) for line in given.split("\n")] if isinstance(given, str) else given,
                json.loads(wanted) if isinstance(wanted, str) else wanted[0],
            )
            for given, wanted in pairs(inputs, outputs)
        ]
    except ValueError as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"an argument or a result is not JSON: {error}") from None
    return call_tests(function, calls)


_DEEPCODER_LIMITS = Limits(wall_time_s=12.0, cpu_time_s=12.0)  # rllm, rllm/rewards/code_reward.py


def read_deepcoder(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row of a part, named by its place."""
    about = decoded(row.get("metadata") or "{}")
    listed = decoded(row.get("tests") or [])
    is_lcb = bool(at_path({"tests": listed}, "tests.0.testtype"))
    function = optional_text(about, "func_name") if isinstance(about, dict) else ""
    problem = Problem(
        problem_id=f"deepcoder-{'lcb-' * is_lcb}{number}",
        prompt=text(row, "problem"),
        tests=found_tests(listed, function),
        limits=LCB_LIMITS if is_lcb else _DEEPCODER_LIMITS,
        prelude=Prelude.LCB,
        difficulty=optional_text(row, "difficulty"),
        source="deepcoder",
        starter_code=optional_text(row, "starter_code"),
    )
    return ReferencedProblem(problem, references(row.get("solutions")))


def read_klear(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row, named by its place."""
    item = read_generic(row, number)
    question, code = without_form(item.problem.prompt)
    named = replace(item.problem, problem_id=f"klear-{number}", prompt=question, starter_code=code, source="klear")
    return replace(item, problem=named)


_ANSWERS = 16


def read_skywork(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row, named by its place, with the pass rates of the models in its metadata."""
    item = read_generic(row, number)
    wrong = at_path(row, "extra_info.model_difficulty") or {}
    rates = {
        f"pass_rate.{model}": f"{_ANSWERS - count}/{_ANSWERS}"
        for model, count in wrong.items()
        if isinstance(count, int) and 0 <= count <= _ANSWERS
    }
    named = replace(item.problem, problem_id=f"skywork-{number}", family=item.problem.source, source="skywork")
    return replace(item, problem=named, metadata={**item.metadata, **rates})


FORMATS = {
    "generic": Format(read_generic, "CSV, JSON lines or parquet with any columns (--column), verl's parquet"),
    "nouscoder": Format(read_nouscoder, "NousCoder's RLVR_Coding_Problems and lcb_test"),
    "deepcoder": Format(read_deepcoder, "DeepCoder-Preview-Dataset, its four parts"),
    "klear": Format(read_klear, "KlearReasoner-CodeSub-15K"),
    "skywork": Format(read_skywork, "Skywork-OR1-RL-Data, code and mathematics"),
}
