"""The samples of an evaluation: which there must be, under which keys, and where each comes from.

The key of a sample from a server is made of everything that the server is asked, its seed included. The seed of a
sample depends on the evaluation's seed, the problem and the position only. So an evaluation that is started again, or
with more samples a problem, asks only for what it does not have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from nouscoder.errors import Unusable
from nouscoder.evaluation.problems import EvaluatedProblem
from nouscoder.evaluation.prompts import PromptFormat, messages_of
from nouscoder.grade_files.entries import read_entries
from nouscoder.openai_server import OpenAIServer
from nouscoder.record_log import RecordLog, key_of

TRUNCATED = "length"  # the finish_reason of a completion that reached max_tokens


class SamplesUnusable(Unusable):
    """A file of samples cannot be evaluated. The message names the line."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How an evaluation samples: its own settings, never those of a run. `extra` are further fields of each request."""

    model: str
    num_samples: int = 8  # of each problem
    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int = 32_768
    seed: int = 0
    prompt: PromptFormat = PromptFormat.PLAIN
    extra: Mapping[str, Any] = field(default_factory=dict)

    def request(self, problem: EvaluatedProblem, position: int) -> dict[str, Any]:
        """The request of the sample at this position of the problem. Raises NothingToEvaluate."""
        return {
            **self.extra,
            "model": self.model,
            "messages": messages_of(problem, self.prompt),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": sample_seed(self.seed, problem.problem_id, position),
        }


@dataclass(frozen=True, slots=True)
class Job:
    """One sample that the evaluation needs: the `position`-th of its problem, from 0."""

    problem: EvaluatedProblem
    position: int
    key: str


def sample_seed(seed: int, problem_id: str, position: int) -> int:
    """The seed of one sample, in [1, 2**31): servers take 32 bits, and for some 0 means none."""
    digest = blake2b(f"{seed}/{problem_id}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (2**31 - 1) + 1


def server_jobs(problems: Sequence[EvaluatedProblem], settings: SamplingSettings) -> list[Job]:
    """The samples to ask a server for, position by position, so that all problems have a first sample early."""
    return [
        Job(problem, position, key_of({"request": settings.request(problem, position)}))
        for position in range(settings.num_samples)
        for problem in problems
    ]


async def sampled(server: OpenAIServer, settings: SamplingSettings, job: Job) -> dict[str, Any]:
    """The record of a sample. Raises CompletionFailed."""
    answer = await server.complete(**settings.request(job.problem, job.position))
    return {
        "problem_id": job.problem.problem_id,
        "position": job.position,
        "code" if job.problem.rules.text_is_code else "completion": answer.text,
        "reasoning": answer.reasoning,
        "finish_reason": answer.finish_reason,
        "num_tokens": answer.num_tokens,
    }


def given_jobs(path: Path, problems: Sequence[EvaluatedProblem], all_ids: Sequence[str], log: RecordLog) -> list[Job]:
    """The samples of a file, which are copied to the log. `all_ids` are the problems of the whole problem file.

    Samples of problems outside the window are left out. Raises SamplesUnusable and UnreadableFile.
    """
    known = {problem.problem_id: problem for problem in problems}
    anywhere = set(all_ids)
    positions: Counter[str] = Counter()
    jobs = []
    for entry in read_entries(path, all_ids):
        fault = entry.fault or ("" if entry.is_sample else "it has tests of its own")
        if not fault and entry.problem_id not in anywhere:
            fault = f"the problem file has no problem {entry.problem_id!r:.80}"
        if fault:
            raise SamplesUnusable(f"{path}, line {entry.number}: {fault}")
        if entry.problem_id not in known:
            continue
        position = positions[entry.problem_id]
        positions[entry.problem_id] += 1
        answer = entry.request or {}
        key = key_of({"given": answer, "problem_id": entry.problem_id, "position": position})
        log.add(key, {"problem_id": entry.problem_id, "position": position, **answer, "finish_reason": ""})
        jobs.append(Job(known[entry.problem_id], position, key))
    without = [name for name in known if not positions[name]]
    if without:
        raise SamplesUnusable(f"{path} has no sample of {len(without)} problems, such as {without[0]}")
    return jobs
