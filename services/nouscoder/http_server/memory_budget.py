"""The memory that all requests in progress may hold together: bodies, and answers that clients have not taken yet.

INVARIANT: the requests in progress hold at most `budget_bytes` together: their bytes on the wire, what their JSON
becomes when it is decoded (formats/json_values.py), and their answers. Of one request, decoded values count only until
it holds seven eighths of the budget, so that a request alone always has room, also for its answer. Only answers of at
most SMALL_ANSWER_BYTES are never refused, because they cost little more than their connection. A body that would exceed
the budget is refused at once and can be repeated. An answer waits for room first: for ROOM_PATIENCE_S at most, and all
that wait together have at most an eighth of the budget. The bytes of a request are free again when it ends.

INVARIANT: where the scope names a client (CLIENT_KEY), the requests of one client hold at most half of the budget.

INVARIANT: over REST an answer is counted before it is sent, and until `send` has returned (http_server/delivery.py:
until the transport has it). An answer of known length for which there is no room becomes a 429. A stream gets a last
record.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nouscoder.http_server.fair_queue import QueueFull

SMALL_ANSWER_BYTES = 16 * 1024
ROOM_PATIENCE_S = 2.0
_LOOK_S = 0.05
_CLIENT_SHARE = 0.5
_ROOM_SHARE = 8  # an eighth of the budget: for answers that wait, and beside decoded values


class MemoryBudgetExceeded(QueueFull):
    """The requests in progress hold as many bytes as they may."""

    def __init__(self) -> None:
        super().__init__(1, "the requests in progress hold as much memory as they may; retry")


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

    def until_end_of(self, context: Any) -> Self:
        """Close when the gRPC call of this context has ended. (The stubs' type of a callback admits no function.)"""
        context.add_done_callback(lambda _: self.close())
        return self


class MemoryBudget:
    """Shared by REST and gRPC."""

    def __init__(self, budget_bytes: int, whole: MemoryBudget | None = None, *, is_divided: bool = True) -> None:
        """With `whole` this is a part of it: what is taken from the part is taken from the whole too.

        Unless it `is_divided`, one client may hold all of it.
        """
        self.budget_bytes = budget_bytes
        self._is_divided = is_divided
        self._of_clients: WeakValueDictionary[str, MemoryBudget] = WeakValueDictionary()  # of those with requests
        self._whole = whole
        self._waiting_bytes = 0
        self.held_bytes = 0

    def part(self, share: float) -> MemoryBudget:
        """The budget for some of what requests hold, which gets no more than this share of the whole."""
        return MemoryBudget(int(share * self.budget_bytes), self)

    def of_client(self, client: str | None) -> MemoryBudget:
        """The part of a client; all of it for a client without a name."""
        if client is None or not self._is_divided:
            return self
        return self._of_clients.setdefault(client, self.part(_CLIENT_SHARE))

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


CLIENT_KEY = "nouscoder.client"  # of a scope: whose request it is
_SCOPE_KEY = "nouscoder.reservation"


@dataclass(frozen=True, slots=True)
class Refusals:
    """How a service writes that there is no room: as a whole answer, and as the last part of a stream of a type."""

    whole: Callable[[str], bytes]
    last: Callable[[str, str], bytes]  # content type and message


class CountMemory:
    """Counts until the request's answer has been sent, except for paths that are open to everybody.

    Pages that everybody may read are the same bytes for all. The reader of a body that exceeds the budget gets
    MemoryBudgetExceeded.
    """

    def __init__(
        self, app: ASGIApp, budget: MemoryBudget, is_open_path: Callable[[str], bool], refusals: Refusals
    ) -> None:
        self._app = app
        self._budget = budget
        self._is_open_path = is_open_path
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or self._is_open_path(scope["path"]):
            await self._app(scope, receive, send)
            return
        with self._budget.of_client(scope.get(CLIENT_KEY)).request() as reservation:

            async def counted() -> Message:
                message = await receive()
                reservation.add(len(message.get("body", b"")))
                return message

            answer = _CountedAnswer(reservation, send, self._refusals)
            with charging(reservation):
                await self._app({**scope, _SCOPE_KEY: reservation}, counted, answer.send)


class _CountedAnswer:
    def __init__(self, reservation: Reservation, send: Send, refusals: Refusals) -> None:
        self._reservation = reservation
        self._refusals = refusals
        self._send = send
        self._held_back: Message | None = None  # the head of an answer of known length, which may become a 429
        self._content_type = ""
        self._is_refused = False

    async def send(self, message: Message) -> None:
        """ASGI's `send`."""
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            headers = {bytes(name).lower(): bytes(value) for name, value in message.get("headers", ())}
            self._content_type = headers.get(b"content-type", b"").decode("latin-1")
            if b"content-length" in headers:
                self._held_back = message
            else:
                await self._send(message)
            return
        try:
            await self._reservation.add_answer(len(message.get("body", b"")))
        except MemoryBudgetExceeded as error:
            self._is_refused = True
            await self._refuse(error)
            return
        if self._held_back is not None:
            head, self._held_back = self._held_back, None
            await self._send(head)
        await self._send(message)

    async def _refuse(self, error: MemoryBudgetExceeded) -> None:
        if self._held_back is None:
            last = self._refusals.last(self._content_type, str(error))
            await self._send({"type": "http.response.body", "body": last})
            return
        record = self._refusals.whole(str(error))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(record)),
            (b"retry-after", b"%d" % error.retry_after_s),
        ]
        await self._send({"type": "http.response.start", "status": 429, "headers": headers})
        await self._send({"type": "http.response.body", "body": record})


async def stored_parts(request: Request) -> AsyncIterator[bytes]:
    """The parts of a body whose reader has put each of them on the disk when it asks for the next."""
    reservation: Reservation | None = request.scope.get(_SCOPE_KEY)
    async for part in request.stream():
        if part:
            yield part
            if reservation is not None:
                reservation.release(len(part))


async def add_answer(scope: Scope, num_bytes: int) -> None:
    """Count an answer before it is made, or the largest part of a stream. Raises MemoryBudgetExceeded."""
    reservation: Reservation | None = scope.get(_SCOPE_KEY)
    if reservation is not None:
        await reservation.add_answer(num_bytes)
