"""NeMo Gym's protocol of resources servers, as its server `code_gen` speaks it.

A row has `verifier_metadata.unit_tests`: `inputs`, `outputs` and perhaps `fn_name`, or the `digest` of stored tests.
The text of `response` is graded by code_gen's rules (the profile `code_gen`): the reward is 1 or 0. The answer has
code_gen's fields and `verdict`, `tests_passed` and `tests_total`, always the same keys.

A failure of the service is a 503, which no client takes for a sample. A row whose `verifier_metadata.on_failure` is
"mask" gets a 200 with `mask_sample` in its place, wherever a trainer looks for it.

INVARIANT: no call needs what an earlier one left, so any process or replica may answer it. `responses_create_params`
and `response` come back as the bytes that arrived: trainers read token ids from keys that nobody here knows.

Rows are large, and an agent does not repeat a call, so a row waits for memory before its body is read beyond the first
part: those that have it hold _SHARE of the budget at most.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.types import Message

from nouscoder.domain.reward import RewardRule, reward_of_verdict
from nouscoder.domain.submission import CallTests, Profile, Submission, TestsReference
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.formats.json_values import ValueCount, json_bytes, json_value, with_whole_characters
from nouscoder.formats.public_shapes import NOT_MET, unmet
from nouscoder.formats.sent_tests import NotTests, fields_of
from nouscoder.http_server.body import READ_PATIENCE_S, read_body, read_whole, too_slow, while_connected
from nouscoder.http_server.fair_queue import OneThread
from nouscoder.http_server.memory_budget import CLIENT_KEY, MemoryBudget, Reservation, add_answer
from nouscoder.store.blobs import BlobsUnavailable
from nouscoder.verifier.api.compat import gym_metrics
from nouscoder.verifier.api.faults import AS_ELSEWHERE, Draining, fault
from nouscoder.verifier.api.schema import bodies, parse_submission
from nouscoder.verifier.api.streaming import NotGraded, judged, while_full
from nouscoder.verifier.grading.extract import extract_code
from nouscoder.verifier.grading.grader import Grading, QueueFull
from nouscoder.verifier.grading.validation import Bounds, InvalidSubmission, validate

VERSION = "0.4.0"  # of nemo-gym; its wire has no place for a version
PATIENCE_S = 120.0  # while the queue is full, and before while the memory is
_SHARE = 0.75  # of the memory budget, for rows
_ROOM = 6  # times the bytes of a row: its body, what its JSON becomes, and the answer
_COMING_SHARE = 0.5  # of that, for what is declared and has not arrived
_COMING_S = 0.5  # as long as it is kept
_PART_BYTES = 64 * 1024  # that a listener reads at once
_LIMIT_S = 10  # for each test; code_gen's default
_OURS = (QueueFull, Draining, NotGraded, BlobsUnavailable)
_METADATA = "verifier_metadata"
_TEXTS = ("output_text", "summary_text")  # not a refusal
_PARTS = 4  # times the bytes of a body, of all responses of an evaluation
_CODES: Mapping[VerdictKind, bool | int] = {
    VerdictKind.ACCEPTED: True,
    VerdictKind.WRONG_ANSWER: -2,
    VerdictKind.TIME_LIMIT_EXCEEDED: -3,
}
_MESSAGES = {-2: "Wrong Answer", -3: "Time Limit Exceeded", -4: "Runtime Error"}


@dataclass(frozen=True, slots=True)
class GymRow:
    """A row with the answer of a model. `echoed` is the begin of the JSON of the answer to it."""

    submission: Submission
    echoed: bytes
    text: str
    breaks_format: bool
    difficulty: str | None
    masks: bool


class _Rows:
    """Reads rows, each of which waits for its memory first: `most_bytes` for all, half of them for one client.

    What has arrived takes memory, and for _COMING_S what is declared: who declares and does not send holds nobody.
    """

    def __init__(self, max_body_bytes: int, most_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._budget = MemoryBudget(most_bytes)
        self._coming = self._budget.part(_COMING_SHARE)

    @asynccontextmanager
    async def body_of(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request, whose memory is held until the block ends. Raises QueueFull, and BodyFault."""
        declared, client = request.headers.get("content-length", ""), request.scope.get(CLIENT_KEY)
        expected = min(int(declared) if declared.isdigit() else self._max_body_bytes, self._max_body_bytes)
        budget, soon = self._budget.of_client(client), self._coming.of_client(client)
        with budget.request() as arrived, budget.request() as first, soon.request() as coming:

            async def promise(to: Reservation, num_bytes: int) -> None:
                await while_full(functools.partial(_take, to, num_bytes), PATIENCE_S)
                asyncio.get_running_loop().call_later(_COMING_S, to.close)

            async def receive() -> Message:
                if parts:
                    return parts.pop()
                message = await request.receive()
                num_bytes = min(_ROOM * len(message.get("body", b"")), budget.budget_bytes - arrived.num_bytes)
                for promised in (first, coming):
                    promised.release(min(num_bytes, promised.num_bytes))
                await while_full(functools.partial(_take, arrived, num_bytes), PATIENCE_S)
                return message

            parts: list[Message] = []
            await promise(first, min(_ROOM * min(expected, _PART_BYTES), budget.budget_bytes))
            try:
                parts.append(await asyncio.wait_for(receive(), READ_PATIENCE_S))
            except TimeoutError:
                raise too_slow() from None
            if parts[0].get("more_body"):
                await promise(coming, max(0, min(_ROOM * expected - arrived.num_bytes, soon.budget_bytes)))
            yield await read_whole(declared, receive, self._max_body_bytes)


