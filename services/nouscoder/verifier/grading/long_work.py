"""The thread for works with the values of one large case.

INVARIANT: at most one work of `in_turn` is in progress, and the garbage collector is off meanwhile: it would look at
all the values again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nouscoder.formats.json_values import without_collections
from nouscoder.http_server.parsing import OneThread

Result = TypeVar("Result")

thread = OneThread("long work")


async def in_turn(act: Callable[..., Result], *arguments: object) -> Result:
    """The result of `act`, a work with one large case. Raises what it raises, and QueueFull when it began too late."""
    return await thread.run(_run, act, *arguments)


def _run(act: Callable[..., Result], *arguments: object) -> Result:
    with without_collections():
        return act(*arguments)
