"""Judges are pure: the ruling for each result of a checker, an interactor or the lcb driver."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import tracemalloc
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
    JsonValue,
    JudgeProgram,
    JudgeProtocol,
    Limits,
    Prelude,
    Profile,
    StdinCase,
    StdinTests,
    Submission,
    Tests,
)
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.runs import judge_for
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, validate
from nouscoder.verifier.judges.asserting import AssertJudge
from nouscoder.verifier.judges.comparators import same_as_lcb_prints, same_text, same_value
from nouscoder.verifier.judges.judge import CLIP_CHARS, failure_of, outcome_of
from nouscoder.verifier.judges.lcb import LcbJudge
from nouscoder.verifier.judges.rulings import (
    Ruling,
    by_testlib,
    has_crashed,
    ruling_of_checker,
    ruling_of_crash,
    ruling_of_interactor,
)
from nouscoder.verifier.sandbox.base import Exit, RunResult
from nouscoder.verifier.sandbox.fake import ended

OK, WRONG, ERROR = VerdictKind.ACCEPTED, VerdictKind.WRONG_ANSWER, VerdictKind.RUNTIME_ERROR
OURS, LATE = VerdictKind.INTERNAL_ERROR, VerdictKind.TIME_LIMIT_EXCEEDED


WAITED = replace(ended(), partner_ended=True)  # its partner ended first
FAILURES = [ended(exit_code=1), ended(exit_code=3, stderr=b"ValueError"), ended(exit=Exit.SIGNALLED, signal=11)]
CRASHES = [
    ended(exit_code=1, stderr=b"Traceback (most recent call last):\n"),
    ended(exit_code=1, stderr=b'Exception in thread "main" java.util.NoSuchElementException'),
    ended(exit_code=101),
    ended(exit=Exit.SIGNALLED, signal=6),
]


def heard(interactor: RunResult) -> RunResult:
    """An interactor that has read something of what the candidate said."""
    return replace(interactor, has_heard=True)


def asleep() -> RunResult:
    """A program that used no CPU until its time limit."""
    return replace(ended(exit=Exit.TIME_LIMIT), wall_time_s=12.0, cpu_time_s=0.1)


@pytest.mark.parametrize(
    ("code", "outcome"), [(0, OK), (1, WRONG), (2, WRONG), (3, OURS), (4, WRONG), (7, WRONG), (8, WRONG)]
)
def test_a_checkers_exit_codes_are_those_of_testlib(code: int, outcome: VerdictKind) -> None:
    ruling = ruling_of_checker(ended(exit_code=code, stderr=b"wrong answer 3rd token"))
    assert ruling.outcome is outcome
    assert "3rd token" in ruling.remark


TRACEBACK = b"Traceback (most recent call last):\n  ...\nValueError: invalid literal for int()"


# The exit code and the end of stderr with which each language ends a judge program that decided nothing.
UNCAUGHT = {
    "python, syntax": (1, b'  File "/tmp/main.py", line 1\n    x =\nSyntaxError: invalid syntax\n'),
    "java, another thread": (1, b'Exception in thread "Thread-0" java.lang.RuntimeException: boom\n\tat Main'),
    "java, no main": (1, b"Error: Main method not found in class Main, please define the main method as:\n"),
    "java, no memory": (1, b"Error occurred during initialization of VM\nCould not reserve enough space\n"),
    "javascript": (1, b"/tmp/main.js:1\nthrow 5\n^\n5\n(Use `node --trace-uncaught`)\n\nNode.js v20.19.2\n"),
    "go": (2, b"panic: boom\n\ngoroutine 1 [running]:\nmain.main()\n\t/tmp/main.go:4 +0x25\nexit status 2\n"),
    "rust, an error of main": (1, b"Error: ParseIntError { kind: InvalidDigit }\n"),
    "rust, a text of main": (1, b'Error: "no answer"\n'),
    "ruby": (1, b"main.rb:1:in '<main>': boom (RuntimeError)\n"),
    "lua": (1, b"lua: main.lua:1: boom\nstack traceback:\n\t[C]: in ?\n"),
    "r": (1, b"Error: boom\nExecution halted\n"),
    "perl": (2, b"boom at /tmp/main.pl line 1.\n"),
    "bash": (2, b"main.sh: line 1: syntax error near unexpected token `)'\n"),
}
DECISIONS = [b"Error: expected 3, found 4", b"wrong answer in line 3: RuntimeError", b"at line 4."]


@pytest.mark.parametrize(
    ("check", "crashed"),
    [
        (ended(exit_code=1, stderr=b"wrong answer"), False),
        (ended(exit_code=1, stderr=TRACEBACK), True),
        (ended(exit_code=1, stderr=b'Exception in thread "main" java.lang.NumberFormatException'), True),
        *((ended(exit_code=code, stderr=text), True) for code, text in UNCAUGHT.values()),
        *((ended(exit_code=1, stderr=text), False) for text in DECISIONS),
        (ended(exit_code=3), False),
        (ended(exit_code=77), True),
        (ended(exit_code=7, stderr=b"points 0.5 half"), False),
        (ended(exit_code=7, stderr=b"points 5"), True),
        (ended(exit_code=7, stderr=b"partial 3/10"), False),
        (ended(exit_code=7, stderr=b"partial 11/10"), True),
        *((ended(exit=exit_), True) for exit_ in Exit if exit_ is not Exit.EXITED),
    ],
)
def test_a_crash_of_a_checker_is_told_apart_from_its_decision(check: RunResult, crashed: bool) -> None:
    assert has_crashed(check) is crashed
    right, wrong = ended(), ended(exit_code=1)
    if crashed:
        assert [ruling_of_crash(check, own, True).outcome for own in (right, wrong, check)] == [WRONG, WRONG, OURS]
        assert "the checker" in ruling_of_crash(check, right, True).remark


def test_without_an_answer_an_uncaught_exception_of_a_checker_refuses_the_output() -> None:
    check = ended(exit_code=1, stderr=TRACEBACK)
    assert ruling_of_crash(check, check, False).outcome is WRONG
    assert ruling_of_crash(ended(exit_code=77), ended(exit_code=77), False).outcome is OURS


@pytest.mark.parametrize(
    ("stderr", "stdout", "outcome", "points"),
    [
        (b"points 0.25 some are right", b"", WRONG, 0.25),
        (b"0.5", b"", WRONG, 0.5),
        (b"", b"points: 1e-1\n", WRONG, 0.1),
        (b"points 1.0", b"", OK, None),
        # The end of a longer stderr, which may begin with what the candidate said.
        pytest.param(b"1 " * (32 << 10), b"0.5", WRONG, 0.5, id="long stderr beside stdout"),
        pytest.param(b"1 " * (32 << 10), b"", WRONG, None, id="long stderr"),
        (b"some are right", b"", WRONG, None),
        (b"1.2.3", b"", WRONG, None),
        (b"-1", b"", WRONG, None),
        (b"partial 3/10\n", b"", WRONG, 0.3),  # DMOJ's coci
        (b"", b"partial 3/10", WRONG, 0.3),
        (b"\npartial 2/8\ntwo of the lines are right\n", b"", WRONG, 0.25),
        (b"got:\npartial 10/10\n", b"", WRONG, None),  # a line of the candidate that the checker shows
        (b"", b"got:\npartial 10/10\n", WRONG, None),
        (b"partial 10/10", b"", OK, None),
        (b"partial 0/10", b"", WRONG, 0.0),
        (b"partial 3/0", b"", WRONG, None),
        (b"partial 3", b"", WRONG, None),
        (b"partial 3/10 of it", b"", WRONG, None),
        (b"partial " + b"9" * 400 + b"/" + b"9" * 400, b"", WRONG, None),
    ],
)
def test_points_of_a_checker_are_its_first_number_or_a_fraction(
    stderr: bytes, stdout: bytes, outcome: VerdictKind, points: float | None
) -> None:
    ruling = ruling_of_checker(ended(stdout, exit_code=7, stderr=stderr))
    assert (ruling.outcome, ruling.points) == (outcome, points)


@pytest.mark.parametrize(("code", "outcome"), [(42, OK), (43, WRONG), (0, None), (1, None), (7, None)])
def test_a_judge_of_kattis_says_42_or_43(code: int, outcome: VerdictKind | None) -> None:
    check = by_testlib(ended(exit_code=code), JudgeProtocol.KATTIS)
    assert (None if has_crashed(check) else ruling_of_checker(check).outcome) is outcome
    ruling = ruling_of_interactor(WAITED, check)
    assert ruling is not None
    assert ruling.outcome is (outcome or OURS)


@pytest.mark.parametrize("limit", [Exit.TIME_LIMIT, Exit.MEMORY_LIMIT, Exit.OUTPUT_LIMIT])
def test_an_interactor_that_decided_before_the_candidate_exceeded_a_limit_has_decided(limit: Exit) -> None:
    late = replace(ended(exit=limit), partner_ended=True)
    ruling = ruling_of_interactor(late, ended(exit_code=1, stderr=b"too many questions"))
    assert ruling == Ruling(WRONG, "too many questions")
    for no_decision in (ended(), ended(exit_code=3), ended(exit_code=7, stderr=b"1"), heard(ended(exit=limit))):
        assert ruling_of_interactor(late, no_decision) is None
    before_a_word = ruling_of_interactor(late, ended(exit=limit))
    assert before_a_word is not None
    assert before_a_word.outcome is OURS
    assert ruling_of_interactor(ended(exit=limit), ended(exit_code=1)) is None  # it ended because of the candidate


def test_an_interactor_gives_points() -> None:
    assert ruling_of_interactor(ended(), ended(exit_code=7, stderr=b"points 0.5")) == Ruling(WRONG, "points 0.5", 0.5)
    out_of_range = ruling_of_interactor(ended(), ended(exit_code=7, stderr=b"points 5"))
    assert out_of_range is not None
    assert out_of_range.outcome is OURS


@pytest.mark.parametrize(
    ("candidate", "interactor", "outcome"),
    [
        (ended(), ended(), OK),
        (ended(), ended(exit_code=1), WRONG),
        (ended(exit_code=1), ended(), None),
        (ended(exit_code=1, stderr=b"ZeroDivisionError"), ended(exit_code=2), None),
        (ended(exit_code=1, stderr=b"EOFError: EOF when reading a line"), ended(exit_code=1), None),
        *((replace(end, partner_ended=True), ended(exit_code=1), WRONG) for end in FAILURES),
        *((replace(end, partner_ended=True), ended(), None) for end in FAILURES),
        *((replace(end, partner_ended=True), heard(end), WRONG) for end in CRASHES),
        *((replace(end, partner_ended=True), end, OURS) for end in CRASHES),  # before it had heard a word
        *((replace(ended(b"x"), partner_ended=True), end, OURS) for end in CRASHES),
        (ended(), asleep(), OURS),
        (ended(exit=Exit.TIME_LIMIT), asleep(), OURS),
        (ended(exit_code=1), heard(asleep()), OURS),
        (ended(exit=Exit.TIME_LIMIT), replace(asleep(), cpu_time_s=6.0), None),
        (ended(exit=Exit.SIGNALLED, signal=11), ended(exit_code=1), None),
        (ended(exit=Exit.TIME_LIMIT), ended(exit_code=2), None),
        (ended(exit=Exit.TIME_LIMIT), ended(exit=Exit.TIME_LIMIT), None),
        (ended(), ended(exit_code=3), OURS),
        (WAITED, ended(exit=Exit.SIGNALLED, signal=11), OURS),
        (WAITED, heard(ended(exit=Exit.SIGNALLED, signal=11)), WRONG),
        (ended(), heard(ended(exit=Exit.SIGNALLED, signal=6)), WRONG),  # of the end of the input
        (ended(b"x"), ended(exit=Exit.SIGNALLED, signal=6), OURS),  # it read nothing of what the candidate left
        (ended(b"x"), ended(exit_code=3), OURS),
        (ended(b"x"), heard(ended(exit_code=101)), WRONG),
        (ended(b"x"), ended(exit_code=101), OURS),
        (ended(b"x", exit_code=1), ended(exit=Exit.SIGNALLED, signal=11), None),
        *((ended(), heard(end), WRONG) for end in CRASHES),
        *((ended(), end, OURS) for end in CRASHES),
        (ended(exit_code=1), ended(exit=Exit.TIME_LIMIT), None),
        (ended(exit=Exit.SIGNALLED, signal=11), ended(exit=Exit.SIGNALLED, signal=13), None),
    ],
)
def test_of_two_sides_that_failed_the_one_that_ended_first_decides(
    candidate: RunResult, interactor: RunResult, outcome: VerdictKind | None
) -> None:
    ruling = ruling_of_interactor(candidate, interactor)
    assert (ruling.outcome if ruling else None) is outcome


def test_an_assert_passes_only_with_the_token_of_its_case() -> None:
    judge = AssertJudge(AssertTests(("assert f(1) == 2", "assert f(2) == 3")))
    tokens = [json.loads(judge.stdin(index))["args"][1] for index in range(2)]
    assert tokens[0] != tokens[1]
    assert judge.answer_outcome(0, ended(result=json.dumps([tokens[0], True]).encode())) is OK
    assert judge.answer_outcome(0, ended(result=b"false")) is WRONG
    assert judge.answer_outcome(0, ended(result=json.dumps([tokens[0], False]).encode())) is ERROR
    forged = [None, b"", b"true", b'["", true]', json.dumps([tokens[1], True]).encode()]
    assert [judge.answer_outcome(0, ended(result=said)) for said in forged] == [ERROR] * 5


def test_assert_tests_that_are_not_python_are_an_invalid_submission() -> None:
    for tests, field in ((AssertTests(("assert (",)), "tests.cases[0]"), (AssertTests(("",), "def"), "tests.setup")):
        with pytest.raises(InvalidSubmission) as refusal:
            judge_for(Submission(tests, "x = 1"))
        assert refusal.value.field == field


def test_what_livecodebench_does_not_support_in_a_case_is_refused_with_the_field() -> None:
    for tests in (CallTests("f", (CallCase(kwargs={"a": 1}),)), StdinTests((StdinCase("", "", ("-x",)),))):
        with pytest.raises(InvalidSubmission, match="lcb does not support") as refusal:
            judge_for(Submission(tests, "x", profile=Profile.LCB))
        assert refusal.value.field == "profile"


def lcb_judge(*pairs: tuple[str, str]) -> LcbJudge:
    return LcbJudge(StdinTests(tuple(StdinCase(*pair) for pair in pairs)), limit_s=5.5)


def test_the_lines_of_the_lcb_driver_become_results_up_to_the_first_bad_one() -> None:
    judge = lcb_judge(("a", "1"), ("b", "2"), ("c", "3"), ("d", "4"))
    lines = b'["ok", "1", 0.5]\n["late", "x", 6]\nnull\n["ok", "3", 0.1]\n'
    results = judge.split_now(ended(result=lines))
    outcomes = [outcome_of(judge, index, result) for index, result in enumerate(results)]
    assert outcomes == [OK, LATE, ERROR, ERROR]
    assert results[0].wall_time_s == 0.5


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b'"abc"',
        b'["ok", "1", "x"]',
        b'["ok", "1", 1' + b"0" * 400 + b"]",
        b'[["ok"], "1", 1]',
        b"[" * 30_000,
        b"\xff",
        b'{"ok": 1}',
        b"nan",
    ],
    ids=lambda line: repr(line[:20]),
)
def test_a_forged_line_is_not_accepted(line: bytes) -> None:
    judge = lcb_judge(("a", "1"))
    (result,) = judge.split_now(ended(result=line))
    assert outcome_of(judge, 0, result) is ERROR


def test_a_line_longer_than_any_right_answer_is_wrong_and_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = LcbJudge(CallTests("f", (CallCase((1,), {}, 1),)), limit_s=5.5)
    for judge, line in (
        (lcb_judge(("a", "1")), b'["ok", "1' + b" " * 2_000_000 + b'", 0.1]'),
        (calls, b'["ok", 1' + b" " * 20_000 + b", 0.1]"),
        (lcb_judge(("a", "1")), b"[" * 100_000),
        (lcb_judge(("a", "1")), b"\xff[" * 100_000),
        (lcb_judge(("a", "1")), b"\xff" * 2_000_000),
    ):
        with monkeypatch.context() as patched:
            patched.setattr("json.loads", lambda *_: pytest.fail("parsed"))
            (result,) = judge.split_now(ended(result=line))
        assert outcome_of(judge, 0, result) is WRONG
        assert len(result.stdout) <= 3 * 8000  # three for each byte that is not UTF-8


async def test_a_line_of_64_mib_is_split_beside_the_event_loop_in_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop must run while the result is split; without a thread the test ends at its limit."""
    judge = lcb_judge(("a", "1"), ("b", "2"))
    whole = ended(result=b'["ok", "' + b"\0" * (64 << 20) + b'", 0.1]')
    loop, has_run, split_now = asyncio.get_running_loop(), threading.Event(), judge.split_now

    def waiting(result: RunResult) -> list[RunResult]:
        loop.call_soon_threadsafe(has_run.set)
        assert has_run.wait(60), "the event loop stands still"
        return split_now(result)

    monkeypatch.setattr(judge, "split_now", waiting)
    tracemalloc.start()
    try:
        results = await judge.split(whole)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [outcome_of(judge, index, result) for index, result in enumerate(results)] == [WRONG, ERROR]
    assert peak_bytes < len(whole.result or b"") + (1 << 20)  # one copy


