"""The memory that all requests in progress may hold together: bodies, and answers that clients have not taken yet.

INVARIANT: the requests in progress hold at most `budget_bytes` together: their bytes on the wire, what their JSON
becomes when it is decoded (formats/json_size.py), and their answers. Of one request, decoded values count only until it
holds seven eighths of the budget, so that a request alone always has room, also for its answer. Only answers of at most
SMALL_ANSWER_BYTES are never refused, because they cost little more than their connection. A body that would exceed the
budget is refused at once and can be repeated. An answer waits for room first: for ROOM_PATIENCE_S at most, and all that
wait together have at most an eighth of the budget. The bytes of a request are free again when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from nouscoder.verifier.grading.grader import QueueFull

SMALL_ANSWER_BYTES = 16 * 1024
ROOM_PATIENCE_S = 2.0
_LOOK_S = 0.05
_ROOM_SHARE = 8  # an eighth of the budget: for answers that wait, and beside decoded values
_RETRY_AFTER_S = 1


class MemoryBudgetExceeded(QueueFull):
    """The requests in progress hold as many bytes as they may."""

    def __init__(self) -> None:
        super().__init__(_RETRY_AFTER_S)
        self.args = ("the requests in progress hold as much memory as they may; retry",)


class Reservation:
    """The bytes of one request."""

    def __init__(self, budget: MemoryBudget, request: Reservation | None = None) -> None:
        """With `request` this is the reservation of a part of it, one of its submissions."""
        self._budget = budget
        self._request = request
        self._answer_bytes = 0
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that the request holds from now on. Raises MemoryBudgetExceeded."""
        self._budget.take(num_bytes)
        self.num_bytes += num_bytes

    def add_decoded(self, num_bytes: int) -> None:
        """Count bytes of decoded values, as far as the request may hold them. Raises MemoryBudgetExceeded."""
        own_bytes = self.num_bytes + (0 if self._request is None else self._request.num_bytes)
        most_bytes = self._budget.budget_bytes - self._budget.budget_bytes // _ROOM_SHARE
        self.add(max(0, min(num_bytes, most_bytes - own_bytes)))

    @contextmanager
    def part(self) -> Iterator[Reservation]:
        """The reservation of one of many submissions of this request, released at its end."""
        part = Reservation(self._budget, self)
        try:
            yield part
        finally:
            part.close()

    def release(self, num_bytes: int) -> None:
        """Count bytes that the request no longer holds."""
        self._budget.give(num_bytes)
        self.num_bytes -= num_bytes

    async def add_answer(self, num_bytes: int) -> None:
        """Count an answer, or a part of a stream, until the request ends. Raises MemoryBudgetExceeded.

        The request holds one part at a time, so only what is more than the largest part before is counted.
        """
        more = num_bytes - self._answer_bytes
        if more <= 0:
            return
        if num_bytes <= SMALL_ANSWER_BYTES:
            self._budget.take(more, always=True)
        else:
            await self._budget.take_for_answer(more)
        self._answer_bytes = num_bytes
        self.num_bytes += more

    def close(self) -> None:
        """Count that the request has ended."""
        self.release(self.num_bytes)

    def close_after(self, context: Any) -> None:
        """Close when the gRPC call of this context has ended. (The stubs' type of a callback admits no function.)"""
        context.add_done_callback(lambda _: self.close())


class MemoryBudget:
    """Shared by REST and gRPC."""

    def __init__(self, budget_bytes: int, whole: MemoryBudget | None = None) -> None:
        """With `whole` this is a part of it: what is taken from the part is taken from the whole too."""
        self.budget_bytes = budget_bytes
        self._whole = whole
        self._waiting_bytes = 0
        self.held_bytes = 0

    def part(self, share: float) -> MemoryBudget:
        """The budget for some of what requests hold, which gets no more than this share of the whole."""
        return MemoryBudget(int(share * self.budget_bytes), self)

    def take(self, num_bytes: int, *, always: bool = False) -> None:
        """Raises MemoryBudgetExceeded when fewer bytes are left, unless `always`."""
        if not always and self.held_bytes + num_bytes > self.budget_bytes:
            raise MemoryBudgetExceeded
        if self._whole is not None:
            self._whole.take(num_bytes, always=always)
        self.held_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        """Give back what was taken."""
        self.held_bytes -= num_bytes
        if self._whole is not None:
            self._whole.give(num_bytes)

    async def take_for_answer(self, num_bytes: int) -> None:
        """Like `take` for an answer that exists, which waits for room. Raises MemoryBudgetExceeded."""
        loop = asyncio.get_running_loop()
        end = loop.time() + ROOM_PATIENCE_S
        may_wait = self._waiting_bytes + num_bytes <= self.budget_bytes // _ROOM_SHARE
        self._waiting_bytes += num_bytes
        try:
            while True:
                try:
                    self.take(num_bytes)
                    return
                except MemoryBudgetExceeded:
                    if not may_wait or loop.time() >= end:
                        raise
                await asyncio.sleep(_LOOK_S)
        finally:
            self._waiting_bytes -= num_bytes

    @contextmanager
    def request(self) -> Iterator[Reservation]:
        """The reservation of one request, released at its end."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            reservation.close()


_current: ContextVar[Reservation | None] = ContextVar("reservation", default=None)


@contextmanager
def charging(reservation: Reservation) -> Iterator[None]:
    """Charge `charge_decoded` of this task, and of all tasks that it starts, to `reservation`."""
    token = _current.set(reservation)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def charging_part() -> Iterator[None]:
    """Release what this submission of a request charges at the end of the submission, before that of the request."""
    whole = _current.get()
    if whole is None:
        yield
        return
    with whole.part() as part, charging(part):
        yield


def charge_decoded(num_bytes: int) -> None:
    """Count bytes of decoded values for the request of this task. Raises MemoryBudgetExceeded."""
    reservation = _current.get()
    if reservation is not None:
        reservation.add_decoded(num_bytes)
