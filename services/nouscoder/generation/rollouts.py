"""Makes rollouts from tasks: waits for a policy that is new enough, then runs the task in the environment.

INVARIANT: every started task ends exactly once: with its rollout, with an error, or cancelled. After a cancellation the
engine has no request of the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from nouscoder.domain.rollout import Rollout, Task
from nouscoder.generation.engines.base import Engine
from nouscoder.generation.environments.base import Environment, TaskRefused
from nouscoder.generation.environments.tools import Tools
from nouscoder.generation.policies import Policies

_POLICY_LIMIT_S = 900.0


class Rollouts:
    """Runs tasks in one environment on one engine. `tools` are those of the environment, if it has any."""

    def __init__(
        self, environment: Environment, engine: Engine, policies: Policies, tools: Tools | None = None
    ) -> None:
        self._environment = environment
        self._engine = engine
        self._policies = policies
        self._tools = tools
        self._started: set[str] = set()  # the engine has requests of others too
        self._oldest_versions: dict[str, int] = {}

    def start(self, task: Task) -> asyncio.Task[Rollout]:
        """Start a task. The returned asyncio task raises TaskRefused, ToolUnavailable or EngineError."""
        rollout = asyncio.create_task(self._make(task), name=f"rollout {task.rollout_id}")
        self._started.add(task.rollout_id)
        rollout.add_done_callback(lambda _: self._forget(task.rollout_id))
        return rollout

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the start, over all rollouts."""
        return self._engine.num_tokens

    @property
    def num_waiting_for_tools(self) -> int:
        """Rollouts that need no place in the engine, because they wait for a tool."""
        return self._tools.num_waiting if self._tools else 0

    @property
    def paused(self) -> bool:
        """Sampling stands still because a person wants it."""
        return self._engine.paused

    @property
    def has_work(self) -> bool:
        """There are requests in the engine."""
        return self._engine.num_running + self._engine.num_waiting > 0

    def progress(self, rollout_ids: Iterable[str]) -> dict[str, int]:
        """For each rollout a number that changes while it is worked on.

        Of one that is being sampled: the tokens of its present turn. Of one that waits: the tokens of all.
        """
        sampled = {name.partition("/")[0]: tokens for name, tokens in self._engine.progress.items()}
        return {rollout_id: sampled.get(rollout_id, self._engine.num_tokens) for rollout_id in rollout_ids}

    def oldest_versions(self) -> dict[str, int]:
        """For each rollout with tokens a policy version that its oldest token is not newer than.

        It is the version in use when its first tokens were seen here: versions only rise, so those are not newer.
        """
        for name, tokens in self._engine.progress.items():
            rollout_id = name.partition("/")[0]
            if tokens and rollout_id in self._started and self._engine.policy_version is not None:
                self._oldest_versions.setdefault(rollout_id, self._engine.policy_version)
        return dict(self._oldest_versions)

    async def all_of(self, tasks: Sequence[Task]) -> AsyncIterator[Rollout]:
        """The rollouts in order of completion. Leaving early cancels the rest. Raises the first error of a task."""
        started = [self.start(task) for task in tasks]
        try:
            for following in asyncio.as_completed(started):
                yield await following
        finally:
            for rollout in started:
                rollout.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    async def _make(self, task: Task) -> Rollout:
        try:
            async with asyncio.timeout(_POLICY_LIMIT_S):
                await self._policies.wait_for(task.min_policy_version)
        except TimeoutError:
            raise TaskRefused(
                f"task {task.rollout_id} needs policy version {task.min_policy_version}, which did not arrive within"
                f" {_POLICY_LIMIT_S:.0f} s"
            ) from None
        return await self._environment.rollout(task, self._engine)

    def _forget(self, rollout_id: str) -> None:
        self._started.discard(rollout_id)
        self._oldest_versions.pop(rollout_id, None)