def add_nemo_gym(
    app: FastAPI, grader: Grading, enter: Callable[[], None], max_body_bytes: int, max_bodies_bytes: int
) -> None:
    """Add the calls of a resources server. `enter` raises when the service drains."""
    rows, aggregating = _Rows(max_body_bytes, int(_SHARE * max_bodies_bytes)), OneThread("aggregate")

    @app.post("/seed_session", **AS_ELSEWHERE)
    async def seed_session(request: Request) -> Response:
        """Refuses a row whose tests cannot be graded, before a model answers it."""
        try:
            enter()
            async with rows.body_of(request) as body:
                await bodies.parsed(body, _check_row)
        except _OURS as error:
            return _failed(error)
        return _json({})

    @app.post("/verify", **AS_ELSEWHERE)
    async def verify(request: Request) -> Response:
        """Grades the answer of a row."""
        try:
            enter()
            async with rows.body_of(request) as body:
                row = await bodies.parsed(body, parse_row)
                record = await while_connected(request.receive, _graded(grader, row))
                answer = row.echoed + json.dumps(record).encode()[1:]
                await add_answer(request.scope, len(answer))
        except _OURS as error:
            return _failed(error)
        return Response(answer, media_type="application/json")

    @app.post("/aggregate_metrics", **AS_ELSEWHERE)
    async def aggregate_metrics(request: Request) -> Response:
        """Statistics of the rewards of a whole evaluation."""
        try:
            answer = await aggregating.run(gym_metrics.of_any_size, await read_body(request, _PARTS * max_body_bytes))
        except NotTests as error:
            raise InvalidSubmission(error.field, str(error)) from None
        await add_answer(request.scope, len(answer))
        return Response(answer, media_type="application/json")

    @app.get("/reverify_mode")
    async def reverify_mode() -> Response:
        """Rows that were graded may be graded again (nemo-gym 0.5)."""
        return _json("stateless")


async def _take(reservation: Reservation, num_bytes: int) -> None:
    reservation.add(num_bytes)


def _json(value: object) -> Response:
    return Response(json.dumps(value), media_type="application/json")


def _failed(error: Exception) -> Response:
    return fault(503, str(error) or "the service is draining", **{"Retry-After": "1"})


# A request.


def _check_row(body: bytes, _: ValueCount) -> None:
    """Raises InvalidSubmission for a row that has tests which no answer can be graded with."""
    metadata = _object(_decoded(body).get(_METADATA) or {}, _METADATA)
    if metadata.get("unit_tests") is not None:
        submission = _submission(metadata, "", ValueCount())
        if not isinstance(submission.tests, TestsReference):
            validate(submission, Bounds())


def parse_row(body: bytes, values: ValueCount) -> GymRow:
    """Raises InvalidSubmission naming the invalid field."""
    record = _decoded(body)
    response = _object(record.get("response"), "response")
    if not isinstance(response.get("output"), list):
        raise InvalidSubmission("response.output", "must be a list")
    if "responses_create_params" not in record:
        raise InvalidSubmission("responses_create_params", "is missing")
    metadata = _object(record.get(_METADATA), _METADATA)
    if metadata.get("on_failure") not in (None, "mask"):
        raise InvalidSubmission(f"{_METADATA}.on_failure", 'must be "mask", or absent')
    difficulty = metadata.get("difficulty")
    text, thoughts = _texts(response, "message", "content"), _texts(response, "reasoning", "summary")
    tags = ("<think>", "</think>")
    return GymRow(
        submission=_submission(metadata, text, values),
        echoed=_echoed(body),
        text=text,
        breaks_format=any(tag in text or thoughts.count(tag) > 1 for tag in tags),
        difficulty=difficulty if isinstance(difficulty, str) else None,
        masks=metadata.get("on_failure") == "mask",
    )


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return _object(json_value(with_whole_characters(body)), "body")
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidSubmission):
            raise
        raise InvalidSubmission("body", f"not JSON: {error}") from None


