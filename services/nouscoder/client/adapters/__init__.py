"""Rewards for trainers of other projects, one module for each (docs/trainers.md). None of them imports its trainer.

INVARIANT: a failure of the service or of the way to it never becomes a reward.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from nouscoder.client.errors import BadRequest, GradingFailed
from nouscoder.client.records import GradeAnswer

# What the adapters share: the text of a completion, and the reward of a result.

log = logging.getLogger(__name__)

Completion = str | Sequence[Mapping[str, Any]]


def text_of(completion: Completion) -> str:
    """The text of a completion: itself, or the content of the last message of the assistant."""
    if isinstance(completion, str):
        return completion
    texts = [message.get("content") for message in completion if message.get("role", "assistant") == "assistant"]
    return str(texts[-1] or "") if texts else ""


def score_of(answer: GradeAnswer) -> float:
    """1 for accepted, else 0. Raises GradingFailed when the service failed, because then it is neither."""
    if answer["verdict"] == "internal_error":
        raise GradingFailed(f"the grading service failed: internal_error: {answer['detail']}", 200)
    return float(answer["verdict"] == "accepted")


def reward_or_none(result: GradeAnswer | GradingFailed) -> float | None:
    """1 for accepted, -1 for a wrong program, None for our failures and for tests that cannot be graded.

    Raises AuthenticationFailed, TlsFailed and other errors that every request has.
    """
    if not isinstance(result, GradingFailed):
        return result["reward"]
    if not result.is_passing and not isinstance(result, BadRequest):
        raise result
    log.warning("no reward", extra={"reason": str(result)})
    return None
