"""The seam between problem and engine: an environment turns a task into a rollout.

Prompts, messages, chat templates, stop conditions, turns and tools belong to the environment. The engine sees tokens.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from nouscoder.domain.rollout import Completion, Rollout, Task
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.generation.engines.base import SampleRequest


class EnvironmentUnusable(Unusable):
    """The environment can never work with this policy folder or this configuration."""


class TaskRefused(NousCoderError):
    """No rollout can be made of the task; the message names it."""


class Sampler(Protocol):
    """What an environment needs of an engine."""

    def sample(self, request: SampleRequest) -> asyncio.Future[Completion]:
        """The completion to come. Cancelling the future cancels the request."""
        ...


class Environment(Protocol):
    """Makes rollouts. It keeps no state between rollouts, so many may run at once."""

    name: str

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        """Carry out the task. Raises TaskRefused, or EngineError from the sampler."""
        ...