def _object(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidSubmission(field, "is missing" if value is None else "must be an object")
    return value


def _texts(response: Mapping[str, Any], item_type: str, parts: str) -> str:
    """The texts of all items of a type: what `Response.output_text` of OpenAI's package returns, or the reasoning."""
    items = [item for item in response["output"] if isinstance(item, dict) and item.get("type") == item_type]
    found = [part for item in items if isinstance(item.get(parts), list) for part in item[parts]]
    texts = [part.get("text") for part in found if isinstance(part, dict) and part.get("type") in _TEXTS]
    return "".join(text for text in texts if isinstance(text, str))


def _submission(metadata: Mapping[str, Any], text: str, values: ValueCount) -> Submission:
    """Raises InvalidSubmission."""
    if metadata.get("unit_tests") is None:
        raise InvalidSubmission(f"{_METADATA}.unit_tests", "is missing")
    if asked := unmet(metadata, ("unit_tests", "on_failure", "difficulty", "problem_id")):
        raise InvalidSubmission(f"{_METADATA}.{asked}", NOT_MET)
    limits = {"wall_time_s": _LIMIT_S, "cpu_time_s": _LIMIT_S}
    request = {"tests": metadata["unit_tests"], "completion": text, "profile": Profile.CODE_GEN, "limits": limits}
    try:
        return parse_submission(json_bytes(request), values)
    except InvalidSubmission as error:
        message = str(error).removeprefix(error.field)
        error.field = error.field.replace("tests", f"{_METADATA}.unit_tests", 1)
        error.args = (error.field + message,)
        raise


def _echoed(body: bytes) -> bytes:
    try:
        spans = dict(fields_of(body))
    except NotTests as error:
        raise InvalidSubmission(error.field, str(error)) from None
    names = ("responses_create_params", "response")
    return b"{" + b"".join(b'"%s":%s,' % (name.encode(), body[slice(*spans[name])]) for name in names)


# An answer.


async def _graded(grader: Grading, row: GymRow) -> dict[str, Any]:
    """The answer beside what is echoed. Raises InvalidSubmission, and one of _OURS unless the row masks failures."""
    try:
        verdict = await judged(grader, row.submission, PATIENCE_S)
    except _OURS as error:
        if not row.masks:
            raise
        return {"reward": 0.0, **_result(row, None), **_mask(str(error))}
    reward = 0.0 if row.breaks_format else reward_of_verdict(verdict, RewardRule.BINARY)
    return {"reward": reward, **_result(row, verdict), **(_mask(None) if row.masks else {})}


def _result(row: GymRow, verdict: Verdict | None) -> dict[str, Any]:
    """code_gen's fields, and three of ours."""
    tests = () if verdict is None else verdict.tests
    codes = [_CODES.get(test.outcome, -4) for test in tests]
    if isinstance(row.submission.tests, CallTests):
        codes = [False if code == -2 else code for code in codes]
    seconds = sum(test.wall_time_s for test in tests)
    failure = None if verdict is None else verdict.first_failure
    metadata: dict[str, Any] | None = {"execution time": seconds} if tests else None
    if failure is not None:
        texts = {"output": failure.output, "inputs": failure.input, "expected": failure.expected}
        code = _CODES.get(failure.outcome, -4)
        metadata = {**texts, "error": failure.stderr, "error_code": code, "error_message": _MESSAGES[code]}
    return {
        "extracted_model_output": row.text or None,
        "extracted_model_code": extract_code(row.text, profile=Profile.CODE_GEN),
        "result": codes or None,
        "metadata": metadata,
        "unit_tests_time_taken": seconds,
        "reasoning_format_violation_rate": float(row.breaks_format),
        "difficulty": row.difficulty,
        "verdict": None if verdict is None else verdict.kind.value,
        "tests_passed": 0 if verdict is None else verdict.passed,
        "tests_total": 0 if verdict is None else verdict.total,
    }


def _mask(reason: str | None) -> dict[str, Any]:
    """The marks of a sample that is no evidence, in all places: the schema's, NeMo RL's, and Gym's file of failures."""
    masked, kind = reason is not None, None if reason is None else "infrastructure"
    marks = {"mask_sample": masked, "failure_kind": kind, "failure_reason": reason}
    return marks | {"instance_config": {"mask_sample": masked}} | ({"_ng_failure_class": kind} if masked else {})
