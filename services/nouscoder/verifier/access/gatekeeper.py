"""ASGI middleware that handles request id, API key and deadline of every HTTP request. It does not buffer streams.

A WebSocket is one request. Its API key is checked again for each message.

INVARIANT: no request to a path that is not open (`is_open_path`) reaches the API without a valid API key, unless no
keys are configured. Then no request that a browser sends for a foreign site reaches the API (api_keys.py).
Every answer carries the request's id. At its deadline the work of a request is cancelled, which frees its sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nouscoder.http_server.api_keys import ApiKeys
from nouscoder.http_server.body import NOT_DECODED, coding_of
from nouscoder.http_server.foreign_sites import foreign_part
from nouscoder.http_server.memory_budget import CLIENT_KEY, Refusals
from nouscoder.verifier.access.caller import ANONYMOUS, Caller, request_id_from, set_caller

# Errors as JSON, for middleware: a whole answer, or the last record of a stream that has begun.


def fault_record(detail: str, field: str | None) -> bytes:
    """The JSON of an error, with the fields of Fault."""
    return json.dumps({"detail": detail, "field": field}).encode()


def last_record(content_type: str, record: bytes) -> bytes:
    """The error as the last part of a stream of this type: an event `fault`, or a line."""
    return b"event: fault\ndata: " + record + b"\n\n" if "event-stream" in content_type else record + b"\n"


REFUSALS = Refusals(
    lambda detail: fault_record(detail, None), lambda kind, detail: last_record(kind, fault_record(detail, None))
)

# Besides the parts of pages, whose names have a digest.
OPEN = frozenset({"/", "/docs", "/healthz", "/readyz", "/openapi.json"})
_OPEN_PARTS = ("/highlight-", "/docs-")
MAX_DEADLINE_S = 86400
_FOREIGN = "a service without tokens takes no request from another site; name the site in verifier.hosts, or use tokens"
_CHALLENGE = (b"www-authenticate", b"Bearer")


class Gatekeeper:
    """Wraps `app`."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys, hosts: Collection[str] = ()) -> None:
        """`hosts` are the public names of a service without keys."""
        self._app = app
        self._api_keys = api_keys
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = {bytes(name).lower(): bytes(value).decode("latin-1") for name, value in scope["headers"]}
        answer = _Answer(send, request_id_from(headers.get(b"x-request-id")), is_websocket=scope["type"] == "websocket")
        caller = self._caller(scope["path"], headers, answer.request_id)
        if caller is None:
            await answer.fault(401, "a valid API key is required: Authorization: Bearer TOKEN", None, _CHALLENGE)
            return
        if self._api_keys.is_open and not is_open_path(scope["path"]):
            foreign = foreign_part(headers.get(b"host"), headers.get(b"origin"), self._hosts)
            if foreign is not None:
                await answer.fault(403, f"{foreign}: {_FOREIGN}", foreign)
                return
        if coding := coding_of(scope):
            detail = f"Content-Encoding: {coding!r} {NOT_DECODED}"
            await answer.fault(415, detail, "Content-Encoding", (b"accept-encoding", b"identity"))
            return
        try:
            deadline_s = _deadline_s(headers.get(b"x-deadline-s"))
        except ValueError as error:
            await answer.fault(422, f"X-Deadline-S: {error}", "X-Deadline-S")
            return
        set_caller(caller)
        scope = {**scope, CLIENT_KEY: caller.share}
        if answer.is_websocket:
            receive = self._while_valid(scope["path"], headers, receive)
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

    def _while_valid(self, path: str, headers: dict[bytes, str], receive: Receive) -> Receive:
        """`receive` of a WebSocket, which ends when its API key is no longer valid."""

        async def received() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and self._caller(path, headers, "") is None:
                return {"type": "websocket.disconnect", "code": 1008, "reason": "the API key is no longer valid"}
            return message

        return received

    def _caller(self, path: str, headers: dict[bytes, str], request_id: str) -> Caller | None:
        """The caller, or None when a valid API key is required and missing."""
        if self._api_keys.is_open:
            return Caller(ANONYMOUS, request_id)
        secret = _secret(headers.get(b"authorization", ""))
        key = None if secret is None else self._api_keys.find(secret)
        if key is not None:
            return Caller(key.client, request_id, key.quota)
        return Caller(ANONYMOUS, request_id) if is_open_path(path) else None


def is_open_path(path: str) -> bool:
    """Whether everybody may request the path."""
    return path in OPEN or path.startswith(_OPEN_PARTS)


class _Answer:
    """One answer. It records whether it has begun, so that it can be ended correctly at any time."""

    def __init__(self, send: Send, request_id: str, *, is_websocket: bool) -> None:
        self.request_id = request_id
        self.is_websocket = is_websocket
        self._send = send
        self._begun: str | None = None
        self._ended = False

    async def send(self, message: Message) -> None:
        """ASGI's `send`, with the request id added to the headers."""
        if message["type"] in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            kinds = [bytes(value) for name, value in headers if bytes(name).lower() == b"content-type"]
            self._begun = kinds[0].decode("latin-1") if kinds else ""
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended = True
        await self._send(message)

    async def fault(self, status: int, detail: str, field: str | None, *more: tuple[bytes, bytes]) -> None:
        """Send a complete error answer."""
        headers = [(b"content-type", b"application/json"), *more]
        kind = "websocket.http.response" if self.is_websocket else "http.response"
        await self.send({"type": f"{kind}.start", "status": status, "headers": headers})
        await self.send({"type": f"{kind}.body", "body": fault_record(detail, field)})

    async def cut(self, detail: str) -> None:
        """End the answer: 504 if it has not begun, else a last record of the stream with the reason."""
        if self._begun is None:
            await self.fault(504, detail, "X-Deadline-S")
        elif self.is_websocket:
            await self.send({"type": "websocket.close", "code": 1008, "reason": detail})
        elif not self._ended:
            record = fault_record(detail, "X-Deadline-S")
            await self.send({"type": "http.response.body", "body": last_record(self._begun, record)})


def _secret(authorization: str) -> str | None:
    """The API key of the header, None without one.

    It is also the password of Basic, for programs that can only be given a URL: http://any:TOKEN@host.
    """
    kind, _, given = authorization.partition(" ")
    if kind.lower() == "bearer":
        return given.strip()
    if kind.lower() != "basic":
        return None
    try:
        return base64.b64decode(given.strip(), validate=True).decode("utf8").partition(":")[2]
    except ValueError:
        return None


def _deadline_s(header: str | None) -> float | None:
    """Raises ValueError."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_DEADLINE_S:
        raise ValueError(f"must be a number of seconds over 0, at most {MAX_DEADLINE_S}")
    return seconds
