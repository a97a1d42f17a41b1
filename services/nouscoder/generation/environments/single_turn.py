"""The environment for single-turn code: one prompt and one completion, which is graded."""

from __future__ import annotations

from functools import lru_cache

from nouscoder.config.generation import EnvironmentSection
from nouscoder.domain.message import Message, Role
from nouscoder.domain.rollout import FinishReason, Rollout, Task
from nouscoder.generation.environments.base import EnvironmentUnusable, Sampler, TaskRefused
from nouscoder.generation.environments.episode import Episode
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError

# The rollouts of a group have the same prompt, and their tasks arrive one after another.
_CACHED_PROMPTS = 256


class SingleTurn:
    """Sends the prompt once, as text or as messages in the policy's chat template."""

    name = "single_turn"

    def __init__(self, tokenizer: PolicyTokenizer, settings: EnvironmentSection) -> None:
        """Raises EnvironmentUnusable when messages are configured for a policy without a chat template."""
        if settings.prompt_as == "messages" and not tokenizer.has_chat_template:
            raise EnvironmentUnusable(
                'generation.environment.prompt_as is "messages", but the policy folder has no chat template'
            )
        self._as_messages = settings.prompt_as != "text" and tokenizer.has_chat_template
        self._tokenizer = tokenizer
        self._settings = settings
        self._prompt_ids = lru_cache(maxsize=_CACHED_PROMPTS)(self._encode_prompt)

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        """Sample one completion of the task's prompt."""
        episode = Episode(task, sampler, self._tokenizer.stop_ids)
        try:
            episode.give(self._prompt_ids(task.prompt, task.prompt_template))
        except TokenizerError as error:
            raise TaskRefused(f"task {task.rollout_id}: {error}") from error
        completion = await episode.sample()
        stopped = completion.finish_reason is FinishReason.STOP
        answer = completion.token_ids[:-1] if stopped else completion.token_ids
        return episode.finished(self._tokenizer.decode(answer))

    def _encode_prompt(self, prompt: str, template: str) -> list[int]:
        if not prompt:
            raise TokenizerError("the prompt is empty")
        # Not str.format, because a problem's statement may contain braces.
        text = (template or self._settings.prompt_template).replace("{prompt}", prompt)
        if not self._as_messages:
            return self._tokenizer.encode(text)
        system = self._settings.system_prompt
        messages = [Message(Role.SYSTEM, system)] if system else []
        return self._tokenizer.encode_messages([*messages, Message(Role.USER, text)])
