"""How a test of each type runs: alone, followed by a checker, together with an interactor (and perhaps followed by a
checker), read by a checker (`of_code`, perhaps after a runner in another sandbox), or in one process with all others
(the lcb profile). Math tests run no process (grader.py).

Each type of tests has one judge (judges/judge.py). A new type needs a judge, a line in `judge_for`, and a line in
`open_runs` if it does not run like stdin tests.

INVARIANT: an expected output enters only the sandbox of a checker or an interactor, in which no candidate code has run.
It never enters the candidate's sandbox. A sandbox is asked until it has once imported pytest, and never again. One
without it refuses tests with a module, because the verdict of a candidate must not depend on it. For the same reason a
checker of code is used only after it has accepted the right program of each case here, and a setup only after its
trial without a program (setups.py).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from nouscoder.domain.submission import (
    AssertTests,
    CallTests,
    CheckerTests,
    InteractiveTests,
    JudgeProgram,
    JudgeProtocol,
    Limits,
    MathTests,
    Prelude,
    Profile,
    StdinCase,
    StdinTests,
    Submission,
    Tests,
    TestsReference,
)
from nouscoder.domain.verdict import VerdictKind
from nouscoder.verifier.grading.proofs import PROOF_S, Proofs
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.harness.frames import RESULT_FILE
from nouscoder.verifier.judges.asserting import AssertJudge, ProgramEndJudge, PytestJudge, is_short, require_python
from nouscoder.verifier.judges.judge import (
    CallJudge,
    Judge,
    StdinJudge,
    encoded,
    in_turn,
    outcome_of,
    readable,
    takes_long,
)
from nouscoder.verifier.judges.lcb import PRELUDE, LcbJudge
from nouscoder.verifier.judges.mathematics import MathJudge
from nouscoder.verifier.judges.rulings import (
    ACCEPTS,
    Ruling,
    by_testlib,
    has_crashed,
    ruling_of_checker,
    ruling_of_crash,
    ruling_of_interactor,
)
from nouscoder.verifier.sandbox.base import (
    CompileFailed,
    Exit,
    PartnerCompileFailed,
    Program,
    RunResult,
    Sandbox,
    SandboxError,
    Session,
    longest_run_s,
)
from nouscoder.verifier.toolchains.languages import installed

_ARGUMENTS = {
    JudgeProtocol.TESTLIB: ("input", "output", "answer"),
    JudgeProtocol.KATTIS: ("input", "answer", "./"),  # the last is the folder for feedback, the working directory
}
# A checker says little. One that prints without end should not do so for its 30 s.
_CHECKER_LIMITS = Limits(wall_time_s=30.0, cpu_time_s=30.0, memory_bytes=2 * 1024**3, output_bytes=8 * 1024**2)
_INTERACTOR_EXTRA_S = 10.0
_CODE_FILE = "code"  # what a runner gets
_LIMITS = (Exit.TIME_LIMIT, Exit.MEMORY_LIMIT, Exit.OUTPUT_LIMIT)
_USED = ("wall_time_s", "cpu_time_s", "memory_bytes")
Ran = tuple[RunResult, Ruling | None]  # the ruling is that of a checker or interactor, else None
# Runs the test of an index in the fresh sandbox of one submission. Raises SandboxError.
RunCase = Callable[[int], Awaitable[Ran]]
log = logging.getLogger(__name__)
_NEXT_PASS = "nextpass.in"  # a validator of Kattis writes it in its folder for the input of another pass
_IMPORT_LIMITS = Limits(wall_time_s=60.0, cpu_time_s=60.0)


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
    if isinstance(submission.tests, CallTests) and is_short(submission.tests):
        require_python(submission.tests)
    match submission.tests:
        case StdinTests() | CallTests() as tests if submission.profile.is_lcb:
            return LcbJudge(tests, submission.limits.wall_time_s, submission.profile)
        case StdinTests() | CheckerTests() | InteractiveTests() as tests:
            return StdinJudge(tests, submission.comparator, prelude)
        case CallTests() as tests:
            return CallJudge(tests, submission.comparator, prelude)
        case AssertTests() as tests if submission.language != "python":
            return ProgramEndJudge(tests)
        case AssertTests() as tests:
            return PytestJudge(tests, prelude) if tests.module else AssertJudge(tests, prelude)
        case MathTests() as tests:
            return MathJudge(tests.cases)
        case TestsReference():
            raise InvalidSubmission("tests.digest", "names stored tests that have not been read")


def program_of(submission: Submission, code: str, judge: Judge, since_s: float | None = None) -> Program:
    """The candidate's program in the form that the sandbox takes. `since_s`: see Program."""
    limits = submission.limits
    if isinstance(submission.tests, CheckerTests) and submission.tests.of_code:
        first = _reader_of_code(submission.tests, encoded(code), limits)
        return replace(first, problem_id=submission.problem_id, since_s=since_s)
    language = installed()[submission.language]
    if isinstance(judge, LcbJudge | PytestJudge):
        limits = judge.run_limits(limits)
    factor = language.time_factor
    if factor != 1.0:
        limits = replace(limits, wall_time_s=limits.wall_time_s * factor, cpu_time_s=limits.cpu_time_s * factor)
    source, prelude = judge.source(code), judge.prelude
    if isinstance(submission.tests, InteractiveTests) and submission.tests.unbuffered:
        language = replace(language, run=language.unbuffered_run or language.run)
        source, prelude = source + language.unbuffered_tail, language.unbuffered_prelude + prelude
    files = {name: encoded(text) for name, text in submission.files.items()}
    return Program(language, source, limits, judge.entry_point, prelude, submission.problem_id, since_s, files)


