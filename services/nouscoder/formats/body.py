"""The base of all JSON records, and the records of limits and comparators.

Unknown fields are refused, types are strict, and a fault is named by its field.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import ErrorDetails

from nouscoder.domain.submission import TEST_TYPES, Comparator, ComparatorKind, Limits

_Item = TypeVar("_Item")


class _FirstFault(FailFast):
    """Hashable, for unions."""

    __hash__ = object.__hash__


# A client may send millions of items. Only the first that is wrong is a fault.
ListOf = Annotated[list[_Item], _FirstFault()]
MOST_FAULTS = 1000  # each takes microseconds and half a kilobyte to list


class Body(BaseModel):
    """Base of every received record: unknown fields fail, "1" is not 1. Frozen, so that defaults can be shared."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def first_fault(error: ValidationError, prefix: str = "") -> tuple[str, str]:
    """(field, message) of the first fault. `prefix` is the field that holds the whole record.

    Of a record with very many faults only their number is told.
    """
    if error.error_count() > MOST_FAULTS:
        return prefix or "body", f"has {error.error_count()} faults"
    return _fault(error.errors(include_url=False, include_context=True)[0], prefix)


def all_faults(error: ValidationError) -> list[tuple[str, str]]:
    """(field, message) of each fault."""
    return [_fault(fault, "") for fault in error.errors(include_url=False, include_context=True)]


def _fault(fault: ErrorDetails, prefix: str) -> tuple[str, str]:
    kind, context = fault["type"], fault.get("ctx", {})
    field = _field_name((prefix, *fault["loc"]) if prefix else fault["loc"])
    if kind == "union_tag_invalid":
        given = str(context.get("tag"))
        return f"{field}.type", f"{given!r:.40} is none of {', '.join(TEST_TYPES)}"
    if kind == "union_tag_not_found":
        return f"{field}.type", "is missing"
    if kind == "json_invalid":
        return "body", f"not JSON: {context.get('error', fault['msg'])}"
    if kind == "model_type":
        return field, "not a JSON object"
    if kind == "extra_forbidden":
        return field, "unknown field"
    return field, fault["msg"].removeprefix("Value error, ")


def _field_name(loc: tuple[int | str, ...]) -> str:
    """A name such as tests.cases[0].input, from pydantic's path, which also has the tag of a union."""
    parts = [part for at, part in enumerate(loc) if not (at == 1 and loc[0] == "tests" and part in TEST_TYPES)]
    name = ""
    for part in parts:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    return name.lstrip(".") or "body"


# The JSON form of limits and comparators.

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

    type: Literal["exact", "lines", "tokens", "unordered_lines", "kattis", "lcb"] = "tokens"
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
