"""The environment for single-turn code: one prompt and one completion, which is graded."""

from __future__ import annotations

from nouscoder.config.generation import EnvironmentSection
from nouscoder.domain.rollout import Rollout, Task
from nouscoder.generation.environments.base import Sampler
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.policy_folder.tokenizer import PolicyTokenizer


class SingleTurn:
    """Sends the prompt once, as text or as messages in the policy's chat template."""

    name = "single_turn"

    def __init__(self, tokenizer: PolicyTokenizer, settings: EnvironmentSection) -> None:
        """Raises EnvironmentUnusable when messages are configured for a policy without a chat template."""
        self._prompts = Prompts(tokenizer, settings)

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        """Sample one completion of the task's prompt."""
        episode = self._prompts.begin(task, sampler)
        return episode.finished(self._prompts.text_of(await episode.sample()))
