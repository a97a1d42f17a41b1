"""A thread for works that hold the interpreter for long, such as those with the values of one large body.

INVARIANT: at most one work of a OneThread is in progress. A work that has not begun after PATIENCE_S, or whose caller
has gone, never begins.

Each call of a decoder or encoder keeps the interpreter for up to a tenth of a second, and the event loop would wait for
those of several threads, one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from nouscoder.http_server.fair_queue import QueueFull

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