def has_free_order(submission: Submission) -> bool:
    """Whether each test has its own process, so that tests can run in any order."""
    return submission.profile is Profile.PROCESS and not isinstance(submission.tests, MathTests)


def has_parallel_tests(submission: Submission) -> bool:
    """Whether tests can run in parallel. An interactive test already uses two processes."""
    return has_free_order(submission) and not isinstance(submission.tests, InteractiveTests)


def partner_patience_s(submission: Submission) -> float:
    """Seconds that a checker (which may run twice) or an interactor may take in addition to the candidate."""
    tests = submission.tests
    if isinstance(tests, CheckerTests) and tests.of_code:
        return 2 * longest_run_s(submission.limits) if tests.runner is not None else 0.0
    has_partner = isinstance(tests, InteractiveTests | CheckerTests)
    return 2 * _CHECKER_LIMITS.wall_time_s + 15.0 if has_partner else 0.0


@asynccontextmanager
async def open_runs(sandbox: Sandbox, submission: Submission, program: Program, judge: Judge) -> AsyncIterator[RunCase]:
    """A fresh sandbox for this submission. Raises CompileFailed, PartnerCompileFailed and SandboxError on entry."""
    match submission.tests:
        case MathTests():
            raise ValueError("math tests need no sandbox")
        case CheckerTests() as tests if tests.of_code:
            async with _open_checker_of_code(sandbox, program, tests) as sessions:
                yield partial(_run_checker_of_code, sessions, tests)
        case CheckerTests() as tests:
            fetch = (_NEXT_PASS,) if tests.checker.protocol is JudgeProtocol.KATTIS else ()
            judging = _partner(tests.checker, _CHECKER_LIMITS, fetch)
            async with sandbox.with_partners(program, judging) as (candidate, other):
                yield partial(_run_checked, candidate, _Checker(other, tests.checker.protocol), tests, judge)
        case InteractiveTests() as tests:
            longer_s = program.limits.wall_time_s + _INTERACTOR_EXTRA_S
            limits = Limits(longer_s, longer_s, _CHECKER_LIMITS.memory_bytes)
            checker = None if tests.checker is None else _partner(tests.checker, _CHECKER_LIMITS)
            interactor = replace(_partner(tests.interactor, limits), makes_file=checker is not None)
            async with sandbox.with_partners(program, interactor, checker) as (candidate, *partners):
                yield partial(_run_dialogue, candidate, partners, tests)
        case TestsReference():
            raise ValueError("the tests have not been read")
        case tests:
            async with sandbox.session(program) as session:
                of_lcb = _LcbRuns(session, judge) if isinstance(judge, LcbJudge) else None
                yield partial(_run, session, judge, tests) if of_lcb is None else of_lcb.run


def _partner(program: JudgeProgram, limits: Limits, fetch: tuple[str, ...] = ()) -> Program:
    return Program(installed()[program.language], program.code, limits, fetch=fetch)