def test_the_tests_left_by_a_dead_or_late_lcb_process_get_its_result() -> None:
    judge = lcb_judge(("a", "1"), ("b", "2"))
    dead = ended(exit=Exit.SIGNALLED, signal=9, result=b'["ok", "1", 0]\n')
    assert [outcome_of(judge, i, result) for i, result in enumerate(judge.split_now(dead))] == [OK, ERROR]
    late = replace(dead, exit=Exit.TIME_LIMIT)
    assert [outcome_of(judge, i, result) for i, result in enumerate(judge.split_now(late))] == [OK, LATE]


def test_the_lcb_process_gets_only_inputs_and_a_limit_for_the_whole_run() -> None:
    judge = lcb_judge(("given one", "expected one"), ("given two", "expected two"))
    assert b"given two" in judge.stdin(0)
    assert b"expected" not in judge.stdin(0) + judge.source("print(1)").encode()
    assert judge.run_limits(Limits(wall_time_s=5.5)).wall_time_s == (6 + 1) * 2 + 5


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("1 2", " 1  2 \n\n", True),
        ("1", "1.0", True),
        ("1\n2", "1 2", False),
        ("a b", "a  b", False),
        ("1e400", "1E+400", True),
        ("1", "sNaN", False),
        ("NaN", "nan", False),
        ("1", "1\n" * 100_000, False),
    ],
)
def test_lcb_compares_lines_and_decimals(expected: str, printed: str, same: bool) -> None:
    assert same_as_lcb_prints(expected, printed) is same


