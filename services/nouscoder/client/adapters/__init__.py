"""Rewards for trainers of other projects, one module for each (docs/trainers.md). None of them imports its trainer.

INVARIANT: a failure of the service or of the way to it never becomes a reward. A fault that every request has is raised
at once. A fault of the data set is raised in the first batch, and when no completion of a batch has a reward.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nouscoder.client.errors import BadRequest, GradingFailed, Unreachable
from nouscoder.client.records import GradeAnswer

log = logging.getLogger(__name__)

_NOT_FOUND, _INVALID = frozenset({404, 405}), 422
_OF_THE_COMPLETION = ("completion", "code", "files")

Completion = str | Sequence[Mapping[str, Any]]


def text_of(completion: Completion) -> str:
    """The text of a completion: itself, or the content of the last message of the assistant, perhaps in parts."""
    if isinstance(completion, str):
        return completion
    texts = [message.get("content") for message in completion if message.get("role", "assistant") == "assistant"]
    parts = texts[-1] if texts and isinstance(texts[-1], list) else [{"text": texts[-1]}] if texts else []
    return "".join(str(part.get("text") or "") for part in parts)


def score_of(answer: GradeAnswer) -> float:
    """1 for accepted, else 0. Raises GradingFailed when the service failed, because then it is neither."""
    if answer["verdict"] == "internal_error":
        raise GradingFailed(f"the grading service failed: internal_error: {answer['detail']}", 200)
    return float(answer["verdict"] == "accepted")


@dataclass(slots=True)
class AdapterRewards:
    """The rewards of one batch after the other: 1 for accepted, -1 for a wrong program, None when there is no verdict.

    The reasons of None are logged, each once in a batch, in the message itself: trainers print no other fields.
    """

    has_graded: bool = False  # a batch before

    def of(self, results: Sequence[GradeAnswer | GradingFailed]) -> list[float | None]:
        """The rewards of a batch. Raises GradingFailed, see the INVARIANT of this package."""
        reasons = Counter[str]()
        for result in results:
            if isinstance(result, GradingFailed):
                if is_of_every_request(result) or (is_of_the_data_set(result) and not self.has_graded):
                    raise result
                reasons[str(result)] += 1
            elif result["reward"] is None:
                reasons[f"the grading service failed: {result['verdict']}: {result['detail']}"] += 1
        rewards = [None if isinstance(result, GradingFailed) else result["reward"] for result in results]
        failures = [result for result in results if isinstance(result, GradingFailed)]
        if len(failures) == len(results) and failures:
            # A batch without an answer has failed, unless the service is only busy or away.
            first = failures[0]
            if all(map(is_of_the_data_set, failures)) or (isinstance(first, Unreachable) and not self.has_graded):
                raise first
        for reason, count in reasons.items():
            log.warning("no reward for %d of %d completions: %s", count, len(results), reason)
        self.has_graded = self.has_graded or any(reward is not None for reward in rewards)
        return rewards


def is_of_every_request(failure: GradingFailed) -> bool:
    """Whether the way to the service is at fault, such as the URL, the key or TLS, or the service as a whole."""
    if isinstance(failure, BadRequest):
        return failure.status in _NOT_FOUND or failure.field == "url"
    return not failure.is_passing


def is_of_the_data_set(failure: GradingFailed) -> bool:
    """Whether the tests, or the rules of the reward function, are at fault, and not the completion."""
    return isinstance(failure, BadRequest) and failure.status == _INVALID and failure.field not in _OF_THE_COMPLETION
