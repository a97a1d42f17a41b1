"""Wrong values in any field of a request give 422 with one sentence that names the field. Grading continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

import httpx
import pytest

GRADE, RUN_CODE = "/v1/grade", "/run_code"
RUN = {"code": "print(1)", "language": "python"}


class Verifier(Protocol):
    """See conftest.py."""

    http: str

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response: ...

    def refuses(self, path: str, body: Any, status: int, field: str | None = None) -> str: ...


def grade_body(**fields: Any) -> dict[str, Any]:
    """A request that is graded."""
    case = {"input": "1", "output": "1"}
    return {"code": "print(input())", "tests": {"type": "stdin", "cases": [case]}, **fields}


WHOLE: dict[str, Any] = {
    "language": "python",
    "code": "def f(x): return x",
    "tests": {"type": "call", "entry_point": "f", "cases": [{"args": [1], "kwargs": {}, "expected": 1}]},
    "limits": {"wall_time_s": 5.0, "cpu_time_s": 5.0, "memory_bytes": 2**28, "output_bytes": 2**20, "processes": 9},
    "comparator": {"type": "tokens", "float_tolerance": 0.0, "absolute_tolerance": 0.0, "relative_tolerance": 0.0},
    "profile": "process",
    "prelude": "none",
    "stop_on_first_failure": True,
    "reveal": "none",
    "problem_id": "p",
}
CHECKED = {"type": "checker", "cases": [{"input": "", "output": ""}], "checker": {"language": "c", "code": "x"}}
OTHER_TESTS: dict[str, dict[str, Any]] = {
    "stdin": {"type": "stdin", "cases": [{"input": "", "output": ""}]},
    "assert": {"type": "assert", "cases": ["assert f(1)"], "setup": ""},
    "checker": CHECKED,
    "interactive": {**CHECKED, "type": "interactive", "interactor": CHECKED["checker"]},
    "math": {"type": "math", "cases": [{"expected": "1"}]},
}
del OTHER_TESTS["interactive"]["checker"]
A_STATEMENT = "tests.cases[0]"  # of assert tests
WRONG: tuple[Any, ...] = (None, True, 7, 1.5, -1, 10**30, "7", "", "\0", [], [1], {}, {"a": 1}, [[]])


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Every field, also those that contain others: `tests.cases[0].input`."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")


def replaced(body: Any, path: str, value: Any) -> Any:
    """A copy of `body` with another value at `path`."""
    copy = json.loads(json.dumps(body))
    at = copy
    *before, last = [
        int(part) if part.isdigit() else part for part in path.replace("[", ".").replace("]", "").split(".")
    ]
    for part in before:
        at = at[part]
    at[last] = value
    return copy


_WITH_DEFAULT = {
    *("language", "limits", "comparator", "profile", "prelude", "stop_on_first_failure", "reveal", "problem_id"),
    *("tests.setup", "tests.cases[0].args", "tests.cases[0].kwargs"),
}


def is_right(field: str, old: Any, value: Any) -> bool:
    """Whether docs/verdicts.md and docs/grading.md allow `value` in place of `old`."""
    last = field.rpartition(".")[2]
    if value is None and (field in _WITH_DEFAULT or field.startswith(("limits.", "comparator."))):
        return True
    match old:
        case _ if last in ("args[0]", "expected") and "math" not in field:
            return True
        case bool():
            return isinstance(value, bool)
        case str() if last in ("input", "output", "setup", "code", "problem_id") or field.startswith(A_STATEMENT):
            empty_judge = value == "" and field.endswith("er.code")
            return isinstance(value, str) and not empty_judge and (value != "\0" or last not in ("cases[0]", "setup"))
        case int() | float():
            given = isinstance(value, int if isinstance(old, int) else int | float) and not isinstance(value, bool)
            return given and (0 < value < 100 or (last.endswith("tolerance") and value > 0))
        case list():
            return isinstance(value, list) and last == "args"
        case dict():
            return isinstance(value, dict) and (last == "kwargs" or (value == {} and field in ("limits", "comparator")))
    return False


def wrong_requests() -> Iterator[tuple[str, Any]]:
    """(the invalid field, the whole request)."""
    for tests in (None, *OTHER_TESTS.values()):
        whole = WHOLE if tests is None else {**WHOLE, "tests": tests}
        for field in leaves(whole):
            if tests is not None and not field.startswith("tests."):
                continue
            old = whole
            for part in field.replace("[", ".").replace("]", "").split("."):
                old = old[int(part)] if part.isdigit() else old[part]  # type: ignore[index]
            for value in WRONG:
                if not is_right(field, old, value):
                    yield field, replaced(whole, field, value)
            if isinstance(old, dict) and "kwargs" not in field:
                yield f"{field}.colour", replaced(whole, field, {**old, "colour": "red"})


def test_a_wrong_value_in_any_field_is_422_with_that_field(verifier: Verifier) -> None:
    odd = []
    requests = list(wrong_requests())
    for field, body in requests:
        answer = verifier.post(GRADE, body)
        fault = answer.json()
        named = str(fault.get("field"))
        # A wrong type of tests may be reported at the fields that the type lacks, a missing source at the body.
        fits = field.startswith(named) or named.startswith(field) or (field == "code" and named == "body")
        if answer.status_code != 422 or not fits or not fault["detail"].startswith(f"{named}: "):
            odd.append((field, answer.status_code, answer.text[:200], json.dumps(body)[:300]))
    assert len(requests) > 500
    assert not odd, "\n".join(map(str, odd[:20]))


NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" + "0" * 5000, "1" + "0" * 4299, "-1", "0", "1e-400")


@pytest.mark.parametrize("limit", ["wall_time_s", "cpu_time_s", "memory_bytes", "output_bytes", "processes"])
def test_an_invalid_limit_is_422(verifier: Verifier, limit: str) -> None:
    for number in NUMBERS:
        body = json.dumps(grade_body(limits={limit: "NUMBER"})).replace('"NUMBER"', number).encode()
        # A number with too many digits is refused as invalid JSON.
        verifier.refuses(GRADE, body, 422, "body" if len(number) > 4300 else f"limits.{limit}")


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:12])
@pytest.mark.parametrize("field", ["run_timeout", "memory_limit_MB"])
def test_an_invalid_limit_of_run_code_is_422(verifier: Verifier, field: str, number: str) -> None:
    if field == "memory_limit_MB" and number in ("-1", "0", "1e-400"):
        return  # SandboxFusion's value for the default
    body = json.dumps({**RUN, field: "NUMBER"}).replace('"NUMBER"', number).encode()
    named = {"run_timeout": ("run_timeout", "limits.wall_time_s"), "memory_limit_MB": (field, "limits.memory_bytes")}
    assert verifier.refuses(RUN_CODE, body, 422) in ("body" if len(number) > 4300 else "", *named[field])


@pytest.mark.parametrize("tolerance", ["float_tolerance", "absolute_tolerance", "relative_tolerance"])
def test_an_invalid_tolerance_is_422(verifier: Verifier, tolerance: str) -> None:
    for number in ("NaN", "Infinity", "1e400", "-1", "true"):
        body = json.dumps(grade_body(comparator={tolerance: "NUMBER"})).replace('"NUMBER"', number).encode()
        verifier.refuses(GRADE, body, 422, f"comparator.{tolerance}")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"language": "python\0"}, "language"),
        ({"language": "x" * 1_000_000}, "language"),
        ({"\0" * 1000: 1}, None),
        ({"c" * 1_000_000: 1}, None),
        ({"line\nfeed": 1}, None),
        ({"tests": {"type": "t" * 1_000_000, "cases": []}}, "tests.type"),
        ({"tests": {"type": ["stdin"], "cases": []}}, "tests.type"),
        ({"tests": {"type": "stdin", "cases": [{"input": "", "output": ""}] * 10_001}}, "tests.cases"),
        ({"tests": {"type": "call", "entry_point": "f\0", "cases": [{"expected": 1}]}}, "tests.entry_point"),
        ({"tests": {"type": "call", "entry_point": "f()", "cases": [{"expected": 1}]}}, "tests.entry_point"),
        ({"tests": {"type": "assert", "cases": ["assert\0"]}}, "tests.cases[0]"),
        ({"tests": {"type": "assert", "cases": ["(" * 100_000]}}, "tests.cases[0]"),
        ({"tests": {"type": "assert", "cases": ["-" * 100_000 + "1"]}}, "tests.cases[0]"),
        ({"tests": {"type": "assert", "cases": ["pass"] * 2, "setup": "x;" * 2_000_000}}, "tests"),
        ({"tests": {"type": "math", "cases": [{"expected": "1" * 4001}]}}, "tests.cases[0].expected"),
        ({"tests": {**CHECKED, "checker": {"language": "cobol", "code": "x"}}}, "tests.checker.language"),
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_impossible_names_and_sizes_are_422(verifier: Verifier, fields: dict[str, Any], named: str | None) -> None:
    assert verifier.refuses(GRADE, grade_body(**fields), 422, named)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"a\0b": "YQ=="}, "files"),
        ({"../a": "YQ=="}, "files"),
        ({"main.py": "YQ=="}, "files"),
        ({"n" * 300: "YQ=="}, "files"),
        ({"": "YQ=="}, "files"),
        ({"é" * 150: "YQ=="}, "files"),
        ({"a": "no base64!"}, "files.a"),
        ({"n" * 100_000: "no base64!"}, None),
        ({"line\nfeed": "no base64!"}, None),
        ({f"f{number}": "YQ==" for number in range(300)}, "files"),
        (["a"], "files"),
        ({"a": 1}, "files.a"),
    ],
    ids=lambda files: str(files)[:30],
)
def test_an_invalid_file_is_422(verifier: Verifier, files: Any, named: str | None) -> None:
    assert verifier.refuses(RUN_CODE, {**RUN, "files": files}, 422, named).startswith("files")
