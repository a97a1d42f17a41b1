"""The environment with an interpreter: the policy may run Python before it writes its answer.

    prompt -> text with <python>...</python> -> <output>...</output> -> ... -> the last text is graded
    given     sampled                           given

A turn whose text ends in a call is answered with what the code prints. A turn without one is the answer. The
interpreter keeps its state between the calls of a rollout. An episode also ends after `calls` calls and one more turn,
when a turn is cut at the limit of tokens, and when the output leaves no room for another turn.

Source: R1-Code-Interpreter (arXiv 2505.21668): at most 5 to 8 calls of 60 s each, whose outputs are not in the loss.
`broker.reward.rule` r1_code_interpreter has its rewards.
"""

from __future__ import annotations

from nouscoder.config.generation import InterpreterSection
from nouscoder.domain.conversation import CallEnd, InterpreterAnswer
from nouscoder.domain.rollout import Rollout, Task
from nouscoder.domain.tokens import Completion, FinishReason
from nouscoder.generation.environments.base import Sampler
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.generation.environments.tools import Tools
from nouscoder.policy_folder.tokenizer import PolicyTokenizer

_ENDS = {
    CallEnd.DONE: "",
    CallEnd.EXITED: "The code ended the interpreter. The next call begins with a fresh one.",
    CallEnd.TIME_LIMIT: "The code took too long. The next call begins with a fresh interpreter.",
    CallEnd.MEMORY_LIMIT: "The code needed too much memory. The next call begins with a fresh interpreter.",
    CallEnd.OUTPUT_LIMIT: "The code printed too much. The next call begins with a fresh interpreter.",
}


class WithInterpreter:
    """Up to `settings.calls` calls of an interpreter, then the answer."""

    name = "interpreter"

    def __init__(
        self, tokenizer: PolicyTokenizer, settings: InterpreterSection, tools: Tools, max_tokens_total: int
    ) -> None:
        """`max_tokens_total` is the engine's limit of given and sampled tokens. Raises EnvironmentUnusable."""
        self._prompts = Prompts(tokenizer, settings)
        self._settings = settings
        self._tools = tools
        self._max_tokens_total = max_tokens_total

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        """Sample turns until one makes no call, or a limit is reached. Raises ToolUnavailable."""
        episode = self._prompts.begin(task, sampler)
        async with self._tools.interpreter() as interpreter:
            for calls_left in reversed(range(self._settings.calls + 1)):
                answer = await episode.sample()
                text = self._prompts.text_of(answer)
                code = call_in(text, self._settings.call_begin, self._settings.call_end)
                if code is None or not calls_left or answer.finish_reason is FinishReason.LENGTH:
                    break
                reply = self._reply(answer, await interpreter.run(code))
                if not episode.give_reply(reply, self._max_tokens_total):
                    break
        return episode.finished(text)

    def _reply(self, answer: Completion, output: InterpreterAnswer) -> list[int]:
        """Token ids [tokens] of the reply to a call; empty when the vocabulary cannot write it."""
        begin, end = self._settings.output_begin, self._settings.output_end
        return self._prompts.reply_to(answer, reply_to_call(output, begin, end, self._settings.output_chars))


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
    lines = [line for line in (output, _ENDS[answer.end]) if line]
    return begin + "\n".join(lines) + end
