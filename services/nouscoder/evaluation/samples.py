"""The samples of an evaluation: which there must be, under which keys, where each comes from, and their verdicts.

The key of a sample from a server is made of everything that the server is asked, its seed included. The seed of a
sample depends on the evaluation's seed, the problem and the position only. So an evaluation that is started again, or
with more samples a problem, asks only for what it does not have.

Every job is sampled and every sample graded, each stored as it comes.

INVARIANT: a sample is in `samples` before it is graded, and each pair of an answer and a profile has one verdict in
`verdicts`, never internal_error. Whatever is stored is not sampled or graded again, so an evaluation that is killed at
any point and started again ends with the same records.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from nouscoder.domain.prompt import PromptSettings, PromptText
from nouscoder.domain.reasoning import begun_by, opened_by
from nouscoder.domain.submission import Profile
from nouscoder.domain.verdict import VerdictKind
from nouscoder.errors import NousCoderError, Unusable, first_error
from nouscoder.evaluation.problems import EvaluatedProblem
from nouscoder.grade_files.answers import Answerer
from nouscoder.grade_files.entries import BadEntry, Entry, read_entries
from nouscoder.openai_server import OpenAIServer
from nouscoder.progress_bar import Advance
from nouscoder.record_log import RecordLog, key_of
from nouscoder.retry import Retry

TRUNCATED = "length"  # the finish_reason of a completion that reached max_tokens


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How an evaluation samples: its own settings, never those of a run. `extra` are further fields of each request.

    A `prompt` as text is completed as it is; in any other a server writes the chat template around the messages.
    `prefill` is the tag of reasoning with which that template ends a prompt, where the server does not say it.
    """

    model: str
    num_samples: int = 8  # of each problem
    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int = 32_768
    seed: int = 0
    prompt: PromptSettings = PromptSettings()
    extra: Mapping[str, Any] = field(default_factory=dict)
    prefill: str = ""

    def request(self, problem: EvaluatedProblem, position: int) -> dict[str, Any]:
        """The request of the sample at this position of the problem."""
        thinking = None if self.prompt.prompt_as == "text" else self.prompt.enable_thinking
        return {
            **({} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}),
            **self.extra,
            **self._asked(PromptText.of(problem)),
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": sample_seed(self.seed, problem.problem_id, position),
        }

    def _asked(self, problem: PromptText) -> dict[str, Any]:
        if self.prompt.prompt_as == "text":
            return {"prompt": self.prompt.text(problem)}
        messages = self.prompt.messages(problem)
        return {"messages": [{"role": each.role.value, "content": each.content} for each in messages]}


@dataclass(frozen=True, slots=True)
class SampleJob:
    """One sample that the evaluation needs: the `position`-th of its problem, from 0."""

    problem: EvaluatedProblem
    position: int
    key: str


