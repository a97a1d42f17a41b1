"""The seam between the generation service and what samples tokens.

An engine is driven one decoding step at a time by a single thread, so weights change only between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from nouscoder.domain.rollout import Rollout, Task
from nouscoder.errors import NousCoderError, Unusable


class EngineError(NousCoderError):
    """The engine cannot do what it was asked; the message names the task or file at fault."""


class EngineUnusable(EngineError, Unusable):
    """The engine can never work with the policy folder or the device it was given."""


class Engine(Protocol):
    """Continuous batching: tasks wait, run together, and leave as finished rollouts.

    Every task added leaves exactly once, as a rollout or by `cancel`.
    """

    name: str

    def add(self, task: Task) -> None:
        """Queue a task. Raises EngineError when its prompt is empty or leaves no room, or its id is already here."""
        ...

    def cancel(self, rollout_id: str) -> None:
        """Forget a task, waiting or running; unknown ids are ignored."""
        ...

    def step(self) -> list[Rollout]:
        """Admit waiting tasks while there is room, decode one token for every running one, return those that ended.

        Raises EngineError before a policy is loaded and when the policy's logits are not numbers.
        """
        ...

    def load_policy(self, files: Sequence[Path], policy_version: int) -> None:
        """Take over new weights between two steps; running rollouts go on, their next tokens carry the new version.

        `files` are the policy's safetensors shards. Raises EngineError, with the old weights untouched, when they
        cannot be read or do not fit.
        """
        ...

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in use; None before the first `load_policy`."""
        ...

    @property
    def num_running(self) -> int:
        """Rollouts being decoded."""
        ...

    @property
    def num_waiting(self) -> int:
        """Tasks waiting for a place."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the start."""
        ...
