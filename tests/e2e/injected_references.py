"""An environment for tests: the completion is the reference solution of the problem, not what the policy samples.

The policy samples one token, so that the engine is used and the rollout has the version of a real policy.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

from nouscoder.config import EntryPointSection
from nouscoder.domain.rollout import Rollout, Task
from nouscoder.domain.tokens import Completion, FinishReason, float32, int32, spans_of
from nouscoder.generation.engines.base import SampleRequest
from nouscoder.generation.environments.base import Sampler
from nouscoder.generation.environments.prompts import SingleTurn
from nouscoder.generation.environments.tools import Tools
from nouscoder.policy_folder.tokenizer import PolicyTokenizer

LOGPROB = -0.5


class InjectedReferences:
    """options.answers: a JSON file, {problem id: the text of the answer}."""

    name = "injected_references"

    def __init__(
        self, tokenizer: PolicyTokenizer, settings: EntryPointSection, tools: Tools, max_tokens_total: int
    ) -> None:
        self._single_turn = SingleTurn(tokenizer, settings)
        self._tokenizer = tokenizer
        self._answers: dict[str, str] = json.loads(Path(str(settings.options["answers"])).read_text())

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        ids = [*self._tokenizer.encode(self._answers[task.problem_id]), min(self._tokenizer.stop_ids)]
        return await self._single_turn.rollout(task, _Injecting(sampler, ids))


class _Injecting:
    def __init__(self, sampler: Sampler, ids: list[int]) -> None:
        self._sampler, self._ids = sampler, ids

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        return asyncio.ensure_future(self._inject(request))

    async def _inject(self, request: SampleRequest) -> Completion:
        one = replace(request, sampling=replace(request.sampling, max_new_tokens=1))
        sampled = await self._sampler.sample(one)
        versions = spans_of([sampled.versions[0].policy_version] * len(self._ids))
        return Completion(int32(self._ids), float32([LOGPROB] * len(self._ids)), versions, FinishReason.STOP)
