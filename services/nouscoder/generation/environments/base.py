"""The interface between tasks and engines: an environment makes a rollout from a task.

Prompts, messages, chat templates, stop conditions, turns and tools belong to the environment. The engine gets tokens.
"""

from __future__ import annotations

from typing import Protocol

from nouscoder.domain.rollout import Rollout, Task
from nouscoder.errors import NousCoderError, Unusable
from nouscoder.generation.engines.base import Sampler as Sampler


class EnvironmentUnusable(Unusable):
    """The environment can never work with this policy folder or this configuration."""


class TaskRefused(NousCoderError):
    """No rollout can be made from the task. The message names it."""


class ProblemRefused(TaskRefused):
    """No worker can encode the problem's prompt, or it leaves no room for an answer. The problem is not asked again."""


class SessionAbandoned(NousCoderError):
    """The agent that made the rollout is gone: it has asked for nothing within its limit."""


class ToolUnavailable(NousCoderError):
    """A tool gave no answer in time. The task is given back: the rollout can be made later, or by another worker."""


class Environment(Protocol):
    """Makes rollouts. It keeps no state between rollouts, so many may run at once."""

    name: str

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        """Run the task. Raises TaskRefused, ToolUnavailable, SessionAbandoned, or EngineError from the sampler."""
