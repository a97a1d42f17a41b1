"""Parses the bodies of requests: bounded before it costs much, and without stalling the event loop.

A decoder reads a whole text in one call, and the interpreter runs nothing else meanwhile, in whatever thread. So the
weight of the text (formats/json_values.py) is counted first, piece by piece. A body with too many values is refused.

INVARIANT: no body above MAX_BYTES or MAX_WEIGHT is decoded. A body above SMALL_WEIGHT or SMALL_BYTES is parsed outside
of the event loop, one at a time, without collections of garbage. What the values of a body take is charged to the
memory budget before it is decoded.

`OneThread` is for works that hold the interpreter for long. Each call of a decoder or encoder keeps it for up to a
tenth of a second, and the event loop would wait for those of several threads, one after the other. INVARIANT: at most
one work of a OneThread is in progress. A work that has not begun after PATIENCE_S, or whose caller has gone, never
begins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from nouscoder.formats.json_values import (
    BYTES_PER_WEIGHT,
    MAX_WEIGHT,
    TooManyValues,
    ValueCount,
    give_way,
    json_weight,
    without_collections,
)
from nouscoder.http_server.fair_queue import QueueFull
from nouscoder.http_server.memory_budget import charge_decoded

MAX_BYTES = 8 * 1024**2
BODIES_OF_MANY = 8  # a batch of lines and a gRPC message may have so many times the bytes of one body
SMALL_BYTES = 256 * 1024
SMALL_WEIGHT = 10_000

Parsed = TypeVar("Parsed")
Parse = Callable[[bytes, ValueCount], Parsed]
Charge = Callable[[], Awaitable[None]]


# A thread for works that hold the interpreter for long.

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


# The bodies of one service.


def weight_of_json(body: bytes) -> int:
    """The weight of a body; of one with too many values, some weight above MAX_WEIGHT."""
    return json_weight(body, MAX_WEIGHT)


class BodyParser:
    """Parses the bodies of one service. `too_large` makes its error for one with too many bytes or values."""

    def __init__(self, too_large: Callable[[str], Exception]) -> None:
        self._too_large = too_large
        self.thread = OneThread("parse")

    async def parsed(
        self,
        body: bytes,
        parse: Parse[Parsed],
        patiently: Callable[[Charge], Awaitable[None]] | None = None,
        weigh: Callable[[bytes], int] = weight_of_json,
    ) -> Parsed:
        """What `parse` makes of a body.

        `parse` also gets the count of the body's values, to which it adds texts that it decodes. `patiently` gets a
        function that charges the memory budget, and may call it again after MemoryBudgetExceeded. `weigh` returns the
        weight of a body that is not JSON. Raises what `parse` and `weigh` raise, what `too_large` makes,
        MemoryBudgetExceeded, and QueueFull when other bodies take too long.
        """
        if len(body) > MAX_BYTES:
            raise self._too_large(f"must have at most {MAX_BYTES} bytes")
        is_short = len(body) <= SMALL_BYTES
        values = ValueCount()
        try:
            values.add_weight(weigh(body) if is_short else await self.thread.run(weigh, body))
            before = values.weight

            async def charge() -> None:
                charge_decoded(BYTES_PER_WEIGHT * before)

            await (charge() if patiently is None else patiently(charge))
            if is_short and before <= SMALL_WEIGHT:
                return parse(body, values)
            found: Parsed = await self.thread.run(_parsed_apart, parse, body, values)
        except TooManyValues as error:
            raise self._too_large(str(error)) from None
        charge_decoded(BYTES_PER_WEIGHT * (values.weight - before))
        return found


def _parsed_apart(parse: Parse[Parsed], body: bytes, values: ValueCount) -> Parsed:
    give_way(len(body))  # the body before this one may have taken long, too
    with without_collections():
        return parse(body, values)
