"""The environments with tools: feedback from the public tests, and a Python interpreter.

An episode of both also ends after a number of turns, when a turn is cut at the limit of
tokens, and when the reply leaves no room for another turn.

With feedback the policy sees how its program fails the public tests, and writes another:

    prompt -> program -> public tests -> feedback -> program -> ... -> the last program is graded by the hidden tests
    given     sampled    the verifier    given       sampled

The episode ends when the public tests pass, or when the problem has none. The hidden tests and their expected outputs
are not in this process.

With an interpreter the policy may run Python before it writes its answer:

    prompt -> text with <python>...</python> -> <output>...</output> -> ... -> the last text is graded
    given     sampled                           given

A turn whose text ends in a call is answered with what the code prints. A turn without one is the answer. The
interpreter keeps its state between the calls of a rollout. Source: R1-Code-Interpreter (arXiv 2505.21668): at most 5 to
8 calls of 60 s each, whose outputs are not in the loss. `broker.reward.rule` r1_code_interpreter has its rewards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic

from nouscoder.config.generation import FeedbackSection, InterpreterSection
from nouscoder.domain.conversation import InterpreterAnswer, feedback_on
from nouscoder.domain.rollout import Rollout, Task
from nouscoder.domain.tokens import Completion, FinishReason
from nouscoder.domain.verdict import VerdictKind
from nouscoder.generation.environments.base import Sampler
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.generation.environments.tools import ENDS, Settings, Tools
from nouscoder.policy_folder.tokenizer import PolicyTokenizer


class _Turns(Generic[Settings]):
    def __init__(self, tokenizer: PolicyTokenizer, settings: Settings, tools: Tools, max_tokens_total: int) -> None:
        """`max_tokens_total` is the engine's limit of given and sampled tokens. Raises EnvironmentUnusable."""
        self._prompts = Prompts(tokenizer, settings)
        self._settings: Settings = settings
        self._tools = tools
        self._max_tokens_total = max_tokens_total

    async def _rollout(
        self, task: Task, sampler: Sampler, turns: int, reply: Callable[[Completion, str], Awaitable[list[int]]]
    ) -> Rollout:
        """Sample turns until `reply`, which gets each with its text, has no tokens, or a limit is reached."""
        episode = self._prompts.begin(task, sampler)
        for turns_left in reversed(range(turns)):
            answer = await episode.sample()
            text = self._prompts.text_of(answer, episode.given)
            if not turns_left or answer.finish_reason is FinishReason.LENGTH:
                break
            if not episode.give_reply(await reply(answer, text), self._max_tokens_total):
                break
        return episode.finished(text)


class Feedback(_Turns[FeedbackSection]):
    """Up to `settings.turns` programs, with feedback from the public tests between them."""

    name = "feedback"

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        """Sample programs until one passes the public tests or a limit is reached. Raises ToolUnavailable."""

        async def reply(answer: Completion, text: str) -> list[int]:
            if task.public_tests is None:
                return []
            verdict = await self._tools.grade(task.public_tests.submission(text))
            if verdict.kind is VerdictKind.ACCEPTED:
                return []
            return self._prompts.reply_to(answer, feedback_on(verdict, self._settings.feedback_chars))

        return await self._rollout(task, sampler, self._settings.turns, reply)


class WithInterpreter(_Turns[InterpreterSection]):
    """Up to `settings.calls` calls of an interpreter, then the answer."""

    name = "interpreter"

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        """Sample turns until one makes no call, or a limit is reached. Raises ToolUnavailable."""
        settings = self._settings
        async with self._tools.interpreter() as interpreter:

            async def reply(answer: Completion, text: str) -> list[int]:
                code = call_in(text, settings.call_begin, settings.call_end)
                if code is None:
                    return []
                output = await interpreter.run(code)
                text = reply_to_call(output, settings.output_begin, settings.output_end, settings.output_chars)
                return self._prompts.reply_to(answer, text)

            return await self._rollout(task, sampler, settings.calls + 1, reply)


def call_in(text: str, begin: str, end: str) -> str | None:
    """The code of the call that `text` ends in; None if it ends in none."""
    before, has_end, after = text.rpartition(end)
    if not has_end or after.strip():
        return None
    _, has_begin, code = before.rpartition(begin)
    return code.strip("\n") if has_begin else None


def reply_to_call(answer: InterpreterAnswer, begin: str, end: str, max_chars: int) -> str:
    """The text of the reply to a call. The middle of an output of more than `max_chars` characters is left out."""
    output = answer.output.rstrip()
    if len(output) > max_chars:
        half = max_chars // 2
        output = f"{output[:half]}\n...\n{output[len(output) - half :]}"
    lines = [line for line in (output, ENDS[answer.end]) if line]
    return begin + "\n".join(lines) + end
