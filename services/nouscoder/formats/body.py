"""The base of all JSON records. Unknown fields are refused, types are strict, and a fault is named by its field."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError
from pydantic_core import ErrorDetails

from nouscoder.domain.submission import TEST_TYPES

_Item = TypeVar("_Item")
# A client may send millions of items. Only the first that is wrong is a fault.
ListOf = Annotated[list[_Item], FailFast()]
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