async def _run(session: Session, judge: Judge, tests: Tests, index: int) -> Ran:
    if takes_long(tests, index):
        stdin, arguments = await in_turn(judge.stdin, index), await in_turn(judge.arguments, index)
    else:
        stdin, arguments = judge.stdin(index), judge.arguments(index)
    return await session.run(stdin, args=arguments), None


async def _run_checked(session: Session, checker: _Checker, tests: CheckerTests, judge: Judge, index: int) -> Ran:
    """Run one process for this test and, if it exits normally, the checker."""
    result, _ = await _run(session, judge, tests, index)
    if outcome_of(judge, index, result) is not VerdictKind.ACCEPTED:
        return result, None
    return result, await checker.rule(_files(tests.cases[index]), result.stdout)


class _Checker:
    def __init__(self, session: Session, protocol: JudgeProtocol) -> None:
        self._session = session
        self._protocol = protocol

    async def rule(self, files: dict[str, bytes], output: bytes, *, is_like_answer: bool = True) -> Ruling:
        """The ruling on an output. Runs one process, and another one after a crash.

        `is_like_answer`: a right output has the form of the answer file, which an interactor's file need not have.
        """
        check = await self._check(files, output)
        if _NEXT_PASS in check.files:
            return Ruling(VerdictKind.INTERNAL_ERROR, f"the checker asks for another pass ({_NEXT_PASS}): there is one")
        if not has_crashed(check):
            return ruling_of_checker(check)
        on_answer = await self._check(files, files["answer"])
        return ruling_of_crash(check, on_answer, is_like_answer and bool(files["answer"].strip()))

    async def _check(self, files: dict[str, bytes], output: bytes) -> RunResult:
        """Run the checker on an output, which Kattis's protocol gives as stdin."""
        arguments = _ARGUMENTS[self._protocol]
        if self._protocol is JudgeProtocol.KATTIS:
            check = await self._session.run(output, args=arguments, files=files)
        else:
            check = await self._session.run(b"", args=arguments, files=files | {RESULT_FILE: output})
        return by_testlib(check, self._protocol)


def _reader_of_code(tests: CheckerTests, code: bytes, limits: Limits) -> Program:
    """The program that gets a candidate's text: the runner, else the checker."""
    if tests.runner is None:
        return replace(_partner(tests.checker, limits), files={RESULT_FILE: code})
    return replace(_partner(tests.runner, limits), files={_CODE_FILE: code}, makes_file=True)


@asynccontextmanager
async def _open_checker_of_code(
    sandbox: Sandbox, reader: Program, tests: CheckerTests
) -> AsyncIterator[tuple[Session, ...]]:
    """The sandbox of the checker, after that of the runner if there is one."""
    if tests.runner is None:
        async with sandbox.session(reader) as session:
            yield (session,)
    else:
        async with sandbox.with_partners(reader, _partner(tests.checker, reader.limits)) as sessions:
            yield sessions


async def _run_checker_of_code(sessions: tuple[Session, ...], tests: CheckerTests, index: int) -> Ran:
    """Run the checker on the program's text, or on what the runner makes of it when all its processes are dead."""
    given = {"input": _files(tests.cases[index])["input"]}
    made = None
    if tests.runner is not None:
        made = await sessions[0].run(b"", args=(_CODE_FILE, RESULT_FILE))
        if made.exit in _LIMITS:
            return made, None
        if made.exit is not Exit.EXITED or made.exit_code or made.result is None:
            return made, Ruling(VerdictKind.WRONG_ANSWER, "the program left nothing that can be judged")
        given[RESULT_FILE] = made.result
    check = await sessions[-1].run(b"", args=("input", RESULT_FILE), files=given)
    if made is not None:  # each had the limits of the submission
        longest = {name: max(getattr(made, name), getattr(check, name)) for name in _USED}
        check = replace(check, **longest)
    if check.exit in _LIMITS:
        return check, None
    if not has_crashed(check) and (ruling := ruling_of_checker(check)).outcome is not VerdictKind.INTERNAL_ERROR:
        return check, ruling
    # The checker accepts a right program (`ProvenCheckers`), so this one made it fail.
    return check, ruling_of_crash(check, ACCEPTS, True)


