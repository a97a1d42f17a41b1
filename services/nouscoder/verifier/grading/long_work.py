"""Work with the values of one large case, in a thread.

INVARIANT: at most one such work is in progress. Each call of a decoder or encoder keeps the interpreter for up to a
tenth of a second, and the event loop would wait for those of several threads, one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
_worker = ThreadPoolExecutor(1, "long work")


async def in_turn(act: Callable[..., Result], *arguments: object) -> Result:
    """The result of `act`. Raises what it raises."""
    return await asyncio.get_running_loop().run_in_executor(_worker, act, *arguments)
