"""A submission: code sent for grading, the tests it must pass and the limits it runs under."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one test's process tree. Defaults are NousCoder-14B's: 15 s and 4 GiB."""

    wall_time_s: float = 15.0
    cpu_time_s: float = 15.0
    memory_bytes: int = 4 * 1024**3
    output_bytes: int = 64 * 1024**2
    processes: int = 64

    def __post_init__(self) -> None:
        """Raises ValueError naming the first limit that is not positive."""
        for name in ("wall_time_s", "cpu_time_s", "memory_bytes", "output_bytes", "processes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"limits.{name} must be positive, not {getattr(self, name)!r}")


class ComparatorKind(StrEnum):
    """How an output is compared with what was expected."""

    EXACT = "exact"
    LINES = "lines"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Comparator:
    """`float_tolerance` (absolute or relative, the wider) applies to `tokens` and to call results; 0 is off."""

    kind: ComparatorKind = ComparatorKind.TOKENS
    float_tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class StdinCase:
    """The program reads `input` on stdin and must print `output`."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class CallCase:
    """`entry_point(*args, **kwargs)` must return `expected`; all are JSON values."""

    args: tuple[JsonValue, ...] = ()
    kwargs: dict[str, JsonValue] = field(default_factory=dict)
    expected: JsonValue = None


@dataclass(frozen=True, slots=True)
class StdinTests:
    """Tests of a whole program."""

    cases: tuple[StdinCase, ...]


@dataclass(frozen=True, slots=True)
class CallTests:
    """Tests of one function, or of a method of `class Solution` when there is one."""

    entry_point: str
    cases: tuple[CallCase, ...]


Tests = StdinTests | CallTests


@dataclass(frozen=True, slots=True)
class Submission:
    """Code to grade. Give `code`, or `completion` to have the code extracted from a model's answer."""

    tests: Tests
    code: str | None = None
    completion: str | None = None
    language: str = "python"
    limits: Limits = Limits()
    comparator: Comparator = Comparator()
    stop_on_first_failure: bool = True
    reveal: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError when not exactly one of `code` and `completion` is given."""
        if (self.code is None) == (self.completion is None):
            raise ValueError("give exactly one of code and completion")
