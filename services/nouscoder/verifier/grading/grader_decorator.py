"""Base class of the decorators of a grader: audit log, quotas and traces."""

from __future__ import annotations

from nouscoder.verifier.grading.verdict_cache import Grading


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
