"""Rewards for environments of the `verifiers` package, which prime-rl trains with.

A Rubric (before version 0.4) takes an exception of its functions for a reward of 0. So a failure is set as the
rollout's error (`state["error"]`), and trainers leave out rollouts with an error. Each reason is logged once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Unpack

from nouscoder.client.adapters import Completion, score_of, text_of
from nouscoder.client.async_client import AsyncClient
from nouscoder.client.errors import GradingFailed
from nouscoder.client.records import Rules

log = logging.getLogger(__name__)

_MOST_TOLD = 100


async def score(
    client: AsyncClient, completion: Completion, tests: Mapping[str, Any] | str, **rules: Unpack[Rules]
) -> float:
    """1 for a right program, else 0, for a method with `@vf.reward` (version 0.4).

    Raises GradingFailed when there is no verdict, which verifiers records as the rollout's error.
    """
    return score_of(await client.grade(completion=text_of(completion), tests=tests, **rules))


def code_reward(client: AsyncClient, key: str = "tests", **rules: Unpack[Rules]) -> Callable[..., Awaitable[float]]:
    """A function for `Rubric(funcs=[...])`: 1 for a right program, else 0. `info[key]` holds the tests."""
    told: set[str] = set()

    async def accepted(completion: Completion, info: Mapping[str, Any] | str, state: MutableMapping[str, Any]) -> float:
        tests = (json.loads(info) if isinstance(info, str) else info)[key]
        try:
            return await score(client, completion, tests, **rules)
        except GradingFailed as error:
            state["error"] = error
            if (reason := str(error)) not in told and len(told) < _MOST_TOLD:
                told.add(reason)
                log.error("no reward: %s", reason)
            return 0.0

    return accepted
