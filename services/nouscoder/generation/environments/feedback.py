"""The environment with feedback: the policy sees how its program fails the public tests, and writes another.

    prompt -> program -> public tests -> feedback -> program -> ... -> the last program is graded by the hidden tests
    given     sampled    the verifier    given       sampled

An episode ends when the public tests pass, after `turns` programs, when a turn is cut at the limit of tokens, when the
feedback leaves no room for another program, or when the problem has no public tests. The hidden tests and their
expected outputs are not in this process.
"""

from __future__ import annotations

from nouscoder.config.generation import FeedbackSection
from nouscoder.domain.conversation import feedback_on
from nouscoder.domain.rollout import Rollout, Task
from nouscoder.domain.tokens import Completion, FinishReason
from nouscoder.domain.verdict import VerdictKind
from nouscoder.generation.environments.base import Sampler
from nouscoder.generation.environments.prompts import Prompts
from nouscoder.generation.environments.tools import Tools
from nouscoder.policy_folder.tokenizer import PolicyTokenizer


class Feedback:
    """Up to `settings.turns` programs, with feedback from the public tests between them."""

    name = "feedback"

    def __init__(
        self, tokenizer: PolicyTokenizer, settings: FeedbackSection, tools: Tools, max_tokens_total: int
    ) -> None:
        """`max_tokens_total` is the engine's limit of given and sampled tokens. Raises EnvironmentUnusable."""
        self._prompts = Prompts(tokenizer, settings)
        self._settings = settings
        self._tools = tools
        self._max_tokens_total = max_tokens_total

    async def rollout(self, task: Task, sampler: Sampler) -> Rollout:
        """Sample programs until one passes the public tests or a limit is reached. Raises ToolUnavailable."""
        episode = self._prompts.begin(task, sampler)
        for turns_left in reversed(range(self._settings.turns)):
            answer = await episode.sample()
            text = self._prompts.text_of(answer)
            if not turns_left or answer.finish_reason is FinishReason.LENGTH:
                break
            if not episode.give_reply(await self._reply(task, answer, text), self._max_tokens_total):
                break
        return episode.finished(text)

    async def _reply(self, task: Task, answer: Completion, text: str) -> list[int]:
        """Token ids [tokens] of the feedback; empty when there is nothing to say."""
        if task.public_tests is None:
            return []
        verdict = await self._tools.grade(task.public_tests.submission(text))
        if verdict.kind is VerdictKind.ACCEPTED:
            return []
        return self._prompts.reply_to(answer, feedback_on(verdict, self._settings.feedback_chars))
