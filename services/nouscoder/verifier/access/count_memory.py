"""ASGI middleware that counts what each request holds in the memory budget: its body, and the answer until it is sent.

INVARIANT: an answer is counted before it is sent, and until `send` has returned (http_server/delivery.py: until the
transport has it). An answer of known length for which there is no room becomes a 429. A stream gets a last record.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from starlette.requests import Request

from nouscoder.verifier.access.fault_records import fault_record, last_record
from nouscoder.verifier.access.gatekeeper import is_open_path
from nouscoder.verifier.access.memory_budget import MemoryBudget, MemoryBudgetExceeded, Reservation, charging

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_SCOPE_KEY = "nouscoder.reservation"


class CountMemory:
    """Counts until the request's answer has been sent. Pages that everybody may read are the same bytes for all.

    The reader of a body that exceeds the budget gets MemoryBudgetExceeded.
    """

    def __init__(self, app: App, budget: MemoryBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or is_open_path(scope["path"]):
            await self._app(scope, receive, send)
            return
        with self._budget.request() as reservation:

            async def counted() -> Message:
                message = await receive()
                reservation.add(len(message.get("body", b"")))
                return message

            answer = _CountedAnswer(reservation, send)
            with charging(reservation):
                await self._app({**scope, _SCOPE_KEY: reservation}, counted, answer.send)


class _CountedAnswer:
    def __init__(self, reservation: Reservation, send: Send) -> None:
        self._reservation = reservation
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
        record = fault_record(str(error), None)
        if self._held_back is None:
            await self._send({"type": "http.response.body", "body": last_record(self._content_type, record)})
            return
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


async def add_answer(scope: Message, num_bytes: int) -> None:
    """Count an answer before it is made, or the largest part of a stream. Raises MemoryBudgetExceeded."""
    reservation: Reservation | None = scope.get(_SCOPE_KEY)
    if reservation is not None:
        await reservation.add_answer(num_bytes)
