"""Samples every job and grades every sample, each stored as it comes.

INVARIANT: a sample is in `samples` before it is graded, and each pair of an answer and a profile has one verdict in
`verdicts`, never internal_error. Whatever is stored is not sampled or graded again, so an evaluation that is killed at
any point and started again ends with the same records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from nouscoder.domain.submission import Profile
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import NousCoderError, first_error
from nouscoder.evaluation.problems import EvaluatedProblem
from nouscoder.evaluation.samples import Job
from nouscoder.grade_files.answers import Answerer, BadEntry
from nouscoder.grade_files.entries import Entry
from nouscoder.progress_bar import Advance
from nouscoder.record_log import RecordLog, key_of
from nouscoder.retry import Retry

Sampler = Callable[[Job], Awaitable[dict[str, Any]]]

_KEPT = ("verdict", "passed", "total", "graded", "duration_s", "detail", "first_failure")


class EvaluationIncomplete(NousCoderError):
    """Some samples have no verdict. The message says how many and why; what is there is kept."""


class _InternalError(Exception):
    """The infrastructure failed. The text is the detail."""


_AFTER_INTERNAL_ERRORS = Retry("grading for the evaluation", (_InternalError,), max_tries=3, wait_s=0.5)


def verdict_key(problem: EvaluatedProblem, answer: dict[str, str], profile: Profile) -> str:
    """The key of the verdict on an answer: its text, the tests, and every rule of grading. Equal answers share it."""
    rules = {**asdict(problem.rules), "profile": profile.value}
    return key_of({"answer": answer, "tests": problem.tests_digest, "rules": rules})


def answer_of(sample: dict[str, Any]) -> dict[str, str]:
    """What is graded of a sample: its `code` or its `completion`, in Unicode."""
    # Half of a surrogate pair, which JSON can carry, is no text that can be sent or run.
    return {name: sample[name].encode("utf8", "replace").decode() for name in ("code", "completion") if name in sample}


class Grading:
    """Samples and grades at the same time. `sample` is None when all samples are there."""

    def __init__(
        self,
        samples: RecordLog,
        verdicts: RecordLog,
        profiles: Sequence[Profile],
        sample: Sampler | None,
        answer: Answerer,
        advance: Advance,
    ) -> None:
        self._samples = samples
        self._verdicts = verdicts
        self._profiles = profiles
        self._sample = sample
        self._answer = answer
        self._advance = advance
        self._num_graded = 0
        self._num_accepted = 0
        self._failures: list[str] = []

    async def run(self, jobs: Sequence[Job], sample_at_once: int, grade_at_once: int) -> None:
        """Do all jobs. Raises EvaluationIncomplete, CompletionFailed and what grading raises."""
        waiting = iter(jobs)
        # Its bound keeps sampled texts from filling the memory when grading is slower.
        sampled: asyncio.Queue[Job | None] = asyncio.Queue(2 * grade_at_once)
        try:
            async with asyncio.TaskGroup() as graders:
                for _ in range(grade_at_once):
                    graders.create_task(self._grade_all(sampled))
                async with asyncio.TaskGroup() as samplers:
                    for _ in range(sample_at_once):
                        samplers.create_task(self._sample_all(waiting, sampled))
                for _ in range(grade_at_once):
                    await sampled.put(None)
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        if self._failures:
            raise EvaluationIncomplete(
                f"{len(self._failures)} samples could not be graded, the first {self._failures[0]}; all others are"
                " stored, and the same command tries these again"
            )

    async def _sample_all(self, waiting: Iterator[Job], sampled: asyncio.Queue[Job | None]) -> None:
        for job in waiting:
            if job.key not in self._samples:
                assert self._sample is not None
                self._samples.add(job.key, await self._sample(job))
            await sampled.put(job)

    async def _grade_all(self, sampled: asyncio.Queue[Job | None]) -> None:
        while (job := await sampled.get()) is not None:
            try:
                verdicts = [await self._verdict(job, profile) for profile in self._profiles]
            except _InternalError as error:
                self._failures.append(f"{job.problem.problem_id}/{job.position}: internal_error: {error}")
                continue
            self._num_graded += 1
            self._num_accepted += verdicts[0] == VerdictKind.ACCEPTED.value
            self._advance(1, f"pass@1 {self._num_accepted / self._num_graded:.4f}")

    async def _verdict(self, job: Job, profile: Profile) -> str:
        """The verdict on a stored sample, from the log if it is there. Raises _InternalError."""
        answer = answer_of(self._samples.get(job.key))
        key = verdict_key(job.problem, answer, profile)
        if key not in self._verdicts:
            request = {**answer, "profile": profile.value, "all_tests": job.problem.rules.run_all_tests}
            record = await self._graded(Entry(0, key, job.problem.problem_id, request, is_sample=True))
            kept = {name: record[name] for name in _KEPT if name in record}
            self._verdicts.add(key, {"problem_id": job.problem.problem_id, "profile": profile.value, **kept})
        return str(self._verdicts.get(key)["verdict"])

    async def _graded(self, entry: Entry) -> dict[str, Any]:
        async def once() -> dict[str, Any]:
            record = await self._answer(entry)
            if record["verdict"] == VerdictKind.INTERNAL_ERROR.value:
                raise _InternalError(record.get("detail", ""))
            return record

        try:
            return await _AFTER_INTERNAL_ERRORS.call(once)
        except BadEntry as error:
            raise EvaluationIncomplete(f"a sample of {entry.problem_id} cannot be graded: {error}") from None
