"""The JSON form of limits and comparators."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nouscoder.domain.submission import Comparator, ComparatorKind, Limits
from nouscoder.formats.body import Body

_DEFAULT = Limits()


class LimitsBody(Body):
    """The limits of one test."""

    wall_time_s: float = Field(_DEFAULT.wall_time_s, gt=0, description="seconds")
    cpu_time_s: float = Field(_DEFAULT.cpu_time_s, gt=0, description="seconds, user and system")
    memory_bytes: int = Field(_DEFAULT.memory_bytes, gt=0)
    output_bytes: int = Field(_DEFAULT.output_bytes, gt=0, description="of stdout, and of stderr")
    processes: int = Field(_DEFAULT.processes, gt=0, description="processes and threads at once")

    def record(self) -> Limits:
        """The domain record."""
        return Limits(self.wall_time_s, self.cpu_time_s, self.memory_bytes, self.output_bytes, self.processes)


class ComparatorBody(Body):
    """The comparison of outputs. The result of a call is always compared as a value."""

    type: Literal["exact", "lines", "tokens", "unordered_lines", "kattis"] = "tokens"
    float_tolerance: float = Field(0.0, ge=0, description="absolute or relative, whichever is wider; 0 is off")
    absolute_tolerance: float = Field(0.0, ge=0, description="of numbers; 0 is off")
    relative_tolerance: float = Field(
        0.0, ge=0, description="of numbers, relative to the larger one (kattis: to the expected one); 0 is off"
    )
    ignore_case: bool = Field(False, description="upper and lower case ASCII letters of text are equal")

    def record(self) -> Comparator:
        """The domain record."""
        tolerances = (self.float_tolerance, self.absolute_tolerance, self.relative_tolerance)
        return Comparator(ComparatorKind(self.type), *tolerances, self.ignore_case)

    @classmethod
    def of(cls, comparator: Comparator) -> ComparatorBody:
        """The JSON form of a domain record."""
        return cls(
            type=comparator.kind.value,
            float_tolerance=comparator.float_tolerance,
            absolute_tolerance=comparator.absolute_tolerance,
            relative_tolerance=comparator.relative_tolerance,
            ignore_case=comparator.ignore_case,
        )
