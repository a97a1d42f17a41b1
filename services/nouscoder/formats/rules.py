"""How tests are run and compared, as JSON: limits and comparator."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from nouscoder.domain.submission import Comparator, ComparatorKind, Limits
from nouscoder.formats.body import Body

_DEFAULT = Limits()


class LimitsBody(Body):
    """Bounds on one test."""

    wall_time_s: float = Field(_DEFAULT.wall_time_s, gt=0, description="seconds")
    cpu_time_s: float = Field(_DEFAULT.cpu_time_s, gt=0, description="seconds, user and system")
    memory_bytes: int = Field(_DEFAULT.memory_bytes, gt=0)
    output_bytes: int = Field(_DEFAULT.output_bytes, gt=0, description="of stdout, and of stderr")
    processes: int = Field(_DEFAULT.processes, gt=0, description="processes and threads alive at once")

    def record(self) -> Limits:
        """The domain's record."""
        return Limits(self.wall_time_s, self.cpu_time_s, self.memory_bytes, self.output_bytes, self.processes)


class ComparatorBody(Body):
    """How outputs are compared; a call's result is always compared as a value."""

    type: Literal["exact", "lines", "tokens", "unordered_lines"] = "tokens"
    float_tolerance: float = Field(0.0, ge=0, description="absolute or relative, the wider; 0 is off")
    absolute_tolerance: float = Field(0.0, ge=0, description="of numbers; 0 is off")
    relative_tolerance: float = Field(0.0, ge=0, description="of numbers, in parts of the larger one; 0 is off")

    def record(self) -> Comparator:
        """The domain's record."""
        return Comparator(
            ComparatorKind(self.type), self.float_tolerance, self.absolute_tolerance, self.relative_tolerance
        )

    @classmethod
    def of(cls, comparator: Comparator) -> ComparatorBody:
        """The JSON form of the domain's record."""
        return cls(
            type=comparator.kind.value,
            float_tolerance=comparator.float_tolerance,
            absolute_tolerance=comparator.absolute_tolerance,
            relative_tolerance=comparator.relative_tolerance,
        )
