"""The tests of a submission: protocol <-> domain, one pair of functions a type of tests."""

from __future__ import annotations

import json
from collections.abc import Iterable

from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    InteractiveTests,
    JsonValue,
    JudgeProgram,
    MathCase,
    MathTests,
    StdinCase,
    StdinTests,
    Tests,
)
from nouscoder.rpc.faults import InvalidMessage
from nouscoder.v1 import verdict_pb2


def tests_to(tests: Tests) -> verdict_pb2.Tests:
    """Domain -> protocol."""
    match tests:
        case StdinTests():
            return verdict_pb2.Tests(stdin=verdict_pb2.StdinTests(cases=_cases_to(tests.cases)))
        case CallTests():
            calls = [_call_case_to(case) for case in tests.cases]
            return verdict_pb2.Tests(call=verdict_pb2.CallTests(entry_point=tests.entry_point, cases=calls))
        case AssertTests():
            return verdict_pb2.Tests(asserts=verdict_pb2.AssertTests(cases=tests.cases, setup=tests.setup))
        case CheckerTests():
            checked = verdict_pb2.CheckerTests(cases=_cases_to(tests.cases), checker=_program_to(tests.checker))
            return verdict_pb2.Tests(checker=checked)
        case InteractiveTests():
            interactor = _program_to(tests.interactor)
            talks = verdict_pb2.InteractiveTests(cases=_cases_to(tests.cases), interactor=interactor)
            return verdict_pb2.Tests(interactive=talks)
        case MathTests():
            answers = [verdict_pb2.MathCase(expected=case.expected) for case in tests.cases]
            return verdict_pb2.Tests(math=verdict_pb2.MathTests(cases=answers))


def tests_from(message: verdict_pb2.Tests) -> Tests:
    """Protocol -> domain. Raises InvalidMessage naming the field at fault."""
    match message.WhichOneof("kind"):
        case "stdin":
            return StdinTests(_cases_from(message.stdin.cases))
        case "call":
            return _call_tests_from(message.call)
        case "asserts":
            return AssertTests(tuple(message.asserts.cases), message.asserts.setup)
        case "checker":
            checker = _program_from(message.checker.checker, "tests.checker.checker")
            return CheckerTests(_cases_from(message.checker.cases), checker)
        case "interactive":
            interactor = _program_from(message.interactive.interactor, "tests.interactive.interactor")
            return InteractiveTests(_cases_from(message.interactive.cases), interactor)
        case "math":
            return MathTests(tuple(MathCase(case.expected) for case in message.math.cases))
        case _:
            raise InvalidMessage("tests has none of stdin, call, asserts, checker, interactive and math")


def _cases_to(cases: tuple[StdinCase, ...]) -> list[verdict_pb2.StdinCase]:
    return [verdict_pb2.StdinCase(input=case.input, output=case.output) for case in cases]


def _cases_from(cases: Iterable[verdict_pb2.StdinCase]) -> tuple[StdinCase, ...]:
    return tuple(StdinCase(case.input, case.output) for case in cases)


def _program_to(program: JudgeProgram) -> verdict_pb2.JudgeProgram:
    return verdict_pb2.JudgeProgram(code=program.code, language=program.language)


def _program_from(message: verdict_pb2.JudgeProgram, field: str) -> JudgeProgram:
    if not message.code:
        raise InvalidMessage(f"{field}.code is empty")
    return JudgeProgram(message.code, message.language or JudgeProgram("").language)


def _call_case_to(case: CallCase) -> verdict_pb2.CallCase:
    return verdict_pb2.CallCase(
        args_json=json.dumps(list(case.args)),
        kwargs_json=json.dumps(case.kwargs),
        expected_json=json.dumps(case.expected),
    )


def _call_tests_from(message: verdict_pb2.CallTests) -> CallTests:
    if not message.entry_point:
        raise InvalidMessage("tests.call.entry_point is empty")
    cases = [_call_case_from(case, f"tests.call.cases[{i}]") for i, case in enumerate(message.cases)]
    return CallTests(message.entry_point, tuple(cases))


def _call_case_from(message: verdict_pb2.CallCase, field: str) -> CallCase:
    args = _json_in(message.args_json or "[]", f"{field}.args_json")
    kwargs = _json_in(message.kwargs_json or "{}", f"{field}.kwargs_json")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise InvalidMessage(f"{field}: args_json must be an array and kwargs_json an object")
    return CallCase(tuple(args), kwargs, _json_in(message.expected_json or "null", f"{field}.expected_json"))


def _json_in(text: str, field: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"{field} is not JSON: {error}") from error
    return value
