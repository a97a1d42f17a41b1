"""A job of the synchronous client: many submissions that were sent at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from nouscoder.client.calls import JOBS_PATH
from nouscoder.client.job_calls import ResultReader
from nouscoder.client.records import JobAnswer, JobResult

Call = Callable[[str, str], dict[str, Any]]
Read = Callable[[str, Callable[[], Mapping[str, str]]], Iterator[bytes]]


class Job:
    """Made by `Client.submit_job` and `Client.job`. `id` names it, also after a restart of this program."""

    def __init__(self, job_id: str, call: Call, read: Read) -> None:
        self.id = job_id
        self._path = f"{JOBS_PATH}/{job_id}"
        self._call = call
        self._read = read

    def state(self) -> JobAnswer:
        """How far it is. Raises BadRequest when it was removed."""
        return cast("JobAnswer", self._call("GET", self._path))

    def results(self, offset: int = 0) -> Iterator[JobResult]:
        """Each result once, as soon as it is there, in order of completion, until the job has ended.

        `offset` leaves out that many bytes of results. Raises JobEnded after the last result of a job that ended early.
        """
        reader = ResultReader(offset)
        while True:
            before = reader.offset
            for part in self._read(f"{self._path}/results", reader.parameters):
                yield from reader.feed(part)
            if reader.offset == before and reader.is_ended(self.state()):
                return

    def delete(self) -> JobAnswer:
        """Stop it and remove it with its results. Returns its last state."""
        return cast("JobAnswer", self._call("DELETE", self._path))
