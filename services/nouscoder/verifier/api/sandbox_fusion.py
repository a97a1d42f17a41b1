"""The REST calls of SandboxFusion, so that its clients work unchanged: /run_code (run_code.py) and /submit.

The service has no data sets, so `config.provided_data` of /submit must hold the tests: `{"test": [{"input": {"stdin":
...}, "output": {"stdout": ...}}, ...]}`, as for SandboxFusion's CommonOJDataset. As there, case and the white space
around words do not count, and numbers may differ by rounding. `exec_info` of a test that passed has no stdout.

An answer with long texts is written in pieces, so that the whole of its JSON is never in memory: a NUL character of a
program's output has six bytes there.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from nouscoder.domain.reasoning import opened_by
from nouscoder.domain.submission import Comparator, Limits, StdinCase, StdinTests, Submission, language_name
from nouscoder.domain.verdict import FirstFailure, TestOutcome, Verdict, VerdictKind
from nouscoder.formats.json_values import RepeatedKey, TooManyValues, ValueCount
from nouscoder.formats.public_shapes import NOT_MET, unmet
from nouscoder.http_server.body import read_body, while_connected
from nouscoder.http_server.memory_budget import add_answer
from nouscoder.verifier.api.faults import FAULTS, Absent, Draining, fault
from nouscoder.verifier.api.run_code import (
    CodeRunner,
    CommandResult,
    CommandStatus,
    RunCodeAnswer,
    RunStatus,
    parse_run_code,
)
from nouscoder.verifier.api.schema import Fault, bodies, body_of, parsed_as
from nouscoder.verifier.api.streaming import judged
from nouscoder.verifier.grading.extract import extract_code
from nouscoder.verifier.grading.grader import Grading, QueueFull
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, TooLarge
from nouscoder.verifier.sandbox.base import CompileStarved

# JSON in pieces.

_PIECE_CHARS = 16 * 1024
BYTES_PER_CHAR = 6  # at most: of a control character, as \\u0000
MAX_PIECE_BYTES = 2 * BYTES_PER_CHAR * _PIECE_CHARS


async def json_pieces(record: Mapping[str, object]) -> AsyncIterator[bytes]:
    """The JSON of `record` as parts of at most MAX_PIECE_BYTES. Its values are texts, numbers, None and records."""
    waiting = ""
    for text in _texts(record):
        waiting += text
        if len(waiting) >= _PIECE_CHARS:
            yield waiting.encode()
            waiting = ""
    yield waiting.encode()


def _texts(value: object) -> Iterator[str]:
    """The JSON of `value`, each part of at most BYTES_PER_CHAR * _PIECE_CHARS bytes."""
    if isinstance(value, str):
        yield '"'
        for start in range(0, len(value), _PIECE_CHARS):
            yield json.dumps(value[start : start + _PIECE_CHARS], ensure_ascii=False)[1:-1]
        yield '"'
    elif isinstance(value, Mapping):
        yield "{"
        for number, (key, part) in enumerate(value.items()):
            yield f"{',' if number else ''}{json.dumps(key, ensure_ascii=False)}:"
            yield from _texts(part)
        yield "}"
    else:
        yield json.dumps(value)


# POST /submit.

NO_DATA_SETS = "this service has no data sets: send the tests as config.provided_data to /submit"
NO_JUPYTER = "this service runs no notebooks: send programs to /run_code, or use the gRPC call Interpret"
_TOLERANCE = 1e-9
_CPU_PER_WALL = 8.0  # SandboxFusion limits only wall time, and threads may use several cores


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class StdioTest(_Lenient):
    """One test: `stdin` of the input, `stdout` of the output. Another field would ask for what is not done."""

    model_config = ConfigDict(extra="forbid")

    input: dict[str, str]
    output: dict[str, str]


class ProvidedData(_Lenient):
    """The row of a data set."""

    test: list[StdioTest] | str = Field(description="tests, also as JSON text")


class SubmitConfig(_Lenient):
    """How the answer is graded."""

    language: str | None = None
    run_timeout: float | None = Field(None, gt=0, description="wall seconds of each test")
    custom_extract_logic: str | None = None
    provided_data: ProvidedData | list[Any] | None = None
    extra: dict[str, Any] = {}


class SubmitRequest(_Lenient):
    """An answer to grade. `dataset` is not used."""

    dataset: str = ""
    id: int | str
    completion: str
    config: SubmitConfig

    def submission(self, values: ValueCount | None = None) -> Submission:
        """The submission. `values` counts tests that are text.

        Raises InvalidSubmission, and Absent for what only SandboxFusion has.
        """
        config = self.config
        if not isinstance(config.provided_data, ProvidedData):
            raise Absent(NO_DATA_SETS)
        if config.custom_extract_logic:
            raise Absent("this service has no config.custom_extract_logic: it takes the last block of its language")
        if not config.language:
            raise InvalidSubmission("config.language", "is missing")
        for name, record, known in (
            ("config", config.model_extra or {}, ("compile_timeout", *SubmitConfig.model_fields)),
            ("config.extra", config.extra, ("run_all_cases", "total_timeout", "prompt")),
            ("config.provided_data", config.provided_data.model_extra or {}, ("test",)),
        ):
            if asked := unmet(record, known):
                raise InvalidSubmission(f"{name}.{asked}", NOT_MET)
        wall_time_s = config.run_timeout or Limits().wall_time_s
        return Submission(
            tests=StdinTests(tuple(_cases(config.provided_data.test, values or ValueCount.unbounded()))),
            completion=self.completion,
            prompt=opened_by(config.extra.get("prompt")),
            language=language_name(config.language),
            limits=Limits(wall_time_s, min(300.0, _CPU_PER_WALL * wall_time_s)),
            comparator=Comparator(float_tolerance=_TOLERANCE, ignore_case=True),
            stop_on_first_failure=not config.extra.get("run_all_cases", False),
            stderr=True,
        )


class EvalCase(BaseModel):
    """The result of one test."""

    passed: bool
    exec_info: RunCodeAnswer
    test_info: dict[str, Any] | None = None


class EvalResult(BaseModel):
    """The answer to a SubmitRequest."""

    id: int | str
    accepted: bool
    extracted_code: str
    full_code: str | None = None
    test_code: str | None = None
    tests: list[EvalCase]
    extracted_type: str | None = None
    extra: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to grade, and the program in it."""

    id: int | str
    submission: Submission
    code: str


