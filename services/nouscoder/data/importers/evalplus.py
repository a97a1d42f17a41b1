"""The test programs of HumanEval+ and MBPP+ as call tests, so that a program never sees the expected results.

A program keeps `inputs` and `results` as literals and compares in a loop, `assertion(f(*inp), exp, atol)`. Only the
plain comparison is taken: equal, or within atol. EvalPlus judges some tasks otherwise (as sets, any result but None,
one of two results, a root of a polynomial); those keep their program, which may need numpy in the sandbox. Source:
tools/humaneval and tools/mbpp of evalplus, to_original_fmt.py.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from nouscoder.data.importers.fields import call_tests, pairs
from nouscoder.data.importers.rejection import Reason, Rejected
from nouscoder.domain.submission import CallTests, Comparator

# EvalPlus compares by numpy.allclose(rtol=1e-7), with atol 1e-6 where it is published as 0 and the result is a float.
_RELATIVE, _LEAST_ABSOLUTE = 1e-7, 1e-6
_PLAIN = "exact_match = out == exp"


@dataclass(frozen=True, slots=True)
class PlusTests:
    """Call tests, and how their results are compared."""

    tests: CallTests
    comparator: Comparator


def plus_tests(module: ast.Module, entry_point: str | None) -> PlusTests | None:
    """The tests of a program of this form; None for another program.

    `entry_point` is what a HumanEval+ program calls `candidate`; None for MBPP+, whose program has the function's own
    name. Raises Rejected for a program that gives the function no name.
    """
    check = _function(module.body, "check")
    body = module.body if check is None else check.body
    call = _compared(body)
    if call is None or not _is_plain(module):
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
    return PlusTests(tests, Comparator(absolute_tolerance=absolute, relative_tolerance=_RELATIVE))


def _function(body: list[ast.stmt], name: str) -> ast.FunctionDef | None:
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _is_plain(module: ast.Module) -> bool:
    """Whether `assertion` begins with the plain comparison."""
    assertion = _function(module.body, "assertion")
    return assertion is not None and ast.unparse(assertion.body[0]) == _PLAIN


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