def sample_seed(seed: int, problem_id: str, position: int) -> int:
    """The seed of one sample, in [1, 2**31): servers take 32 bits, and for some 0 means none."""
    digest = blake2b(f"{seed}/{problem_id}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (2**31 - 1) + 1


def server_jobs(problems: Sequence[EvaluatedProblem], settings: SamplingSettings) -> list[SampleJob]:
    """The samples to ask a server for, position by position, so that all problems have a first sample early."""
    kept = {"date": settings.prompt.date} if settings.prompt.date else {}
    kept |= {"prefill": settings.prefill} if settings.prefill else {}
    return [
        SampleJob(problem, position, key_of({"request": settings.request(problem, position), **kept}))
        for position in range(settings.num_samples)
        for problem in problems
    ]


async def sampled(server: OpenAIServer, settings: SamplingSettings, job: SampleJob) -> dict[str, Any]:
    """The record of a sample. Raises CompletionFailed."""
    request = settings.request(job.problem, job.position)
    is_code = job.problem.rules.text_is_code
    answer = await (server.complete(**request) if "messages" in request else server.complete_text(**request))
    asked = opened_by(request.get("prompt")) or settings.prefill or answer.prefill
    text = answer.text if is_code or answer.reasoning else begun_by(asked, answer.text)
    return {
        "problem_id": job.problem.problem_id,
        "position": job.position,
        "code" if is_code else "completion": text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "num_tokens": answer.num_tokens,
    }


def given_jobs(
    path: Path, problems: Sequence[EvaluatedProblem], all_ids: Sequence[str], log: RecordLog, prefill: str = ""
) -> list[SampleJob]:
    """The samples of a file, which are copied to the log. `all_ids` are the problems of the whole problem file.

    Samples of problems outside the window are left out. Raises Unusable and UnreadableFile.
    """
    known = {problem.problem_id: problem for problem in problems}
    anywhere = set(all_ids)
    positions: Counter[str] = Counter()
    jobs = []
    for entry in read_entries(path, all_ids, prefill):
        fault = entry.fault or ("" if entry.is_sample else "it has tests of its own")
        if not fault and entry.problem_id not in anywhere:
            fault = f"the problem file has no problem {entry.problem_id!r:.80}"
        if fault:
            raise Unusable(f"{path}, line {entry.number}: {fault}")
        if entry.problem_id not in known:
            continue
        position = positions[entry.problem_id]
        positions[entry.problem_id] += 1
        answer = entry.request or {}
        key = key_of({"given": answer, "problem_id": entry.problem_id, "position": position})
        log.add(key, {"problem_id": entry.problem_id, "position": position, **answer, "finish_reason": ""})
        jobs.append(SampleJob(known[entry.problem_id], position, key))
    without = [name for name in known if not positions[name]]
    if without:
        raise Unusable(f"{path} has no sample of {len(without)} problems, such as {without[0]}")
    return jobs


Sampler = Callable[[SampleJob], Awaitable[dict[str, Any]]]

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
    """What is graded of a sample, in Unicode: its `code`, with its `language` if that is given, or its `completion`."""
    # Half of a surrogate pair, which JSON can carry, is no text that can be sent or run.
    names = ("code", "completion", "language")
    return {name: sample[name].encode("utf8", "replace").decode() for name in names if name in sample}


def answer_text(sample: dict[str, Any]) -> str:
    """The program or the completion of a sample."""
    answer = answer_of(sample)
    return answer.get("code", "") + answer.get("completion", "")


@dataclass(slots=True)
class SampleGrading:
    """Samples and grades at the same time. `sample` is None when all samples are there."""

    samples: RecordLog
    verdicts: RecordLog
    profiles: Sequence[Profile]
    sample: Sampler | None
    answer: Answerer
    advance: Advance
    _num_graded: int = 0
    _num_accepted: int = 0
    _failures: list[str] = field(default_factory=list)

    async def run(self, jobs: Sequence[SampleJob], sample_at_once: int, grade_at_once: int) -> None:
        """Do all jobs. Raises EvaluationIncomplete, CompletionFailed and what grading raises."""
        waiting = iter(jobs)
        # Its bound keeps sampled texts from filling the memory when grading is slower.
        sampled: asyncio.Queue[SampleJob | None] = asyncio.Queue(2 * grade_at_once)
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

    async def _sample_all(self, waiting: Iterator[SampleJob], sampled: asyncio.Queue[SampleJob | None]) -> None:
        for job in waiting:
            if job.key not in self.samples:
                assert self.sample is not None
                self.samples.add(job.key, await self.sample(job))
            await sampled.put(job)

    async def _grade_all(self, sampled: asyncio.Queue[SampleJob | None]) -> None:
        while (job := await sampled.get()) is not None:
            try:
                verdicts = [await self._verdict(job, profile) for profile in self.profiles]
            except _InternalError as error:
                self._failures.append(f"{job.problem.problem_id}/{job.position}: internal_error: {error}")
                continue
            self._num_graded += 1
            self._num_accepted += verdicts[0] == VerdictKind.ACCEPTED.value
            self.advance(1, f"pass@1 {self._num_accepted / self._num_graded:.4f}")

    async def _verdict(self, job: SampleJob, profile: Profile) -> str:
        """The verdict on a stored sample, from the log if it is there. Raises _InternalError."""
        answer = answer_of(self.samples.get(job.key))
        key = verdict_key(job.problem, answer, profile)
        if key not in self.verdicts:
            request = {**answer, "profile": profile.value, "all_tests": job.problem.rules.run_all_tests}
            record = await self._graded(Entry(0, key, job.problem.problem_id, request, is_sample=True))
            kept = {name: record[name] for name in _KEPT if name in record}
            self.verdicts.add(key, {"problem_id": job.problem.problem_id, "profile": profile.value, **kept})
        return str(self.verdicts.get(key)["verdict"])

    async def _graded(self, entry: Entry) -> dict[str, Any]:
        async def once() -> dict[str, Any]:
            record = await self.answer(entry)
            if record["verdict"] == VerdictKind.INTERNAL_ERROR.value:
                raise _InternalError(record.get("detail", ""))
            return record

        try:
            return await _AFTER_INTERNAL_ERRORS.call(once)
        except BadEntry as error:
            raise EvaluationIncomplete(f"a sample of {entry.problem_id} cannot be graded: {error}") from None
