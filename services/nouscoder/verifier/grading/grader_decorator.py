"""What stands before a grader (audit log, quotas, traces): the same grader in all but how it grades."""

from __future__ import annotations

from nouscoder.verifier.grading.verdict_cache import Grading


class AroundGrading:
    """Base of those; a subclass says how it grades with the help of `inner`."""

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
