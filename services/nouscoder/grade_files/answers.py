"""Where the verdicts of entries come from: a grading service, or the grader of this machine."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nouscoder.client import AsyncClient, BadRequest, Unreachable
from nouscoder.config import VerifierSection
from nouscoder.data.check import library_fault
from nouscoder.data.problem_index import IndexedProblem, NotInIndex, ProblemIndex
from nouscoder.domain.prompt import PYTHON
from nouscoder.domain.submission import MathTests, Profile, Submission, Tests, TestsReference, language_name
from nouscoder.errors import Unusable
from nouscoder.grade_files.entries import BadEntry, Entry, continued_program
from nouscoder.input_file import regular
from nouscoder.rpc.addresses import require_url
from nouscoder.store.tests import TestStore
from nouscoder.verifier.api.schema import answer_record, parse_submission, request_of
from nouscoder.verifier.grading.extract import extract_program
from nouscoder.verifier.grading.grader import local_grader
from nouscoder.verifier.grading.validation import InvalidSubmission

SERVER_AT_ONCE = 16
_NOT_FOUND = frozenset({404, 405})

Answerer = Callable[[Entry], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class GradingTarget:
    """Where programs are graded: at the URL `server` (`ca`: PEM file of its authority), else as `verifier` says."""

    verifier: VerifierSection = field(default_factory=VerifierSection)
    server: str | None = None
    token: str | None = None
    ca: Path | None = None


def answers_of(
    target: GradingTarget, problems: ProblemIndex | None
) -> AbstractAsyncContextManager[tuple[Answerer, int]]:
    """(answerer, submissions at once). Raises SandboxUnavailable, and GradingFailed when nothing at the URL grades."""
    if target.server is not None:
        require_url(target.server, "the URL of the grading service")
        return _remote_answers(target.server, problems, target.token, target.ca)
    return _local_answers(target.verifier, problems)


async def library_fault_of(answer: Answerer, needed: Mapping[str, int], of: str) -> str:
    """As `library_fault` of data/check.py, by an answerer."""

    async def grade(submission: Submission) -> object:
        return await answer(Entry(0, 0, request=request_of(submission)))

    return await library_fault(grade, needed, of, BadEntry, BadRequest)


@asynccontextmanager
async def _local_answers(
    section: VerifierSection, problems: ProblemIndex | None
) -> AsyncIterator[tuple[Answerer, int]]:
    async with local_grader(section) as grader:

        async def graded(submission: Submission) -> dict[str, Any]:
            kind = "" if isinstance(submission.tests, TestsReference) else submission.tests.type
            return {
                **_language(submission.completion, submission.languages, kind),
                **answer_record(await grader.grade(submission)),
            }

        async def answer(entry: Entry) -> dict[str, Any]:
            try:
                if not entry.is_sample:
                    return await graded(parse_submission(json.dumps(entry.request)))
                assert problems is not None
                problem = _problem_of(entry, problems)
                with problems.tests.opened(problem.tests_digest) as tests:
                    return await graded(_submission(entry, problem, tests))
            except InvalidSubmission as error:
                raise BadEntry(str(error)) from None

        yield answer, grader.num_slots


@asynccontextmanager
async def _remote_answers(
    server: str, problems: ProblemIndex | None, token: str | None, ca: Path | None
) -> AsyncIterator[tuple[Answerer, int]]:
    """Raises GradingFailed before thousands of entries wait for the service, or are sampled for it."""

    async def answer(entry: Entry) -> dict[str, Any]:
        request = entry.request or {}
        if entry.is_sample:
            assert problems is not None
            problem = _problem_of(entry, problems)
            request = await asyncio.to_thread(_request, entry, problem, problems.tests)
        others, tests = request.get("other_languages"), request.get("tests")
        names = (request.get("language") or PYTHON[0], *(others if isinstance(others, list) else ()))
        kind = str(tests.get("type", "")) if isinstance(tests, dict) else ""
        language = _language(request.get("completion"), [language_name(str(name)) for name in names], kind)
        return {**language, **await client.grade_record(request)}

    tls = None if ca is None else _tls(ca)
    async with AsyncClient(server, num_connections=SERVER_AT_ONCE, token=token, tls=tls) as client:
        await _require_service(client, server)
        yield answer, SERVER_AT_ONCE


async def _require_service(client: AsyncClient, server: str) -> None:
    """A grading service refuses an empty submission. Raises GradingFailed for every other failure."""
    try:
        await client.grade_record({})
    except BadRequest as error:
        if error.status in _NOT_FOUND:
            raise BadRequest(f"{server} is no grading service: {error}", error.status) from None
        if not error.status:
            raise
    except Unreachable as error:
        start = "start it with nouscoder serve verifier, or " if error.is_passing else ""
        raise type(error)(f"{server}: {error}; {start}correct the URL") from None


def _language(completion: object, languages: Sequence[str], tests_type: str) -> dict[str, str]:
    """{"language": that of the program, as the grader finds it}; {} for an answer in mathematics."""
    if tests_type == MathTests.type:
        return {}
    several = isinstance(completion, str) and len(languages) > 1
    found = extract_program(str(completion), languages) if several else None
    return {"language": languages[0] if found is None else found.language}


def _tls(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(regular(ca)))
    except (OSError, ssl.SSLError) as error:
        raise Unusable(f"--ca {ca} cannot be used: {error}") from error


def _problem_of(entry: Entry, problems: ProblemIndex) -> IndexedProblem:
    try:
        return problems.problem(entry.problem_id)
    except NotInIndex:
        raise BadEntry(f"--problems has no problem {entry.problem_id!r:.80}") from None


def _submission(entry: Entry, problem: IndexedProblem, tests: Tests) -> Submission:
    """The sample as a submission. A completion is graded as the loop grades it; `code` is a whole program.

    A completion that continues the prompt, as those of HumanEval do, is a whole program with it. A program is in the
    sample's `language`, or in the first one of the problem.
    `profile` replaces that of the problem; with `all_tests` every test is run, also after a failure.
    """
    request = entry.request or {}
    made = problem.rules.submission(tests, request.get("completion", ""), problem.problem_id, problem.tests_digest)
    profile = Profile(request.get("profile", made.profile))
    stops = made.stop_on_first_failure and not request.get("all_tests", False)
    made = replace(made, reveal=True, profile=profile, stop_on_first_failure=stops)
    code = request.get("code", continued_program(problem.prompt, request.get("completion", "")))
    if code is None:
        return made
    return replace(made.in_language(request.get("language", made.language)), code=code, completion=None)


def _request(entry: Entry, problem: IndexedProblem, store: TestStore) -> dict[str, Any]:
    with store.opened(problem.tests_digest) as tests:
        return request_of(_submission(entry, problem, tests))