@pytest.mark.parametrize(
    ("submission", "field"),
    [
        (Submission(AssertTests(("assert 1", "assert 2")), "x", language="c"), "tests.cases"),
        (Submission(CallTests("f", (CallCase(),)), "x", language="c"), "language"),
        (Submission(StdinTests((StdinCase("", ""),)), "x", language="c", prelude=Prelude.LCB), "prelude"),
        (Submission(StdinTests((StdinCase("", ""),)), "x", language="c", profile=Profile.LCB), "profile"),
        (Submission(AssertTests(("assert 1",)), "x", profile=Profile.LCB), "profile"),
        (
            Submission(StdinTests((StdinCase("", ""),)), "x", comparator=Comparator(absolute_tolerance=math.inf)),
            "comparator.absolute_tolerance",
        ),
        (Submission(AssertTests(("pass",), "x;" * 1_000_000), "x"), "tests"),
    ],
)
def test_incompatible_fields_are_refused_with_the_field(submission: Submission, field: str) -> None:
    with pytest.raises(InvalidSubmission) as refusal:
        validate(submission, Bounds())
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("tests", "field"),
    [
        (CheckerTests((StdinCase("", ""),), JudgeProgram("x", "cobol")), "tests.checker.language"),
        (InteractiveTests((StdinCase("", ""),), JudgeProgram("x", "cobol")), "tests.interactor.language"),
    ],
)
def test_a_judge_in_an_unknown_language_is_refused(tests: Tests, field: str) -> None:
    with pytest.raises(InvalidSubmission, match="python") as refusal:
        validate(Submission(tests, "x"), Bounds())
    assert refusal.value.field == field


