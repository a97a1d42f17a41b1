"""Makes rollouts from tasks: waits for a policy that is new enough, then runs the task in the environment.

INVARIANT: every started task ends exactly once: with its rollout, with an error, or cancelled. After a cancellation the
engine has no request of the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from nouscoder.domain.rollout import Rollout, Task
from nouscoder.generation.engines.base import Engine
from nouscoder.generation.environments.base import Environment, TaskRefused
from nouscoder.generation.policies import Policies

_POLICY_LIMIT_S = 900.0


class Rollouts:
    """Runs tasks in one environment on one engine."""

    def __init__(self, environment: Environment, engine: Engine, policies: Policies) -> None:
        self._environment = environment
        self._engine = engine
        self._policies = policies

    def start(self, task: Task) -> asyncio.Task[Rollout]:
        """Start a task. The returned asyncio task raises TaskRefused or EngineError when there is no rollout."""
        return asyncio.create_task(self._make(task), name=f"rollout {task.rollout_id}")

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
