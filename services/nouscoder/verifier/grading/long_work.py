"""Threads for works that hold the interpreter for long, such as those with the values of one large case.

INVARIANT: at most one work of a OneThread is in progress. A work that has not begun after PATIENCE_S, or whose caller
has gone, never begins. While a work of `in_turn` is in progress, the garbage collector is off.

Each call of a decoder or encoder keeps the interpreter for up to a tenth of a second, and the event loop would wait for
those of several threads, one after the other, and for collections of all the values in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from nouscoder.formats.json_values import without_collections
from nouscoder.verifier.grading.fair_queue import QueueFull

PATIENCE_S = 60.0
_RETRY_AFTER_S = 5
Result = TypeVar("Result")


@dataclass(slots=True)
class _Pending(Generic[Result]):
    """A work whose result is awaited."""

    future: Future[Result]
    is_late: bool = False

    def give_up(self) -> None:
        """Cancel it unless it has begun."""
        self.is_late = self.future.cancel()


class OneThread:
    """Works wait in the order of the calls. `waits` is their number and the seconds that they waited."""

    def __init__(self, name: str, patience_s: float = PATIENCE_S) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._patience_s = patience_s
        self.waits = (0, 0.0)

    async def run(self, act: Callable[..., Result], *arguments: object) -> Result:
        """The result of `act`. Raises what it raises, and QueueFull when it has not begun after the patience."""
        called_s = time.monotonic()

        def work() -> Result:
            num, waited_s = self.waits  # only this thread writes it
            self.waits = (num + 1, waited_s + time.monotonic() - called_s)
            return act(*arguments)

        pending = _Pending(self._executor.submit(work))
        late = asyncio.get_running_loop().call_later(self._patience_s, pending.give_up)
        try:
            return await asyncio.wrap_future(pending.future)
        except asyncio.CancelledError:
            if pending.is_late:
                raise QueueFull(_RETRY_AFTER_S) from None
            raise
        finally:
            late.cancel()
            del pending.future  # it holds the error, whose traceback holds this frame


thread = OneThread("long work")


async def in_turn(act: Callable[..., Result], *arguments: object) -> Result:
    """The result of `act`, a work with one large case. Raises what it raises, and QueueFull when it began too late."""
    return await thread.run(_run, act, *arguments)


def _run(act: Callable[..., Result], *arguments: object) -> Result:
    with without_collections():
        return act(*arguments)
