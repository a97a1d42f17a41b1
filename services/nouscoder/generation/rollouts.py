"""Makes rollouts from tasks: waits for a policy that is new enough, then runs the task in the environment.

INVARIANT: every started task ends exactly once: with its rollout, with an error, or cancelled. After a cancellation the
engine has no request of the task. The versions of the tokens of a rollout never fall, also when it was begun by another
worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nouscoder.config.generation import SamplingSection
from nouscoder.domain.partial import PartialRollout
from nouscoder.domain.rollout import Rollout, Task
from nouscoder.domain.tokens import Completion
from nouscoder.generation.engines.base import Engine, EngineError, SampleRequest, StopTexts, checked_max_tokens
from nouscoder.generation.environments.agent import AgentSessions
from nouscoder.generation.environments.base import (
    Environment,
    EnvironmentUnusable,
    Sampler,
    SessionAbandoned,
    TaskRefused,
)
from nouscoder.generation.environments.tools import Tools
from nouscoder.generation.metrics import GenerationMetrics, PartialTokens
from nouscoder.generation.partials import KeepPartials, PartialReports, ResumableSampler
from nouscoder.generation.weights.policies import Policies
from nouscoder.policy_folder.tokenizer import TokenizerError, load_tokenizer

log = logging.getLogger(__name__)

_POLICY_LIMIT_S = 900.0
_MOST_AGENTS = 10  # for one rollout of an evaluation


class ContextLimit:
    """Holds prompt and completion to `max_tokens_total` tokens, below what the engine was started for."""

    def __init__(self, sampler: Sampler, max_tokens_total: int) -> None:
        self._sampler = sampler
        self._max_tokens_total = max_tokens_total

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """A future of the completion. It raises EngineError when the prompt leaves no room."""
        try:
            max_new_tokens = checked_max_tokens(request, (), self._max_tokens_total)
        except EngineError as error:
            refused: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            refused.set_exception(error)
            return refused
        sampling = replace(request.sampling, max_new_tokens=max_new_tokens)
        return self._sampler.sample(replace(request, sampling=sampling))


@dataclass(frozen=True, slots=True)
class RunSampling:
    """What a run adds to every request of its rollouts: see SampleRequest."""

    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    stops: StopTexts | None = None

    @classmethod
    def of(cls, section: SamplingSection, folder: Path) -> RunSampling:
        """That of a run with the tokenizer in `folder`. Raises EnvironmentUnusable for what it cannot do."""
        ids, stops = frozenset(section.stop_token_ids), None
        if ids or section.stop:
            try:
                tokenizer = load_tokenizer(folder)  # of its own, because engines call it in their threads
            except TokenizerError as error:
                raise EnvironmentUnusable(str(error)) from error
            if (largest := max(ids, default=0)) >= tokenizer.vocabulary_size:
                raise EnvironmentUnusable(
                    f"generation.sampling.stop_token_ids: {largest} is not a token of the policy, which has"
                    f" {tokenizer.vocabulary_size}"
                )
            stops = StopTexts(section.stop, tokenizer.decode) if section.stop else None
        return cls(section.top_k, section.min_p, ids, stops)

    def added_to(self, sampler: Sampler) -> Sampler:
        """A sampler that adds it and passes the requests to `sampler`."""
        return sampler if self == RunSampling() else _Adding(sampler, self)


class _Adding:
    def __init__(self, sampler: Sampler, run: RunSampling) -> None:
        self._sampler = sampler
        self._run = run

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        run = self._run
        ids = request.stop_token_ids | run.stop_token_ids
        more = replace(request, top_k=run.top_k, min_p=run.min_p, stops=run.stops, stop_token_ids=ids)
        return self._sampler.sample(more)


class Rollouts:
    """Runs tasks in one environment on one engine. `tools` and `sessions` are those of the environment, if any."""

    def __init__(
        self,
        environment: Environment,
        engine: Engine,
        policies: Policies,
        tools: Tools | None = None,
        metrics: GenerationMetrics | None = None,
        max_tokens_total: int | None = None,
        sampling: RunSampling | None = None,
        sessions: AgentSessions | None = None,
    ) -> None:
        """`max_tokens_total` holds prompt and completion below what the engine was started for; None: to that."""
        self._sampling = sampling or RunSampling()
        self._environment = environment
        self.engine = engine
        self._sampler: Sampler = engine if max_tokens_total is None else ContextLimit(engine, max_tokens_total)
        self._policies = policies
        self._tools = tools
        self._sessions = sessions
        self._metrics = metrics or GenerationMetrics()
        self._oldest_versions: dict[str, int] = {}
        self._samplers: dict[str, ResumableSampler] = {}  # the engine has requests of others too

    def start(self, task: Task, kept: PartialRollout | None = None) -> asyncio.Task[Rollout]:
        """Start a task, from `kept` tokens on if there are some. The result raises as Environment.rollout."""
        sampler = self._samplers[task.rollout_id] = ResumableSampler(self._sampler, kept)
        version = max(task.min_policy_version, kept.newest_version if kept else 0)
        rollout = asyncio.create_task(self._make(task, version, sampler), name=f"rollout {task.rollout_id}")
        rollout.add_done_callback(lambda _: self._forget(task.rollout_id, sampler))
        return rollout

    @property
    def num_waiting_for_tools(self) -> int:
        """Rollouts that need no place in the engine, because they wait for a tool or an agent."""
        return sum(each.num_waiting for each in (self._tools, self._sessions) if each)

    def progress(self, rollout_ids: Iterable[str]) -> dict[str, int]:
        """For each rollout a number that changes while it is worked on.

        Of one that is being sampled: the tokens of its present turn. Of one that waits: the tokens of all. One that
        waits for an agent has limits of its own (environments/agent.py), so its number is also that of the seconds.
        """
        sampled = {name.partition("/")[0]: tokens for name, tokens in self.engine.progress.items()}
        waiting = self.engine.num_tokens + (int(time.monotonic()) if self._sessions else 0)
        return {rollout_id: sampled.get(rollout_id, waiting) for rollout_id in rollout_ids}

    def oldest_versions(self) -> dict[str, int]:
        """For each rollout with tokens a policy version that its oldest token is not newer than.

        It is the version in use when its first tokens were seen here: versions only rise, so those are not newer.
        """
        for name, tokens in self.engine.progress.items():
            rollout_id = name.partition("/")[0]
            if tokens and rollout_id in self._samplers and self.engine.policy_version is not None:
                self._oldest_versions.setdefault(rollout_id, self.engine.policy_version)
        known = dict(self._oldest_versions)
        for rollout_id, sampler in self._samplers.items():
            version = sampler.oldest_version
            if version is not None:
                known[rollout_id] = min(version, known.get(rollout_id, version))
        return known

    def partial_reports(self, keep: KeepPartials, every_tokens: int) -> PartialReports:
        """Reports of the rollouts in progress, for which `keep` is called; see PartialReports."""
        return PartialReports(self.engine, self._samplers, keep, every_tokens, self._metrics)

    async def all_of(self, tasks: Sequence[Task]) -> AsyncIterator[Rollout]:
        """The rollouts as they end, or the first error. Leaving early cancels the rest. A lost agent is replaced."""
        started = [asyncio.create_task(self._with_agents(task)) for task in tasks]
        try:
            for following in asyncio.as_completed(started):
                yield await following
        finally:
            for rollout in started:
                rollout.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    async def _with_agents(self, task: Task) -> Rollout:
        for _ in range(_MOST_AGENTS - 1):
            try:
                return await self.start(task)
            except SessionAbandoned as error:
                log.warning("another agent gets the task", extra={"task": task.rollout_id, "reason": str(error)})
        return await self.start(task)

    async def _make(self, task: Task, version: int, sampler: ResumableSampler) -> Rollout:
        while True:
            try:
                async with asyncio.timeout(_POLICY_LIMIT_S):
                    await self._policies.wait_for(version)
                break
            except TimeoutError:
                if self._policies.is_pinned:
                    continue
                raise TaskRefused(
                    f"task {task.rollout_id} needs policy version {version}, which did not arrive within"
                    f" {_POLICY_LIMIT_S:.0f} s"
                ) from None
        return await self._environment.rollout(task, self._sampling.added_to(sampler))

    def _forget(self, rollout_id: str, sampler: ResumableSampler) -> None:
        self._oldest_versions.pop(rollout_id, None)
        if self._samplers.get(rollout_id) is sampler:
            del self._samplers[rollout_id]
        self._count(PartialTokens.CONTINUED, sampler.num_continued)
        self._count(PartialTokens.DROPPED, sampler.num_dropped)

    def _count(self, fate: PartialTokens, num_tokens: int) -> None:
        self._metrics.partial_tokens.labels(fate.value).inc(num_tokens)
