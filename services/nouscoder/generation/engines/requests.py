"""The checks of a request and the order of waiting requests, which all engines share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

from nouscoder.generation.engines.base import EngineError, SampleRequest


class WaitingRow(Protocol):
    """What an engine keeps of a waiting request."""

    request: SampleRequest


Row = TypeVar("Row", bound=WaitingRow)


def join_line(waiting: dict[str, Row], row: Row) -> None:
    """Add a row to those that wait, the next one first: at the end, or, if it goes first, before all that do not."""
    waiting[row.request.request_id] = row
    if row.request.goes_first:
        for name in [name for name, other in waiting.items() if not other.request.goes_first]:
            waiting[name] = waiting.pop(name)


def checked_max_tokens(request: SampleRequest, ids_in_use: Collection[str], capacity: int) -> int:
    """The maximum length of the completion when prompt and completion together may have `capacity` tokens.

    Raises EngineError naming the request when its id is in use, or its prompt is empty or leaves no room.
    """
    name = f"request {request.request_id}"
    num_prompt_tokens = len(request.prompt_token_ids)
    if request.request_id in ids_in_use:
        raise EngineError(f"{name}: the id is in use")
    if not num_prompt_tokens:
        raise EngineError(f"{name}: the prompt is empty")
    room = capacity - num_prompt_tokens
    if room < 1:
        raise EngineError(f"{name}: a prompt of {num_prompt_tokens} tokens leaves no room in a total of {capacity}")
    if request.sampling.max_new_tokens < 1:
        raise EngineError(f"{name}: max_new_tokens must be at least 1")
    return min(room, request.sampling.max_new_tokens)
