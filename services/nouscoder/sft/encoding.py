"""Examples in the tokens of a policy, exactly as a run's environment would give and sample them.

    prompt or messages -> answer + end token -> what the environment writes around a reply -> answer + end token
    given                 loss                  given                                         loss

The prompt goes through the template, the system prompt and the chat template of generation.environment. So a policy
that was trained on examples finds the same tokens before its answers in the run that follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from nouscoder.config.generation import EnvironmentSection
from nouscoder.domain.rollout import Rollout, Sampling, Task
from nouscoder.generation.environments.base import TaskRefused
from nouscoder.generation.environments.prompts import THINKING, Prompts
from nouscoder.policy_folder.tokenizer import PolicyTokenizer
from nouscoder.sft.examples import BadExample, Example
from nouscoder.sft.rollouts import Part, rollout_of, written


class Encoder:
    """Encodes examples for one policy."""

    def __init__(self, tokenizer: PolicyTokenizer, environment: EnvironmentSection) -> None:
        """Raises EnvironmentUnusable when messages are configured for a policy without a chat template."""
        self._tokenizer = tokenizer
        self._prompts = Prompts(tokenizer, environment)
        in_template = environment.model_copy(update={"prompt_as": "messages"})
        self._chat = Prompts(tokenizer, in_template) if tokenizer.has_chat_template else None
        self._thinking = THINKING[environment.thinking]

    def encode(self, example: Example) -> Rollout:
        """The example as a rollout. Raises BadExample."""
        try:
            parts: list[Part] = [(self._beginning(example), False)]
            for turn in example.turns:
                if turn.is_given:
                    parts.append((self._reply(example, parts[-1][0], turn.text), False))
                else:
                    parts.append(([*self._tokenizer.encode_inside(turn.text), self._tokenizer.end_id], True))
        except (ValueError, TaskRefused) as error:
            raise BadExample(str(error)) from error
        return rollout_of(parts, example.problem_id)

    def _beginning(self, example: Example) -> list[int]:
        if example.messages:
            if self._chat is None:
                raise BadExample("it has messages, but the policy has no chat template: give prompt and completion")
            return self._tokenizer.encode_messages(example.messages, self._thinking)
        if example.is_rendered:
            if self._prompts.as_messages:
                raise BadExample(
                    "a line of samples.jsonl has lost the special tokens of its prompt: give the run folder instead"
                )
            return self._tokenizer.encode(example.prompt)
        return self._prompts.prompt_of(Task("example", "", "", example.prompt, Sampling(), 0, example.prompt_template))

    def _reply(self, example: Example, answer: Sequence[int], text: str) -> list[int]:
        """What follows an answer [tokens] when the environment replies with `text`."""
        prompts = self._chat if example.messages and self._chat is not None else self._prompts
        reply = prompts.reply_to(written(answer), text)
        if not reply:
            raise BadExample("the vocabulary of the policy cannot write a given turn")
        return reply
