"""A job of the asyncio client: many submissions that were sent at once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, cast

from nouscoder.client.calls import JOBS_PATH
from nouscoder.client.job_calls import ResultReader
from nouscoder.client.records import JobAnswer, JobResult

Call = Callable[[str, str], Awaitable[dict[str, Any]]]
Read = Callable[[str, Callable[[], Mapping[str, str]]], AsyncIterator[bytes]]


class AsyncJob:
    """Made by `AsyncClient.submit_job` and `AsyncClient.job`. `id` names it, also after a restart of this program."""

    def __init__(self, job_id: str, call: Call, read: Read) -> None:
        self.id = job_id
        self._path = f"{JOBS_PATH}/{job_id}"
        self._call = call
        self._read = read

    async def state(self) -> JobAnswer:
        """See `Job.state`."""
        return cast("JobAnswer", await self._call("GET", self._path))

    async def results(self, offset: int = 0) -> AsyncIterator[JobResult]:
        """See `Job.results`."""
        reader = ResultReader(offset)
        while True:
            before = reader.offset
            async for part in self._read(f"{self._path}/results", reader.parameters):
                for result in reader.feed(part):
                    yield result
            if reader.offset == before and reader.is_ended(await self.state()):
                return

    async def delete(self) -> JobAnswer:
        """See `Job.delete`."""
        return cast("JobAnswer", await self._call("DELETE", self._path))
