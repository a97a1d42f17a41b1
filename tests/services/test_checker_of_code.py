"""A checker of code is asked about the right program of each case once, before it judges anybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from nouscoder.domain.submission import CheckerTests, JudgeProgram, JudgeProtocol, StdinCase, Submission
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox.base import Exit, RunResult
from nouscoder.verifier.sandbox.fake import FakeSandbox, ended

TESTS = CheckerTests(
    (StdinCase("given", "right"), StdinCase("more", "right")), JudgeProgram("1", "python"), of_code=True
)
WRONG = Submission(TESTS, code="not ( python", stop_on_first_failure=False)


async def grader_of(*ends: RunResult | Callable[[], RunResult]) -> tuple[Grader, FakeSandbox]:
    """A grader whose checker ends so, one run after the other; the last one is repeated."""
    left = list(ends)

    def check(_: bytes) -> RunResult:
        end = left.pop(0) if len(left) > 1 else left[0]
        return end if isinstance(end, RunResult) else end()

    sandbox = FakeSandbox({"1": check}, num_slots=1)
    await sandbox.start()
    return Grader(sandbox, VerifierMetrics(CollectorRegistry())), sandbox


async def test_the_right_programs_are_judged_once_and_apart_from_candidates() -> None:
    grader, sandbox = await grader_of(ended(), ended(), ended(exit_code=1))
    for _ in range(2):
        verdict = await grader.grade(WRONG)
        assert (verdict.kind, verdict.passed, verdict.total) == (VerdictKind.WRONG_ANSWER, 0, 2)
    proofs, judged = sandbox.inputs[:2], sandbox.inputs[2:]
    assert [one.args for one in proofs] == [("input", "output")] * 2
    assert len(judged) == 4
    assert {one.args for one in judged} == {("input", "output")}
    assert all("answer" not in one.files for one in judged)
    assert sandbox.num_sessions == 4
    await grader.close()


@pytest.mark.parametrize("refusal", [ended(exit_code=1), ended(exit_code=99), ended(exit=Exit.SIGNALLED, signal=9)])
async def test_a_checker_that_refuses_a_right_program_judges_nobody(refusal: RunResult) -> None:
    grader, _ = await grader_of(ended(), refusal)
    for _ in range(2):
        with pytest.raises(InvalidSubmission, match=r"tests.cases\[1\]: the checker does not accept the right program"):
            await grader.grade(WRONG)
    await grader.close()


async def test_a_proof_that_takes_too_long_is_our_failure() -> None:
    grader, _ = await grader_of(ended(exit=Exit.TIME_LIMIT))
    assert (await grader.grade(WRONG)).kind is VerdictKind.INTERNAL_ERROR
    await grader.close()


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (ended(exit_code=99), VerdictKind.WRONG_ANSWER),
        (ended(exit_code=1, stderr=b"Traceback (most recent call last):"), VerdictKind.WRONG_ANSWER),
        (ended(exit=Exit.SIGNALLED, signal=9), VerdictKind.WRONG_ANSWER),
        (ended(exit=Exit.MEMORY_LIMIT), VerdictKind.MEMORY_LIMIT_EXCEEDED),
        (ended(exit=Exit.OUTPUT_LIMIT), VerdictKind.OUTPUT_LIMIT_EXCEEDED),
        (ended(exit_code=3), VerdictKind.WRONG_ANSWER),
    ],
)
async def test_how_a_proven_checker_ends_is_due_to_the_program(end: RunResult, kind: VerdictKind) -> None:
    grader, _ = await grader_of(ended(), ended(), end)
    assert (await grader.grade(WRONG)).kind is kind
    await grader.close()


async def test_what_makes_no_sense_with_it_is_refused() -> None:
    grader, _ = await grader_of(ended())
    kattis = replace(TESTS, checker=JudgeProgram("1", "python", JudgeProtocol.KATTIS))
    with pytest.raises(InvalidSubmission, match=r"tests.checker.protocol: must be testlib"):
        await grader.grade(replace(WRONG, tests=kattis))
    with pytest.raises(InvalidSubmission, match=r"files: cannot be given to a checker of code"):
        await grader.grade(replace(WRONG, files={"a.py": ""}))
    await grader.close()