def test_unordered_lines_are_a_multiset() -> None:
    unordered = Comparator(ComparatorKind.UNORDERED_LINES)
    assert same_text("a\nb\na", b"b\na  \na\n\n", unordered)
    assert not same_text("a\nb\na", b"b\nb\na", unordered)
    assert not same_text("a", b"a\n" + b"b\n" * 100_000, unordered)


@pytest.mark.parametrize("name", ["float_tolerance", "absolute_tolerance", "relative_tolerance"])
def test_a_negative_tolerance_is_refused_with_the_field(name: str) -> None:
    with pytest.raises(ValueError, match=f"comparator.{name}"):
        Comparator(**{name: -1.0})  # type: ignore[arg-type]


def test_absolute_and_relative_tolerances_are_separate() -> None:
    absolute, relative = Comparator(absolute_tolerance=0.1), Comparator(relative_tolerance=0.1)
    assert same_text("0.0 5.0", b"0.05 5.05", absolute)
    assert not same_text("0.0", b"0.05", relative)
    assert same_text("100.0", b"109.0", relative)
    assert not same_text("100.0", b"109.0", absolute)
    assert same_value([100.0], [109.0], relative=0.1)
    assert not same_value([100.0], [109.0], absolute=0.1)


def test_a_missing_remark_is_empty() -> None:
    assert ruling_of_checker(ended()) == Ruling(OK, "")


def test_of_large_values_only_the_beginning_is_written_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    values: JsonValue = [[number, 0.5, "\ud800"] for number in range(100_000)]
    kwargs: dict[Profile, dict[str, JsonValue]] = {Profile.PROCESS: {"key": values}, Profile.LCB: {}}
    judges = [
        judge_for(Submission(CallTests("f", (CallCase((values,), given, values),)), "x", profile=profile))
        for profile, given in kwargs.items()
    ]
    written = json.dumps(values)[:CLIP_CHARS]
    monkeypatch.setattr("json.dumps", lambda *_: pytest.fail("written as a whole"))
    for judge, begin in zip(judges, ('{"args": [', "["), strict=True):
        result = ended(b"[]", result=b"[]")
        assert outcome_of(judge, 0, result) is WRONG
        failure = failure_of(judge, 0, WRONG, result)
        assert failure.input == (begin + written)[:CLIP_CHARS] + "..."
        assert (failure.expected, failure.output) == (written + "...", "[]")
