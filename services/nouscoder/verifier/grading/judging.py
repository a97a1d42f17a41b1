"""Turns the result of a process (RunResult) into the outcome of its test. Pure.

Each type of tests has one judge. The judge knows the input of a process, the expected output, and how to show both. A
new type of tests needs a new judge and a line in `judge_for`.
"""

from __future__ import annotations

from nouscoder.domain.submission import (
    AssertTests,
    CallTests,
    CheckerTests,
    InteractiveTests,
    MathTests,
    Prelude,
    Profile,
    StdinTests,
    Submission,
    TestsReference,
)
from nouscoder.domain.verdict import FirstFailure, VerdictKind
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.judges.answers import MathJudge
from nouscoder.verifier.judges.asserting import AssertJudge
from nouscoder.verifier.judges.base import CLIP_CHARS, Judge
from nouscoder.verifier.judges.calls import CallJudge
from nouscoder.verifier.judges.lcb import PRELUDE, LcbJudge
from nouscoder.verifier.judges.programs import StdinJudge
from nouscoder.verifier.judges.pytest_file import PytestJudge
from nouscoder.verifier.sandbox.base import Exit, RunResult

_ENDED_BADLY = {
    Exit.SIGNALLED: VerdictKind.RUNTIME_ERROR,
    Exit.TIME_LIMIT: VerdictKind.TIME_LIMIT_EXCEEDED,
    Exit.MEMORY_LIMIT: VerdictKind.MEMORY_LIMIT_EXCEEDED,
    Exit.OUTPUT_LIMIT: VerdictKind.OUTPUT_LIMIT_EXCEEDED,
}


def judge_for(submission: Submission) -> Judge:
    """The judge of a submission's tests. Raises InvalidSubmission when a test value cannot be encoded."""
    try:
        return _judge_for(submission)
    except (RecursionError, ValueError) as error:
        if isinstance(error, InvalidSubmission):
            raise
        raise InvalidSubmission("tests.cases", f"a value cannot be encoded: {error}") from None


def _judge_for(submission: Submission) -> Judge:
    prelude = PRELUDE if submission.prelude is Prelude.LCB else ""
    match submission.tests:
        case StdinTests() | CallTests() as tests if submission.profile is Profile.LCB:
            return LcbJudge(tests, submission.limits.wall_time_s)
        case StdinTests() | CheckerTests() | InteractiveTests() as tests:
            return StdinJudge(tests, submission.comparator, prelude)
        case CallTests() as tests:
            return CallJudge(tests, submission.comparator, prelude)
        case AssertTests() as tests:
            return PytestJudge(tests, prelude) if tests.module else AssertJudge(tests, prelude)
        case MathTests() as tests:
            return MathJudge(tests)
        case TestsReference():
            raise InvalidSubmission("tests.digest", "names stored tests that have not been read")


def outcome_of(judge: Judge, index: int, result: RunResult) -> VerdictKind:
    """The outcome of test `index`. A non-zero exit code is a runtime error even after a correct answer."""
    if result.exit is not Exit.EXITED:
        return _ENDED_BADLY[result.exit]
    if result.exit_code != 0:
        return VerdictKind.RUNTIME_ERROR
    return judge.answer_outcome(index, result)


def failure_of(judge: Judge, index: int, outcome: VerdictKind, result: RunResult, remark: str = "") -> FirstFailure:
    """A failure as the service reports it: texts clipped, the end of stderr, then the checker's remark."""
    test_input, expected, output = judge.shown(index, result)
    stderr = stderr_of(result)
    if remark:
        stderr = f"{stderr}\n[judge] {remark}".lstrip("\n")
    return FirstFailure(
        index=index,
        outcome=outcome,
        input=_clip(test_input),
        expected=_clip(expected),
        output=_clip(output),
        stderr=stderr[-CLIP_CHARS:],
    )


def stderr_of(result: RunResult) -> str:
    """The end of what the program wrote to stderr."""
    return result.stderr[-4 * CLIP_CHARS :].decode("utf8", "replace")[-CLIP_CHARS:]


def _clip(text: str) -> str:
    return text if len(text) <= CLIP_CHARS else text[:CLIP_CHARS] + "..."
