"""The REST API's requests: an invalid one is refused with the name of its field."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nouscoder.domain.submission import (
    AssertTests,
    CallCase,
    CallTests,
    CheckerTests,
    Comparator,
    ComparatorKind,
    InteractiveTests,
    JudgeProgram,
    JudgeProtocol,
    Limits,
    MathCase,
    MathTests,
    Prelude,
    Profile,
    StdinCase,
    StdinTests,
    Tests,
    TestsReference,
)
from nouscoder.rpc.pairs import SUBMISSION
from nouscoder.verifier.api.schema import parse_submission, parse_tests
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, validate


def request(**fields: object) -> dict[str, object]:
    """A request with one stdin test."""
    return {"code": "cat", "tests": {"type": "stdin", "cases": [{"input": "a", "output": "a"}]}, **fields}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"\xff\xfe\x00", "body"),
        (b"[" * 100_000, "body"),
        (json.dumps(request(code="ca\0t")).replace("\\u0000", "\0").encode(), "body"),
        (json.dumps(request(colour="red")).encode(), "colour"),
        (json.dumps(request(code=1)).encode(), "code"),
        (json.dumps(request(completion="both")).encode(), "body"),
        (json.dumps(request(profile="judge")).encode(), "profile"),
        (json.dumps(request(tests={"type": "guess", "cases": []})).encode(), "tests.type"),
        (json.dumps(request(tests={"cases": []})).encode(), "tests.type"),
        (json.dumps(request(tests={"type": "stdin", "cases": []})).encode(), "tests.cases"),
        (
            json.dumps(request(tests={"type": "stdin", "cases": [{"input": "", "output": 3}]})).encode(),
            "tests.cases[0].output",
        ),
        (
            json.dumps(request(tests={"type": "call", "entry_point": "f", "cases": [{"args": 3}]})).encode(),
            "tests.cases[0].args",
        ),
        (json.dumps(request(limits={"wall_time_s": 0})).encode(), "limits.wall_time_s"),
        (json.dumps(request(limits={"wall_time_s": "1"})).encode(), "limits.wall_time_s"),
        (json.dumps(request(limits={"memory_bytes": 1.5})).encode(), "limits.memory_bytes"),
        (json.dumps(request(comparator={"type": "fuzzy"})).encode(), "comparator.type"),
        (json.dumps(request(comparator={"float_tolerance": -1})).encode(), "comparator.float_tolerance"),
        (json.dumps(request(reveal="all")).encode(), "reveal"),
    ],
)
def test_an_invalid_request_is_refused_with_its_field(body: bytes, field: str) -> None:
    with pytest.raises(InvalidSubmission) as refusal:
        parse_submission(body)
    assert refusal.value.field == field
    assert str(refusal.value).startswith(field)


TOLERANCES = ("float_tolerance", "absolute_tolerance", "relative_tolerance")


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, name) for kind in ("exact", "lines", "unordered_lines") for name in TOLERANCES), ("lcb", TOLERANCES[2])],
)
def test_a_tolerance_that_would_not_be_used_is_refused(kind: str, name: str) -> None:
    submission = parse_submission(json.dumps(request(comparator={"type": kind, name: 0.1})))
    with pytest.raises(InvalidSubmission, match=rf"comparator.{name}: {kind} does not use it: take tokens"):
        validate(submission, Bounds())


def test_an_unknown_type_of_tests_is_refused_with_the_list() -> None:
    with pytest.raises(InvalidSubmission, match=r"tests\.type: 'guess' is none of stdin, call, assert, checker"):
        parse_submission(json.dumps(request(tests={"type": "guess", "cases": []})))


JUDGE = {"language": "c", "code": "int main(){}"}


@pytest.mark.parametrize(
    ("tests", "record"),
    [
        ({"type": "assert", "cases": ["assert f(1)"], "setup": "x = 1"}, AssertTests(("assert f(1)",), "x = 1")),
        ({"type": "assert", "cases": ["test_f"], "setup": "x", "module": "a"}, AssertTests(("test_f",), "x", "a")),
        (
            {"type": "checker", "cases": [{"input": "1", "output": "2"}], "checker": JUDGE},
            CheckerTests((StdinCase("1", "2"),), JudgeProgram("int main(){}", "c")),
        ),
        (
            {"type": "interactive", "cases": [{"input": "1"}], "interactor": {"code": "x"}},
            InteractiveTests((StdinCase("1", ""),), JudgeProgram("x", "cpp")),
        ),
        (
            {"type": "interactive", "cases": [{"input": "1"}], "interactor": {"code": "x"}, "checker": JUDGE},
            InteractiveTests((StdinCase("1", ""),), JudgeProgram("x"), checker=JudgeProgram("int main(){}", "c")),
        ),
        (
            {"type": "checker", "cases": [{"input": "1"}], "checker": {"code": "x", "protocol": "kattis"}},
            CheckerTests((StdinCase("1", ""),), JudgeProgram("x", "cpp", JudgeProtocol.KATTIS)),
        ),
        ({"type": "math", "cases": [{"expected": "1/2"}]}, MathTests((MathCase("1/2"),))),
    ],
)
def test_every_type_of_tests_is_unchanged_by_schema_and_protocol(tests: object, record: Tests) -> None:
    submission = parse_submission(json.dumps(request(tests=tests)))
    assert submission.tests == record
    assert SUBMISSION.of(SUBMISSION.to(submission)) == submission


def test_profile_prelude_and_tolerances_are_unchanged_by_the_protocol() -> None:
    comparator = {"type": "kattis", "absolute_tolerance": 0.25, "relative_tolerance": 0.5, "ignore_case": True}
    submission = parse_submission(json.dumps(request(profile="lcb", prelude="lcb", comparator=comparator)))
    assert (submission.profile, submission.prelude) == (Profile.LCB, Prelude.LCB)
    assert (submission.comparator.absolute, submission.comparator.relative) == (0.25, 0.5)
    assert SUBMISSION.of(SUBMISSION.to(submission)) == submission


def test_defaults_and_every_field_reach_the_submission() -> None:
    plain = parse_submission(json.dumps(request()))
    assert (plain.tests, plain.limits, plain.comparator) == (StdinTests((StdinCase("a", "a"),)), Limits(), Comparator())
    assert (plain.code, plain.stop_on_first_failure, plain.reveal) == ("cat", True, True)
    record = {
        "completion": "```x```",
        "tests": {"type": "call", "entry_point": "f", "cases": [{"args": [1], "kwargs": {"k": 2.5}, "expected": None}]},
        "limits": {"wall_time_s": 1, "processes": 2},
        "comparator": {"type": "lines", "float_tolerance": 0.5},
        "stop_on_first_failure": False,
        "reveal": "none",
        "language": "python",
        "other_languages": ["C++", "pypy"],
        "profile": "process",
        "problem_id": "abc/1",
    }
    whole = parse_submission(json.dumps(record))
    assert whole.tests == CallTests("f", (CallCase((1,), {"k": 2.5}, None),))
    assert whole.limits == Limits(wall_time_s=1.0, processes=2)
    assert whole.comparator == Comparator(ComparatorKind.LINES, 0.5)
    assert (whole.completion, whole.stop_on_first_failure, whole.reveal) == ("```x```", False, False)
    assert (plain.problem_id, whole.problem_id) == ("", "abc/1")
    assert (plain.languages, whole.languages) == (("python",), ("python", "cpp", "pypy"))
    assert SUBMISSION.of(SUBMISSION.to(whole)) == whole


RUN = StdinTests((StdinCase("1\n2", "3"), StdinCase("a", "b")))
CALL = CallTests("add", (CallCase((1, 2), {}, 3), CallCase(([4],), {}, None)))
WRAPPED = CallTests("add", (CallCase((1, 2), {}, [3]), CallCase(([4],), {}, [None])), wrapped=True)


@pytest.mark.parametrize(
    ("tests", "record"),
    [
        ({"inputs": ["1\n2", "a"], "outputs": ["3", "b"]}, RUN),
        ({"inputs": [["1", "2"], ["a"]], "outputs": [["3"], ["b"]], "fn_name": None}, RUN),
        ({"input": ["1\n2", "a"], "output": ["3", "b"], "fn_name": "none"}, RUN),
        ('{"inputs": ["1\\n2", "a"], "outputs": ["3", "b"]}', RUN),
        (
            [{"input": "1\n2", "output": "3", "testtype": "stdin"}, {"input": "a", "output": "b", "testtype": "stdin"}],
            RUN,
        ),
        (
            [{"input": "1\n2", "output": "3", "type": "stdin_stdout", "fn_name": None}, {"input": "a", "output": "b"}],
            RUN,
        ),
        ('[{"input": "1\\n2", "output": "3"}, {"input": "a", "output": "b"}]', RUN),
        (
            [
                {"input": "1\n2", "output": "3", "metadata": {"func_name": None}, "time": None},
                {"input": "a", "output": "b"},
            ],
            RUN,
        ),
        ({"inputs": ["1\n2", "a"], "outputs": ["3", "b"], "assert_case": ["", ""]}, RUN),
        (
            {"inputs": ["", None], "outputs": ["", ""], "assert_case": ["assert f(1) == 2", "assert f(2) == 3"]},
            AssertTests(("assert f(1) == 2", "assert f(2) == 3")),
        ),
        ({"inputs": [[1, 2], [[4]]], "outputs": [3, None], "fn_name": "add"}, replace(CALL, wrapped=True)),
        ({"inputs": [[1, 2], [[4]]], "outputs": [[3], [None]], "fn_name": "Solution.add"}, WRAPPED),
        ({"inputs": ["1\n2", "[4]\n"], "outputs": ["3", "null"], "fn_name": "add"}, CALL),
        (
            {"inputs": ['"a\u2028b"\r\n"\x85"\r\n'], "outputs": ['"\u2028"'], "fn_name": "add"},
            CallTests("add", (CallCase(("a\u2028b", "\x85"), {}, "\u2028"),)),
        ),
        (
            {
                "type": "stdin",
                "entry_point": None,
                "cases": [{"input": "1\n2", "output": "3", "args": None}, {"input": "a", "output": "b"}],
            },
            RUN,
        ),
        (
            {
                "type": "call",
                "entry_point": "add",
                "setup": None,
                "cases": [{"args": [1, 2], "expected": 3, "input": None}, {"args": [[4]], "expected": None}],
            },
            CALL,
        ),
    ],
)
def test_tests_of_public_data_sets_are_taken_as_they_are(tests: object, record: Tests) -> None:
    assert parse_submission(json.dumps(request(tests=tests))).tests == record


def test_null_means_the_default_and_stored_tests_may_come_with_nulls() -> None:
    nulls = dict.fromkeys(("completion", "limits", "comparator", "language", "problem_id", "profile"))
    assert parse_submission(json.dumps(request(**nulls))) == parse_submission(json.dumps(request()))
    within = request(limits={"wall_time_s": 2.0, "processes": None}, comparator={"type": None})
    assert parse_submission(json.dumps(within)).limits == Limits(2.0)
    digest = "sha256:" + "0" * 64
    stored = parse_submission(json.dumps(request(tests={"digest": digest, "type": None}, limits=None)))
    assert stored.tests == TestsReference(digest)


@pytest.mark.parametrize(
    ("tests", "field", "says"),
    [
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "tests.inputs", "there are 2 inputs and 1 outputs"),
        ({"inputs": ["1"], "outputs": []}, "tests.inputs", "each input needs its output"),
        ({"inputs": ["1"], "outputs": [3]}, "tests.cases[0].output", ""),
        ({"inputs": [3], "outputs": ["3"], "fn_name": "f"}, "tests.cases[0].args", ""),
        ({"inputs": [], "outputs": []}, "tests.cases", ""),
        ("not JSON", "tests", ""),
        ([], "tests", '"input": ...'),
        *[
            ({"inputs": [given], "outputs": [wanted], "fn_name": "f"}, "tests", "must be JSON")
            for given, wanted in [("1", "True"), ("1", "(1, 2)"), ("'a'", "1"), ("None", "1"), ("abc", '"cba"')]
        ],
        ([{"input": "1"}], "tests", "or give an object with type and cases"),
        (["1"], "tests", '"output": ...'),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "tests", "for a function give"),
        ([{"input": "1", "output": "1", "type": ["x"]}], "tests", "fn_name"),
        ([{"input": "1", "output": "1", "testtype": "stdin", "type": "function_call"}], "tests", "for a function give"),
        ([{"input": "1", "output": "1", "fn_name": "f"}], "tests", "for a function give"),
        ([{"input": "1", "output": "1", "metadata": {"func_name": "f"}}], "tests", "for a function give"),
        (
            [{"input": "1", "output": "1"}, {"input": "1", "output": "1", "checker": "c"}],
            "tests[1].checker",
            "not known",
        ),
        *[
            ([{"input": "1", "output": "1", "metadata": {name: "f"}}], f"tests[0].metadata.{name}", "not known")
            for name in ("fn_name", "func_nmae", "time_limit")
        ],
        *[
            ({"inputs": [""], "outputs": [""], "assert_case": asked}, "tests.assert_case", "give one")
            for asked in (5, True)
        ],
        ({"inputs": [[[1, 2], [3]]], "outputs": ["1"]}, "tests.cases[0].input", "must be a text"),
        ({"inputs": ["1"], "outputs": [[None, True]]}, "tests.cases[0].output", "must be a text"),
        ({"inputs": ["1"], "outputs": ["1"], "assert_case": ["assert f(1) == 2"]}, "tests.assert_case", "with empty"),
        (
            {"inputs": ["", ""], "outputs": ["", ""], "assert_case": ["assert f(1)", ""]},
            "tests.assert_case",
            "one assert",
        ),
        (
            {"inputs": [""], "outputs": [""], "fn_name": "f", "assert_case": ["assert f()"]},
            "tests.assert_case",
            "fn_name",
        ),
        ({"inputs": [""], "outputs": [""], "assert_case": "assert f()"}, "tests.assert_case", "for each case"),
        ({"inputs": [""], "outputs": [""], "assert_case": ["assert f()"] * 2}, "tests.assert_case", "for each case"),
        ({"inputs": [[1]], "outputs": [1], "func_name": "f"}, "tests.func_name", "fn_name"),
        ({"inputs": ["1"], "outputs": ["1"], "input": ["2"], "output": ["2"]}, "tests.input", "not known"),
        *[
            ({"inputs": ["1"], "outputs": ["1"], name: value}, f"tests.{name}", "not known")
            for name, value in [
                ("time_limit", 1),
                ("comparator", "lines"),
                ("checker", "c"),
                ("cases", []),
                ("fn_names", "f"),
            ]
        ],
    ],
)
def test_an_invalid_public_shape_is_refused_with_its_field(tests: object, field: str, says: str) -> None:
    with pytest.raises(InvalidSubmission) as refusal:
        parse_submission(json.dumps(request(tests=tests)))
    assert refusal.value.field == field
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "name"),
    [("Python", "python"), ("python3", "python"), ("py", "python"), ("C++", "cpp"), ("cpp17", "cpp"),
     ("nodejs", "javascript"), ("golang", "go"), ("PyPy3", "pypy"), ("cobol", "cobol")],
)  # fmt: skip
def test_a_language_may_have_the_name_that_data_sets_use(given: str, name: str) -> None:
    submission = parse_submission(json.dumps(request(language=given)))
    assert submission.language == name
    assert SUBMISSION.of(SUBMISSION.to(replace(submission, language=given))).language == name
    checker = {"type": "checker", "cases": [{"input": ""}], "checker": {"language": given, "code": "x"}}
    tests = parse_submission(json.dumps(request(tests=checker))).tests
    assert isinstance(tests, CheckerTests)
    assert tests.checker.language == name


def test_half_of_a_surrogate_pair_in_a_request_becomes_a_mark() -> None:
    submission = parse_submission(json.dumps(request(code="print(1)  # \ud83d", problem_id="\U0001f600")))
    assert (submission.code, submission.problem_id) == ("print(1)  # \ufffd", "\U0001f600")
    tests = parse_tests(json.dumps({"type": "stdin", "cases": [{"input": "\udfff", "output": "1"}]}).encode())
    assert tests.cases[0] == StdinCase("\ufffd", "1")


def test_tests_to_store_may_have_a_public_shape_too() -> None:
    assert parse_tests(json.dumps({"inputs": ["1\n2", "a"], "outputs": ["3", "b"], "fn_name": None}).encode()) == RUN
    assert parse_tests(b'[{"input": "1\\n2", "output": "3"}, {"input": "a", "output": "b"}]') == RUN
    for body in (b"null", b"3", b"{}", b"[" * 100_000, b"\xff"):
        with pytest.raises(InvalidSubmission):
            parse_tests(body)
