"""Reward functions for TRL's GRPOTrainer and its other online trainers.

TRL calls them with `completions`, a list of texts or of lists of messages, and each column of the data set as a list.
None is no reward for that completion; the reason is in the log. A fault of the tests ends the first batch. TRL adds the
rewards of all functions. It leaves a completion for which all are None out of its group: the advantage is 0 (TRL 1.16;
docs/trainers.md says what older versions do).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Unpack

from nouscoder.client.adapters import AdapterRewards, Completion, text_of
from nouscoder.client.async_client import AsyncClient
from nouscoder.client.records import Rules
from nouscoder.client.sync_client import Client

Rewards = list[float | None]


def reward_fn(
    client: Client, column: str = "tests", at_once: int = 16, **rules: Unpack[Rules]
) -> Callable[..., Rewards]:
    """A reward function. `column` of the data set holds the tests, as a record or as JSON text."""
    batches = AdapterRewards()

    def code_reward(*, completions: Sequence[Completion], **columns: Any) -> Rewards:
        requests = _requests(completions, columns[column], columns.get("prompts"), rules)
        return batches.of(list(client.grade_many(requests, at_once=at_once)))

    return code_reward


def async_reward_fn(
    client: AsyncClient, column: str = "tests", at_once: int = 16, **rules: Unpack[Rules]
) -> Callable[..., Awaitable[Rewards]]:
    """The same for the event loop in which TRL calls its asynchronous reward functions."""
    batches = AdapterRewards()

    async def code_reward(*, completions: Sequence[Completion], **columns: Any) -> Rewards:
        requests = _requests(completions, columns[column], columns.get("prompts"), rules)
        return batches.of([result async for result in client.grade_many(requests, at_once=at_once)])

    return code_reward


def _requests(completions: Sequence[Completion], tests: Any, prompts: Any, rules: Rules) -> Iterator[dict[str, Any]]:
    for completion, each, prompt in zip(completions, tests, prompts or [""] * len(completions), strict=True):
        # The end of a prompt, or of messages whose last begins the answer, may have opened the completion's reasoning.
        last = {"content": prompt} if isinstance(prompt, str) else (prompt or [{}])[-1]
        begin = last.get("content") if last.get("role", "assistant") == "assistant" else None
        asked = {"prompt": begin[-100:]} if begin and isinstance(begin, str) else {}
        yield {**rules, "completion": text_of(completion), "tests": each, **asked}
