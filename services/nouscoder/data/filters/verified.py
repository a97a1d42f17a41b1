"""Filters that run programs: reference solutions must pass, and known wrong solutions must fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from nouscoder.client import AsyncClient, GradingFailed
from nouscoder.data.asking import fill
from nouscoder.data.filters.step import Candidate, CannotFilter, Context, Step, StepOutcome
from nouscoder.data.json_records import checked_records
from nouscoder.data.problems import Reference
from nouscoder.domain.submission import Submission, Tests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats.body import Body
from nouscoder.grade_files.answers import GradingTarget
from nouscoder.record_log import RecordLog, key_of
from nouscoder.verifier.api.schema import request_of
from nouscoder.verifier.grading.grader import Grader, local_grader
from nouscoder.verifier.grading.validation import InvalidSubmission

REFUSED = "refused"  # the program cannot be graded, as for an unknown language
_SERVER_AT_ONCE = 16
_UNGRADABLE = frozenset({413, 422})

Judge = Callable[["CandidateProgram"], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class CandidateProgram:
    """A program for a candidate's problem."""

    candidate: Candidate
    solution: Reference

    @property
    def key(self) -> str:
        """A digest of all that its verdict depends on."""
        values = self.candidate.record.values
        rules = [values[name] for name in ("tests_digest", "limits", "comparator", "prelude", "profile")]
        return key_of([*rules, self.solution.language, self.solution.code])

    def submission(self, tests: Tests) -> Submission:
        """The program with the rules of the problem."""
        record = self.candidate.record
        return self.solution.submission(record.problem(tests), reveal=False, tests_digest=record.stored.digest)


async def grade_all(
    programs: Iterator[CandidateProgram], grading: GradingTarget, known: RecordLog
) -> list[tuple[str, str]]:
    """(problem id, verdict or REFUSED) of each program. At most one program for each slot is in memory.

    A program with a verdict in `known` is not graded again; each new verdict is added to it at once.
    Raises CannotFilter when a program gets no verdict, after the verdicts of all others are kept.
    """
    keys: list[tuple[str, str]] = []
    failures: list[str] = []

    def missing() -> Iterator[tuple[str, CandidateProgram]]:
        for program in programs:
            keys.append((program.candidate.problem_id, key := program.key))
            if key not in known:
                yield key, program

    async with _judge(grading) as (judge, at_once):

        async def record(program: CandidateProgram) -> dict[str, Any] | None:
            try:
                verdict = await judge(program)
            except GradingFailed as error:
                failures.append(str(error))
                return None
            if verdict == VerdictKind.INTERNAL_ERROR.value:
                failures.append(verdict)
                return None
            return {"verdict": verdict}

        await fill(known, missing(), at_once, record)
    if failures:
        raise CannotFilter(
            f"{len(failures)} programs got no verdict ({failures[0]:.200}); the other verdicts are kept: start again"
        )
    return [(problem_id, str(known.get(key)["verdict"])) for problem_id, key in keys]


@asynccontextmanager
async def _judge(grading: GradingTarget) -> AsyncIterator[tuple[Judge, int]]:
    """(judge, programs at once). Raises SandboxUnavailable."""
    if grading.server is not None:
        async with AsyncClient(grading.server, num_connections=_SERVER_AT_ONCE, token=grading.token) as client:
            yield lambda program: _remote(client, program), _SERVER_AT_ONCE
        return
    async with local_grader(grading.verifier) as grader:
        yield lambda program: _local(grader, program), grader.num_slots


async def _local(grader: Grader, program: CandidateProgram) -> str:
    with program.candidate.store.opened(program.candidate.record.stored.digest) as tests:
        try:
            return (await grader.grade(program.submission(tests))).kind.value
        except InvalidSubmission:
            return REFUSED


async def _remote(client: AsyncClient, program: CandidateProgram) -> str:
    try:
        answer = await client.grade_record(await asyncio.to_thread(_request, program))
    except GradingFailed as error:
        if error.status in _UNGRADABLE:
            return REFUSED
        raise
    return str(answer["verdict"])


def _request(program: CandidateProgram) -> dict[str, Any]:
    with program.candidate.store.opened(program.candidate.record.stored.digest) as tests:
        return request_of(program.submission(tests))


class ReferencesPass(Step):
    """Keeps problems whose reference solutions pass all tests."""

    filter: Literal["references_pass"]
    most: int = Field(1, ge=0, description="reference solutions of a problem that are run; 0: all")
    share: float = Field(1.0, gt=0, le=1, description="share of them that must pass")
    without: Literal["keep", "drop"] = Field("keep", description="problems without a reference solution")

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        accepted, table = _graded(self._programs(candidates, context), context)
        dropped, notes = {}, {}
        for one in candidates:
            if not one.num_references:
                if self.without == "drop":
                    dropped[one.problem_id] = "no reference solution: none"
                continue
            tried = min(one.num_references, self.most) if self.most else one.num_references
            passed = accepted[one.problem_id]
            notes[one.problem_id] = {"references_passed": f"{passed}/{tried}"}
            if passed < self.share * tried:
                dropped[one.problem_id] = f"references fail: {passed} of {tried} passed"
        return StepOutcome(dropped, dict(notes), table)

    def _programs(self, candidates: Sequence[Candidate], context: Context) -> Iterator[CandidateProgram]:
        for one, references in context.references(candidates):
            for reference in references[: self.most] if self.most else references:
                yield CandidateProgram(one, reference)


class WrongSolution(Body):
    """A record of the file of wrong solutions."""

    problem_id: str
    code: str
    language: str = "python"


class WrongSolutionsFail(Step):
    """Keeps problems whose tests refuse the programs that are known to be wrong: the false-positive screen."""

    filter: Literal["wrong_solutions_fail"]
    file: str = Field(description="lines of {problem_id, code, language}; language is python by default")
    allowed: int = Field(0, ge=0, description="wrong solutions that may pass")

    def apply(self, candidates: Sequence[Candidate], context: Context) -> StepOutcome:
        accepted, table = _graded(self._programs(candidates, context), context)
        passing = {problem_id: count for problem_id, count in accepted.items() if count > self.allowed}
        return StepOutcome({one: f"wrong solutions pass: {count}" for one, count in passing.items()}, {}, table)

    def _programs(self, candidates: Sequence[Candidate], context: Context) -> Iterator[CandidateProgram]:
        known = {one.problem_id: one for one in candidates}
        for wrong in checked_records(context.folder / self.file, WrongSolution):
            if wrong.problem_id in known:
                yield CandidateProgram(known[wrong.problem_id], Reference(wrong.code, wrong.language))


def _graded(programs: Iterator[CandidateProgram], context: Context) -> tuple[Counter[str], dict[str, int]]:
    """(accepted programs by problem, programs by verdict)."""
    with RecordLog(context.evidence, "verdict") as known:
        verdicts = asyncio.run(grade_all(programs, context.grading, known))
    accepted = Counter(problem_id for problem_id, verdict in verdicts if verdict == VerdictKind.ACCEPTED)
    return accepted, dict(sorted(Counter(verdict for _, verdict in verdicts).items()))
