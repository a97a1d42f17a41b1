"""Streaming answers: one submission test by test, and many submissions over one connection.

INVARIANT: at most two submissions of a batch per slot are in progress at once. Every line of a batch gets exactly one
answer. When the reader of a stream disconnects, the work behind the stream is cancelled.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from enum import Enum
from typing import Any, TypeVar

from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import TestOutcome, Verdict
from nouscoder.formats.json_values import ValueCount, json_bytes
from nouscoder.http_server.body import Charge
from nouscoder.http_server.memory_budget import charging_part
from nouscoder.store.blobs import BlobsUnavailable
from nouscoder.verifier.api.schema import answer_json, answer_record, bodies, outcome_record, parse_submission
from nouscoder.verifier.grading.grader import Grading, OnOutcome, QueueFull
from nouscoder.verifier.grading.validation import InvalidSubmission

QUEUE_PATIENCE_S = 120.0
_MAX_ID_CHARS = 200
_LINE = re.compile(rb"[^\n]+")
_BLANK_LINES = 1000  # looked at before the event loop has a turn


class NotGraded(Exception):
    """The service failed on a submission. The message says why; the request can be repeated."""


class _Id(Enum):
    """In place of the id of a line."""

    ABSENT = "absent"


Item = TypeVar("Item")
Answer = TypeVar("Answer")


async def grade_events(grader: Grading, submission: Submission) -> AsyncIterator[TestOutcome | Verdict]:
    """The outcome of each test as it becomes final, then the verdict. Raises what `Grader.grade` raises."""
    events: asyncio.Queue[TestOutcome | None] = asyncio.Queue()
    task = asyncio.ensure_future(grader.grade(submission, events.put_nowait))
    task.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (outcome := await events.get()) is not None:
            yield outcome
        yield task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def server_events(grader: Grading, submission: Submission) -> AsyncIterator[bytes]:
    """`grade_events` as server-sent events."""
    async with aclosing(grade_events(grader, submission)) as events:  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, Verdict):
                yield b"event: verdict\ndata: " + answer_json(event) + b"\n\n"
            else:
                yield b"event: outcome\ndata: " + json.dumps(outcome_record(event)).encode() + b"\n\n"


async def grade_patiently(
    grader: Grading, submission: Submission, on_outcome: OnOutcome | None = None, patience_s: float = QUEUE_PATIENCE_S
) -> Verdict:
    """Like `Grader.grade`, but waits up to `patience_s` seconds while the queue is full, then raises QueueFull."""
    return await while_full(lambda: grader.grade(submission, on_outcome), patience_s)


async def judged(grader: Grading, submission: Submission, patience_s: float = QUEUE_PATIENCE_S) -> Verdict:
    """Like `grade_patiently`. Raises NotGraded for an internal_error."""
    verdict = await grade_patiently(grader, submission, patience_s=patience_s)
    if verdict.is_ours:
        raise NotGraded(f"the grading service failed: {verdict.detail}")
    return verdict


async def while_full(act: Callable[[], Awaitable[Answer]], patience_s: float = QUEUE_PATIENCE_S) -> Answer:
    """The result of `act`, repeated while it raises QueueFull, for up to `patience_s` seconds. Raises QueueFull."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience_s
    while True:
        try:
            return await act()
        except QueueFull:
            if loop.time() >= end:
                raise
        await asyncio.sleep(0.1)


async def map_concurrently(
    items: AsyncIterator[Item], work: Callable[[Item], Awaitable[Answer]], at_once: int
) -> AsyncIterator[Answer]:
    """Results of `work` for every item, `at_once` at a time, in order of completion.

    An exception raised by `items` is raised after all results.
    """
    pending: set[asyncio.Future[Answer]] = set()
    feed: asyncio.Future[Item] | None = None
    source = items.__aiter__()
    failure: Exception | None = None
    ended = False
    waiting, done = set[asyncio.Future[Any]](), set[asyncio.Future[Any]]()
    try:
        while not ended or pending:
            if not ended and feed is None and len(pending) < at_once:
                feed = asyncio.ensure_future(anext(source))
            waiting = {*pending} | ({feed} if feed is not None else set())
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if feed is not None and feed in done:
                done = done - {feed}
                try:
                    pending.add(asyncio.ensure_future(work(feed.result())))
                except StopAsyncIteration:
                    ended = True
                except Exception as error:
                    ended, failure = True, error
                feed = None
            pending -= done
            while done:
                yield done.pop().result()
        if failure is not None:
            raise failure
    finally:
        unfinished: list[asyncio.Future[Any]] = [*pending, *done, *([feed] if feed is not None else [])]
        for future in unfinished:
            future.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        # A failed one holds its error, whose traceback holds this frame, and so all items until a garbage collection.
        feed, failure = None, None
        for futures in (pending, waiting, done, unfinished):
            futures.clear()


def lines_of(body: bytes) -> Iterator[bytes]:
    """The lines of a body that are not empty, without a list of all."""
    return (line[0] for line in _LINE.finditer(body))


async def batch_lines(grader: Grading, lines: Iterable[bytes]) -> AsyncIterator[bytes]:
    """NDJSON answers to NDJSON requests: a verdict, or {"error", "field"} for a line that cannot be graded."""

    async def answer(numbered: tuple[int, bytes]) -> bytes:
        verdict_of = functools.partial(grade_patiently, grader)
        return json.dumps(await answer_line(verdict_of, *numbered)).encode() + b"\n"

    async def numbered() -> AsyncIterator[tuple[int, bytes]]:
        number = 0
        for at, line in enumerate(lines):
            if line.strip():
                yield number, line
                number += 1
            elif at % _BLANK_LINES == 0:
                await asyncio.sleep(0)

    answered = map_concurrently(numbered(), answer, 2 * grader.num_slots)
    async with aclosing(answered) as answers:  # type: ignore[type-var]
        async for line in answers:
            yield line


async def answer_line(
    grade: Callable[[Submission], Awaitable[Verdict]],
    number: int,
    line: bytes,
    patiently: Callable[[Charge], Awaitable[None]] = while_full,
) -> dict[str, Any]:
    """The answer to one line. `number` counts lines from 0 and is the id of a line that has none.

    `patiently` waits for memory.
    """
    request_id: object = number
    try:
        with charging_part():
            found_id, submission = await bodies.parsed(line, _parse_line, patiently)
            request_id = number if found_id is _Id.ABSENT else found_id
            if isinstance(submission, InvalidSubmission):
                raise submission
            verdict = await grade(submission)
    except InvalidSubmission as error:
        return {"id": request_id, "error": str(error), "field": error.field}
    except (QueueFull, BlobsUnavailable) as error:
        return {"id": request_id, "error": str(error), "field": None}
    return {"id": request_id, **answer_record(verdict)}


def _parse_line(line: bytes, values: ValueCount) -> tuple[object, Submission | InvalidSubmission]:
    """The id of a line, if it has a valid one, and its submission, or why it is none."""
    found_id: object = _Id.ABSENT
    try:
        record = json.loads(line.decode())
        if isinstance(record, dict) and "id" in record:
            value = record.pop("id")
            if isinstance(value, list | dict) or value != value or value in (math.inf, -math.inf):
                raise InvalidSubmission("id", "must be a text or a number")
            if len(str(value)) > _MAX_ID_CHARS:
                raise InvalidSubmission("id", f"must have at most {_MAX_ID_CHARS} characters")
            found_id = value
            line = json_bytes(record)
        del record
        return found_id, parse_submission(line, values)
    except InvalidSubmission as error:
        return found_id, error
    except (ValueError, RecursionError):
        return found_id, InvalidSubmission("body", "not JSON")