def submitted_answer(body: bytes, values: ValueCount) -> Answer:
    """Parse a request. Raises InvalidSubmission naming the invalid field, and Absent."""
    if values.weight > Bounds().num_tests:
        _check_num_tests(body)
    request = parsed_as(SubmitRequest, body)
    submission = request.submission(values)
    return Answer(request.id, submission, extract_code(request.completion, submission.language) or "")


async def evaluated(grader: Grading, answer: Answer) -> EvalResult:
    """Grade one answer. Raises InvalidSubmission, Absent, QueueFull, and NotGraded for a failure of the service."""
    verdict = await judged(grader, answer.submission)
    return EvalResult(
        id=answer.id,
        accepted=verdict.kind is VerdictKind.ACCEPTED,
        extracted_code=answer.code,
        tests=[_case(outcome, verdict.first_failure) for outcome in verdict.tests] or [_not_run(verdict)],
    )


def _check_num_tests(body: bytes) -> None:
    """Raises InvalidSubmission for more tests than may be graded, before each of them is a fault."""
    try:
        test = from_json(body)["config"]["provided_data"]["test"]
    except (ValueError, TypeError, LookupError):  # parsing it names the fault
        return
    if isinstance(test, list) and len(test) > Bounds().num_tests:
        raise InvalidSubmission("config.provided_data.test", f"may hold at most {Bounds().num_tests} tests")


def _cases(test: list[StdioTest] | str, values: ValueCount) -> list[StdinCase]:
    """Raises InvalidSubmission."""
    if isinstance(test, str):
        try:
            values.add(test)
            test = [StdioTest.model_validate(one) for one in json.loads(test)]
        except TooManyValues as error:
            raise TooLarge("config.provided_data.test", str(error)) from None
        except RepeatedKey as error:
            raise InvalidSubmission("config.provided_data.test", str(error)) from None
        except (ValueError, TypeError, RecursionError):
            raise InvalidSubmission("config.provided_data.test", "is no JSON list of tests") from None
    for number, one in enumerate(test):
        if one.input.keys() != {"stdin"} or one.output.keys() != {"stdout"}:
            raise InvalidSubmission(f"config.provided_data.test[{number}]", "needs input.stdin and output.stdout only")
    return [StdinCase(one.input["stdin"], one.output["stdout"]) for one in test]


