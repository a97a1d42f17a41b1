"""What every HTTP request passes first: its id, its token, its deadline. Plain ASGI, so that streams stay streams.

INVARIANT: no request to a path outside `OPEN` reaches the API without a valid token, unless no tokens are configured;
every answer carries the request's id; at its deadline a request's work is cancelled, which frees its sandbox.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from nouscoder.verifier.access.api_keys import ApiKeys
from nouscoder.verifier.access.caller import ANONYMOUS, Caller, request_id_from, set_caller

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/", "/healthz", "/readyz", "/openapi.json"})
MAX_DEADLINE_S = 86400
_CHALLENGE = (b"www-authenticate", b"Bearer")


class BadDeadline(ValueError):
    """X-Deadline-S is no positive number."""


class Gatekeeper:
    """Stands before `app`."""

    def __init__(self, app: App, api_keys: ApiKeys) -> None:
        self._app = app
        self._api_keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {bytes(name).lower(): bytes(value).decode("latin-1") for name, value in scope["headers"]}
        answer = _Answer(send, request_id_from(headers.get(b"x-request-id")))
        caller = self._caller(scope["path"], headers, answer.request_id)
        if caller is None:
            await answer.fault(401, "give a valid token: Authorization: Bearer TOKEN", None, _CHALLENGE)
            return
        try:
            deadline_s = _deadline_s(headers.get(b"x-deadline-s"))
        except BadDeadline as error:
            await answer.fault(422, f"X-Deadline-S: {error}", "X-Deadline-S")
            return
        set_caller(caller)
        if deadline_s is None:
            await self._app(scope, receive, answer.send)
            return
        try:
            async with asyncio.timeout(deadline_s) as limit:
                await self._app(scope, receive, answer.send)
        except TimeoutError:
            if not limit.expired():
                raise
            await answer.cut(f"the deadline of {deadline_s:g} s has passed")

    def _caller(self, path: str, headers: dict[bytes, str], request_id: str) -> Caller | None:
        """None when a token is needed and none that is valid was given."""
        if self._api_keys.is_open:
            return Caller(ANONYMOUS, request_id)
        kind, _, secret = headers.get(b"authorization", "").partition(" ")
        key = self._api_keys.find(secret.strip()) if kind.lower() == "bearer" else None
        if key is not None:
            return Caller(key.client, request_id, key.quota)
        return Caller(ANONYMOUS, request_id) if path in OPEN else None


class _Answer:
    """One answer: knows whether it has begun, so that it can still be ended properly."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self._send = send
        self._begun: str | None = None
        self._ended = False

    async def send(self, message: Message) -> None:
        """As ASGI's send; the request's id is added."""
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            kinds = [bytes(value) for name, value in headers if bytes(name).lower() == b"content-type"]
            self._begun = kinds[0].decode("latin-1") if kinds else ""
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended = True
        await self._send(message)

    async def fault(self, status: int, detail: str, field: str | None, *more: tuple[bytes, bytes]) -> None:
        """A whole answer that says what is wrong."""
        headers = [(b"content-type", b"application/json"), *more]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": _record(detail, field)})

    async def cut(self, detail: str) -> None:
        """End the answer: 504 when it has not begun, else one last record of the stream that says why."""
        if self._begun is None:
            await self.fault(504, detail, "X-Deadline-S")
        elif not self._ended:
            record = _record(detail, "X-Deadline-S")
            event = b"event: fault\ndata: " + record + b"\n\n"
            await self.send(
                {"type": "http.response.body", "body": event if "event-stream" in self._begun else record + b"\n"}
            )


def _record(detail: str, field: str | None) -> bytes:
    return json.dumps({"detail": detail, "field": field}).encode()


def _deadline_s(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_DEADLINE_S:
        raise BadDeadline(f"must be a number of seconds over 0, at most {MAX_DEADLINE_S}")
    return seconds
