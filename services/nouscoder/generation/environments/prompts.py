"""How a task becomes the tokens of a prompt, and a reply of the environment the tokens between two answers."""

from __future__ import annotations

from functools import lru_cache

from nouscoder.config.generation import EnvironmentSection
from nouscoder.domain.message import Message, Role
from nouscoder.domain.rollout import Task
from nouscoder.domain.tokens import Completion, FinishReason
from nouscoder.generation.environments.base import EnvironmentUnusable, Sampler, TaskRefused
from nouscoder.generation.environments.episode import Episode
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError

# The rollouts of a group have the same prompt, and their tasks arrive one after another.
_CACHED_PROMPTS = 256
THINKING = {"auto": None, "on": True, "off": False}


class Prompts:
    """Encodes prompts and replies, as text or as messages in the policy's chat template."""

    def __init__(self, tokenizer: PolicyTokenizer, settings: EnvironmentSection) -> None:
        """Raises EnvironmentUnusable when messages are configured for a policy without a chat template."""
        if settings.prompt_as == "messages" and not tokenizer.has_chat_template:
            raise EnvironmentUnusable(
                'generation.environment.prompt_as is "messages", but the policy folder has no chat template'
            )
        self.as_messages = settings.prompt_as != "text" and tokenizer.has_chat_template
        self._tokenizer = tokenizer
        self._settings = settings
        self._thinking = THINKING[settings.thinking]
        self._encoded = lru_cache(maxsize=_CACHED_PROMPTS)(self._encode_prompt)

    def begin(self, task: Task, sampler: Sampler) -> Episode:
        """A rollout in progress that begins with the prompt of the task. Raises TaskRefused."""
        episode = Episode(task, sampler, self._tokenizer.stop_ids)
        episode.give(self.prompt_of(task))
        return episode

    def prompt_of(self, task: Task) -> list[int]:
        """Token ids [tokens] of the task's prompt. Raises TaskRefused."""
        try:
            return self._encoded(task.prompt, task.prompt_template)
        except TokenizerError as error:
            raise TaskRefused(f"task {task.rollout_id}: {error}") from error

    def reply_to(self, answer: Completion, text: str) -> list[int]:
        """Token ids [tokens] that follow the policy's `answer` when the environment replies with `text`.

        The answer keeps its own stop token: the template's is left out where it is the same. There are no ids when the
        vocabulary cannot write `text`, such as the output of a program in a small vocabulary.
        """
        try:
            if not self.as_messages:
                return self._tokenizer.encode_inside(f"\n{text}\n")
            ids = self._tokenizer.encode_reply(Message(Role.USER, text), self._thinking)
        except TokenizerError:
            return []
        is_ended = answer.finish_reason is FinishReason.STOP and ids[:1] == [answer.token_ids[-1]]
        return ids[1:] if is_ended else ids

    def text_of(self, answer: Completion) -> str:
        """The text of an answer, without its stop token."""
        stopped = answer.finish_reason is FinishReason.STOP
        return self._tokenizer.decode(answer.token_ids[:-1] if stopped else answer.token_ids)

    def _encode_prompt(self, prompt: str, template: str) -> list[int]:
        if not prompt:
            raise TokenizerError("the prompt is empty")
        # Not str.format, because a problem's statement may contain braces.
        text = (template or self._settings.prompt_template).replace("{prompt}", prompt)
        if not self.as_messages:
            return self._tokenizer.encode(text)
        system = self._settings.system_prompt
        messages = [Message(Role.SYSTEM, system)] if system else []
        return self._tokenizer.encode_messages([*messages, Message(Role.USER, text)], self._thinking)