def _case(outcome: TestOutcome, failure: FirstFailure | None) -> EvalCase:
    passed = outcome.outcome is VerdictKind.ACCEPTED
    shown = failure if failure is not None and failure.index == outcome.index else None
    late = outcome.outcome is VerdictKind.TIME_LIMIT_EXCEEDED
    ended_well = passed or outcome.outcome is VerdictKind.WRONG_ANSWER
    ran = CommandResult(
        status=CommandStatus.TIME_LIMIT_EXCEEDED if late else CommandStatus.FINISHED,
        execution_time=outcome.wall_time_s,
        return_code=None if late else 0 if ended_well else 1,
        stdout=None if shown is None else shown.output,
        stderr=outcome.stderr,
    )
    status = RunStatus.SUCCESS if ended_well else RunStatus.FAILED
    info: dict[str, Any] = {"index": outcome.index, "outcome": outcome.outcome.value}
    if shown is not None:
        info |= {"input": {"stdin": shown.input}, "output": {"stdout": shown.expected}}
    return EvalCase(passed=passed, exec_info=RunCodeAnswer(status=status, run_result=ran), test_info=info)


def _not_run(verdict: Verdict) -> EvalCase:
    """The one test of an answer that does not compile or has no program."""
    failed = CommandResult(status=CommandStatus.FINISHED, return_code=1, stdout="", stderr=verdict.detail)
    info = {"outcome": verdict.kind.value}
    answer = RunCodeAnswer(status=RunStatus.FAILED, compile_result=failed)
    return EvalCase(passed=False, exec_info=answer, test_info=info)


_JSON = "application/json"
_HEAD_BYTES = 1024  # of an answer to /run_code: all but its texts
_RUN_FAULTS = {status: fault for status, fault in FAULTS.items() if status not in (429, 503, 504)} | {
    504: {"model": Fault, "description": "No slot, CPU or memory in time, or the X-Deadline-S has passed: retry."}
}


def add_run_code(app: FastAPI, runner: CodeRunner, enter: Callable[[], None], max_body_bytes: int) -> None:
    """Add /run_code. `enter` raises when the service drains."""
    described = body_of("RunCodeRequest")

    @app.post("/run_code", response_model=RunCodeAnswer, responses=_RUN_FAULTS, openapi_extra=described)
    async def run_code(request: Request) -> Response:
        """Run one program once, like SandboxFusion."""
        try:
            enter()
            run_request = await bodies.parsed(await read_body(request, max_body_bytes), parse_run_code)
            answer = await while_connected(request.receive, runner.run(run_request))
            # Counted in the memory budget before it is JSON.
            most_bytes = _HEAD_BYTES + BYTES_PER_CHAR * answer.memory_bytes
            if most_bytes <= MAX_PIECE_BYTES:
                await add_answer(request.scope, most_bytes)
                return Response(answer.model_dump_json(), media_type=_JSON)
            await add_answer(request.scope, answer.memory_bytes + MAX_PIECE_BYTES)
            return StreamingResponse(json_pieces(answer.model_dump()), media_type=_JSON)
        except (QueueFull, Draining, CompileStarved) as error:
            # The callers of this path repeat only a 504 (run_code.py).
            return fault(504, str(error) or "the service is draining", **{"Retry-After": "1"})


def add_submit(app: FastAPI, grader: Grading, enter: Callable[[], None], max_body_bytes: int) -> None:
    """Add /submit, and a 501 for what only SandboxFusion has. `enter` raises when the service drains."""
    described = body_of("SubmitRequest")
    absent: dict[int | str, dict[str, Any]] = {
        501: {"model": Fault, "description": "SandboxFusion has this, the service does not."}
    }

    @app.post("/submit", response_model=EvalResult, responses=FAULTS | absent, openapi_extra=described)
    async def submit(request: Request) -> Response:
        """Grade an answer with tests in the request, like SandboxFusion."""
        enter()
        sent = await bodies.parsed(await read_body(request, max_body_bytes), submitted_answer)
        answer = await while_connected(request.receive, evaluated(grader, sent))
        return Response(answer.model_dump_json(), media_type=_JSON)

    def refuse(path: str, detail: str) -> None:
        @app.post(path, status_code=501, response_model=Fault, response_description="The service does not have this.")
        async def absent_call() -> Response:
            """Says what to use instead."""
            raise Absent(detail)

    refuse("/run_jupyter", NO_JUPYTER)
    refuse("/get_prompts", NO_DATA_SETS)
    refuse("/get_prompt_by_id", NO_DATA_SETS)
