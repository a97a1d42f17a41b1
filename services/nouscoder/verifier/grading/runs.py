"""How one test is run, by the type of tests: alone, before a checker, with an interactor, in one process with the
others (the lcb profile), or not at all (math).

INVARIANT: an expected output goes to a checker or an interactor, each in a sandbox that no candidate's code has
entered, and never to the sandbox of the candidate.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from nouscoder.domain.submission import (
    CheckerTests,
    InteractiveTests,
    JudgeProgram,
    Limits,
    MathTests,
    Profile,
    StdinCase,
    Submission,
)
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.judging import outcome_of
from nouscoder.verifier.judges import mathematics
from nouscoder.verifier.judges.base import Judge, encoded
from nouscoder.verifier.judges.lcb import LcbJudge
from nouscoder.verifier.judges.partners import Ruling, ruling_of_checker, ruling_of_interactor
from nouscoder.verifier.sandbox.base import Exit, Program, RunResult, Sandbox, Session
from nouscoder.verifier.toolchains.languages import installed

_FILE_ARGUMENTS = ("input", "output", "answer")
_CHECKER_LIMITS = Limits(wall_time_s=30.0, cpu_time_s=30.0, memory_bytes=2 * 1024**3)
_INTERACTOR_EXTRA_S = 10.0

Ran = tuple[RunResult, Ruling | None]


class Runs(Protocol):
    """The runs of one submission in one fresh sandbox."""

    async def run(self, index: int) -> Ran:
        """Run test `index`; with what others have said of it, if anybody has. Raises SandboxError."""
        ...


def program_of(submission: Submission, code: str, judge: Judge) -> Program:
    """The candidate's program as the sandbox takes it."""
    language = installed()[submission.language]
    limits = judge.run_limits(submission.limits) if isinstance(judge, LcbJudge) else submission.limits
    factor = language.time_factor
    if factor != 1.0:
        limits = Limits(
            limits.wall_time_s * factor,
            limits.cpu_time_s * factor,
            limits.memory_bytes,
            limits.output_bytes,
            limits.processes,
        )
    return Program(language, judge.source(code), limits, judge.entry_point, judge.prelude)


def has_free_order(submission: Submission) -> bool:
    """Whether each test is a process of its own, so that any of them can be run before any other."""
    return submission.profile is Profile.PROCESS and not isinstance(submission.tests, MathTests)


def has_lanes(submission: Submission) -> bool:
    """Whether tests can be run beside each other; a conversation keeps two processes busy as it is."""
    return has_free_order(submission) and not isinstance(submission.tests, InteractiveTests)


def partner_patience_s(submission: Submission) -> float:
    """Seconds that a checker or an interactor may take on top of the candidate's own."""
    return _CHECKER_LIMITS.wall_time_s + 15.0 if isinstance(submission.tests, CheckerTests | InteractiveTests) else 0.0


@asynccontextmanager
async def open_runs(sandbox: Sandbox, submission: Submission, program: Program, judge: Judge) -> AsyncIterator[Runs]:
    """A fresh sandbox for this submission. Raises CompileFailed, PartnerCompileFailed and SandboxError on entry."""
    match submission.tests:
        case MathTests() as tests:
            yield _MathRuns(tests, program)
        case CheckerTests() as tests:
            async with sandbox.pair(program, _partner(tests.checker, _CHECKER_LIMITS)) as (candidate, checker):
                yield _CheckedRuns(candidate, checker, tests.cases, judge)
        case InteractiveTests() as tests:
            longer_s = program.limits.wall_time_s + _INTERACTOR_EXTRA_S
            limits = Limits(longer_s, longer_s, _CHECKER_LIMITS.memory_bytes)
            async with sandbox.pair(program, _partner(tests.interactor, limits)) as (candidate, interactor):
                yield _TalkingRuns(candidate, interactor, tests.cases)
        case _:
            async with sandbox.session(program) as session:
                yield _LcbRuns(session, judge) if isinstance(judge, LcbJudge) else _PlainRuns(session, judge)


def _partner(program: JudgeProgram, limits: Limits) -> Program:
    return Program(installed()[program.language], program.code, limits)


class _PlainRuns:
    def __init__(self, session: Session, judge: Judge) -> None:
        self._session = session
        self._judge = judge

    async def run(self, index: int) -> Ran:
        """A process for this test."""
        return await self._session.run(self._judge.stdin(index)), None


class _CheckedRuns:
    def __init__(self, candidate: Session, checker: Session, cases: tuple[StdinCase, ...], judge: Judge) -> None:
        self._candidate = candidate
        self._checker = checker
        self._cases = cases
        self._judge = judge

    async def run(self, index: int) -> Ran:
        """A process for this test, then, if it ended well, one of the checker."""
        result = await self._candidate.run(self._judge.stdin(index))
        if outcome_of(self._judge, index, result) is not VerdictKind.ACCEPTED:
            return result, None
        files = _files(self._cases[index]) | {"output": result.stdout}
        return result, ruling_of_checker(await self._checker.run(b"", args=_FILE_ARGUMENTS, files=files))


class _TalkingRuns:
    def __init__(self, candidate: Session, interactor: Session, cases: tuple[StdinCase, ...]) -> None:
        self._candidate = candidate
        self._interactor = interactor
        self._cases = cases

    async def run(self, index: int) -> Ran:
        """A process for this test and one of the interactor, each the other's stdin and stdout."""
        files = _files(self._cases[index])
        result, other = await self._candidate.converse(self._interactor, args=_FILE_ARGUMENTS, files=files)
        return result, ruling_of_interactor(result, other)


class _LcbRuns:
    def __init__(self, session: Session, judge: LcbJudge) -> None:
        self._session = session
        self._judge = judge
        self._results: list[RunResult] | None = None

    async def run(self, index: int) -> Ran:
        """The test's part of the one process, which the first call runs."""
        if self._results is None:
            self._results = self._judge.split(await self._session.run(self._judge.batch_input()))
        return self._results[index], None


class _MathRuns:
    def __init__(self, tests: MathTests, program: Program) -> None:
        self._tests = tests
        self._program = program
        self._rulings: list[Ruling] | None = None

    async def run(self, index: int) -> Ran:
        """The case's part of the one comparison, which the first call makes."""
        if self._rulings is None:
            self._rulings = await mathematics.rule(self._tests, self._program.code, self._program.limits.wall_time_s)
        answer = RunResult(Exit.EXITED, 0, 0, 0.0, 0.0, 0, encoded(self._program.code), b"")
        return answer, self._rulings[index]


def _files(case: StdinCase) -> dict[str, bytes]:
    return {"input": encoded(case.input), "answer": encoded(case.output)}
