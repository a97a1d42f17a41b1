"""Grades the submissions of all unfinished jobs, in the background.

Clients with unfinished jobs take turns, submission by submission. Of one client's jobs the one with the highest
priority comes first, and of these the oldest. The queue gives other requests most of the slots while they wait
(fair_queue.py).

INVARIANT: at most two submissions a slot are in progress. Each submission of a job gets one result: a verdict, or an
error that names its fault. An internal_error is never a result: it is graded again, `ATTEMPTS` times in all, and then
the result is an error. What is in progress when the service stops has no result, and is graded again after its start.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from nouscoder.atomic_files import StorageError
from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import Verdict, VerdictKind
from nouscoder.http_server.body import Charge
from nouscoder.http_server.memory_budget import MemoryBudget, Reservation, charging
from nouscoder.retry import Retry
from nouscoder.store.blobs import BlobsUnavailable
from nouscoder.verifier.access.caller import set_caller
from nouscoder.verifier.api.streaming import answer_line, map_concurrently
from nouscoder.verifier.grading.grader import Grading, QueueFull
from nouscoder.verifier.jobs.folder import JobFolder, JobsFull, JobState
from nouscoder.verifier.jobs.store import JobStore

log = logging.getLogger(__name__)

ATTEMPTS = 3
_WRITE = Retry("the result of a job", on=(StorageError,), for_s=600.0, wait_s=1.0, max_wait_s=30.0)
_BUSY_S = 0.2  # the first wait while the queue, the quota or the memory budget is full; it doubles
_MAX_BUSY_S = 5.0
_BROKEN_S = 1.0  # the wait after an internal_error

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class _Item:
    job: JobFolder
    number: int
    line: bytes


class JobDispatcher:
    """Grades the jobs of `store` with `grader`."""

    def __init__(
        self, store: JobStore, grader: Grading, budget: MemoryBudget, on_end: Callable[[JobFolder], None]
    ) -> None:
        """`on_end` is called for each job that has ended."""
        self._store = store
        self._grader = grader
        self._budget = budget
        self._on_end = on_end
        self._some_work = asyncio.Event()
        self._turns: list[str] = []  # clients, the next one first

    def wake(self) -> None:
        """Look for work: a job was added."""
        self._some_work.set()

    async def run(self) -> None:
        """Work until cancelled."""
        items = map_concurrently(self._items(), self._work, 2 * self._grader.num_slots)
        async with aclosing(items) as worked:  # type: ignore[type-var]
            async for _ in worked:
                pass

    async def _items(self) -> AsyncIterator[_Item]:
        """The submissions of all jobs, in the order in which they are graded. Endless."""
        while True:
            self._some_work.clear()
            job = self._next_job()
            if job is None:
                await self._some_work.wait()
                continue
            async with job.lock:
                if job.ended is not None or job.is_removed:
                    continue
                try:
                    request = await asyncio.to_thread(job.next_request)
                except OSError as error:
                    log.error("a job cannot be read", extra={"job": job.record.job_id, "detail": str(error)})
                    request = None
            if request is not None:
                job.num_open += 1
                yield _Item(job, *request)
            else:
                job.is_read = True
                await self._end_if_done(job)

    def _next_job(self) -> JobFolder | None:
        """The job whose submission is next; its client goes to the end of the round."""
        waiting: dict[str, JobFolder] = {}
        for job in self._store:
            if job.ended is None and not job.is_read:
                best = waiting.get(job.record.client)
                if best is None or _rank(job) < _rank(best):
                    waiting[job.record.client] = job
        if not waiting:
            return None
        self._turns = [client for client in self._turns if client in waiting]
        self._turns += [client for client in waiting if client not in self._turns]
        client = self._turns.pop(0)
        self._turns.append(client)
        return waiting[client]

    async def _work(self, item: _Item) -> None:
        """Grade one submission and write its result."""
        job = item.job
        task = asyncio.create_task(self._result(item))
        job.in_flight.add(task)
        try:
            await asyncio.wait({task})
            if task.cancelled() or job.ended is not None or job.is_removed:
                return
            await self._write(item, task.result())
        finally:
            task.cancel()
            job.in_flight.discard(task)
            job.num_open -= 1
        await self._end_if_done(job)

    async def _write(self, item: _Item, result: dict[str, Any]) -> None:
        """Write a result. A job whose result cannot be written fails."""
        job, before = item.job, item.job.results_bytes

        async def write() -> None:
            job.add_result(item.number, result)

        try:
            await _WRITE.call(write)
            self._store.charge(job.record.client, job.results_bytes - before)
        except (StorageError, JobsFull) as error:
            await self._end(job, JobState.FAILED, str(error))

    async def _end_if_done(self, job: JobFolder) -> None:
        if job.num_done >= job.record.total:
            await self._end(job, JobState.FINISHED)
        elif job.is_read and not job.num_open and job.ended is None:
            await self._end(job, JobState.FAILED, "its submissions could not be read from the disk")

    async def _end(self, job: JobFolder, state: JobState, detail: str = "") -> None:
        try:
            await self._store.end(job, state, detail)
        except StorageError as error:  # the next sweep ends it
            log.error("the end of a job cannot be written", extra={"job": job.record.job_id, "detail": str(error)})
            return
        log.info("job ended", extra={"job": job.record.job_id, "state": state.value, "done": job.num_done})
        self._on_end(job)

    async def _result(self, item: _Item) -> dict[str, Any]:
        """The result of one submission, after as many attempts as it needs."""
        set_caller(item.job.record.caller(item.number))
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(_BROKEN_S * 2 ** (attempt - 1))
            answer = await self._answer(item)
            if answer.get("verdict") != VerdictKind.INTERNAL_ERROR.value:
                break
        else:
            why = answer.get("detail", "")
            return {"id": answer["id"], "error": f"the service failed {ATTEMPTS} times: {why}", "field": None}
        if not item.job.record.options.tests:
            answer.pop("tests", None)
        return answer

    async def _answer(self, item: _Item) -> dict[str, Any]:
        try:
            with self._budget.request() as reservation, charging(reservation):
                room = functools.partial(_wait_for_room, reservation, len(item.line))
                return await answer_line(self._grade, item.number, item.line, room)
        except Exception as error:
            log.exception("grading a job's submission failed")
            kind = VerdictKind.INTERNAL_ERROR.value
            return {"id": item.number, "verdict": kind, "detail": f"{type(error).__name__} in the service"}

    async def _grade(self, submission: Submission) -> Verdict:
        """Grade, as soon as queue, quota and test store admit it. The job's own time limit bounds the wait."""
        return await _while_busy(lambda: self._grader.grade(submission))


async def _wait_for_room(reservation: Reservation, num_bytes: int, charge: Charge) -> None:
    """Wait until the budget has room for a line and its values together.

    A line that kept its own bytes while it waited would be in the way of others that wait.
    """

    async def both() -> None:
        reservation.add(num_bytes)
        try:
            await charge()
        except QueueFull:
            reservation.release(num_bytes)
            raise

    await _while_busy(both)


async def _while_busy(act: Callable[[], Awaitable[Answer]]) -> Answer:
    """The result of `act`, repeated while the service is too busy for it. The job's own time limit ends it."""
    wait_s = _BUSY_S
    while True:
        try:
            return await act()
        except (QueueFull, BlobsUnavailable):
            await asyncio.sleep(wait_s)
            wait_s = min(_MAX_BUSY_S, 2 * wait_s)


def _rank(job: JobFolder) -> tuple[int, float]:
    return -job.record.options.priority, job.record.created_s
