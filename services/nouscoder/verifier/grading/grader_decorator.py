"""The protocol of graders, and the base class of their decorators: verdict cache, audit log, quotas and traces."""

from __future__ import annotations

from typing import Protocol

from nouscoder.domain.submission import Submission
from nouscoder.domain.verdict import Verdict
from nouscoder.verifier.grading.grader import OnOutcome


class Grading(Protocol):
    """The protocol of graders: `Grader` itself, and the decorators around it."""

    @property
    def backend(self) -> str:
        """Name of the sandbox backend."""
        ...

    @property
    def num_slots(self) -> int:
        """Submissions that can run at once."""
        ...

    @property
    def unfinished(self) -> int:
        """Submissions that wait or run."""
        ...

    async def grade(self, submission: Submission, on_outcome: OnOutcome | None = None) -> Verdict:
        """The verdict of one submission. Raises InvalidSubmission and QueueFull."""
        ...


class GraderDecorator:
    """Forwards every property to `inner`. A subclass implements `grade` by calling `inner.grade`."""

    def __init__(self, inner: Grading) -> None:
        self._inner = inner

    @property
    def backend(self) -> str:
        """Name of the sandbox backend."""
        return self._inner.backend

    @property
    def num_slots(self) -> int:
        """Submissions that can run at once."""
        return self._inner.num_slots

    @property
    def unfinished(self) -> int:
        """Submissions that wait or run."""
        return self._inner.unfinished
