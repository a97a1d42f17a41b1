"""The jobs of the service: what the API calls, and the work in the background.

submit -> folder -> dispatcher -> results -> end -> webhook -> removed `keep_minutes` later.

INVARIANT: a job that `submit` has returned is graded to its end, also when the service is stopped or killed in between,
unless its client deletes it, `max_hours` pass, or its results take too many bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from nouscoder.atomic_files import FolderInUse, StorageError
from nouscoder.config import ConfigError, JobsSection
from nouscoder.errors import Unusable
from nouscoder.http_server.memory_budget import SMALL_ANSWER_BYTES, MemoryBudget
from nouscoder.verifier.access.caller import Caller
from nouscoder.verifier.grading.grader import Grading
from nouscoder.verifier.grading.validation import InvalidSubmission
from nouscoder.verifier.jobs.dispatcher import JobDispatcher
from nouscoder.verifier.jobs.folder import JobAnswer, JobFolder, JobOptions, JobState, UnknownJob, WebhookState
from nouscoder.verifier.jobs.intake import JobBody, receive
from nouscoder.verifier.jobs.store import JobStore
from nouscoder.verifier.jobs.webhooks import Webhooks

log = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
_SWEEP_S = 30.0
_READ_BYTES = SMALL_ANSWER_BYTES  # of results at once: a part that needs no room in the memory budget


class Jobs:
    """The API's calls, all for one client, and `run` for the work behind them."""

    def __init__(
        self,
        store: JobStore,
        grader: Grading,
        budget: MemoryBudget,
        max_line_bytes: int,
        webhooks: Webhooks | None = None,
    ) -> None:
        """`store` is loaded. A submission has at most `max_line_bytes`."""
        self._store = store
        self._max_line_bytes = max_line_bytes
        self._dispatcher = JobDispatcher(store, grader, budget, self._tell)
        self._webhooks = webhooks
        self._telling: dict[str, asyncio.Task[None]] = {}

    async def submit(
        self, caller: Caller, options: JobOptions, body: JobBody, idempotency_key: str | None
    ) -> JobAnswer:
        """Receive a job, or find the one that this client sent with the same key before.

        Raises InvalidSubmission, BodyFault, JobsFull, JobConflict and StorageError.
        """
        if options.webhook and self._webhooks is None:
            raise InvalidSubmission("webhook", "this service calls none: verifier.jobs.webhook_origins is empty")
        if options.webhook and self._webhooks is not None:
            self._webhooks.check(options.webhook)
        job_id = self._store.job_id(caller, idempotency_key)
        try:
            return self._answer(self._store.job(caller.client, job_id))
        except UnknownJob:
            await self._store.removals(job_id)
        job = await receive(self._store, caller, job_id, options, body, self._max_line_bytes)
        log.info("job received", extra={"job": job_id, "total": job.record.total})
        self._dispatcher.wake()
        return self._answer(job)

    def state(self, client: str, job_id: str) -> JobAnswer:
        """The state of a job. Raises UnknownJob."""
        return self._answer(self._store.job(client, job_id))

    def states(self, client: str) -> list[JobAnswer]:
        """The client's jobs, the newest first."""
        return [self._answer(job) for job in self._store.jobs_of(client)]

    async def results(self, client: str, job_id: str, offset: int, wait_s: float) -> AsyncIterator[bytes]:
        """The results from byte `offset` to the newest, as lines.

        When there is none yet, waits up to `wait_s` seconds for one. Raises UnknownJob, and InvalidSubmission when
        `offset` is not the begin of a line or the end.
        """
        job = self._store.job(client, job_id)
        if offset > job.results_bytes:
            raise InvalidSubmission("offset", f"the results have {job.results_bytes} bytes")
        before = await asyncio.to_thread(job.read_results, offset - 1, 1) if offset else b"\n"
        if before != b"\n":
            raise InvalidSubmission("offset", "is not the begin of a line")
        if offset == job.results_bytes and wait_s:
            await _progress(job, offset, wait_s)
        return _parts(job, offset, job.results_bytes)

    async def delete(self, client: str, job_id: str) -> JobAnswer:
        """Stop a job and remove it with its results. Raises UnknownJob."""
        job = self._store.job(client, job_id)
        answer = self._answer(job)
        await self._store.remove(job)
        return answer

    async def run(self) -> None:
        """Grade, tell and remove until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._dispatcher.run())
                group.create_task(self._keep_sweeping())
        finally:
            for task in self._telling.values():
                task.cancel()
            await asyncio.gather(*self._telling.values(), return_exceptions=True)

    async def _keep_sweeping(self) -> None:
        while True:
            try:
                await self.sweep()
            except StorageError as error:
                log.error("jobs cannot be swept", extra={"detail": str(error)})
            await asyncio.sleep(_SWEEP_S)

    async def sweep(self) -> None:
        """End jobs that took too long, tell servers, and remove jobs that were kept long enough."""
        now_s, bounds = self._store.clock(), self._store.bounds
        for job in self._store:
            if job.ended is None and now_s - job.record.created_s > bounds.max_s:
                await self._store.end(job, JobState.EXPIRED, f"not finished within {bounds.max_s / 3600:g} hours")
            if job.ended is not None and now_s - job.ended.ended_s > bounds.keep_s:
                await self._store.remove(job)
            elif job.ended is not None:
                self._tell(job)

    def _tell(self, job: JobFolder) -> None:
        job_id = job.record.job_id
        is_new = job.told is WebhookState.WAITING and job_id not in self._telling
        if self._webhooks is None or not job.record.options.webhook or not is_new:
            return
        task = asyncio.create_task(self._told(self._webhooks, job))
        self._telling[job_id] = task
        task.add_done_callback(lambda _: self._telling.pop(job_id, None))

    async def _told(self, webhooks: Webhooks, job: JobFolder) -> None:
        try:
            await webhooks.tell(job)
        except StorageError as error:  # the next sweep tells it again
            log.error("a webhook's end cannot be written", extra={"detail": str(error)})

    def _answer(self, job: JobFolder) -> JobAnswer:
        return job.answer(self._store.bounds.keep_s)


async def _progress(job: JobFolder, offset: int, wait_s: float) -> None:
    """Wait until the job has results after `offset`, has ended or was removed, up to `wait_s` seconds."""
    try:
        async with asyncio.timeout(min(wait_s, MAX_WAIT_S)):
            while job.results_bytes == offset and job.ended is None and not job.is_removed:
                await job.progressed.wait()
    except TimeoutError:
        return


async def _parts(job: JobFolder, offset: int, end: int) -> AsyncIterator[bytes]:
    while offset < end:
        try:
            part = await asyncio.to_thread(job.read_results, offset, min(_READ_BYTES, end - offset))
        except OSError:  # the job was deleted meanwhile
            return
        if not part:
            return
        offset += len(part)
        yield part


@asynccontextmanager
async def open_jobs(
    section: JobsSection, grader: Grading, budget: MemoryBudget, max_line_bytes: int
) -> AsyncIterator[Jobs | None]:
    """The jobs of `verifier.jobs`; None when they are off. Raises Unusable and ConfigError."""
    if not section.folder:
        yield None
        return
    webhooks = _webhooks(section)
    try:
        store = JobStore(Path(section.folder), section)
    except (FolderInUse, StorageError) as error:
        raise Unusable(f"verifier.jobs.folder: {error}") from error
    try:
        await asyncio.to_thread(store.load)
        yield Jobs(store, grader, budget, max_line_bytes, webhooks)
    finally:
        await store.removals()
        store.close()


def _webhooks(section: JobsSection, transport: httpx.AsyncBaseTransport | None = None) -> Webhooks | None:
    if not section.webhook_origins:
        return None
    try:
        key = Path(section.webhook_key_file).read_bytes().strip()
        if len(key) < 16:
            raise Unusable(f"verifier.jobs.webhook_key_file {section.webhook_key_file} has less than 16 bytes")
        return Webhooks(section.webhook_origins, key, section.keep_s, transport)
    except OSError as error:
        raise Unusable(f"verifier.jobs.webhook_key_file cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"verifier.jobs.webhook_origins: {error}") from error
