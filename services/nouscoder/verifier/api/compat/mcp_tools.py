"""The tools that /mcp offers (mcp.py): `run_code`, `list_problems` and `grade_on_public_tests`.

The problems are those of `verifier.problems`. Hidden tests are never used.

INVARIANT: each text that a program printed is cut, so an answer is at most a few hundred kilobytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from nouscoder.domain.conversation import feedback_on
from nouscoder.domain.verdict import VerdictKind
from nouscoder.formats.body import Body
from nouscoder.verifier.api.compat.problem_set import NO_PROBLEMS, ProblemSet, SampleAnswer, prompt_of
from nouscoder.verifier.api.run_code import CodeRunner, CommandResult, CommandStatus, RunCodeRequest, RunStatus

_MOST_CHARS = 20_000  # of one text in an answer
_PAGE_CHARS = 100_000  # of the prompts of list_problems together


class RunCode(Body):
    """A program, which runs once."""

    code: str = Field(description="the whole program")
    language: str = Field("python", description="python, cpp, java, javascript, rust, go, bash and others")
    stdin: str = Field("", description="what the program reads")
    timeout_s: float = Field(10.0, gt=0, le=300, description="seconds that it may take")


class Run(BaseModel):
    """What the program did."""

    status: str = Field(description="finished, time_limit_exceeded or compile_error")
    return_code: int | None = Field(description="null when the program exceeded its time")
    stdout: str
    stderr: str


class ListProblems(Body):
    """A part of the problems."""

    first: int = Field(0, ge=0, description="place of the first problem, from 0")
    most: int = Field(10, ge=1, le=100, description="problems at most; fewer where their texts are long")


class OneProblem(BaseModel):
    """A problem as it is asked."""

    problem_id: str
    prompt: str
    languages: list[str] = Field(description="that a program may be in")
    public_tests: int = Field(description="number of tests of grade_on_public_tests")


class Problems(BaseModel):
    """A part of the problems."""

    problems: list[OneProblem]
    total: int = Field(description="problems that the service offers")
    next: int | None = Field(description="`first` of the next part; null at the end")


class GradeOnPublicTests(Body):
    """A program for a problem."""

    problem_id: str = Field(description="of list_problems")
    answer: str = Field(description="the program, alone or as the last fenced block of an answer")
    language: str = Field("", description="of a program alone; empty: the problem's first language")


class PublicVerdict(BaseModel):
    """What the public tests say."""

    verdict: VerdictKind
    passed: int
    total: int
    feedback: str = Field(description="the first test that fails, and how; empty when all pass")


@dataclass(frozen=True, slots=True)
class Services:
    """What the tools use."""

    runner: CodeRunner
    problems: ProblemSet


class ToolError(Exception):
    """The call of a tool failed. The message is for the model."""


async def _run_code(services: Services, asked: RunCode) -> Run:
    request = RunCodeRequest(
        code=asked.code, language=asked.language, stdin=asked.stdin, run_timeout=asked.timeout_s, compile_timeout=30
    )
    answer = await services.runner.run(request)
    if answer.status is RunStatus.SANDBOX_ERROR:
        raise ToolError(f"the sandbox failed, not the program: {answer.message}")
    if answer.run_result is None:
        failed = answer.compile_result or CommandResult(status=CommandStatus.ERROR)
        return Run(status="compile_error", return_code=failed.return_code, stdout="", stderr=_cut(failed.stderr))
    ran = answer.run_result
    late = ran.status is CommandStatus.TIME_LIMIT_EXCEEDED
    status = "time_limit_exceeded" if late else "finished"
    return Run(status=status, return_code=ran.return_code, stdout=_cut(ran.stdout), stderr=_cut(ran.stderr))


def _cut(text: str | None) -> str:
    """A text with at most about _MOST_CHARS characters: its begin and its end."""
    text = text or ""
    half = _MOST_CHARS // 2
    return text if len(text) <= _MOST_CHARS else f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"


async def _list_problems(services: Services, asked: ListProblems) -> Problems:
    total = len(services.problems.problem_ids)
    if not total:
        raise ToolError(NO_PROBLEMS)
    found: list[OneProblem] = []
    chars = 0
    for place in range(asked.first, min(asked.first + asked.most, total)):
        problem = services.problems.at(place)
        shown = 0 if problem.public_tests is None else len(problem.public_tests.tests.cases)
        prompt = _cut(prompt_of(problem))
        chars += len(prompt)
        if found and chars > _PAGE_CHARS:
            break
        found.append(
            OneProblem(
                problem_id=problem.problem_id, prompt=prompt, languages=list(problem.languages), public_tests=shown
            )
        )
    after = asked.first + len(found)
    return Problems(problems=found, total=total, next=after if after < total else None)


async def _grade(services: Services, asked: GradeOnPublicTests) -> PublicVerdict:
    problem = services.problems.problem(asked.problem_id)
    verdict = await services.problems.public_verdict(problem, SampleAnswer(asked.answer, language=asked.language))
    if verdict is None:
        raise ToolError(f"{problem.problem_id} has no public tests")
    feedback = "" if verdict.kind is VerdictKind.ACCEPTED else feedback_on(verdict, _MOST_CHARS // 10)
    return PublicVerdict(verdict=verdict.kind, passed=verdict.passed, total=verdict.total, feedback=feedback)


class Tool(NamedTuple):
    """A tool: what it is for, what it is asked, what it answers, and what it does."""

    about: str
    asked: type[Body]
    answer: type[BaseModel]
    call: Callable[[Services, Any], Awaitable[BaseModel]]
    reads_only: bool = False


TOOLS = {
    "run_code": Tool("Run a program once, in a sandbox without network.", RunCode, Run, _run_code),
    "list_problems": Tool("List programming problems.", ListProblems, Problems, _list_problems, reads_only=True),
    "grade_on_public_tests": Tool(
        "Run a program on the public tests of a problem.", GradeOnPublicTests, PublicVerdict, _grade
    ),
}
