"""The memory that all requests in progress may hold together.

INVARIANT: the requests in progress hold at most `budget_bytes` together, by their size on the wire. A request that
would exceed it is refused and can be repeated; its bytes are free again when it ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from nouscoder.verifier.grading.grader import QueueFull

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_RETRY_AFTER_S = 1
_SCOPE_KEY = "nouscoder.reservation"


class MemoryBudgetExceeded(QueueFull):
    """The requests in progress hold as many bytes as they may."""

    def __init__(self) -> None:
        super().__init__(_RETRY_AFTER_S)
        self.args = ("the requests in progress hold as much memory as they may; retry",)


class Reservation:
    """The bytes of one request."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that the request holds from now on. Raises MemoryBudgetExceeded."""
        self._budget.take(num_bytes)
        self.num_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count bytes that the request no longer holds."""
        self._budget.held_bytes -= num_bytes
        self.num_bytes -= num_bytes


class MemoryBudget:
    """Shared by REST and gRPC."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises MemoryBudgetExceeded when fewer bytes are left."""
        if self.held_bytes + num_bytes > self._budget_bytes:
            raise MemoryBudgetExceeded
        self.held_bytes += num_bytes

    @contextmanager
    def request(self) -> Iterator[Reservation]:
        """The reservation of one request, released at its end."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            self.held_bytes -= reservation.num_bytes


class CountBodies:
    """ASGI middleware that counts the bytes of each body as they arrive, until the request's answer has ended.

    The reader of a body that exceeds the budget gets MemoryBudgetExceeded.
    """

    def __init__(self, app: App, budget: MemoryBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request."""
        with self._budget.request() as reservation:

            async def counted() -> Message:
                message = await receive()
                reservation.add(len(message.get("body", b"")))
                return message

            await self._app({**scope, _SCOPE_KEY: reservation}, counted, send)


def release_part(scope: Message, num_bytes: int) -> None:
    """Count bytes of the body that its reader has passed on, to the disk for example."""
    reservation: Reservation | None = scope.get(_SCOPE_KEY)
    if reservation is not None:
        reservation.release(num_bytes)
