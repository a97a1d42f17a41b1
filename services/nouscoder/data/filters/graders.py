"""Grades programs of candidates on this machine or by a grading service, several at a time."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic_core import from_json

from nouscoder.client.http import AsyncClient, GradingFailed
from nouscoder.data.filters.evidence import Evidence
from nouscoder.data.filters.step import Candidate, CannotFilter, Grading
from nouscoder.data.references import Reference
from nouscoder.domain.submission import Prelude, Submission, Tests
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats.rules import ComparatorBody, LimitsBody
from nouscoder.formats.tests import canonical_json
from nouscoder.verifier.grading.grader import Grader
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.observe.metrics import VerifierMetrics
from nouscoder.verifier.sandbox import open_sandbox
from nouscoder.verifier.settings import grading_policy, sandbox_config

REFUSED = "refused"  # the program cannot be graded, as for an unknown language
_SERVER_AT_ONCE = 16
_UNGRADABLE = frozenset({413, 422})

Judge = Callable[["Program"], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Program:
    """A program for a candidate's problem."""

    candidate: Candidate
    solution: Reference

    @property
    def key(self) -> str:
        """A digest of all that its verdict depends on."""
        values = self.candidate.record.values
        rules = [values[name] for name in ("tests_digest", "limits", "comparator", "prelude", "profile")]
        said = json.dumps([*rules, self.solution.language, self.solution.code])
        return hashlib.sha256(said.encode()).hexdigest()

    def submission(self, tests: Tests) -> Submission:
        """The program with the rules of the problem."""
        problem = self.candidate.record.problem(tests)
        return Submission(
            tests=tests,
            code=self.solution.code,
            language=self.solution.language,
            limits=problem.limits,
            comparator=problem.comparator,
            reveal=False,
            profile=problem.profile,
            prelude=problem.prelude if self.solution.language == "python" else Prelude.NONE,
            tests_digest=self.candidate.record.stored.digest,
        )


async def grade_all(programs: Iterator[Program], grading: Grading, evidence: Evidence) -> list[tuple[str, str]]:
    """(problem id, verdict or REFUSED) of each program. One that is graded at a time and slot is in memory.

    Raises CannotFilter when a program gets no verdict, after the verdicts of all others are kept.
    """
    found: list[tuple[str, str]] = []
    failures: list[str] = []

    async def work(judge: Judge) -> None:
        for program in programs:
            verdict = evidence.get(program.key)
            if verdict is None:
                try:
                    verdict = await judge(program)
                except GradingFailed as error:
                    failures.append(str(error))
                    continue
                if verdict == VerdictKind.INTERNAL_ERROR.value:
                    failures.append(verdict)
                    continue
                evidence.keep(program.key, verdict)
            found.append((program.candidate.problem_id, verdict))

    async with _judge(grading) as (judge, at_once), asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work(judge))
    if failures:
        raise CannotFilter(
            f"{len(failures)} programs got no verdict ({failures[0]:.200}); the other verdicts are kept: start again"
        )
    return found


@asynccontextmanager
async def _judge(grading: Grading) -> AsyncIterator[tuple[Judge, int]]:
    """(judge, programs at once). Raises SandboxUnavailable."""
    if grading.server is not None:
        async with AsyncClient(grading.server, num_connections=_SERVER_AT_ONCE, token=grading.token) as client:
            yield lambda program: _remote(client, program), _SERVER_AT_ONCE
        return
    sandbox = open_sandbox(sandbox_config(grading.verifier))
    try:
        await sandbox.start()
        grader = Grader(sandbox, VerifierMetrics(CollectorRegistry()), grading_policy(grading.verifier))
        yield lambda program: _local(grader, program), sandbox.num_slots
    finally:
        await sandbox.close()


async def _local(grader: Grader, program: Program) -> str:
    with program.candidate.store.opened(program.candidate.record.stored.digest) as tests:
        try:
            return (await grader.grade(program.submission(tests))).kind.value
        except InvalidSubmission:
            return REFUSED


async def _remote(client: AsyncClient, program: Program) -> str:
    try:
        answer = await client.grade_record(await asyncio.to_thread(_request, program))
    except GradingFailed as error:
        if error.status in _UNGRADABLE:
            return REFUSED
        raise
    return str(answer["verdict"])


def _request(program: Program) -> dict[str, Any]:
    """The request of POST /v1/grade, with the tests in it."""
    with program.candidate.store.opened(program.candidate.record.stored.digest) as tests:
        made = program.submission(tests)
        return {
            "code": made.code,
            "language": made.language,
            "tests": from_json(canonical_json(tests)),
            "limits": {name: getattr(made.limits, name) for name in LimitsBody.model_fields},
            "comparator": ComparatorBody.of(made.comparator).model_dump(),
            "profile": made.profile.value,
            "prelude": made.prelude.value,
            "reveal": "none",
        }
