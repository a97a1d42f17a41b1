"""Checkers, interactors and the lcb profile through the grader: their inputs, and the causes of failures.

Tests the invariant of runs.py: expected outputs enter only the sandbox of a judge program, never the candidate's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.domain.submission import (
    AssertTests,
    CheckerTests,
    InteractiveTests,
    JudgeProgram,
    JudgeProtocol,
    Limits,
    Profile,
    StdinCase,
    StdinTests,
    Submission,
    Tests,
)
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.rpc.pairs import VERDICT
from nouscoder.verifier.api.schema import answer_record
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.judges import asserting
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import Exit, RunResult
from nouscoder.verifier.sandbox.fake import Behaviour, FakeSandbox, ended

SECRET = "the-answer"
CASES = (StdinCase("given", SECRET),)
CHECKER = JudgeProgram("judge = 1", "python")


async def graded(
    tests: Tests, table: Mapping[str, Behaviour], **fields: object
) -> tuple[Verdict, FakeSandbox, CollectorRegistry]:
    """The verdict of the program `candidate = 1`, with the behaviour of programs in `table`."""
    sandbox, registry = FakeSandbox(table), CollectorRegistry()
    await sandbox.start()
    submission = Submission(tests, "candidate = 1", **fields)  # type: ignore[arg-type]
    return await Grader(sandbox, VerifierMetrics(registry)).grade(submission), sandbox, registry


@pytest.mark.parametrize(
    ("code", "kind"),
    [(0, VerdictKind.ACCEPTED), (1, VerdictKind.WRONG_ANSWER), (3, VerdictKind.INTERNAL_ERROR)],
)
async def test_a_checker_gets_three_files_and_the_candidate_only_the_input(code: int, kind: VerdictKind) -> None:
    table = {"candidate = 1": lambda _: ended(b"said"), "judge = 1": lambda _: ended(exit_code=code, stderr=b"why")}
    verdict, sandbox, registry = await graded(CheckerTests(CASES, CHECKER), table)
    assert verdict.kind is kind
    candidate, checker = sandbox.inputs
    assert (candidate.stdin, candidate.args, dict(candidate.files)) == (b"given", (), {})
    assert checker.args == ("input", "output", "answer")
    assert dict(checker.files) == {"input": b"given", "output": b"said", "answer": SECRET.encode()}
    blamed = registry.get_sample_value("nouscoder_verifier_internal_errors_total", {"cause": "judge"})
    assert (blamed or 0) == (kind is VerdictKind.INTERNAL_ERROR)
    if verdict.first_failure is not None:
        assert "why" in verdict.first_failure.stderr


@pytest.mark.parametrize(
    ("on_answer", "kind"),
    [
        (ended(), VerdictKind.WRONG_ANSWER),
        (ended(exit_code=1), VerdictKind.WRONG_ANSWER),
        (ended(exit=Exit.SIGNALLED, signal=11), VerdictKind.INTERNAL_ERROR),
    ],
)
async def test_after_a_crash_the_checker_runs_on_the_answer(on_answer: RunResult, kind: VerdictKind) -> None:
    """So a candidate cannot get internal_error by an output that a correct checker cannot read."""
    ends = [on_answer, ended(exit=Exit.SIGNALLED, signal=11)]
    table: dict[str, Behaviour] = {"candidate = 1": lambda _: ended(b"said"), "judge = 1": lambda _: ends.pop()}
    verdict, sandbox, _ = await graded(CheckerTests(CASES, CHECKER), table)
    assert (verdict.kind, ends) == (kind, [])
    assert [dict(one.files).get("output") for one in sandbox.inputs] == [None, b"said", SECRET.encode()]
    assert "was killed by signal 11" in verdict.first_failure.stderr if verdict.first_failure else False


async def test_a_judge_of_kattis_gets_its_arguments_and_the_output_as_stdin() -> None:
    judge = JudgeProgram("judge = 1", "python", JudgeProtocol.KATTIS)
    table: dict[str, Behaviour] = {
        "candidate = 1": lambda _: ended(b"said"),
        "judge = 1": lambda _: ended(exit_code=42),
    }
    verdict, sandbox, _ = await graded(CheckerTests(CASES, judge), table)
    assert verdict.kind is VerdictKind.ACCEPTED
    checker = sandbox.inputs[1]
    assert (checker.stdin, checker.args) == (b"said", ("input", "answer", "./"))
    assert dict(checker.files) == {"input": b"given", "answer": SECRET.encode()}
    verdict, sandbox, _ = await graded(InteractiveTests(CASES, judge), table)
    assert verdict.kind is VerdictKind.ACCEPTED
    assert sandbox.inputs[1].args == ("input", "answer", "./")


async def test_the_score_is_the_mean_of_the_points_of_all_tests() -> None:
    cases = tuple(StdinCase(str(number), "") for number in range(4))
    ends = [ended(), ended(exit_code=7, stderr=b"points 0.5 half"), ended(exit_code=1), ended()]
    table: dict[str, Behaviour] = {"judge = 1": lambda _: ends.pop()}
    verdict, _, _ = await graded(CheckerTests(cases, CHECKER), table, stop_on_first_failure=False)
    assert (verdict.kind, verdict.passed, verdict.score) == (VerdictKind.WRONG_ANSWER, 2, 2.5 / 4)
    assert sorted(outcome.score for outcome in verdict.tests) == [0.0, 0.5, 1.0, 1.0]
    record = answer_record(verdict)
    assert record["score"] == 0.625
    assert sum(test["score"] for test in record["tests"]) == 2.5
    assert VERDICT.of(VERDICT.to(verdict)) == verdict
    assert VERDICT.to(verdict).score == 0.625


async def test_the_checker_does_not_run_after_a_failed_candidate() -> None:
    table = {"candidate = 1": lambda _: ended(exit_code=1), "judge = 1": lambda _: ended()}
    verdict, sandbox, _ = await graded(CheckerTests(CASES, CHECKER), table)
    assert (verdict.kind, sandbox.num_runs) == (VerdictKind.RUNTIME_ERROR, 1)


async def test_an_interactor_gets_the_files_and_the_candidate_gets_none() -> None:
    table = {"candidate = 1": lambda _: ended(b"hello"), "judge = 1": lambda said: ended(exit_code=said != b"hello")}
    verdict, sandbox, _ = await graded(InteractiveTests(CASES, CHECKER), table)
    assert verdict.kind is VerdictKind.ACCEPTED
    candidate, interactor = sandbox.inputs
    assert SECRET not in repr(candidate)
    assert dict(interactor.files) == {"input": b"given", "answer": SECRET.encode()}


async def test_a_judge_program_that_does_not_compile_is_an_invalid_submission() -> None:
    with pytest.raises(InvalidSubmission, match="the judge does not compile") as refusal:
        await graded(CheckerTests(CASES, JudgeProgram("(", "python")), {})
    assert refusal.value.field == "tests"


async def test_the_lcb_profile_runs_one_process_without_any_expected_output_and_stops_at_the_first_failure() -> None:
    cases = tuple(StdinCase(f"input {n}", f"{SECRET} {n}") for n in range(3))
    lines = [["ok", f"{SECRET} 0", 0.1], ["ok", "wrong", 0.1], ["ok", f"{SECRET} 2", 0.1]]

    class Everything(dict[str, Behaviour]):
        """Every program writes these lines."""

        def get(self, key: str, default: object = None) -> Behaviour:
            """Called by the fake sandbox."""
            return lambda _: ended(result="\n".join(map(json.dumps, lines)).encode())

    sandbox = FakeSandbox()
    sandbox._table = Everything()
    await sandbox.start()
    submission = Submission(
        StdinTests(cases), "candidate = 1", profile=Profile.LCB, stop_on_first_failure=False, limits=Limits(2.0)
    )
    verdict = await Grader(sandbox, VerifierMetrics(CollectorRegistry())).grade(submission)
    assert (verdict.kind, verdict.passed, verdict.graded) == (VerdictKind.WRONG_ANSWER, 1, 2)
    assert sandbox.num_runs == 1
    assert SECRET not in repr(sandbox.inputs)


async def test_long_assert_tests_are_parsed_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = "x = 1\n" * 3000, "x = 1\n" * 3000 + "x ="
    monkeypatch.setattr("ast.parse", lambda *_: pytest.fail("parsed by the service"))
    table: dict[str, Behaviour] = {}
    for cases, setup, field in (((right, wrong), "", "tests.cases[1]"), (("",), wrong, "tests.setup")):
        with pytest.raises(InvalidSubmission, match="is not python") as refusal:
            await graded(AssertTests(cases, setup), table)
        assert refusal.value.field == field


async def test_asserts_that_the_parser_takes_too_long_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asserting, "_CPU_LIMIT_S", 1)
    slow = "x = f'" + "{a!r:>{b}}" * 18_000 + "'"  # 5 s and more
    with pytest.raises(InvalidSubmission, match="takes python's parser more than 1 s") as refusal:
        await graded(AssertTests((slow,)), {})
    assert refusal.value.field == "tests"
