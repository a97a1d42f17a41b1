"""What every environment is written with: prompts and replies as tokens, and the tokens of a rollout in progress.

`SingleTurn`, the simplest environment, needs nothing more.

INVARIANT: each token is recorded once, as given or sampled. Later turns are sampled after exactly these tokens, and the
finished rollout holds exactly these tokens. Text is never tokenised a second time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from nouscoder.config.generation import EnvironmentSection
from nouscoder.domain.conversation import Message, Role
from nouscoder.domain.prompt import PromptSettings, PromptText
from nouscoder.domain.reasoning import TAG_TOKENS, opened_by
from nouscoder.domain.rollout import Rollout, Task, assemble_rollout
from nouscoder.domain.tokens import Completion, FinishReason, int32
from nouscoder.generation.engines.base import PromptTooLong, SampleRequest, seed_from
from nouscoder.generation.environments.base import EnvironmentUnusable, ProblemRefused, Sampler, TaskRefused
from nouscoder.policy_folder.tokenizer import PolicyTokenizer, TokenizerError, load_tokenizer

# The rollouts of a group have the same prompt, and their tasks arrive one after another.
_CACHED_PROMPTS = 256
_COUNTED_AT_ONCE = 256


class Episode:
    """A rollout in progress. `give` and `sample` append tokens; `finished` makes the rollout."""

    def __init__(self, task: Task, sampler: Sampler, stop_token_ids: frozenset[int]) -> None:
        self._task = task
        self._sampler = sampler
        self._stop_token_ids = stop_token_ids
        self._parts: list[memoryview[int] | Completion] = []
        self._tokens: list[int] = []
        self._num_turns = 0
        self._num_sampled = 0

    @property
    def tokens_left(self) -> int:
        """The number of tokens that may still be sampled: `max_new_tokens` is the limit of all turns together."""
        return self._task.sampling.max_new_tokens - self._num_sampled

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far, given and sampled."""
        return len(self._tokens)

    @property
    def given(self) -> memoryview[int]:
        """The tokens [tokens] before the newest completion: the prompt, or a reply."""
        part = self._parts[-2] if len(self._parts) > 1 else None
        return int32([]) if part is None or isinstance(part, Completion) else part

    def give(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample. They do not count in the loss."""
        if not token_ids:
            return
        given = int32(token_ids)
        last = self._parts[-1] if self._parts else None
        if last is None or isinstance(last, Completion):
            self._parts.append(given)
        else:
            self._parts[-1] = int32([*last, *given])
        self._tokens += token_ids

    async def sample(self, max_tokens: int | None = None) -> Completion:
        """Sample the next turn, of at most `max_tokens` tokens. Raises EngineError, and ProblemRefused without room."""
        limit = self.tokens_left if max_tokens is None else min(max_tokens, self.tokens_left)
        request = SampleRequest(
            request_id=self._task.rollout_id if not self._num_turns else f"{self._task.rollout_id}/{self._num_turns}",
            prompt_token_ids=tuple(self._tokens),
            sampling=replace(self._task.sampling, seed=self._seed_of_turn(), max_new_tokens=limit),
            stop_token_ids=self._stop_token_ids,
        )
        try:
            completion = await self._sampler.sample(request)
        except PromptTooLong as error:
            if self._num_turns:
                raise
            raise ProblemRefused(str(error)) from error
        self._parts.append(completion)
        self._tokens += completion.token_ids
        self._num_turns += 1
        self._num_sampled += len(completion.token_ids)
        return completion

    def give_reply(self, reply: Sequence[int], max_tokens_total: int) -> bool:
        """Append a reply, and return whether there is another turn: not after an empty reply, and not without room.

        `max_tokens_total` is the engine's limit of given and sampled tokens.
        """
        if not reply or not self.tokens_left or self.num_tokens + len(reply) >= max_tokens_total:
            return False
        self.give(reply)
        return True

    def finished(self, text: str, own_reward: float | None = None) -> Rollout:
        """The rollout with the `text` to grade, and its `own_reward`, if any. Raises TaskRefused if it is invalid."""
        try:
            return assemble_rollout(self._task, self._parts, text, own_reward)
        except ValueError as error:
            raise TaskRefused(f"task {self._task.rollout_id}: {error}") from error

    def _seed_of_turn(self) -> int:
        """The seed of this turn's random stream, derived from the task's seed and the number of the turn."""
        seed = self._task.sampling.seed
        return seed_from(seed, self._num_turns) if seed and self._num_turns else seed


class Prompts:
    """Encodes prompts and replies, as text or as messages in the policy's chat template."""

    def __init__(self, tokenizer: PolicyTokenizer, settings: EnvironmentSection) -> None:
        """Raises EnvironmentUnusable for messages without a chat template, or with one that never ends."""
        if settings.prompt_as == "messages" and not tokenizer.has_chat_template:
            raise EnvironmentUnusable(
                'generation.environment.prompt_as is "messages", but the policy folder has no chat template'
            )
        self.as_messages = settings.prompt_as != "text" and tokenizer.has_chat_template
        if self.as_messages:
            try:
                tokenizer.check_template()
            except TokenizerError as error:
                raise EnvironmentUnusable(str(error)) from error
        self._tokenizer = tokenizer
        self._stop_ids = tokenizer.stop_ids  # here, because it may wait for the template
        self._asking = settings.record(PromptSettings)
        self._thinking = self._asking.enable_thinking
        self._encoded = lru_cache(maxsize=_CACHED_PROMPTS)(self._encode_prompt)

    def begin(self, task: Task, sampler: Sampler) -> Episode:
        """A rollout in progress that begins with the prompt of the task. Raises ProblemRefused."""
        episode = self.empty(task, sampler)
        episode.give(self.prompt_of(task))
        return episode

    def empty(self, task: Task, sampler: Sampler) -> Episode:
        """A rollout in progress without a token."""
        return Episode(task, sampler, self._stop_ids)

    def messages_of(self, task: Task) -> list[Message]:
        """The prompt of the task as messages; one of the user for a policy without a chat template."""
        text = PromptText.of(task)
        return self._asking.messages(text) if self.as_messages else [Message(Role.USER, self._asking.text(text))]

    def prompt_of(self, task: Task) -> list[int]:
        """Token ids [tokens] of the task's prompt. Raises ProblemRefused."""
        try:
            return self._encoded(PromptText.of(task))
        except TokenizerError as error:
            raise ProblemRefused(f"the prompt cannot be encoded: {error}") from error

    def count(self, texts: Sequence[PromptText]) -> list[int]:
        """How many tokens the prompt of each text has; 0 for one that cannot be encoded. Raises TokenizerError."""
        counts: list[int] = []
        for start in range(0, len(texts), _COUNTED_AT_ONCE):
            part = texts[start : start + _COUNTED_AT_ONCE]
            if self.as_messages:
                counts += self._count_messages([self._asking.messages(text) for text in part])
            else:
                counts += self._tokenizer.count([self._asking.text(text) for text in part])
        return counts

    def _count_messages(self, conversations: Sequence[list[Message]]) -> list[int]:
        """The tokens of each. Those with a system message and those without are counted apart."""
        counts = [0] * len(conversations)
        for size in {len(messages) for messages in conversations}:
            places = [place for place, messages in enumerate(conversations) if len(messages) == size]
            found = self._tokenizer.count_messages([conversations[place] for place in places], self._thinking)
            for place, count in zip(places, found, strict=True):
                counts[place] = count
        return counts

    def reply_to(self, answer: Completion, text: str) -> list[int]:
        """Token ids [tokens] that follow the policy's `answer` when the environment replies with `text`.

        The answer keeps its own stop token: the template's is left out where it is the same. There are no ids when the
        vocabulary cannot write `text`, such as the output of a program in a small vocabulary.
        """
        ended_with = answer.token_ids[-1] if answer.finish_reason is FinishReason.STOP else None
        messages = [Message(Role.USER, text)]
        try:
            return self._tokenizer.reply_ids(messages, ended_with, self._thinking, in_chat=self.as_messages)
        except TokenizerError:
            return []

    def text_of(self, answer: Completion, given: Sequence[int] = ()) -> str:
        """The text of an answer, without its stop token. A text of generation.sampling.stop stays.

        It begins with the tag of reasoning with which the tokens before it, `given`, end: it is one text whether the
        template or the policy has written `<think>`.
        """
        stopped = answer.finish_reason is FinishReason.STOP and answer.token_ids[-1] in self._stop_ids
        opened = opened_by("".join(self._tokenizer.pieces(given[-TAG_TOKENS:])))
        return opened + self._tokenizer.decode(answer.token_ids[:-1] if stopped else answer.token_ids)

    def _encode_prompt(self, asked: PromptText) -> list[int]:
        if not asked.prompt:
            raise TokenizerError("the prompt is empty")
        if not self.as_messages:
            return self._tokenizer.encode(self._asking.text(asked))
        return self._tokenizer.encode_text(self._tokenizer.render(self._asking.messages(asked), self._thinking))


class SingleTurn:
    """The environment of one prompt and one completion, which is graded."""

    name = "single_turn"

    def __init__(self, tokenizer: PolicyTokenizer, settings: EnvironmentSection) -> None:
        """Raises EnvironmentUnusable when messages are configured for a policy without a chat template."""
        self._prompts = Prompts(tokenizer, settings)

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        """Sample one completion of the task's prompt."""
        episode = self._prompts.begin(task, sampler)
        return episode.finished(self._prompts.text_of(await episode.sample(), episode.given))


def counted(request: dict[str, Any]) -> dict[str, Any]:
    """{"counts"} in the order of the texts of {"folder", "environment", "texts": [PromptText, ...]}, or {"fault"}."""
    settings = EnvironmentSection.model_validate(request["environment"])
    try:
        prompts = Prompts(load_tokenizer(Path(request["folder"]), settings.date), settings)
        texts = [PromptText._make(text)._replace(languages=tuple(text[3])) for text in request["texts"]]
        return {"counts": prompts.count(texts)}
    except (TokenizerError, EnvironmentUnusable) as error:
        return {"fault": str(error)}


def count_stdin() -> None:
    """Answer the request on stdin on stdout."""
    # As if it were not installed: the tokenizer's library would load it, and a tokenizer does not need it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print
    json.dump(counted(json.load(sys.stdin)), out)
