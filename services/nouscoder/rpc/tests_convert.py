"""The tests of a submission, protocol <-> domain.

The clients of this project send the JSON form of tests (nouscoder.formats.tests), or a digest. Clients in other
languages may fill the single fields of the protocol. These are converted to the JSON form, so that the rules for tests
are in one place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from nouscoder.domain.submission import Tests, TestsReference
from nouscoder.formats.body import first_fault
from nouscoder.formats.json_values import json_weight
from nouscoder.formats.tests import TestsReferenceBody, canonical_json, tests_from_json, tests_from_record
from nouscoder.rpc.faults import InvalidMessage
from nouscoder.v1 import verdict_pb2


def tests_to(tests: Tests | TestsReference) -> verdict_pb2.Tests:
    """Domain -> protocol."""
    if isinstance(tests, TestsReference):
        return verdict_pb2.Tests(digest=tests.digest)
    return verdict_pb2.Tests(json=canonical_json(tests))


def tests_from_text(text: bytes) -> Tests:
    """The JSON form -> domain. Raises InvalidMessage naming the field at fault."""
    try:
        return tests_from_json(text)
    except ValidationError as error:
        field, wrong = first_fault(error, "tests")
        raise InvalidMessage(f"{field}: {wrong}") from None


def tests_from(message: verdict_pb2.Tests) -> Tests | TestsReference:
    """Protocol -> domain. Raises InvalidMessage naming the field at fault."""
    try:
        match message.WhichOneof("kind"):
            case "json":
                return tests_from_text(message.json)
            case "digest":
                return TestsReferenceBody(digest=message.digest).record()
            case None:
                raise InvalidMessage("tests has none of stdin, call, asserts, checker, interactive, math, json, digest")
            case "call":
                return tests_from_json(json.dumps(_record(message)))
            case _:
                return tests_from_record(_record(message))
    except ValidationError as error:
        field, wrong = first_fault(error, "tests")
        raise InvalidMessage(f"{field}: {wrong}") from None


def weight_of_calls(message: verdict_pb2.Tests, enough: int) -> int:
    """The weight (formats/json_values.py) of all JSON texts of calls; above `enough`, some weight above it."""
    weight = 0
    for case in message.call.cases:
        weight += sum(json_weight(text, enough) for text in (case.args_json, case.kwargs_json, case.expected_json))
        if weight > enough:
            break
    return weight


def _record(message: verdict_pb2.Tests) -> dict[str, Any]:
    """The single fields of the protocol as the JSON form."""
    match message.WhichOneof("kind"):
        case "stdin":
            return {"type": "stdin", "cases": _cases(message.stdin.cases)}
        case "call":
            calls = [_call(case, f"tests.call.cases[{i}]") for i, case in enumerate(message.call.cases)]
            return {"type": "call", "entry_point": message.call.entry_point, "cases": calls}
        case "asserts":
            asserts = message.asserts
            texts = {"setup": asserts.setup, "module": asserts.module}
            return {"type": "assert", **texts, "cases": list(asserts.cases)}
        case "checker":
            checker = _program(message.checker.checker)
            return {"type": "checker", "checker": checker, "cases": _cases(message.checker.cases)}
        case "interactive":
            interactor = _program(message.interactive.interactor)
            head = {"type": "interactive", "interactor": interactor, "unbuffered": message.interactive.unbuffered}
            if message.interactive.HasField("checker"):
                head["checker"] = _program(message.interactive.checker)
            return head | {"cases": _cases(message.interactive.cases)}
        case _:
            return {"type": "math", "cases": [{"expected": case.expected} for case in message.math.cases]}


def _cases(cases: Iterable[verdict_pb2.StdinCase]) -> list[dict[str, Any]]:
    return [
        {"input": case.input, "output": case.output, **({"args": list(case.args)} if case.args else {})}
        for case in cases
    ]


def _program(message: verdict_pb2.JudgeProgram) -> dict[str, str]:
    optional = {"language": message.language, "protocol": message.protocol}
    return {"code": message.code} | {name: value for name, value in optional.items() if value}


def _call(message: verdict_pb2.CallCase, field: str) -> dict[str, Any]:
    texts = {
        "args": message.args_json or "[]",
        "kwargs": message.kwargs_json or "{}",
        "expected": message.expected_json or "null",
    }
    record = {}
    for name, text in texts.items():
        try:
            record[name] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidMessage(f"{field}.{name}_json is not JSON: {error}") from error
    return record