async def _run_dialogue(session: Session, partners: list[Session], tests: InteractiveTests, index: int) -> Ran:
    """Run one process for this test and one of the interactor, with their stdin and stdout connected.

    If the interactor accepts, the checker judges what it has written.
    """
    files = _files(tests.cases[index])
    protocol = tests.interactor.protocol
    result, other = await session.dialogue_with(partners[0], args=_ARGUMENTS[protocol], files=files)
    ruling = ruling_of_interactor(result, by_testlib(other, protocol))
    if tests.checker is None or ruling is None or ruling.outcome is not VerdictKind.ACCEPTED:
        return result, ruling
    checker = _Checker(partners[1], tests.checker.protocol)
    return result, await checker.rule(files, other.result or b"", is_like_answer=False)


class _LcbRuns:
    def __init__(self, session: Session, judge: LcbJudge) -> None:
        self._session = session
        self._judge = judge
        self._results: list[RunResult] | None = None

    async def run(self, index: int) -> Ran:
        """Run one process for all tests at the first call; return its part for this test."""
        if self._results is None:
            self._results = await self._judge.split(await self._session.run(self._judge.stdin(index)))
        return self._results[index], None


def _files(case: StdinCase) -> dict[str, bytes]:
    return {"input": encoded(case.input), "answer": encoded(case.output)}


# Prints the modules of its arguments that cannot be found.
_FIND = """
import importlib.util, sys
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None], sep=", ")
"""
CANNOT_IMPORT = "candidates here cannot import "


class CandidateLibraries:
    """The modules that candidates of one grader can import, of those that submissions need."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._there: set[str] = set()

    async def require(self, submission: Submission) -> None:
        """Raises InvalidSubmission for one that is missing, which is no fault of the program, and SandboxError."""
        tests = submission.tests
        of_tests = ["pytest"] if isinstance(tests, AssertTests) and tests.module else []
        wanted = tuple(dict.fromkeys([*of_tests, *submission.libraries]))
        if self._there.issuperset(wanted):
            return
        async with self._sandbox.session(Program(installed()["python"], _FIND, _IMPORT_LIMITS)) as session:
            result = await session.run(b"", args=wanted)
        if result.exit is not Exit.EXITED or result.exit_code:
            raise SandboxError(f"the search for libraries failed: {readable(result.stderr[-500:])}")
        if missing := result.stdout.decode().strip():
            log.warning("candidates cannot import a library", extra={"library": missing})
            raise InvalidSubmission(
                "tests.module" if missing in of_tests else "libraries",
                f"{CANNOT_IMPORT}{missing} (verifier.libraries)",
            )
        self._there.update(wanted)


class ProvenCheckers:
    """Whether checkers of code accept the right programs in the sandboxes of one grader."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._proofs = Proofs()

    async def require(self, submission: Submission) -> None:
        """Raises InvalidSubmission for a checker that refuses the answer of a case, and SandboxError."""
        tests = submission.tests
        if not isinstance(tests, CheckerTests) or not tests.of_code:
            return
        limits = submission.limits
        longer = replace(limits, wall_time_s=limits.wall_time_s + PROOF_S, cpu_time_s=limits.cpu_time_s + PROOF_S)
        for index in range(len(tests.cases)):
            key = hashlib.sha256(repr((tests.checker, tests.runner, _files(tests.cases[index]))).encode()).digest()
            await self._proofs.require(key, partial(self._prove, tests, longer, index))

    async def _prove(self, tests: CheckerTests, limits: Limits, index: int) -> None:
        reader = _reader_of_code(tests, _files(tests.cases[index])["answer"], limits)
        try:
            async with _open_checker_of_code(self._sandbox, reader, tests) as sessions:
                check, ruling = await _run_checker_of_code(sessions, tests, index)
        except CompileFailed as failure:  # that of the tests, not of a candidate
            raise PartnerCompileFailed(failure.detail) from failure
        if check.exit is Exit.TIME_LIMIT:
            raise SandboxError("the checker of code did not end in time on the right program")
        if ruling is None or ruling.outcome is not VerdictKind.ACCEPTED:
            said = readable(check.stderr[-500:] or check.stdout[-500:]).strip().rpartition("\n")[2]
            raise InvalidSubmission(
                f"tests.cases[{index}]", f"the checker does not accept the right program here: {said}"
            )
