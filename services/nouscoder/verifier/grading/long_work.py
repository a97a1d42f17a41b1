"""Work with the values of one large case, in a thread.

INVARIANT: at most one such work is in progress, and the garbage collector is off meanwhile. Each call of a decoder or
encoder keeps the interpreter for up to a tenth of a second, and the event loop would wait for those of several threads,
one after the other, and for collections of all the values in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from nouscoder.formats.json_values import without_collections
from nouscoder.verifier.grading.one_thread import OneThread

Result = TypeVar("Result")
thread = OneThread("long work")


async def in_turn(act: Callable[..., Result], *arguments: object) -> Result:
    """The result of `act`. Raises what it raises, and QueueFull when it has not begun in time."""
    return await thread.run(_run, act, *arguments)


def _run(act: Callable[..., Result], *arguments: object) -> Result:
    with without_collections():
        return act(*arguments)
