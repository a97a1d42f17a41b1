"""Which runners a submission may use, and which ones it has used (see grading/second_runner.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum


class SecondRun(StrEnum):
    """How the repetition of a submission ended: the label of `verifier_second_runs_total`."""

    AGREED = "agreed"
    OVERRULED = "overruled"  # two other runners agree against the first
    CONFIRMED = "confirmed"  # the second runner disagreed, and the third agreed with the first
    NO_RUNNER = "no_runner"  # no other runner was ready, or it did not answer


@dataclass(frozen=True, slots=True)
class RunnerChoice:
    """`used` grows while the submission is graded."""

    avoided: frozenset[str] = frozenset()
    used: set[str] = field(default_factory=set)


_current: ContextVar[RunnerChoice] = ContextVar("runner choice")


def current_choice() -> RunnerChoice:
    """The choice of the current task; without one, an empty one that nobody reads."""
    return _current.get(None) or RunnerChoice()


@contextlib.contextmanager
def choosing(avoided: frozenset[str] = frozenset()) -> Iterator[RunnerChoice]:
    """Sessions opened in this context, and in tasks made in it, avoid these runners and note theirs."""
    choice = RunnerChoice(avoided)
    token = _current.set(choice)
    try:
        yield choice
    finally:
        _current.reset(token)
