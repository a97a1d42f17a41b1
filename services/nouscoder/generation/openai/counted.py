"""ASGI middleware: counts requests by route and status code, and the seconds that they take.

INVARIANT: each request is counted once, when it ends in any way. One whose client hung up before the status has 499.
"""

from __future__ import annotations

import time

from nouscoder.generation.metrics import ApiMetrics, ApiRoute
from nouscoder.generation.openai.gate import OPEN, App, Message, Receive, Scope, Send

_ROUTES = {route.value for route in ApiRoute}


class Counted:
    """Wraps `app`. Health checks are not counted."""

    def __init__(self, app: App, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        route = scope["path"] if scope["path"] in _ROUTES else ApiRoute.OTHER.value
        status = 499
        started_s = time.monotonic()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            status = 500 if status == 499 else status
            raise
        finally:
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.request_seconds.labels(route).observe(time.monotonic() - started_s)
