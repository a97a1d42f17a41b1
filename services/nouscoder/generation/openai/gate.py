"""ASGI middleware: who may use the API, and how many requests at a time.

INVARIANT: no request to a path outside `OPEN` reaches the API without a valid token, when tokens are configured.
Without tokens no request that a browser sends for a foreign site does (http_server/api_keys.py). At most
`max_requests` requests are in progress, from before their body is read until the last byte of their answer. A client
that takes nothing of its answer for _READER_PATIENCE_S is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse

from nouscoder.generation.openai.faults import ApiFault
from nouscoder.http_server.api_keys import ApiKeys, foreign_part

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/healthz", "/readyz"})
_RETRY_AFTER_S = "1"
# Parts wait only when the buffers of the connection are full.
_READER_PATIENCE_S = 60.0


class Gate:
    """Wraps `app`. `hosts` are the public names of a service without tokens."""

    def __init__(self, app: App, api_keys: ApiKeys, hosts: Collection[str], max_requests: int) -> None:
        self._app = app
        self._api_keys = api_keys
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_requests = max_requests
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        headers = {bytes(name).lower(): bytes(value).decode("latin-1") for name, value in scope["headers"]}
        fault = self._fault(headers)
        if fault is not None:
            await response(fault)(scope, receive, send)
            return
        self._num_requests += 1
        reader = _Reader(send)
        try:
            await self._app(scope, receive, reader.send)
        except TimeoutError:
            if not reader.is_gone:
                raise
        finally:
            self._num_requests -= 1

    def _fault(self, headers: dict[bytes, str]) -> ApiFault | None:
        """Why a request with these headers is not admitted."""
        if self._api_keys.is_open:
            foreign = foreign_part(headers.get(b"host"), headers.get(b"origin"), self._hosts)
            if foreign is not None:
                message = (
                    f"{foreign}: a service without tokens takes no request from another site; name the site in"
                    " generation.openai.hosts, or use tokens"
                )
                return ApiFault(403, message, code="foreign_site")
        elif not self._is_known(headers.get(b"authorization", "")):
            return ApiFault(401, "a valid token is required: Authorization: Bearer TOKEN", code="invalid_api_key")
        if self._num_requests >= self._max_requests:
            message = f"{self._num_requests} requests are in progress, the most that are taken; retry later"
            return ApiFault(429, message, code="rate_limit_exceeded", kind="rate_limit_error")
        return None

    def _is_known(self, authorization: str) -> bool:
        kind, _, secret = authorization.partition(" ")
        return kind.lower() == "bearer" and self._api_keys.find(secret.strip()) is not None


def response(fault: ApiFault) -> JSONResponse:
    """The answer to a request that is refused."""
    headers = {"www-authenticate": "Bearer"} if fault.status == 401 else {}
    if fault.status in (429, 503):
        headers["retry-after"] = _RETRY_AFTER_S
    return JSONResponse(fault.record(), fault.status, headers=headers)


class _Reader:
    """The client, which must take each part of its answer within _READER_PATIENCE_S."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_gone = False

    async def send(self, message: Message) -> None:
        """Send a part. Raises TimeoutError, which ends the request, when the client reads nothing for too long."""
        try:
            async with asyncio.timeout(_READER_PATIENCE_S):
                await self._send(message)
        except TimeoutError:
            self.is_gone = True
            raise
