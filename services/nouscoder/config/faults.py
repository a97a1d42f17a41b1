"""One sentence for each fault of a configuration, with the nearest known key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from nouscoder.config import environment, objective
from nouscoder.config.keys import keys_of
from nouscoder.errors import did_you_mean

_TAGS = (environment.TAG, objective.TAG)


def sentences(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """The faults of a configuration in the order of its keys."""
    return [_sentence(fault, model) for fault in error.errors(include_url=False)]


def _sentence(fault: Any, model: type[BaseModel]) -> str:
    loc = [str(part) for part in fault["loc"] if not str(part).startswith(_TAGS)]
    where = ".".join(loc) or "configuration"
    if fault["type"] == "extra_forbidden":
        return f"unknown key {where}{_nearest(loc, model)}"
    if fault["type"] == "string_pattern_mismatch":
        return f"{where}: expected: {_description(loc, model)} (given: {fault['input']!r:.80})"
    message = fault["msg"].removeprefix("Value error, ")
    if where == "configuration" or isinstance(fault["input"], dict):
        return f"{where}: {message}"
    return f"{where}: {message} (given: {fault['input']!r:.80})"


def _description(loc: list[str], model: type[BaseModel]) -> str:
    """What the key is. `loc` may have the index of a section in a list, which keys do not have."""
    path = tuple(part for part in loc if not part.isdigit())
    return next((key.field.description or "" for key in keys_of(model) if key.path == path), "another text")


def _nearest(loc: list[str], model: type[BaseModel]) -> str:
    """A key of the same name elsewhere; else the nearest name in the same section; else the nearest of all keys."""
    keys = [key.path for key in keys_of(model)]
    namesakes = [".".join(path) for path in keys if path[-1] == loc[-1]]
    if namesakes:
        return f": did you mean {' or '.join(namesakes[:3])}?"
    section = tuple(loc[:-1])
    siblings = {path[len(section)] for path in keys if path[: len(section)] == section and len(path) > len(section)}
    near = did_you_mean(loc[-1], siblings)
    if near and section:
        return near.replace("mean ", f"mean {'.'.join(section)}.")
    return near or did_you_mean(".".join(loc), [".".join(path) for path in keys])
