"""Examples in the tokens of a policy.

An example has the tokens of a policy, exactly as a run's environment would give and sample them:

    prompt or messages -> answer + its end -> what the environment writes around a reply -> answer + its end
        given                loss                given                                         loss

The end is what the chat template writes after an answer, or without a template the end-of-sequence token.

The prompt goes through the template, the system prompt and the chat template of generation.environment. So a policy
that was trained on examples finds the same tokens before its answers in the run that follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from nouscoder.config.generation import EnvironmentSection
from nouscoder.domain.prompt import PromptSettings, rendered_mark
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.generation.environments.base import TaskRefused
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.policy_folder.chat_template import ChatMessage
from nouscoder.policy_folder.finished_chat import FinishedChats, unmarked
from nouscoder.policy_folder.tokenizer import PolicyTokenizer
from nouscoder.sft.records import BadExample, Example, Record, Turn
from nouscoder.sft.rollouts import Part, rollout_of, written

_TASK = Task("example", "", "", "", Sampling())


class Encoder:
    """Encodes examples for one policy."""

    def __init__(self, tokenizer: PolicyTokenizer, environment: EnvironmentSection) -> None:
        """Raises EnvironmentUnusable when messages are configured for a policy without a chat template."""
        self._tokenizer = tokenizer
        self._prompts = Prompts(tokenizer, environment)
        in_template = environment.model_copy(update={"prompt_as": "messages"})
        self._in_chat = Prompts(tokenizer, in_template) if tokenizer.has_chat_template else None
        self._thinking = environment.record(PromptSettings).enable_thinking
        self._chats = FinishedChats(tokenizer, self._thinking) if tokenizer.has_chat_template else None

    def encode(self, example: Example) -> Rollout:
        """The example as a rollout, up to its last answer. Raises BadExample."""
        return next(self.encode_all(example))

    def encode_all(self, example: Example) -> Iterator[Rollout]:
        """The rollouts of an example: one, or where the template changes earlier answers, one for each of these too."""
        try:
            for parts in self._parts(example):
                yield rollout_of(parts, example.record.problem_id)
        except (ValueError, TaskRefused) as error:
            raise BadExample(str(error)) from error

    def _parts(self, example: Example) -> Iterator[Sequence[Part]]:
        record = example.record
        if record.messages and self._chats is None:
            raise BadExample("it has messages, but the policy has no chat template: give prompt and completion")
        if self._prompts.as_messages and (mark := rendered_mark(record.prompt)):
            raise BadExample(
                f"the prompt is in a chat template already (it begins with {mark}): give its text, or messages"
            )
        if self._chats is None or not (record.messages or self._prompts.as_messages):
            yield self._as_text(example)
            return
        chat, trained = self._chat(record), [n for n, one in enumerate(record.messages) if one.is_trained]
        tools = _tools(record)
        if len(example.turns) > 1:
            yield self._of_run(chat, example.turns, self._chats)
            return
        if example.turns:
            trained.append(len(chat))
            chat.append({"role": "assistant", "content": example.turns[0].text})
        yield from self._chats.parts(chat, trained, tools)

    def _chat(self, record: Record) -> list[ChatMessage]:
        """The messages, or those that a run makes of the prompt."""
        if record.messages:
            return [message.message() for message in record.messages]
        if record.program:
            raise BadExample(
                "a line of samples.jsonl has lost the special tokens of its prompt: give the run folder instead"
            )
        asked = self._prompts.messages_of(_task(record))
        return [{"role": message.role.value, "content": message.content} for message in asked]

    def _of_run(self, chat: list[ChatMessage], turns: Sequence[Turn], chats: FinishedChats) -> list[Part]:
        """Turns of an environment: each answer and each reply follows the tokens before it, as in a run."""
        parts: list[Part] = []
        for turn in turns:
            if turn.given:
                parts.append((self._reply(parts[-1][0], turn.text), False))
                chat = [*chat, {"role": "user", "content": turn.text}]
                continue
            chat = [*chat, {"role": "assistant", "content": turn.text}]
            answer = chats.answer(chat)
            parts += [] if parts else [(self._tokenizer.encode_text(answer.prompt), False)]
            end = [] if answer.is_ended else [self._tokenizer.eos_id]
            parts.append(([*self._tokenizer.encode_after(answer.prompt, answer.text), *end], True))
        return parts

    def _as_text(self, example: Example) -> list[Part]:
        record, end = example.record, self._tokenizer.eos_id
        # The prompt of a line of samples.jsonl needs no template any more.
        text = record.prompt if record.program else self._prompts.messages_of(_task(record))[-1].content
        parts: list[Part] = [(self._tokenizer.encode(text), False)]
        for turn in example.turns:
            if turn.given:
                parts.append((self._reply(parts[-1][0], turn.text), False))
            else:
                answer = unmarked(self._tokenizer, text, turn.text)
                parts.append(([*self._tokenizer.encode_after(text, answer, in_chat=False), end], True))
            text = turn.text
        return parts

    def _reply(self, answer: Sequence[int], text: str) -> list[int]:
        """What follows an answer [tokens] when the environment replies with `text`."""
        prompts = self._in_chat if self._in_chat is not None and self._prompts.as_messages else self._prompts
        reply = prompts.reply_to(written(answer), text)
        if not reply:
            raise BadExample("the vocabulary of the policy cannot write a given turn")
        return reply


def _task(record: Record) -> Task:
    asked = replace(_TASK, prompt=record.prompt, prompt_template=record.prompt_template)
    tests = record.tests if isinstance(record.tests, dict) else {}  # of a line of a problem file
    asked = replace(asked, tests_type=str(tests.get("type") or record.tests_type))
    return replace(asked, starter_code=record.starter_code, languages=tuple(record.languages) or asked.languages)


def _tools(record: Record) -> list[Any]:
    tools = record.tools
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except ValueError:
            raise BadExample("tools: not JSON") from None
    if not isinstance(tools, list):
        raise BadExample("tools: not a list")
    return tools
