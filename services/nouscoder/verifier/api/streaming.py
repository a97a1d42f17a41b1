"""Streaming answers: one submission test by test, and many submissions over one connection.

INVARIANT: at most two submissions of a batch per slot are in progress at once. Every line of a batch gets exactly one
answer. When the reader of a stream disconnects, the work behind the stream is cancelled.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import TestOutcome, Verdict
from nouscoder.store.blobs import BlobsUnavailable
from nouscoder.verifier.api.schema import answer_json, answer_record, outcome_record, parse_submission
from nouscoder.verifier.grading.grader import OnOutcome, QueueFull
from nouscoder.verifier.grading.grader_decorator import Grading
from nouscoder.verifier.grading.validation import InvalidSubmission

QUEUE_PATIENCE_S = 120.0
_MAX_ID_CHARS = 200

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
    try:
        while not ended or pending:
            if not ended and feed is None and len(pending) < at_once:
                feed = asyncio.ensure_future(_next(source))
            waiting: set[asyncio.Future[Any]] = {*pending} | ({feed} if feed is not None else set())
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
            for answer in done:
                pending.discard(answer)
                yield answer.result()
        if failure is not None:
            raise failure
    finally:
        unfinished: list[asyncio.Future[Any]] = [*pending, *([feed] if feed is not None else [])]
        for future in unfinished:
            future.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


async def _next(source: AsyncIterator[Item]) -> Item:
    return await anext(source)


async def batch_lines(grader: Grading, lines: Sequence[bytes]) -> AsyncIterator[bytes]:
    """NDJSON answers to NDJSON requests: a verdict, or {"error", "field"} for a line that cannot be graded."""

    async def answer(numbered: tuple[int, bytes]) -> bytes:
        verdict_of = functools.partial(grade_patiently, grader)
        return json.dumps(await answer_line(verdict_of, *numbered)).encode() + b"\n"

    async def numbered() -> AsyncIterator[tuple[int, bytes]]:
        for number, line in enumerate(line for line in lines if line.strip()):
            yield number, line

    answered = map_concurrently(numbered(), answer, 2 * grader.num_slots)
    async with aclosing(answered) as answers:  # type: ignore[type-var]
        async for line in answers:
            yield line


async def answer_line(grade: Callable[[Submission], Awaitable[Verdict]], number: int, line: bytes) -> dict[str, Any]:
    """The answer to one line. `number` counts lines from 0 and is the id of a line that has none."""
    request_id: object = number
    try:
        record = json.loads(line.decode())
        if isinstance(record, dict) and "id" in record:
            request_id = _checked_id(record.pop("id"))
            line = json.dumps(record).encode()
        verdict = await grade(parse_submission(line))
    except InvalidSubmission as error:
        return {"id": request_id, "error": str(error), "field": error.field}
    except (ValueError, RecursionError):
        return {"id": request_id, "error": "body: not JSON", "field": "body"}
    except (QueueFull, BlobsUnavailable) as error:
        return {"id": request_id, "error": str(error), "field": None}
    return {"id": request_id, **answer_record(verdict)}


def _checked_id(value: object) -> object:
    if isinstance(value, list | dict) or value != value or value in (math.inf, -math.inf):
        raise InvalidSubmission("id", "must be a text or a number")
    if len(str(value)) > _MAX_ID_CHARS:
        raise InvalidSubmission("id", f"must have at most {_MAX_ID_CHARS} characters")
    return value
