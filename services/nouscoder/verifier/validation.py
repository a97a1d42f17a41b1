"""What this service can grade. Pure; the same rules for REST, gRPC, files and the broker."""

from __future__ import annotations

from dataclasses import dataclass, fields

from nouscoder.submission import CallTests, Limits, Submission
from nouscoder.verifier.languages import installed


class InvalidSubmission(ValueError):
    """A submission that cannot be graded as it stands: the caller's fault, not the candidate's. Names the field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest limits a submission may ask for, so that no candidate holds a slot or the memory for ever."""

    limits: Limits = Limits(
        wall_time_s=300.0, cpu_time_s=300.0, memory_bytes=64 * 1024**3, output_bytes=256 * 1024**2, processes=4096
    )
    num_tests: int = 10_000


def validate(submission: Submission, bounds: Bounds) -> None:
    """Raises InvalidSubmission naming the first field at fault."""
    if submission.language not in installed():
        there = ", ".join(installed())
        raise InvalidSubmission("language", f"{submission.language!r:.40} cannot be graded here; these can: {there}")
    if not submission.tests.cases:
        raise InvalidSubmission("tests.cases", "must hold at least one test")
    if len(submission.tests.cases) > bounds.num_tests:
        raise InvalidSubmission("tests.cases", f"may hold at most {bounds.num_tests} tests")
    if isinstance(submission.tests, CallTests) and not submission.tests.entry_point.isidentifier():
        raise InvalidSubmission("tests.entry_point", "must be the name of a function or method")
    if not submission.comparator.float_tolerance >= 0:
        raise InvalidSubmission("comparator.float_tolerance", "must be at least 0")
    for item in fields(Limits):
        asked, most = getattr(submission.limits, item.name), getattr(bounds.limits, item.name)
        if not asked <= most:
            raise InvalidSubmission(f"limits.{item.name}", f"may be at most {most} here, not {asked!r:.40}")
